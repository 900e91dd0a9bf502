"""Which nodes jobs may use, and what is left of what they hold when nodes go.

Pure functions on the values of snapshots. The loop calls them through :class:`SlotRules`, which a simulator may extend.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from pollux.types import NO_ALLOCATION, Allocation, JobSpec, JobView, Node, NodeShare, Plan, Snapshot


def usable(
    leaving: Collection[str], nodes: Sequence[Node], views: Sequence[JobView]
) -> tuple[list[Node], list[JobView]]:
    """Of nodes that leave, only the slots of jobs that must not be moved are kept; other jobs hold nothing there.

    A node that has shrunk keeps those slots too: no plan could leave these jobs alone otherwise.
    """
    held: Counter[str] = Counter()
    staying = []
    for view in views:
        if view.is_fixed:
            held.update(view.allocation.as_mapping())
        elif any(node in leaving for node, _ in view.allocation.shares):
            view = dataclasses.replace(view, allocation=NO_ALLOCATION)
        staying.append(view)
    kept = []
    for node in nodes:
        num_slots = held[node.name] if node.name in leaving else max(node.num_slots, held[node.name])
        if num_slots:
            kept.append(node if num_slots == node.num_slots else dataclasses.replace(node, num_slots=num_slots))
    return kept, staying


def placeable(snapshot: Snapshot) -> Snapshot:
    """Without the jobs that cannot run on the nodes there are: they wait, delay no other job, and count in no share.

    Those are jobs that may use none of the nodes, or need more slots of one type than there are. A job that holds slots
    stays.
    """
    there = slots_by_type(snapshot.nodes)
    jobs = tuple(job for job in snapshot.jobs if job.allocation.shares or _fits(job.spec, there, snapshot.nodes))
    return snapshot if len(jobs) == len(snapshot.jobs) else dataclasses.replace(snapshot, jobs=jobs)


def slots_by_type(nodes: Iterable[Node], spec: JobSpec | None = None) -> Counter[str]:
    """All slots there are; of a job that asks more of a node, those that it could have if it were alone."""
    there: Counter[str] = Counter()
    for node in nodes:
        if spec is None:
            there[node.accelerator] += node.num_slots
        elif spec.may_use(node):
            there[node.accelerator] += spec.most_on(node)
    return there


def _fits(spec: JobSpec, there: Mapping[str, int], nodes: Sequence[Node]) -> bool:
    """Whether it could start if it had all slots of a type to itself."""
    if spec.is_picky:
        there = slots_by_type(nodes, spec)
    usable = [num for kind, num in there.items() if spec.accelerators is None or kind in spec.accelerators]
    return max(usable, default=0) >= spec.min_replicas


def noticed(nodes: Iterable[Node]) -> dict[str, str]:
    """Nodes that will be gone soon, whatever is decided, each with why in a word."""
    return {node.name: "taken away soon" for node in nodes if node.notice}


def shrunk(nodes: Sequence[Node], quarantined: Collection[str], views: Iterable[JobView]) -> list[Node]:
    """Of quarantined nodes, only the slots that jobs hold: replicas that train there stay, and no other comes."""
    if not quarantined:
        return list(nodes)
    held: Counter[str] = Counter()
    for view in views:
        held.update(view.allocation.as_mapping())
    found = []
    for node in nodes:
        num_slots = min(held[node.name], node.num_slots) if node.name in quarantined else node.num_slots
        if num_slots:
            found.append(dataclasses.replace(node, num_slots=num_slots))
    return found


def avoiding(snapshot: Snapshot, plan: Plan, excluded: Mapping[str, Mapping[str, str]]) -> Plan:
    """The plan without new replicas on nodes that are excluded for their job. ``excluded``: why, by job and node.

    Replicas that are there stay. The others go to slots of the same type that the plan leaves free. If a job has less
    than its minimum then, it changes places with a job that has not started yet, or others that can do with less give
    it slots; otherwise it keeps what it holds, if that is free, or waits.
    """
    if not any(excluded.values()):
        return plan
    allocations = {name: Counter(dict(allocation.own_shares)) for name, allocation in plan.allocations.items()}
    free = Counter({node.name: node.num_slots for node in snapshot.nodes})
    for counts in allocations.values():
        free.subtract(counts)
    type_of = {node.name: node.accelerator for node in snapshot.nodes}
    views = {view.name: view for view in snapshot.jobs}
    changed: dict[str, str] = {}
    for name, counts in allocations.items():
        view, barred = views[name], excluded.get(name, {})
        held = view.allocation.as_mapping()
        for node in [node for node in counts if node in barred and counts[node] > held.get(node, 0)]:
            changed[name] = f"{node} is excluded: {barred[node]}"
            num_moving = counts[node] - held.get(node, 0)
            counts[node] -= num_moving
            free[node] += num_moving
            fit = [other for other in free if other not in barred and type_of[other] == type_of[node]]
            for other in sorted(fit, key=lambda other: (-counts[other], -free[other])):
                num_moved = min(free[other], num_moving)
                counts[other] += num_moved
                free[other] -= num_moved
                num_moving -= num_moved
            movable = [other for other in allocations if not views[other].has_started and not excluded.get(other)]
            for donor in movable if counts.total() < view.spec.min_replicas else ():
                for place in fit:
                    num_moved = min(allocations[donor][place], num_moving, free[node])
                    _exchange(allocations[donor], counts, place, node, num_moved)
                    free[node] -= num_moved
                    num_moving -= num_moved
                    if num_moved:
                        changed[donor] = f"takes slots on {node}, which {name} cannot use"
            if (num_short := view.spec.min_replicas - counts.total()) > 0:
                for donor, place, num_given in _spared(allocations, views, name, fit, num_short):
                    allocations[donor][place] -= num_given
                    counts[place] += num_given
                    changed[donor] = f"gives slots to {name}, which cannot use {node}"
        if name in changed and counts.total() < view.spec.min_replicas:
            free.update(counts)
            counts.clear()
            if all(count <= free[node] for node, count in held.items()):
                counts.update(held)
                free.subtract(held)
    return rewritten(plan, {name: (allocations[name], note) for name, note in changed.items()})


def _spared(
    allocations: Mapping[str, Counter[str]],
    views: Mapping[str, JobView],
    taker: str,
    places: Sequence[str],
    num_short: int,
) -> list[tuple[str, str, int]]:
    """(job, node, slots) of those that may shrink, the largest first, which together are enough; else nothing."""
    found: list[tuple[str, str, int]] = []
    donors = [name for name in allocations if name != taker and not views[name].is_fixed]
    for donor in sorted(donors, key=lambda name: (-allocations[name].total(), name)):
        num_spare = allocations[donor].total() - views[donor].spec.min_replicas
        for place in places:
            num_given = min(allocations[donor][place], num_spare, num_short)
            if num_given > 0:
                found.append((donor, place, num_given))
                num_spare -= num_given
                num_short -= num_given
    return found if num_short == 0 else []


def _exchange(donor: Counter[str], taker: Counter[str], place: str, node: str, num_slots: int) -> None:
    """The donor's slots at ``place`` go to the taker; the donor gets as many on ``node``."""
    donor[place] -= num_slots
    donor[node] += num_slots
    taker[place] += num_slots


