"""The textbook baselines: FIFO, shortest remaining time first, equal shares."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pollux.policy.base import PolicySettings
from pollux.policy.dense import place_counts
from pollux.policy.estimates import remaining_steps, step_s
from pollux.types import JobView, Plan, Snapshot


class FifoPolicy:
    """First in, first out: the requested replicas, in order of submission; nobody overtakes, nobody is preempted."""

    name = "fifo"
    adapts_batch = False
    needs_oracle = False

    def __init__(self, settings: PolicySettings) -> None:
        pass

    def reset(self) -> None:
        pass

    def decide(self, snapshot: Snapshot) -> Plan:
        running = [job for job in snapshot.jobs if job.allocation]
        waiting = [job for job in snapshot.jobs if not job.allocation and not job.is_fixed]
        counts = {job.name: job.allocation.num_replicas for job in running}
        counts |= _admit(waiting, snapshot.num_slots - sum(counts.values()), lets_overtake=False)
        return Plan(allocations=place_counts(snapshot.nodes, snapshot.jobs, counts))


class SrtfPolicy:
    """Shortest remaining time first, preemptive, at the requested replicas; gaps are filled by later jobs."""

    name = "srtf"
    adapts_batch = False
    needs_oracle = False

    def __init__(self, settings: PolicySettings) -> None:
        pass

    def reset(self) -> None:
        pass

    def decide(self, snapshot: Snapshot) -> Plan:
        fixed = {job.name: job.allocation.num_replicas for job in snapshot.jobs if job.is_fixed}
        others = [job for job in snapshot.jobs if job.name not in fixed]
        order = sorted(others, key=lambda job: _remaining_s(job, snapshot))  # stable: ties by submission
        counts = fixed | _admit(order, snapshot.num_slots - sum(fixed.values()), lets_overtake=True)
        return Plan(allocations=place_counts(snapshot.nodes, snapshot.jobs, counts))


class EqualPolicy:
    """Equal shares, elastic: every job gets the same number of replicas, the remainder going to the oldest."""

    name = "equal"
    adapts_batch = True
    needs_oracle = False

    def __init__(self, settings: PolicySettings) -> None:
        pass

    def reset(self) -> None:
        pass

    def decide(self, snapshot: Snapshot) -> Plan:
        counts = {job.name: job.allocation.num_replicas for job in snapshot.jobs if job.is_fixed}
        left = snapshot.num_slots - sum(counts.values())
        sharing = [job for job in snapshot.jobs if job.name not in counts]
        limit = {job.name: _usable_replicas(job, snapshot.num_slots) for job in sharing}
        shares = dict.fromkeys(limit, 0)
        for job in sharing:  # the least that lets it run at all, oldest first
            if job.spec.min_replicas <= min(left, limit[job.name]):
                shares[job.name] = job.spec.min_replicas
                left -= job.spec.min_replicas
        while left > 0:
            growing = [name for name in shares if 0 < shares[name] < limit[name]]
            if not growing:
                break
            least = min(shares[name] for name in growing)
            for name in growing:
                if shares[name] == least and left > 0:
                    shares[name] += 1
                    left -= 1
        return Plan(allocations=place_counts(snapshot.nodes, snapshot.jobs, counts | shares))


def _admit(jobs: Iterable[JobView], slots: int, *, lets_overtake: bool) -> dict[str, int]:
    admitted = {}
    for job in jobs:
        demand = job.spec.requested_replicas or job.spec.min_replicas
        if demand <= slots:
            admitted[job.name] = demand
            slots -= demand
        elif not lets_overtake:
            break
    return admitted


def _remaining_s(job: JobView, snapshot: Snapshot) -> float:
    demand = job.spec.requested_replicas or job.spec.min_replicas
    estimate = step_s(job, demand, snapshot.nodes) * remaining_steps(job)
    return estimate if not math.isnan(estimate) else math.inf


def _usable_replicas(job: JobView, num_slots: int) -> int:
    by_batch = job.spec.batch.max_replicas if job.spec.batch is not None else num_slots
    return min(job.spec.max_replicas, by_batch, num_slots)
