"""Greedy dense placement: roomiest node first. What the baselines use, as in the OSDI'21 artifact.

Where there are several accelerator types a job sits on one of them: :class:`Budget` promises slots by type while a
policy decides who gets any, :class:`FreeSlots` finds the nodes. With one type both do what the artifact does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from pollux.types import Allocation, JobView, Node, NodeShare, Snapshot


def types_of(nodes: Sequence[Node]) -> tuple[str, ...]:
    """The accelerator types there are, in order of their first node."""
    return tuple(dict.fromkeys(node.accelerator for node in nodes))


def may_use(job: JobView, accelerator: str) -> bool:
    return job.spec.accelerators is None or accelerator in job.spec.accelerators


class Budget:
    """Slots by accelerator type that are not promised to anybody yet."""

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
        """Slots that stay as they are; guests have none."""
        accelerator = self.type_of(allocation)
        if accelerator is not None:
            self.left[accelerator] -= allocation.num_slots

    def admit(self, job: JobView, demand: int) -> str | None:
        """Promise ``demand`` slots of one type: that which the job sits on, else the one with the most left."""
        fitting = [name for name, left in self.left.items() if may_use(job, name) and demand <= left]
        if not fitting:
            return None
        own = self.type_of(job.allocation)
        chosen = own if own in fitting else max(fitting, key=self.left.__getitem__)
        assert chosen is not None
        self.left[chosen] -= demand
        return chosen


def settle(snapshot: Snapshot, keeps: Callable[[JobView], bool] = lambda job: False) -> tuple[dict[str, int], Budget]:
    """What jobs have that must not be changed or that ``keeps`` says stay as they are, and what they leave."""
    budget = Budget(snapshot)
    staying = [job for job in snapshot.jobs if job.is_fixed or keeps(job)]
    for job in staying:
        budget.take(job.allocation)
    return {job.name: job.allocation.num_replicas for job in staying}, budget


class FreeSlots:
    """Free slots per node, in node order."""

    def __init__(self, nodes: Sequence[Node], held: Iterable[Allocation] = ()) -> None:
        self._free = {node.name: node.num_slots for node in nodes}
        self._type_of = {node.name: node.accelerator for node in nodes}
        for allocation in held:
            self.take(allocation)

    @property
    def total(self) -> int:
        return sum(self._free.values())

    def on(self, accelerator: str) -> int:
        return sum(free for node, free in self._free.items() if self._type_of[node] == accelerator)

    def at(self, node: str) -> int:
        return self._free[node]

    def take(self, allocation: Allocation) -> None:
        if allocation.host:
            return  # a guest: its host's slots
        for node, count in allocation.shares:
            self._free[node] -= count

    def give(self, allocation: Allocation) -> None:
        """Slots that are free again; a guest had none."""
        if not allocation.host:
            for node, count in allocation.shares:
                self._free[node] += count

    def place(self, num_replicas: int, accelerator: str | None = None, *, tightly: bool = False) -> Allocation:
        """Take ``num_replicas`` from the roomiest nodes, the earliest among equals; they must be there.

        Without an ``accelerator`` there must be one type only. ``tightly``: what fits into one node goes where the
        least stays free, so that roomy nodes are kept for those who need them.
        """
        nodes = [node for node in self._free if accelerator is None or self._type_of[node] == accelerator]
        shares: list[NodeShare] = []
        left = num_replicas
        while left > 0:
            fitting = [node for node in nodes if self._free[node] >= left] if tightly else []
            node = min(fitting, key=self._free.__getitem__) if fitting else max(nodes, key=self._free.__getitem__)
            take = min(self._free[node], left)
            if take <= 0:
                raise ValueError(f"{num_replicas} replicas do not fit into the {num_replicas - left} free slots")
            self._free[node] -= take
            left -= take
            shares.append(NodeShare(node, take))
        return Allocation(tuple(shares))


def place_counts(
    nodes: Sequence[Node], jobs: Sequence[JobView], counts: Mapping[str, int], types: Mapping[str, str] | None = None
) -> dict[str, Allocation]:
    """Keep jobs whose count (and type, where ``types`` names one) is what they hold; place the others on what is free.

    In the order of ``jobs``; a job whose type is not said goes where most is free. Who does not fit gets nothing.
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
    plan = dict(kept)
    for job in jobs:
        count = counts.get(job.name, 0)
        if job.name in kept or count == 0:
            continue
        wanted = [types[job.name]] if job.name in types else [name for name in types_of(nodes) if may_use(job, name)]
        fitting = [name for name in wanted if count <= free.on(name)]
        if fitting:
            plan[job.name] = free.place(count, max(fitting, key=free.on))
    return plan
