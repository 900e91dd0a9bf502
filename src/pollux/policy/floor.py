"""Which job sits on which slots while a plan is made: own slots, guests on the slots of others, and free slots.

Used by the policies that let two jobs share slots (gandiva, antman, lucid). A floor starts as the snapshot is. The
policy lets jobs leave, places them and lets them join others; what they hold in the end is its plan.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator

from pollux.policy.dense import Budget, FreeSlots, may_use
from pollux.policy.estimates import largest_nodes, load
from pollux.policy.gangs import demand
from pollux.policy.simulated import GuestAllocation, host_of
from pollux.types import Allocation, JobView, NodeShare, Plan, Snapshot

Entry = tuple[float, int, str, float]
"""A job that may be a host: its rank, its position in order of submission, its name, its load."""


class Floor:
    """The cluster under a plan in the making.

    ``rank``: hosts are ordered by this function of their load, which must not decrease with it.
    """

    def __init__(self, snapshot: Snapshot, rank: Callable[[float], float] = lambda load: load) -> None:
        self.jobs = {job.name: job for job in snapshot.jobs}
        self.held = {job.name: job.allocation for job in snapshot.jobs if job.allocation}
        self.free = FreeSlots(snapshot.nodes, self.held.values())
        self._type_of = {node.name: node.accelerator for node in snapshot.nodes}
        self._total = Budget(snapshot).total
        self._largest = largest_nodes(snapshot.nodes)
        self._order = {name: number for number, name in enumerate(self.jobs)}
        self._guests = {host: name for name, allocation in self.held.items() if (host := host_of(allocation))}
        fixed = {job.name for job in snapshot.jobs if job.is_fixed}
        # A guest that must stay needs its host where it is.
        self._fixed = fixed | {host for host, guest in self._guests.items() if guest in fixed}
        self._rank = rank
        self._hosts: dict[tuple[str, int], list[Entry]] = {}  # by type and replicas: owners without a guest, in order
        self._listed: dict[str, tuple[tuple[str, int], Entry]] = {}  # by job, where it is among them
        self._stale = set(self.held)  # jobs for which these two may be wrong

    def plan(self) -> Plan:
        return Plan(allocations=dict(self.held))

    # Questions ----------------------------------------------------------------------------------

    def is_fixed(self, name: str) -> bool:
        """Its allocation must not change, even if it is empty."""
        return name in self._fixed

    @property
    def waiting(self) -> list[JobView]:
        """Jobs that hold nothing and may be given something, in order of submission.

        Without jobs that ask for more than any type has: they must not hold up the others.
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
        return [name for name in self.jobs if name in self.held and not host_of(self.held[name])]

    def guest_of(self, name: str) -> str | None:
        return self._guests.get(name)

    def type_of(self, name: str) -> str:
        """The accelerator type that a job sits on."""
        return self._type_of[self.held[name].shares[0].node]

    def hosts_for(
        self, job: JobView, count: int, suits: Callable[[float, float], bool], *, of_same_size: bool = False
    ) -> Iterator[str]:
        """Jobs beside which ``count`` replicas of ``job`` could sit, the least rank first, then in order of submission.

        ``suits`` says of the loads of a host and of ``job`` whether they go together; if not, no larger ones do. A host
        has as many replicas at least, or just as many. None for jobs that are not preemptible: their hosts could not be
        moved either. What is held must not be changed before the last one was asked for.
        """
        if not job.spec.is_preemptible:
            return
        self._list_hosts()
        own = {name: load(job, count, self._largest, name) for name in self._total if may_use(job, name)}
        fitting = [
            _while_suited(entries, own[accelerator], suits)
            for (accelerator, size), entries in self._hosts.items()
            if accelerator in own and (size == count or (size > count and not of_same_size))
        ]
        for _, _, name, _ in heapq.merge(*fitting):
            yield name

    def _list_hosts(self) -> None:
        """Put jobs that have changed where they belong."""
        for name in self._stale:
            listed = self._listed.pop(name, None)
            if listed is not None:
                where, entry = listed
                del self._hosts[where][bisect.bisect_left(self._hosts[where], entry)]
            if name in self.held and not host_of(self.held[name]) and name not in self._guests:
                where = (self.type_of(name), self.held[name].num_replicas)
                busy = load(self.jobs[name], where[1], self._largest, where[0])
                entry = (self._rank(busy), self._order[name], name, busy)
                bisect.insort(self._hosts.setdefault(where, []), entry)
                self._listed[name] = (where, entry)
        self._stale.clear()

    # Changes ------------------------------------------------------------------------------------

    def leave(self, name: str) -> None:
        """Give up what a job sits on. Its guest, if it has one, has its part of the slots to itself."""
        left = self.held.pop(name)
        self._stale |= {name, host_of(left)}
        self._guests.pop(host_of(left), None)
        self.free.give(left)
        guest = self._guests.pop(name, None)
        if guest is not None:
            self.sit(guest, Allocation(self.held[guest].shares))

    def place(self, job: JobView, count: int, accelerator: str | None = None) -> bool:
        """Give a job slots of its own, close together; False if no type that it may use has as many free."""
        types = [name for name in self._total if may_use(job, name)] if accelerator is None else [accelerator]
        fitting = [name for name in types if count <= self.free.on(name)]
        if not fitting:
            return False
        self.held[job.name] = self.free.place(count, max(fitting, key=self.free.on), tightly=True)
        self._stale.add(job.name)
        return True

    def join(self, name: str, host: str, count: int) -> None:
        """Let a job sit beside the first ``count`` replicas of another one."""
        self.held[name] = GuestAllocation(_first(self.held[host], count), host)
        self._guests[host] = name
        self._stale |= {name, host}

    def shrink(self, name: str, count: int) -> None:
        """Keep the first ``count`` replicas of a job that has more, and no guest."""
        first = _first(self.held[name], count)
        self.leave(name)
        self.sit(name, Allocation(first))

    def sit(self, name: str, allocation: Allocation) -> None:
        """Let a job that holds nothing have slots of its own; they must be free."""
        self.held[name] = allocation
        self._stale.add(name)
        self.free.take(allocation)


def _while_suited(entries: list[Entry], own: float, suits: Callable[[float, float], bool]) -> Iterator[Entry]:
    for entry in entries:
        if not suits(entry[3], own):
            return
        yield entry


def _first(allocation: Allocation, count: int) -> tuple[NodeShare, ...]:
    shares, left = [], count
    for node, num_replicas in allocation.shares:
        if left > 0:
            shares.append(NodeShare(node, min(num_replicas, left)))
            left -= num_replicas
    return tuple(shares)
