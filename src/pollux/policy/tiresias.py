"""Tiresias: two-queue discretised least-attained-service (Gu et al., NSDI'19), as simulated in OSDI'21.

Jobs keep the replicas they asked for. A job starts in the first queue and falls to the tail of the second
once it has used ``QUEUE_THRESHOLD`` GPU-seconds; the first queue goes first, each in order of arrival
there, later smaller jobs filling the gaps. Simplifications: no promotion back to the first queue;
fragmentation is not considered (a job may be spread).
"""

from __future__ import annotations

from pollux.policy.base import Policy, PolicySettings
from pollux.policy.gangs import demand, gang_plan
from pollux.types import Plan, Snapshot

QUEUE_THRESHOLD = 57_600.0  # GPU-seconds (16 GPU-hours), as in the OSDI'21 artifact


class TiresiasPolicy(Policy):
    name = "tiresias"
    settings_read = frozenset()
    adapts_batch = False

    def __init__(self, settings: PolicySettings) -> None:
        self._queues: tuple[list[str], list[str]] = ([], [])

    def reset(self) -> None:
        self._queues = ([], [])

    def decide(self, snapshot: Snapshot) -> Plan:
        jobs = {job.name: job for job in snapshot.jobs}
        first, second = ([name for name in queue if name in jobs] for queue in self._queues)
        known = {*first, *second}
        first += [name for name in jobs if name not in known]
        behind = set(second)
        # In submission order, which is the order of falling in one round.
        falling = [job.name for job in snapshot.jobs if job.attained_s * demand(job) >= QUEUE_THRESHOLD]
        second += [name for name in falling if name not in behind]
        behind.update(falling)
        first = [name for name in first if name not in behind]
        self._queues = (first, second)
        return gang_plan(snapshot, [jobs[name] for name in (*first, *second)])
