"""Gives promised jobs their share of a plan. :mod:`pollux.scheduler.deadlines` calls it.

Policies are asked with the shares as least numbers of replicas (:func:`with_floors`). Where a policy's answer has less
all the same, the others give what is missing (:func:`with_shares`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from pollux.policy.dense import Budget, may_use, place_counts
from pollux.scheduler.caps import Demand, allot
from pollux.types import NO_ALLOCATION, Allocation, JobView, Plan, Snapshot


def with_floors(snapshot: Snapshot, floors: Mapping[str, int]) -> Snapshot:
    """The same jobs, of which some must not have fewer replicas than these."""
    if not floors:
        return snapshot
    return replace(snapshot, jobs=tuple(_with_floor(job, floors.get(job.name, 0)) for job in snapshot.jobs))


def _with_floor(job: JobView, floor: int) -> JobView:
    if floor <= job.spec.min_replicas or job.is_fixed:
        return job
    return replace(job, spec=replace(job.spec, min_replicas=floor))


def is_enough(plan: Plan, needed: Mapping[str, int]) -> bool:
    return all(plan.allocation_of(name).num_slots >= count for name, count in needed.items())


def with_shares(snapshot: Snapshot, plan: Plan, needed: Mapping[str, int]) -> Plan:
    """The plan with at least ``needed``; what others must give comes from those that have more, in proportion."""
    budget = Budget(snapshot)
    type_of = {job.name: _type(job, plan, budget) for job in snapshot.jobs}
    counts: dict[str, int] = {}
    types: dict[str, str] = {}
    for kind, num_slots in budget.total.items():
        mine = [job for job in snapshot.jobs if type_of[job.name] == kind]
        demands = list(_demands(mine, plan, needed))
        counts |= allot(demands, num_slots)
        types |= {job.name: kind for job in mine}
    order = sorted(_staying(snapshot, plan, counts), key=lambda job: job.name not in needed)  # promised ones first
    return replace(plan, allocations=place_counts(snapshot.nodes, order, counts, types))


def _staying(snapshot: Snapshot, plan: Plan, counts: Mapping[str, int]) -> list[JobView]:
    """Jobs where the policy put them, if their count is the policy's; then where they are, if that is still free."""
    free = {node.name: node.num_slots for node in snapshot.nodes}

    def fits(allocation: Allocation) -> bool:
        if any(count > free[node] for node, count in allocation.own_shares):
            return False
        for node, count in allocation.own_shares:
            free[node] -= count
        return True

    found: dict[str, JobView] = {}
    for job in sorted(snapshot.jobs, key=lambda job: not job.is_fixed):
        planned = plan.allocation_of(job.name)
        if planned and planned.num_slots == counts.get(job.name, 0) and fits(planned):
            found[job.name] = replace(job, allocation=planned)
    for job in snapshot.jobs:
        if job.name not in found:
            stays = job.allocation.num_slots == counts.get(job.name, 0) and fits(job.allocation)
            found[job.name] = job if stays else replace(job, allocation=NO_ALLOCATION)
    return [found[job.name] for job in snapshot.jobs]


def _demands(jobs: Iterable[JobView], plan: Plan, needed: Mapping[str, int]) -> Iterable[Demand]:
    for place, job in enumerate(jobs):
        own, count = needed.get(job.name, 0), plan.allocation_of(job.name).num_slots
        least = max(own, min(job.spec.min_replicas, count))
        yield Demand(
            job=job.name,
            count=max(count, own),
            least=count if job.is_fixed else least,
            is_bound=job.is_fixed,
            order=(0 if own else 1, not job.allocation, place),
            weight=job.spec.weight,
        )


def _type(job: JobView, plan: Plan, budget: Budget) -> str:
    """That of the plan, else the one it holds, else the largest that it may use."""
    planned = budget.type_of(plan.allocation_of(job.name)) or budget.type_of(job.allocation)
    if planned is not None:
        return planned
    return max((kind for kind in budget.total if may_use(job, kind)), key=budget.total.__getitem__, default="")
