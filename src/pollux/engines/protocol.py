"""How an engine and its steward talk: lines of JSON over a socket in the data directory.

Stands in ``engines``, below both sides; no torch. The engine asks, with ``op``:

    hello{version, devices: [{node, number, gpu}]}      start{job, generation, launch, allocation}
    resize{job, generation, allocation}   stop{job, grace_s, reason}   forget{job, generation}   shutdown{grace_s}

and the steward tells, with ``event``:

    state{version, pid, jobs: [...]} or refused{version, reason} after a hello;
    runs{job, generation}   stopped{job, generation}   ended{job, generation, state, exit_code, reason, at}
    lost{job, generation, reason}   replicas{job, replicas: [...]}   note{job, text}   crashed{job, reason}   replaced{}

What ended is kept, and told again after the next hello, until it is forgotten.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pollux.types import Allocation

PROTOCOL_VERSION = 3
SOCKET = "steward.sock"
LOCK = "steward.pid"
LOG = "steward.log"
ENDS = "steward.json"  # of jobs whose end nobody has heard of yet

Message = dict[str, Any]


class Lines:
    """Messages out of a stream of bytes."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]


def to_line(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


@contextlib.contextmanager
def socket_address(directory: Path) -> Iterator[str]:
    """The socket's address, short enough for the kernel (108 bytes) however long the directory's name is."""
    if sys.platform != "linux":
        yield str(directory / SOCKET)
        return
    folder = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{SOCKET}"
    finally:
        os.close(folder)


def allocation_to_list(allocation: Allocation) -> list[list[Any]]:
    return [[share.node, share.num_replicas] for share in allocation.shares]


def allocation_from_list(value: list[list[Any]]) -> Allocation:
    return Allocation.of(*((str(node), int(num_replicas)) for node, num_replicas in value))
