"""Which nodes jobs may use, and what is left of what they hold when nodes go.

Pure functions; the loop calls them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from pollux.types import NO_ALLOCATION, Allocation, JobView, Node, Snapshot


def usable(
    leaving: Collection[str], nodes: Sequence[Node], views: Sequence[JobView]
) -> tuple[list[Node], list[JobView]]:
    """Nodes that leave keep what jobs hold that must not be moved, and nothing else; the others hold nothing there.

    A node that has shrunk keeps that too: no plan could leave them alone otherwise.
    """
    held: Counter[str] = Counter()
    fixed = {view.name for view in views if view.is_fixed}
    staying = []
    for view in views:
        if view.is_fixed:
            if view.allocation.host not in fixed:  # otherwise its host's slots are kept, and it sits on them
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

    A share counts as long as its node is there and has room for it; jobs that must not be moved come first, and keep
    their place on a node that shrank. A guest needs no room: it stays where its host does. A job of which nothing is
    left, or less than it can do with, is not named.
    """
    free = {node.name: node.num_slots for node in nodes}
    stays_on: dict[str, Collection[str]] = {}
    found: dict[str, Allocation] = {}
    for view in sorted(views, key=lambda view: (bool(view.allocation.host), not view.is_fixed)):
        host = view.allocation.host
        left = []
        for share in view.allocation.shares:
            if host:
                if share.node in stays_on.get(host, free):
                    left.append(share)
            elif share.node in free and (view.is_fixed or share.num_replicas <= free[share.node]):
                free[share.node] -= share.num_replicas
                left.append(share)
        stays_on[view.name] = {share.node for share in left}
        allocation = Allocation(tuple(left), host if left else "")
        if allocation != view.allocation and allocation.num_replicas >= view.spec.min_replicas:
            found[view.name] = allocation
    return found
