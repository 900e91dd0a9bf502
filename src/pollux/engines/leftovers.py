"""Finding what replicas have left behind: processes that got away from their group, or outlived their steward.

Stands in ``engines``. All that a steward starts carries a mark in its environment, and so does all that is started by
that, whatever session or parent it has meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import psutil

MARK = "POLLUX_STEWARD"
REPLICA = "POLLUX_REPLICA_ID"


def mark_of(directory: Path) -> str:
    """One steward's, and the same after it was started anew. A container's directory may have the same name."""
    place = directory.resolve()
    stats = place.stat()
    return f"{stats.st_dev}:{stats.st_ino}:{place}"


def kill_leftovers(mark: str, replica_ids: Collection[str] | None = None) -> list[int]:
    """Kill all that carries the mark, but for this process; of these replicas alone, if they are named."""
    killed = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if process.uids().real != os.getuid():
                continue
            env = process.environ()
            if env.get(MARK) == mark and (replica_ids is None or env.get(REPLICA) in replica_ids):
                process.kill()
                killed.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return killed
