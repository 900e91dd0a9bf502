"""Greedy dense placement: roomiest node first, as in the OSDI'21 artifact. All baselines use it.

Where there are several accelerator types, a job sits on one of them. :class:`Budget` counts slots by type while a
policy decides which jobs run, and :class:`FreeSlots` finds the nodes. With one type both do what the artifact does.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence

from pollux.types import Allocation, JobView, Node, NodeShare, Snapshot


def types_of(nodes: Sequence[Node]) -> tuple[str, ...]:
    """The accelerator types there are, in order of their first node."""
    return tuple(dict.fromkeys(node.accelerator for node in nodes))


def may_use(job: JobView, accelerator: str) -> bool:
    return job.spec.accelerators is None or accelerator in job.spec.accelerators


class Budget:
    """Slots by accelerator type that are not promised to a job yet."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._type_of = {node.name: node.accelerator for node in snapshot.nodes}
        self.left = dict.fromkeys(types_of(snapshot.nodes), 0)
        for node in snapshot.nodes:
            self.left[node.accelerator] += node.num_slots
        self.total = dict(self.left)

    def type_of(self, allocation: Allocation) -> str | None:
        """The type that an allocation sits on; None for none."""
        return self._type_of[allocation.shares[0].node] if allocation else None

    def take(self, allocation: Allocation) -> None:
        """The allocation stays as it is."""
        accelerator = self.type_of(allocation)
        if accelerator is not None:
            self.left[accelerator] -= allocation.num_slots

    def admit(self, job: JobView, demand: int) -> str | None:
        """Promise ``demand`` slots of one type: the type that the job is on, else the one with most left."""
        fitting = [name for name, left in self.left.items() if may_use(job, name) and demand <= left]
        if not fitting:
            return None
        own = self.type_of(job.allocation)
        chosen = own if own in fitting else max(fitting, key=self.left.__getitem__)
        assert chosen is not None
        self.left[chosen] -= demand
        return chosen


def settle(snapshot: Snapshot, keeps: Callable[[JobView], bool] = lambda job: False) -> tuple[dict[str, int], Budget]:
    """Replica counts of fixed jobs and of jobs for which ``keeps(job)`` is true, and the slots that are left."""
    budget = Budget(snapshot)
    staying = [job for job in snapshot.jobs if job.is_fixed or keeps(job)]
    for job in staying:
        budget.take(job.allocation)
    return {job.name: job.allocation.num_replicas for job in staying}, budget


class Rooms:
    """Some nodes by the number of their free slots."""

    def __init__(self, free: Mapping[str, int]) -> None:
        self.free = dict(free)
        self._names = tuple(free)
        self._position = {node: position for position, node in enumerate(free)}
        # By number of free slots, positions of nodes as heaps. Nodes that have another number by now are passed over.
        self._with: dict[int, list[int]] = {}
        for node, number in free.items():
            self._with.setdefault(number, []).append(self._position[node])

    def change(self, node: str, count: int) -> None:
        self.free[node] += count
        heapq.heappush(self._with.setdefault(self.free[node], []), self._position[node])

    def roomiest(self) -> str:
        """The earliest of those with most free slots."""
        node = self._first(sorted(self._with, reverse=True))
        assert node is not None, "there are no nodes"
        return node

    def tightest(self, count: int, among: Iterable[str] | None = None) -> str | None:
        """The earliest of those with fewest free slots, but ``count`` at least: of all nodes, or of these."""
        if among is None:
            return self._first(sorted(number for number in self._with if number >= count))
        fitting = [node for node in among if self.free.get(node, 0) >= count]
        return min(fitting, key=lambda node: (self.free[node], self._position[node]), default=None)

    def _first(self, numbers: Sequence[int]) -> str | None:
        for number in numbers:
            positions = self._with[number]
            while positions and self.free[self._names[positions[0]]] != number:
                heapq.heappop(positions)
            if positions:
                return self._names[positions[0]]
            del self._with[number]
        return None


class FreeSlots:
    """Free slots per node, and by accelerator type."""

    def __init__(self, nodes: Sequence[Node], held: Iterable[Allocation] = ()) -> None:
        free = {node.name: node.num_slots for node in nodes}
        for allocation in held:
            for node, count in allocation.own_shares:
                free[node] -= count
        by_type: dict[str, dict[str, int]] = {}
        for each in nodes:
            by_type.setdefault(each.accelerator, {})[each.name] = free[each.name]
        self._type_of = {node.name: node.accelerator for node in nodes}
        self._rooms = {name: Rooms(mine) for name, mine in by_type.items()}
        self._on = {name: sum(mine.values()) for name, mine in by_type.items()}

    def on(self, accelerator: str) -> int:
        return self._on.get(accelerator, 0)

    def at(self, node: str) -> int:
        return self._rooms[self._type_of[node]].free[node]

    def take(self, allocation: Allocation) -> None:
        for node, count in allocation.own_shares:
            self._change(node, -count)

    def give(self, allocation: Allocation) -> None:
        """The allocation's slots are free again."""
        for node, count in allocation.own_shares:
            self._change(node, count)

    def place(self, num_replicas: int, accelerator: str | None = None, *, tightly: bool = False) -> Allocation:
        """Take ``num_replicas`` from the roomiest nodes, the earliest among equals; they must be there.

        Without an ``accelerator`` there must be one type only. ``tightly``: what fits into one node goes where the
        least stays free, so that roomy nodes are kept for jobs that need them.
        """
        if accelerator is None:
            (accelerator,) = self._on
        if num_replicas > self.on(accelerator):
            raise ValueError(f"{num_replicas} replicas do not fit into the {self.on(accelerator)} free slots")
        rooms = self._rooms[accelerator]
        shares: list[NodeShare] = []
        left = num_replicas
        while left > 0:
            node = (rooms.tightest(left) if tightly else None) or rooms.roomiest()
            take = min(rooms.free[node], left)
            self._change(node, -take)
            left -= take
            shares.append(NodeShare(node, take))
        return Allocation(tuple(shares))

    def _change(self, node: str, count: int) -> None:
        accelerator = self._type_of[node]
        self._rooms[accelerator].change(node, count)
        self._on[accelerator] += count


def place_counts(
    nodes: Sequence[Node], jobs: Sequence[JobView], counts: Mapping[str, int], types: Mapping[str, str] | None = None
) -> dict[str, Allocation]:
    """Keep jobs that hold their count already (and of the type in ``types``); place the others on free slots.

    In the order of ``jobs``; a job without a type goes where most is free. A job that does not fit gets nothing.
    """
    types = types or {}
    budget = Budget(Snapshot(now=0.0, nodes=tuple(nodes), jobs=()))
    kept = {
        job.name: job.allocation
        for job in jobs
        if job.allocation
        and (
            job.is_fixed
            or (
                job.allocation.num_replicas == counts.get(job.name, 0)
                and budget.type_of(job.allocation) == types.get(job.name, budget.type_of(job.allocation))
            )
        )
    }
    free = FreeSlots(nodes, kept.values())
    there = types_of(nodes)
    plan = dict(kept)
    for job in jobs:
        count = counts.get(job.name, 0)
        if job.name in kept or count == 0:
            continue
        wanted = [types[job.name]] if job.name in types else [name for name in there if may_use(job, name)]
        fitting = [name for name in wanted if count <= free.on(name)]
        if fitting:
            plan[job.name] = free.place(count, max(fitting, key=free.on))
    return plan
