"""Greedy dense placement: roomiest node first. What the baselines use, as in the OSDI'21 artifact."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pollux.types import Allocation, JobView, Node, NodeShare


class FreeSlots:
    """Free slots per node, in node order."""

    def __init__(self, nodes: Sequence[Node], held: Iterable[Allocation] = ()) -> None:
        self._free = {node.name: node.num_slots for node in nodes}
        for allocation in held:
            self.take(allocation)

    @property
    def total(self) -> int:
        return sum(self._free.values())

    def take(self, allocation: Allocation) -> None:
        for node, count in allocation.shares:
            self._free[node] -= count

    def place(self, num_replicas: int) -> Allocation:
        """Take ``num_replicas`` from the roomiest nodes, the earliest among equals; they must be there."""
        shares: list[NodeShare] = []
        left = num_replicas
        while left > 0:
            node = max(self._free, key=self._free.__getitem__)
            take = min(self._free[node], left)
            if take <= 0:
                raise ValueError(f"{num_replicas} replicas do not fit into the {num_replicas - left} free slots")
            self._free[node] -= take
            left -= take
            shares.append(NodeShare(node, take))
        return Allocation(tuple(shares))


def place_counts(nodes: Sequence[Node], jobs: Sequence[JobView], counts: Mapping[str, int]) -> dict[str, Allocation]:
    """Keep jobs whose count is what they hold; place the others, in the order of ``jobs``, on what is free."""
    kept = {
        job.name: job.allocation
        for job in jobs
        if job.allocation and (job.is_fixed or job.allocation.num_replicas == counts.get(job.name, 0))
    }
    free = FreeSlots(nodes, kept.values())
    plan = dict(kept)
    for job in jobs:
        count = counts.get(job.name, 0)
        if job.name not in kept and 0 < count <= free.total:
            plan[job.name] = free.place(count)
    return plan
