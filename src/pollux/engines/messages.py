"""What an engine and its supervisor say to each other, as JSON objects (:mod:`pollux.engines.transport`).

A supervisor of one machine first sends ``challenge{nonce}``, and the first hello answers it with ``proof``
(:mod:`pollux.engines.local.secret`). The engine asks, with ``op``:

    hello{version, oldest?, epoch?, devices: [Device], layout?, takes_over?, proof?}
    start{job, generation, launch, allocation}   resize{job, generation, allocation}
    stop{job, grace_s, saves?, reason}   forget{job, generation}   shutdown{grace_s}   dump{job}   check{number, asked}

and the supervisor tells, with ``event``:

    state{version, pid, jobs: [...]} or refused{version, reason} after a hello;
    runs{job, generation}   stopped{job, generation}   ended{job, generation, state, exit_code, reason, at, node, cause}
    lost{job, generation, reason}   replicas{job, replicas: [...]}   note{job, text, phase, since}
    crashed{job, reason}
    gave_up{job, generation, node, reason, allocation}   nodes{nodes: [...]}
    unusable{nodes: [{name, reason}]}   head{problem}   replaced{}   readings{nodes: {name: NodeReading}}
    checked{number, nodes: {name: findings}}

``version`` is what a side speaks, ``oldest`` what it still understands; both speak the newest that they share. So a
server and a supervisor of neighbouring versions work together, and either can be upgraded first. A field with ``?`` may
be missing: then the supervisor does what it did before there was this field. ``saves``: the job may save before it
leaves.

``layout`` asks a supervisor to make slots of its machine's GPUs, and to tell when they change; ``devices`` are then not
used. In ``gave_up``, ``node`` is "" when slots of the job are gone and no node is to blame.

``epoch`` counts the servers that have led. A supervisor refuses a hello of an earlier one than it has obeyed.

The supervisor keeps the end of a job, and tells it again after the next hello, until the engine says ``forget``.
"""

from __future__ import annotations

import time

from pollux.engines.transport import Channel, Message
from pollux.errors import EngineError
from pollux.types import Allocation

PROTOCOL_VERSION = 8
OLDEST_VERSION = 7  # that is still spoken
VERSIONS: Message = {"version": PROTOCOL_VERSION, "oldest": OLDEST_VERSION}  # of every hello
_NODE_FIELDS_OF_8 = ("labels", "cpus", "memory_bytes", "notice", "device_memory_bytes")


def common_version(hello: Message) -> int | None:
    """The version to speak with the one who says this hello; None: there is none that both know."""
    version = hello.get("version")
    oldest = hello.get("oldest", version)
    if not isinstance(version, int) or not isinstance(oldest, int):
        return None
    common = min(version, PROTOCOL_VERSION)
    return common if common >= max(oldest, OLDEST_VERSION) else None


def in_version(message: Message, version: int) -> Message:
    """A supervisor's message as a server of this version understands it."""
    if version >= 8:
        return message
    if message["event"] in ("nodes", "state") and message["nodes"] is not None:
        rows = [{key: row[key] for key in row if key not in _NODE_FIELDS_OF_8} for row in message["nodes"]]
        return {**message, "nodes": rows}
    return message


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