def rewritten(plan: Plan, changed: Mapping[str, tuple[Counter[str], str]]) -> Plan:
    """The plan with these jobs' slots, and why they changed in its explanation."""
    after = {
        name: Allocation(tuple(NodeShare(node, count) for node, count in counts.items() if count > 0))
        for name, (counts, _) in changed.items()
    }
    explanation = plan.explanation
    if explanation is not None:
        jobs = tuple(
            dataclasses.replace(
                job, after=after[job.job], note="; ".join(filter(None, (job.note, changed[job.job][1])))
            )
            if job.job in changed
            else job
            for job in explanation.jobs
        )
        explanation = dataclasses.replace(explanation, jobs=jobs)
    return Plan(allocations={**plan.allocations, **after}, explanation=explanation)


def survivors(nodes: Sequence[Node], views: Iterable[JobView]) -> dict[str, Allocation]:
    """What jobs still hold after nodes went or shrank, by name: of those that have lost something and can go on.

    A share counts as long as its node is there and has room for it. Jobs that must not be moved come first, and keep
    their place on a node that shrank. A job that has nothing left, or less than its minimum, is not named.
    """
    return {view.name: left for view, left in kept_by(nodes, views) if goes_on_with(view, left)}


def goes_on_with(view: JobView, left: Allocation) -> bool:
    """The job has lost something, and ``left`` is enough to go on with."""
    return left != view.allocation and left.num_replicas >= view.spec.min_replicas


def kept_by(nodes: Sequence[Node], views: Iterable[JobView]) -> list[tuple[JobView, Allocation]]:
    """What every job still holds on these nodes, if only nothing; see :func:`survivors`."""
    free = {node.name: node.num_slots for node in nodes}
    found = []
    for view in sorted(views, key=lambda view: not view.is_fixed):
        left = []
        for share in view.allocation.shares:
            if share.node in free and (view.is_fixed or share.num_replicas <= free[share.node]):
                free[share.node] -= share.num_replicas
                left.append(share)
        found.append((view, Allocation(tuple(left))))
    return found


class SlotRules:
    """How jobs hold slots, and how policies see them. Here each slot belongs to one job, as on every live cluster.

    This is what a simulator extends (:mod:`pollux.simulator.slot_sharing`): its policies may let two jobs share slots
    and may ask for the truth about a job.
    """

    has_oracles: bool = False
    """Views carry an oracle, as policies that need one ask for."""
    shares_slots: bool = False
    """Jobs may sit on the slots of others."""

    def __init__(self) -> None:
        self.make_view: Callable[..., JobView] = JobView  # from the fields of JobView

    def snapshot(self, now: float, nodes: Sequence[Node], views: Sequence[JobView]) -> Snapshot:
        """See :meth:`Snapshot.of`."""
        return Snapshot.of(now, nodes, views)

    def usable(
        self, leaving: Collection[str], nodes: Sequence[Node], views: Sequence[JobView]
    ) -> tuple[list[Node], list[JobView]]:
        """See :func:`usable`."""
        return usable(leaving, nodes, views)

    def survivors(self, nodes: Sequence[Node], views: Sequence[JobView]) -> dict[str, Allocation]:
        """See :func:`survivors`."""
        return survivors(nodes, views)

    def problems(self, plan: Plan) -> list[str]:
        """Rules of its own that a plan breaks."""
        return []

    def changed_by_end(self, ended: str, held: Iterable[tuple[str, Allocation]]) -> dict[str, Allocation]:
        """What jobs that shared slots with one that ended hold from now on, by name. ``held``: by job, all jobs."""
        return {}
