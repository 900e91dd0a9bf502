"""Who sits where while a plan is made: own slots, guests on the slots of others, and what is free.

Between :mod:`pollux.policy.dense` and the policies that let two jobs share slots (gandiva, antman, lucid). It starts
as the snapshot is; a policy lets jobs leave, places them and lets them join others, and what is held in the end is
its plan.
"""

from __future__ import annotations

from collections.abc import Iterator

from pollux.policy.dense import FreeSlots, may_use, types_of
from pollux.policy.estimates import load
from pollux.policy.gangs import demand
from pollux.types import Allocation, JobView, NodeShare, Plan, Snapshot


class Floor:
    """The cluster under a plan in the making."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.jobs = {job.name: job for job in snapshot.jobs}
        self.held = {job.name: job.allocation for job in snapshot.jobs if job.allocation}
        self.free = FreeSlots(snapshot.nodes, self.held.values())
        self._nodes = snapshot.nodes
        self._type_of = {node.name: node.accelerator for node in snapshot.nodes}
        self._total = {name: FreeSlots(snapshot.nodes).on(name) for name in types_of(snapshot.nodes)}
        self._guests = {allocation.host: name for name, allocation in self.held.items() if allocation.host}
        fixed = {job.name for job in snapshot.jobs if job.is_fixed}
        # A guest that must stay needs its host where it is.
        self._fixed = fixed | {host for host, guest in self._guests.items() if guest in fixed}

    def plan(self) -> Plan:
        return Plan(allocations=dict(self.held))

    # Questions ----------------------------------------------------------------------------------

    def is_fixed(self, name: str) -> bool:
        """Nobody may change what it holds, or that it holds nothing."""
        return name in self._fixed

    @property
    def waiting(self) -> list[JobView]:
        """Jobs that hold nothing and may be given something, in order of submission.

        Without those that ask for more than there is of any type: they hold up nobody.
        """
        return [
            job
            for name, job in self.jobs.items()
            if name not in self.held
            and name not in self._fixed
            and any(may_use(job, kind) and demand(job) <= total for kind, total in self._total.items())
        ]

    @property
    def owners(self) -> list[str]:
        """Jobs with slots of their own, in order of submission."""
        return [name for name in self.jobs if name in self.held and not self.held[name].host]

    def guest_of(self, name: str) -> str | None:
        return self._guests.get(name)

    def type_of(self, name: str) -> str:
        """The accelerator type that a job sits on."""
        return self._type_of[self.held[name].shares[0].node]

    def load_of(self, name: str) -> float:
        """How busy a job keeps the slots it sits on."""
        return load(self.jobs[name], self.held[name].num_replicas, self._nodes, self.type_of(name))

    def hosts_for(self, job: JobView, count: int) -> Iterator[tuple[str, float, float]]:
        """(host, its load, the load of ``job`` there): jobs beside which ``count`` replicas of it could sit.

        Not for jobs that are not preemptible: their hosts could not be moved either.
        """
        if not job.spec.is_preemptible:
            return
        loads: dict[str, float] = {}  # by type
        for name in self.owners:
            accelerator = self.type_of(name)
            if name not in self._guests and may_use(job, accelerator) and count <= self.held[name].num_replicas:
                if accelerator not in loads:
                    loads[accelerator] = load(job, count, self._nodes, accelerator)
                yield name, self.load_of(name), loads[accelerator]

    # Changes ------------------------------------------------------------------------------------

    def leave(self, name: str) -> None:
        """Give up what a job sits on. Its guest, if it has one, has its part of the slots to itself."""
        left = self.held.pop(name)
        self._guests.pop(left.host, None)
        self.free.give(left)
        guest = self._guests.pop(name, None)
        if guest is not None:
            self.sit(guest, Allocation(self.held[guest].shares))

    def place(self, job: JobView, count: int, accelerator: str | None = None) -> bool:
        """Give a job slots of its own, close together; False if no type that it may use has as many free."""
        types = [name for name in types_of(self._nodes) if may_use(job, name)] if accelerator is None else [accelerator]
        fitting = [name for name in types if count <= self.free.on(name)]
        if not fitting:
            return False
        self.held[job.name] = self.free.place(count, max(fitting, key=self.free.on), tightly=True)
        return True

    def join(self, name: str, host: str, count: int) -> None:
        """Let a job sit beside the first ``count`` replicas of another one."""
        self.held[name] = Allocation(_first(self.held[host], count), host=host)
        self._guests[host] = name

    def shrink(self, name: str, count: int) -> None:
        """Keep the first ``count`` replicas of a job that has more, and no guest."""
        first = _first(self.held[name], count)
        self.leave(name)
        self.sit(name, Allocation(first))

    def sit(self, name: str, allocation: Allocation) -> None:
        """Let a job that holds nothing have slots of its own; they must be free."""
        self.held[name] = allocation
        self.free.take(allocation)


def _first(allocation: Allocation, count: int) -> tuple[NodeShare, ...]:
    shares, left = [], count
    for node, num_replicas in allocation.shares:
        if left > 0:
            shares.append(NodeShare(node, min(num_replicas, left)))
            left -= num_replicas
    return tuple(shares)
