"""Free space of the jobs' folders: which jobs must wait, and when they go on. The job manager calls it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

MIN_FREE_BYTES = 64 << 20
ENOUGH = 1.25  # times the minimum: a job that went on at once would stop again at once


def free_bytes(path: str) -> int:
    """What a user may still write at this path, or at its nearest parent that exists."""
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    stats = os.statvfs(place)
    return stats.f_bavail * stats.f_frsize


class SpaceWatch:
    """Remembers which paths are short of space: below the minimum, and until there is a quarter more."""

    def __init__(self, min_free_bytes: int = MIN_FREE_BYTES, free_at: Callable[[str], float] = free_bytes) -> None:
        self._min_free_bytes, self._free_at = min_free_bytes, free_at
        self._short: set[str] = set()

    def shortage(self, path: str) -> str:
        """What is missing, for people; "" when there is enough."""
        try:
            free = self._free_at(path)
        except OSError as error:
            return f"paused: the free space at {path} cannot be seen: {error.strerror}"
        if free >= self._min_free_bytes * (ENOUGH if path in self._short else 1.0):
            self._short.discard(path)
            return ""
        self._short.add(path)
        needed = f"{self._min_free_bytes >> 20} MiB are needed"
        return f"paused: {int(free) >> 20} MiB free at {path}, {needed}; it goes on by itself when there is space"
