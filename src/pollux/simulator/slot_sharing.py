"""The rules of simulated slots: two jobs may share them, and every job has an oracle.

Extends :class:`pollux.scheduler.nodes.SlotRules`, by which the scheduler treats slots; :mod:`pollux.simulator.run`
hands it to the scheduler. How fast two jobs run on the same slots is in :mod:`pollux.simulator.colocation`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

from pollux.policy.simulated import GuestAllocation, Oracle, SimulatedJobView, host_of
from pollux.scheduler.nodes import SlotRules, goes_on_with, kept_by, usable
from pollux.types import NO_ALLOCATION, Allocation, JobSpec, JobView, Node, Plan, Snapshot


class OracleSource(Protocol):
    """Knows the truth about jobs."""

    def oracle(self, job: str) -> Oracle:
        """The truth about one job."""


class SimulatedSlots(SlotRules):
    """Guests sit on the slots of their hosts, and move, stay and end with what becomes of those."""

    has_oracles = True
    shares_slots = True

    def __init__(self, oracles: OracleSource) -> None:
        def with_oracle(*, spec: JobSpec, **fields: Any) -> JobView:
            return SimulatedJobView(spec=spec, oracle=oracles.oracle(spec.name), **fields)

        self.make_view = with_oracle

    def snapshot(self, now: float, nodes: Sequence[Node], views: Sequence[JobView]) -> Snapshot:
        """A guest whose host is gone has the slots to itself; one that must not be moved keeps its host in place."""
        views = _settled(views)
        free = {node.name: node.num_slots for node in nodes}
        held: dict[str, Allocation] = {}
        fixed = {name for view in views if view.is_fixed for name in (view.name, host_of(view.allocation))}
        # Guests come last, when it is clear which hosts stay.
        for view in sorted(views, key=lambda view: (bool(host_of(view.allocation)), view.name not in fixed)):
            host = host_of(view.allocation)
            if host:
                held[view.name] = view.allocation if held[host] else NO_ALLOCATION
                continue
            fits = all(count <= free.get(node, 0) for node, count in view.allocation.shares)
            held[view.name] = view.allocation if fits else NO_ALLOCATION
            for node, count in held[view.name].shares:
                free[node] -= count
        jobs = tuple(
            view if view.allocation == held[view.name] else dataclasses.replace(view, allocation=NO_ALLOCATION)
            for view in views
        )
        return Snapshot(now=now, nodes=tuple(nodes), jobs=jobs)

    def usable(
        self, leaving: Collection[str], nodes: Sequence[Node], views: Sequence[JobView]
    ) -> tuple[list[Node], list[JobView]]:
        """The slots of a guest that stays with its host are kept once."""
        fixed = {view.name for view in views if view.is_fixed}
        carried = {view.name for view in views if view.is_fixed and host_of(view.allocation) in fixed}
        kept, staying = usable(leaving, nodes, [view for view in views if view.name not in carried])
        shown = {view.name: view for view in staying}
        return kept, [shown.get(view.name, view) for view in views]

    def survivors(self, nodes: Sequence[Node], views: Sequence[JobView]) -> dict[str, Allocation]:
        """A guest needs no room of its own: it stays where its host does."""
        left = kept_by(nodes, [view for view in views if not host_of(view.allocation)])
        stays_on = {view.name: {share.node for share in allocation.shares} for view, allocation in left}
        there = {node.name for node in nodes}
        for view in views:
            host = host_of(view.allocation)
            if host:  # one that is not among the views, and only starting, stays
                shares = tuple(share for share in view.allocation.shares if share.node in stays_on.get(host, there))
                left.append((view, GuestAllocation(shares, host) if shares else NO_ALLOCATION))
        return {view.name: allocation for view, allocation in left if goes_on_with(view, allocation)}

    def problems(self, plan: Plan) -> list[str]:
        """A guest sits within what one host holds as its own, and is its only guest."""
        guests: dict[str, list[str]] = {}
        found = []
        for name, allocation in plan.allocations.items():
            host = host_of(allocation)
            if not host:
                continue
            guests.setdefault(host, []).append(name)
            held = dict(plan.allocation_of(host).own_shares)
            if any(count > held.get(node, 0) for node, count in allocation.shares):
                found.append(f"job {name!r} is a guest of {host!r}, which does not hold {allocation.shares} as its own")
        found += [f"{host!r} has several guests: {names}" for host, names in guests.items() if len(names) > 1]
        return found

    def changed_by_end(self, ended: str, held: Iterable[tuple[str, Allocation]]) -> dict[str, Allocation]:
        """The guest of a job that ended has the slots to itself."""
        return {name: Allocation(allocation.shares) for name, allocation in held if host_of(allocation) == ended}


def _settled(views: Sequence[JobView]) -> list[JobView]:
    """Guests whose host holds no slots have the slots to themselves."""
    holders = {view.name for view in views if view.allocation.own_shares}
    return [
        dataclasses.replace(view, allocation=Allocation(view.allocation.shares))
        if (host := host_of(view.allocation)) and host not in holders
        else view
        for view in views
    ]
