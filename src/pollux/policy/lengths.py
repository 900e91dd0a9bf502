"""Estimates how long jobs are that have not declared it, from ended jobs of the same application.

The Pollux policy uses it with ``weights="learnt"`` and ``"remaining"``. Training runs come again and again, and the
same application tends to take about as much service (slots held times seconds held). A job that has had some service
is expected to need what longer ended jobs still needed at that point, on average: the mean residual life, akin to
Gittins' index (:mod:`pollux.policy.gittins`). A job without an application, or of one that no job of has ended yet, is
compared with ended jobs of all applications. A job that has outlasted all of them counts as half done, in steps of two.
Nothing is expected of any job (nan) before the first has ended.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from pollux.types import FloatArray, JobView

_MAX_JOBS = 64  # ended jobs of an application that are remembered: the mean of more would hardly differ
_MAX_ALL = 256  # the same for all applications together
_MAX_APPLICATIONS = 1024  # bounds memory; those without an ended job for longest are forgotten first


class Lengths:
    """Sees the jobs of every round, and remembers the service of jobs that are gone."""

    def __init__(self) -> None:
        self._present: dict[str, tuple[str, float]] = {}  # by job: application, service so far
        self._ended: dict[str, deque[float]] = {}  # by application
        self._all: deque[float] = deque(maxlen=_MAX_ALL)  # of all applications, and of jobs without one

    def clear(self) -> None:
        self._present.clear()
        self._ended.clear()
        self._all.clear()

    def look(self, jobs: Sequence[JobView]) -> None:
        """Note which jobs are there, and which are gone."""
        now = {job.name: (job.spec.application, job.attained_slot_s) for job in jobs}
        for name, (application, service_s) in self._present.items():  # in order: sums must repeat exactly
            if name in now or service_s <= 0:
                continue
            self._all.append(service_s)
            if application:
                known = self._ended.pop(application, None) or deque(maxlen=_MAX_JOBS)
                known.append(service_s)
                self._ended[application] = known  # the latest application last
                if len(self._ended) > _MAX_APPLICATIONS:
                    del self._ended[next(iter(self._ended))]
        self._present = now

    def left(self, jobs: Sequence[JobView]) -> FloatArray:
        """(num_jobs,) slot-seconds that each is likely to need yet; nan before any job has ended."""
        return np.array([self._left(job) for job in jobs], dtype=float)

    def _left(self, job: JobView) -> float:
        known, had = self._ended.get(job.spec.application) or self._all, job.attained_slot_s
        if not known:
            return math.nan
        longer = [total - had for total in known if total > had]
        return sum(longer) / len(longer) if longer else 2.0 ** math.ceil(math.log2(max(had, 1.0)))
