"""AntMan: guaranteed jobs, and opportunistic ones on slots that those leave idle (Xiao et al., OSDI'20).

Rules taken from the paper: jobs within the quota are guaranteed what they ask for, all at once, and keep it until
they end. The others run opportunistically: on slots that are idle until a guaranteed job needs them, or on the slots
of a guaranteed job, the least busy one first, as long as that one is hardly slowed down.

Here there is one tenant whose quota is the whole cluster, so jobs are guaranteed in order of submission as far as the
slots go. No job overtakes another within the guarantee; opportunistic jobs fill the gaps that this leaves. When an
opportunistic job becomes guaranteed, it keeps idle slots that it runs on, and moves off the slots of another job.

Simplifications: the original slows down an opportunistic job's kernels while the guaranteed one is busy, and moves
its tensors to host memory when the other's grow. Here guests are admitted only where the guaranteed job keeps
``MIN_SPEED`` of its speed by the model, both are slowed alike, and memory is not considered. A guest sits beside one
job, while the original chooses each GPU on its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Container
from typing import NamedTuple

from pollux.model.sharing import shared_speed
from pollux.policy.base import StatelessPolicy
from pollux.policy.dense import Budget, may_use
from pollux.policy.floor import Floor
from pollux.policy.gangs import demand
from pollux.types import JobView, Plan, Snapshot

# Share of its own speed that a guaranteed job keeps beside a guest. The paper throttles guests so that the loss is near
# zero; without that, two small models cost each other up to 10 % (pollux.model.sharing). On the OSDI'21 workloads 6 and
# 1 the average JCT is 2 % lower with 0.8, 3 % higher with 0.95.
MIN_SPEED = 0.9


class Guarantee(NamedTuple):
    """The slots that a job within the quota may claim."""

    accelerator: str
    num_replicas: int


class AntManPolicy(StatelessPolicy):
    name = "antman"
    adapts_batch = False
    shares_slots = True

    def decide(self, snapshot: Snapshot) -> Plan:
        floor = Floor(snapshot)
        guarantees = _guarantees(snapshot, floor)
        misplaced = [name for name, guarantee in guarantees.items() if not _has(floor, name, guarantee)]
        for name in misplaced:
            if name in floor.held:
                floor.leave(name)
        room = _Room(floor, guarantees)
        for name in misplaced:
            room.make(name, guarantees[name])
        for job in floor.waiting:
            # A job that cannot be preempted would keep slots that are guaranteed to others.
            if job.spec.is_preemptible and not floor.place(job, demand(job)):
                host = _host(floor, job, guarantees)
                if host is not None:
                    floor.join(job.name, host, demand(job))
        return floor.plan()


def _guarantees(snapshot: Snapshot, floor: Floor) -> dict[str, Guarantee]:
    """Of the jobs within the quota, in order of submission; those that must stay as they are come before others."""
    budget = Budget(snapshot)
    total = dict(budget.left)
    found: dict[str, Guarantee] = {}
    for name in floor.owners:
        if floor.is_fixed(name):
            budget.take(floor.held[name])
            found[name] = Guarantee(floor.type_of(name), floor.held[name].num_slots)
    for job in snapshot.jobs:
        if floor.is_fixed(job.name):
            continue
        for count in dict.fromkeys((job.allocation.num_slots or demand(job), demand(job))):
            accelerator = budget.admit(job, count)  # what it has already before what it asked for
            if accelerator is not None:
                found[job.name] = Guarantee(accelerator, count)
                break
        else:  # it comes next: no later job is guaranteed slots that it waits for
            for name in total:
                if may_use(job, name) and demand(job) <= total[name]:
                    budget.left[name] = 0
    return found


def _has(floor: Floor, name: str, guarantee: Guarantee) -> bool:
    """Whether a job sits on slots of its own as it is guaranteed."""
    return name in floor.held and (floor.type_of(name), floor.held[name].num_slots) == guarantee


class _Room:
    """Slots of their own for guaranteed jobs; opportunistic ones leave for them, the last to come first."""

    def __init__(self, floor: Floor, guaranteed: Container[str]) -> None:
        self._floor = floor
        self._order = {name: number for number, name in enumerate(floor.jobs)}
        self._leaving: dict[str, list[tuple[int, str]]] = {}  # by type, in the order in which they would leave
        for name in floor.owners:
            if name not in guaranteed:
                self._may_leave(name)

    def _may_leave(self, name: str) -> None:
        heapq.heappush(self._leaving.setdefault(self._floor.type_of(name), []), (-self._order[name], name))

    def make(self, name: str, guarantee: Guarantee) -> None:
        while not self._floor.place(self._floor.jobs[name], guarantee.num_replicas, guarantee.accelerator):
            _, other = heapq.heappop(self._leaving[guarantee.accelerator])
            guest = self._floor.guest_of(other)
            self._floor.leave(other)
            if guest is not None:  # it has the slots to itself now
                self._may_leave(guest)


def _host(floor: Floor, job: JobView, guaranteed: Container[str]) -> str | None:
    """The least busy guaranteed job that this one would hardly slow down."""
    hosts = floor.hosts_for(job, demand(job), _is_unnoticed)
    return next((name for name in hosts if name in guaranteed), None)


def _is_unnoticed(load: float, other: float) -> bool:
    return shared_speed(load, other) >= MIN_SPEED
