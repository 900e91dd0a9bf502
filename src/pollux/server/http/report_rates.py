"""How much each job may report: so many bytes a second, and a burst. The routes ask it, on the event loop alone.

A job reports every 0.25 to 30 s, and up to ten times a second while a study waits for its values: with 4,000 bytes for
each report beside its own, that is 50 kB/s. A job that a new leader has not heard of for long sends one joined report.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

BYTES_PER_S = 128_000.0
BURST_BYTES = 1_000_000
OVERHEAD_BYTES = 4_000  # that a report counts beside its own: to take in a small one is work, too
_MANY_JOBS = 4096


@dataclass(slots=True)
class _Bucket:
    level: float  # bytes that have not drained yet
    at: float

    def drain(self, now: float) -> None:
        self.level, self.at = max(self.level - BYTES_PER_S * (now - self.at), 0.0), now


class ReportRates:
    """A leaky bucket for each job. One that is full takes nothing; the last report may overfill it."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._buckets: dict[str, _Bucket] = {}

    def take(self, job: str, num_bytes: int) -> int:
        """0: the report is to be taken, and counts. Otherwise it is not: in so many seconds one would be."""
        now = self._now()
        bucket = self._buckets.get(job)
        if bucket is None:
            self._forget_idle(now)
            bucket = self._buckets[job] = _Bucket(0.0, now)
        bucket.drain(now)
        if bucket.level >= BURST_BYTES:
            return max(1, math.ceil((bucket.level - BURST_BYTES) / BYTES_PER_S))
        bucket.level += OVERHEAD_BYTES + num_bytes
        return 0

    def _forget_idle(self, now: float) -> None:
        if len(self._buckets) < _MANY_JOBS or len(self._buckets) % _MANY_JOBS:
            return
        for bucket in self._buckets.values():
            bucket.drain(now)
        self._buckets = {job: bucket for job, bucket in self._buckets.items() if bucket.level}
