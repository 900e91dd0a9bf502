"""Finds and kills processes that replicas left behind: they got away from their group, or outlived their supervisor.

Supervisors and node agents call it. All that a supervisor starts carries a mark in its environment, and so does all
that is started by that, in any session and with any parent.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import psutil

MARK = "POLLUX_SUPERVISOR"
REPLICA = "POLLUX_REPLICA_ID"


def mark_of(directory: Path) -> str:
    """The mark of one directory's supervisors. A container may have another directory of the same name."""
    place = directory.resolve()
    stats = place.stat()
    return f"{stats.st_dev}:{stats.st_ino}:{place}"


def kill_leftovers(mark: str, replica_ids: Collection[str] | None = None) -> list[int]:
    """Kill all processes with the mark except this one; only those of these replicas, if they are named."""
    killed = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if os.getuid() != 0 and process.uids().real != os.getuid():
                continue  # root looks at all: its jobs may run as other users
            env = process.environ()
            if env.get(MARK) == mark and (replica_ids is None or env.get(REPLICA) in replica_ids):
                process.kill()
                killed.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return killed
