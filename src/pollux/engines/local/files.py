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
