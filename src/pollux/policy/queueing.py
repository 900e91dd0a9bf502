"""The textbook baselines: FIFO, shortest remaining time first, earliest deadline first, equal shares."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pollux.policy.base import StatelessPolicy
from pollux.policy.dense import may_use, place_counts, settle
from pollux.policy.estimates import largest_nodes, remaining_steps, step_s
from pollux.policy.gangs import demand, gang_plan
from pollux.policy.greedy import allot
from pollux.types import JobView, Plan, Snapshot


class FifoPolicy(StatelessPolicy):
    """First in, first out: the requested replicas, in order of submission; no job overtakes or preempts another.

    Where there are several accelerator types, a job that waits holds up jobs that want one of the types it waits for.
    """

    name = "fifo"
    adapts_batch = False

    def decide(self, snapshot: Snapshot) -> Plan:
        return gang_plan(snapshot, snapshot.jobs, keeps=lambda job: bool(job.allocation), lets_overtake=False)


class SrtfPolicy(StatelessPolicy):
    """Shortest remaining time first, preemptive, at the requested replicas; gaps are filled by later jobs."""

    name = "srtf"
    adapts_batch = False

    def decide(self, snapshot: Snapshot) -> Plan:
        largest = largest_nodes(snapshot.nodes)
        # The sort is stable: ties go by submission.
        order = sorted(snapshot.jobs, key=lambda job: _remaining_s(job, largest))
        return gang_plan(snapshot, order)


class EdfPolicy(StatelessPolicy):
    """Earliest deadline first, preemptive, at the requested replicas; jobs without one, or past it, come last."""

    name = "edf"
    adapts_batch = False

    def decide(self, snapshot: Snapshot) -> Plan:
        def due(job: JobView) -> float:
            deadline_at = job.spec.deadline_at
            return math.inf if deadline_at is None or deadline_at <= snapshot.now else deadline_at

        return gang_plan(snapshot, sorted(snapshot.jobs, key=due))


class EqualPolicy(StatelessPolicy):
    """Equal shares, elastic: every job gets the same number of replicas, the remainder going to the oldest.

    Where there are several accelerator types, shares are equal among the jobs on one type.
    """

    name = "equal"

    def decide(self, snapshot: Snapshot) -> Plan:
        held, budget = settle(snapshot)
        able = [job for job in snapshot.jobs if job.spec.min_replicas <= _usable_replicas(job)]
        counts, types = allot(able, budget, _wants_more, staying=held)
        return Plan(allocations=place_counts(snapshot.nodes, snapshot.jobs, counts, types))


def _wants_more(job: JobView, count: int, accelerator: str) -> float:
    """Largest for the jobs that have least."""
    return 1 / count if count < _usable_replicas(job) else 0.0


def _usable_replicas(job: JobView) -> int:
    by_batch = job.spec.batch.max_replicas if job.spec.batch is not None else job.spec.max_replicas
    return min(job.spec.max_replicas, by_batch)


def _remaining_s(job: JobView, largest: Mapping[str, int]) -> float:
    """On the fastest type it may use; infinite if nothing is known."""
    times = (step_s(job, demand(job), largest, name) for name in largest if may_use(job, name))
    estimate = min(times, default=math.inf) * remaining_steps(job)
    return estimate if not math.isnan(estimate) else math.inf
