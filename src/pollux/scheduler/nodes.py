"""Which nodes jobs may use, and what is left of what they hold when nodes go.

Pure functions on the values of snapshots. The loop calls them through :class:`SlotRules`, which a simulator may extend.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from pollux.types import NO_ALLOCATION, Allocation, JobView, Node, Plan, Snapshot


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
    """Without the jobs that may run on none of the accelerators there are: they wait, and delay no other job."""
    types = {node.accelerator for node in snapshot.nodes}
    jobs = tuple(
        job for job in snapshot.jobs if job.spec.accelerators is None or not types.isdisjoint(job.spec.accelerators)
    )
    return snapshot if len(jobs) == len(snapshot.jobs) else dataclasses.replace(snapshot, jobs=jobs)


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
