"""The files of a supervisor in the data directory. Used by both sides: ``supervisor`` and ``connection``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

SOCKET = "supervisor.sock"
LOCK = "supervisor.pid"  # locked while the supervisor lives
LOG = "supervisor.log"
EPOCH = "supervisor-epoch"  # of the last server that was obeyed


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


def read_epoch(directory: Path) -> int:
    """0: none has been obeyed since a supervisor last ended in order."""
    try:
        return int((directory / EPOCH).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def write_epoch(directory: Path, epoch: int) -> None:
    """A supervisor that starts after this one was killed obeys no earlier server either. Raises OSError."""
    beside = directory / f"{EPOCH}.new"
    beside.write_text(f"{epoch}\n", encoding="ascii")
    beside.replace(directory / EPOCH)


def forget_epoch(directory: Path) -> None:
    """No job runs: any server may begin."""
    (directory / EPOCH).unlink(missing_ok=True)
