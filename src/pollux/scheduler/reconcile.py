"""Desired minus actual gives commands; and the check that a plan may be desired at all.

Level-triggered: the loop calls it after every event with the wanted and the actual allocations, and gets the commands
that are possible now. Commands that need slots to become free come from a later call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pollux.errors import InvalidPlanError
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.nodes import SlotRules
from pollux.scheduler.resources import overdrawn
from pollux.types import NO_ALLOCATION, Allocation, JobView, Node, Plan, Snapshot, slots_in_use


@dataclass(frozen=True, slots=True)
class Actual:
    """What a job is doing right now, what it is being brought to, and what it has yet to leave."""

    state: JobState
    allocation: Allocation
    leaving: Allocation = NO_ALLOCATION


@dataclass(frozen=True, slots=True)
class Start:
    job: str
    allocation: Allocation


@dataclass(frozen=True, slots=True)
class Resize:
    job: str
    allocation: Allocation


@dataclass(frozen=True, slots=True)
class Stop:
    job: str


Change = Start | Resize | Stop


def verify_plan(snapshot: Snapshot, plan: Plan, rules: SlotRules | None = None) -> None:
    """Refuse a plan that the cluster cannot carry out.

    Raises:
        InvalidPlanError: names every rule that is broken.
    """
    nodes = {node.name: node for node in snapshot.nodes}
    jobs = {job.name: job for job in snapshot.jobs}
    problems = []
    for name, allocation in plan.allocations.items():
        job = jobs.get(name)
        if job is None:
            problems.append(f"job {name!r} is not in the snapshot")
            continue
        unknown = [node for node, _ in allocation.shares if node not in nodes]
        if unknown:
            problems.append(f"job {name!r} is placed on unknown nodes {unknown}")
            continue
        types = {nodes[node].accelerator for node, _ in allocation.shares}
        if len(types) > 1:
            problems.append(f"job {name!r} is placed on several accelerator types: {sorted(types)}")
        if job.spec.accelerators is not None and not types <= job.spec.accelerators:
            problems.append(f"job {name!r} may run on {sorted(job.spec.accelerators)}, not on {sorted(types)}")
        if job.spec.is_picky and (wrong := _misplaced(job, allocation, nodes)):
            problems.append(f"job {name!r} may not use {', '.join(wrong)}")
        count = allocation.num_replicas
        is_within = count == 0 or job.spec.min_replicas <= count <= job.spec.max_replicas
        if not is_within and count != job.spec.requested_replicas and allocation != job.allocation:
            problems.append(
                f"job {name!r} is given {count} replicas; allowed: {job.spec.min_replicas}..{job.spec.max_replicas}"
            )
    for job in snapshot.jobs:
        if job.is_fixed and plan.allocation_of(job.name) != job.allocation:
            problems.append(_what_stays(job, plan.allocation_of(job.name)))
    for node_name, used in slots_in_use(list(plan.allocations.values())).items():
        if node_name in nodes and used > nodes[node_name].num_slots:
            problems.append(f"node {node_name!r} has {nodes[node_name].num_slots} slots, {used} are given away")
    problems += overdrawn(nodes, jobs, plan)
    problems += rules.problems(plan) if rules is not None else []
    if problems:
        raise InvalidPlanError(*problems)


def _what_stays(job: JobView, planned: Allocation) -> str:
    """Why the plan must leave this job's allocation as it is."""
    why = "is pinned for this round (is_pinned)" if job.is_pinned else "runs and is not preemptible (is_fixed)"
    return f"job {job.name!r} {why}: it must keep {_in_words(job.allocation)}; the plan gives it {_in_words(planned)}"


def _in_words(allocation: Allocation) -> str:
    return ", ".join(f"{count} on {node!r}" for node, count in allocation.shares) or "no replicas"


def _misplaced(job: JobView, allocation: Allocation, nodes: Mapping[str, Node]) -> list[str]:
    """Nodes on which a job gets new replicas, and that it may not use."""
    held = job.allocation.as_mapping()
    return [
        node for node, count in allocation.shares if count > held.get(node, 0) and not job.spec.may_use(nodes[node])
    ]


def reconcile(
    desired: Mapping[str, Allocation],
    actual: Mapping[str, Actual],
    nodes: Sequence[Node],
    *,
    trades_at_once: bool = False,
) -> list[Change]:
    """What to do now to get from ``actual`` towards ``desired``; releases come first.

    With ``trades_at_once`` the whole difference is returned (an engine that releases all before it grabs).
    Otherwise only what fits into slots that are free already; if jobs wait for each other's slots in a circle and
    nothing else is under way, one of them is stopped, and starts again where it should be.
    """
    names = {node.name for node in nodes}
    releases: list[Change] = []
    grabs: list[Start | Resize] = []
    for job, is_now in actual.items():
        if is_now.state.is_final or is_now.state is JobState.STOPPING:
            continue
        target = desired.get(job, NO_ALLOCATION)
        if not all(node in names for node, _ in target.shares):
            continue  # a node of the plan is gone: the next decision will know
        if is_now.state is JobState.PENDING:
            if target:
                grabs.append(Start(job, target))
        elif not target:
            releases.append(Stop(job))
        elif target != is_now.allocation:
            if _is_within(target, is_now.allocation):
                releases.append(Resize(job, target))
            else:
                grabs.append(Resize(job, target))
    if trades_at_once:
        return [*releases, *grabs]

    free = {node.name: node.num_slots for node in nodes}
    for is_now in actual.values():
        if is_now.state.holds_slots:
            for node, count in _held(is_now).items():
                free[node] = free.get(node, 0) - count
    ready: list[Change] = list(releases)
    blocked: list[Start | Resize] = []
    for change in grabs:
        held = _held(actual[change.job]) if isinstance(change, Resize) else {}
        extra = {node: count - held.get(node, 0) for node, count in change.allocation.shares}
        if all(count <= free.get(node, 0) for node, count in extra.items()):
            for node, count in extra.items():
                free[node] -= max(count, 0)
            ready.append(change)
        else:
            blocked.append(change)
    under_way = any(is_now.state in _UNDER_WAY for is_now in actual.values())
    if not ready and not under_way:
        circle = next((change for change in blocked if isinstance(change, Resize)), None)
        if circle is not None:
            ready.append(Stop(circle.job))
    return ready


_UNDER_WAY = frozenset({JobState.STARTING, JobState.RESIZING, JobState.STOPPING})


def together(one: Allocation, other: Allocation) -> Allocation:
    """Slots per node that either needs."""
    most = one.as_mapping()
    for node, count in other.shares:
        most[node] = max(most.get(node, 0), count)
    return Allocation.of(*most.items())


def _held(is_now: Actual) -> dict[str, int]:
    """Slots per node that no other job may use: those the job moves to and those it has yet to leave."""
    if not is_now.leaving:
        return is_now.allocation.as_mapping()
    return together(is_now.allocation, is_now.leaving).as_mapping()


def _is_within(target: Allocation, held: Allocation) -> bool:
    have = held.as_mapping()
    return all(count <= have.get(node, 0) for node, count in target.shares)
