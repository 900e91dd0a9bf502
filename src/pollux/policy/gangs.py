"""All the replicas that a job asked for, or none: turns an order of jobs into a plan.

Used by the policies that queue jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pollux.policy.dense import may_use, place_counts, settle
from pollux.types import JobView, Plan, Snapshot


def demand(job: JobView) -> int:
    """The replicas that the user asked for, within the job's bounds; otherwise ``min_replicas``."""
    spec = job.spec
    return min(max(spec.requested_replicas or spec.min_replicas, spec.min_replicas), spec.max_replicas)


def gang_plan(
    snapshot: Snapshot,
    order: Iterable[JobView],
    *,
    keeps: Callable[[JobView], bool] = lambda job: False,
    lets_overtake: bool = True,
) -> Plan:
    """In this order, every job that still fits gets what it asked for, all on one accelerator type.

    Fixed jobs, and jobs for which ``keeps(job)`` is true, keep their allocation and are counted first. Without
    ``lets_overtake`` no job behind one that waits gets slots of a type that the waiting job could use. A job that asks
    for more than any type has holds up no other job.
    """
    counts, budget = settle(snapshot, keeps)
    types: dict[str, str] = {}
    order = [job for job in order if job.name not in counts]
    for job in order:
        chosen = budget.admit(job, demand(job))
        if chosen is not None:
            types[job.name] = chosen
            counts[job.name] = demand(job)
        elif not lets_overtake:
            for name, total in budget.total.items():
                if may_use(job, name) and demand(job) <= total:
                    budget.left[name] = 0
    staying = [job for job in snapshot.jobs if job.name in counts and job.name not in types]
    return Plan(allocations=place_counts(snapshot.nodes, [*staying, *order], counts, types))
