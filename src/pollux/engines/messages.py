"""What an engine and its supervisor say to each other, as JSON objects (:mod:`pollux.engines.transport`).

A supervisor of one machine first sends ``challenge{nonce}``, and the first hello answers it with ``proof``
(:mod:`pollux.engines.local.secret`). The engine asks, with ``op``:

    hello{version, epoch?, devices: [Device], takes_over?, proof?}    start{job, generation, launch, allocation}
    resize{job, generation, allocation}   stop{job, grace_s, reason}   forget{job, generation}   shutdown{grace_s}
    dump{job}   check{number, asked}

and the supervisor tells, with ``event``:

    state{version, pid, jobs: [...]} or refused{version, reason} after a hello;
    runs{job, generation}   stopped{job, generation}   ended{job, generation, state, exit_code, reason, at, node, cause}
    lost{job, generation, reason}   replicas{job, replicas: [...]}   note{job, text}   crashed{job, reason}
    gave_up{job, generation, node, reason, allocation}   nodes{nodes: [...]}
    unusable{nodes: [{name, reason}]}   head{problem}   replaced{}   readings{nodes: {name: NodeReading}}
    checked{number, nodes: {name: findings}}

``epoch`` counts the servers that have led. A supervisor refuses a hello of an earlier one than it has obeyed.

The supervisor keeps the end of a job, and tells it again after the next hello, until the engine says ``forget``.
"""

from __future__ import annotations

import time

from pollux.engines.transport import Channel, Message
from pollux.errors import EngineError
from pollux.types import Allocation

PROTOCOL_VERSION = 7


def ask(channel: Channel, request: Message | None, event: str, deadline: float) -> Message | None:
    """Send the request, if there is one, and wait for this event. None where the connection ends just then.

    Raises:
        EngineError: the supervisor refuses, or does not answer before the deadline, in monotonic time.
    """
    if request is not None:
        channel.send(request, max(deadline - time.monotonic(), 0.1))
    while True:
        left_s = deadline - time.monotonic()
        messages = channel.receive(max(left_s, 0.1))
        if messages is None:
            return None
        if not messages and left_s <= 0:
            raise EngineError(
                "the supervisor took the connection but does not answer; is it frozen? End it with SIGKILL: its "
                "replicas end with it, and their jobs start again from their checkpoints"
            )
        for index, message in enumerate(messages):
            if message["event"] == "refused":
                raise EngineError(message["reason"])
            if message["event"] == event:  # messages before it were meant for an earlier client
                channel.put_back(messages[index + 1 :])
                return message


def allocation_to_list(allocation: Allocation) -> list[list[str | int]]:
    return [[share.node, share.num_replicas] for share in allocation.shares]


def allocation_from_list(value: list[list[str | int]]) -> Allocation:
    return Allocation.of(*((str(node), int(num_replicas)) for node, num_replicas in value))
