"""Gandiva: time slicing, packing, migration and grow-shrink (Xiao et al., OSDI'18).

Rules taken from the paper. Jobs get the GPUs they ask for, close together, and new ones start at once where there is
room. Where there is not, a job is packed onto a running job of the same size if both leave enough of the GPUs idle. A
pair that makes less progress than its jobs would one after the other is separated, and such pairs are not tried again.
If jobs still wait, jobs take turns: new ones and those that have waited longest come in, those that have run longest
go out. When the queue is empty, packed jobs get GPUs of their own, jobs that are spread over more servers than they
need are brought together, and jobs on one server grow into its idle GPUs as far as ``max_replicas`` allows. They give
them back as soon as a job waits.

Simplifications: the original suspends and resumes within a second and turns every minute. Here a start or resize takes
what the engine says (30 s by default), so a turn takes ``QUANTUM_S``, and all servers turn at the same time. A packed
pair takes its turns together. Which jobs to pack first follows from the oracle's or the model's load, where the
original reads GPU utilisation and memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pollux.model.sharing import shared_speed
from pollux.policy.base import Policy, PolicySettings
from pollux.policy.dense import Budget
from pollux.policy.estimates import largest_nodes, step_s
from pollux.policy.floor import Floor
from pollux.policy.gangs import demand
from pollux.policy.simulated import host_of
from pollux.types import Allocation, JobView, NodeShare, Plan, Snapshot

# Seconds of a turn, and the least time before a job is migrated or grows. The paper's is a minute, where a switch takes
# a second; here a resize takes 30. A turn of 180 s has twice the resizes and 12 % more average JCT on the OSDI'21
# workloads, one of 720 s half the resizes and 4 % less; but the aim is early feedback, and longer turns delay it.
QUANTUM_S = 360.0
MIN_GAIN = 1.1  # least speed of a packed pair, where taking turns has 1. 1.0 and 1.3 are within 3 % of average JCT
MIN_GROWTH = 1.1  # least speedup for which a job grows, since it pays for two resizes. 1.0 and 1.3 make no difference
MAX_MISFITS = 2048  # pairs that did not fit and are remembered, the latest; bounds memory

Kind = tuple[str, str]
"""A job's family, or its name if it has none."""


@dataclass(frozen=True, slots=True)
class _Sight:
    """A job in the last round: where it sits, with which other job, since when, and how far it is."""

    at: float
    shares: tuple[NodeShare, ...]
    beside: str | None
    since: float
    done_examples: float | None


class GandivaPolicy(Policy):
    name = "gandiva"
    settings_read = frozenset({"charges_measured", "resize_s"})
    adapts_batch = False
    shares_slots = True

    def __init__(self, settings: PolicySettings) -> None:
        self._resize_s = settings.resize_s
        self.reset()

    def reset(self) -> None:
        self._turned_at = -math.inf
        self._sights: dict[str, _Sight] = {}  # of jobs that run
        self._ran_at: dict[str, float] = {}  # when a job ran last
        self._alone: dict[tuple[str, int, str], float] = {}  # by job, replicas, type: useful examples a second alone
        self._misfits: dict[frozenset[Kind], None] = {}  # pairs that do not gain by being packed, the latest last

    def decide(self, snapshot: Snapshot) -> Plan:
        floor = Floor(snapshot)
        self._introspect(snapshot, floor)
        self._admit(floor)
        if floor.waiting:
            for name in floor.owners:
                if self._has_grown(floor, name):
                    floor.shrink(name, demand(floor.jobs[name]))
            self._admit(floor)
            self._pack(floor)
        if floor.waiting and snapshot.now - self._turned_at >= QUANTUM_S:
            self._turn(snapshot, floor)
            self._turned_at = snapshot.now
            self._admit(floor)
            self._pack(floor)
        if not floor.waiting:
            self._use_idle_slots(snapshot, floor)
        self._remember(snapshot, floor)
        return floor.plan()

    # Time slicing -------------------------------------------------------------------------------

    def _queue(self, floor: Floor) -> list[JobView]:
        """Waiting jobs: first those that have never run (early feedback is the policy's aim), then by time waited."""
        return sorted(floor.waiting, key=self._waits_since)

    def _waits_since(self, job: JobView) -> float:
        return self._ran_at.get(job.name, -math.inf)

    def _admit(self, floor: Floor) -> None:
        for job in self._queue(floor):
            floor.place(job, demand(job))

    def _turn(self, snapshot: Snapshot, floor: Floor) -> None:
        """Jobs that held nothing come in before jobs that ran; of those, the ones that ran longest go out first."""
        budget = Budget(snapshot)
        owners = set(floor.owners)
        waited, ran = [], []
        for job in snapshot.jobs:
            if floor.is_fixed(job.name):
                budget.take(job.allocation)
            elif job.name in owners and job.allocation:
                ran.append(job)
            elif job.name in owners or job.name not in floor.held:  # guests come and go with their hosts
                waited.append(job)
        waited.sort(key=self._waits_since)
        ran.sort(key=lambda job: self._since(job.name, snapshot.now), reverse=True)
        coming: list[tuple[JobView, str]] = []
        for job in [*waited, *ran]:
            accelerator = budget.admit(job, demand(job))
            stays = job.name in floor.held and floor.held[job.name].num_replicas == demand(job)
            if accelerator is not None and stays and floor.type_of(job.name) == accelerator:
                continue
            if job.name in floor.held:
                self._suspend(floor, job.name)
            if accelerator is not None:
                coming.append((job, accelerator))
        for job, accelerator in coming:
            floor.place(job, demand(job), accelerator)

    def _suspend(self, floor: Floor, name: str) -> None:
        guest = floor.guest_of(name)
        if guest is not None:
            floor.leave(guest)
        floor.leave(name)

    # Packing ------------------------------------------------------------------------------------

    def _pack(self, floor: Floor) -> None:
        for job in self._queue(floor):
            mate = self._mate(floor, job)
            if mate is not None:
                floor.join(job.name, mate, demand(job))

    def _mate(self, floor: Floor, job: JobView) -> str | None:
        """The least busy job of the same size that gains by being packed with this one."""
        hosts = floor.hosts_for(job, demand(job), _gain_together, of_same_size=True)
        return next((name for name in hosts if _kinds(job, floor.jobs[name]) not in self._misfits), None)

    def _introspect(self, snapshot: Snapshot, floor: Floor) -> None:
        """Measure progress since the last sight, and undo pairs that are slower than taking turns."""
        shares: dict[str, float] = {}  # of its own speed that a packed job makes
        for job in snapshot.jobs:
            neighbour = _neighbour(floor, job.name)
            speed = self._speed(job, neighbour, snapshot.now)
            if speed is None:
                continue
            where = (job.name, job.allocation.num_replicas, floor.type_of(job.name))
            if neighbour is None:
                self._alone[where] = speed
            elif self._alone.get(where, 0.0) > 0:
                shares[job.name] = speed / self._alone[where]
        for host in floor.owners:
            guest = floor.guest_of(host)
            if guest is None or floor.is_fixed(guest):
                continue
            known = [shares[name] for name in (host, guest) if name in shares]
            if known and 2 * sum(known) / len(known) < 1:  # an unknown speed counts as the other's
                self._misfits[_kinds(floor.jobs[host], floor.jobs[guest])] = None
                floor.leave(guest)

    def _speed(self, job: JobView, beside: str | None, now: float) -> float | None:
        """Useful examples a second since the last sight, if nothing has changed for the job from before it on."""
        sight = self._sights.get(job.name)
        if sight is None or now <= sight.at or sight.done_examples is None or job.done_examples is None:
            return None
        is_as_it_was = (sight.shares, sight.beside) == (job.allocation.shares, beside)
        if not is_as_it_was or sight.at - sight.since < self._resize_s:
            return None
        return (job.done_examples - sight.done_examples) / (now - sight.at)

    # With an empty queue ------------------------------------------------------------------------

    def _use_idle_slots(self, snapshot: Snapshot, floor: Floor) -> None:
        for name, allocation in list(floor.held.items()):
            host = host_of(allocation)
            if host and not floor.is_fixed(name):
                floor.leave(name)
                if not floor.place(floor.jobs[name], demand(floor.jobs[name])):
                    floor.join(name, host, allocation.num_replicas)
        movable = [
            name
            for name in floor.owners
            if not floor.is_fixed(name)
            and floor.guest_of(name) is None
            and snapshot.now - self._since(name, snapshot.now) >= QUANTUM_S
        ]
        while any([_migrate(floor, name) for name in movable]):
            pass  # what one leaves may be what another needs
        largest = largest_nodes(snapshot.nodes)
        for name in movable:
            _grow(floor, name, largest)

    def _has_grown(self, floor: Floor, name: str) -> bool:
        has_more = floor.held[name].num_replicas > demand(floor.jobs[name])
        return has_more and not floor.is_fixed(name) and floor.guest_of(name) is None

    # Memory -------------------------------------------------------------------------------------

    def _since(self, name: str, now: float) -> float:
        """Since when a job sits where it sits."""
        sight = self._sights.get(name)
        return now if sight is None else sight.since

    def _remember(self, snapshot: Snapshot, floor: Floor) -> None:
        sights = {}
        for name, allocation in floor.held.items():
            before, beside = self._sights.get(name), _neighbour(floor, name)
            stays = before is not None and (before.shares, before.beside) == (allocation.shares, beside)
            since = before.since if before is not None and stays else snapshot.now
            done = floor.jobs[name].done_examples
            sights[name] = _Sight(snapshot.now, allocation.shares, beside, since, done)
        self._sights = sights
        ran = self._ran_at | dict.fromkeys(floor.held, snapshot.now)
        self._ran_at = {name: at for name, at in ran.items() if name in floor.jobs}
        self._alone = {where: speed for where, speed in self._alone.items() if where[0] in floor.jobs}
        for pair in [pair for pair in self._misfits if not all(app or name in floor.jobs for app, name in pair)]:
            del self._misfits[pair]
        while len(self._misfits) > MAX_MISFITS:
            del self._misfits[next(iter(self._misfits))]


def _kinds(one: JobView, other: JobView) -> frozenset[Kind]:
    return frozenset((job.spec.family, "" if job.spec.family else job.name) for job in (one, other))


def _gain_together(load: float, other: float) -> bool:
    return 2 * shared_speed(load, other) >= MIN_GAIN


def _neighbour(floor: Floor, name: str) -> str | None:
    """The job on the same slots."""
    return (host_of(floor.held[name]) or floor.guest_of(name)) if name in floor.held else None


def _migrate(floor: Floor, name: str) -> bool:
    """Move a job that is spread over too many nodes, if its own slots and the free ones allow fewer."""
    before, accelerator = floor.held[name], floor.type_of(name)
    if before.num_nodes == 1:
        return False
    floor.leave(name)
    floor.place(floor.jobs[name], before.num_replicas, accelerator)
    if floor.held[name].num_nodes < before.num_nodes:
        return True
    floor.leave(name)
    floor.sit(name, before)
    return False


def _grow(floor: Floor, name: str, largest: Mapping[str, int]) -> None:
    """Give a job on one node the idle slots of that node, if it is clearly faster with them."""
    job, allocation = floor.jobs[name], floor.held[name]
    if allocation.num_nodes > 1:
        return
    node, count = allocation.shares[0]
    limits = job.spec.batch
    usable = (job.spec.requested_batch_size or limits.initial) // limits.device_min if limits is not None else count
    more = min(count + floor.free.at(node), job.spec.max_replicas, usable)
    if more <= count:
        return
    before_s, after_s = (step_s(job, number, largest, floor.type_of(name)) for number in (count, more))
    if math.isfinite(before_s) and before_s >= MIN_GROWTH * after_s:
        floor.leave(name)
        floor.sit(name, Allocation.of((node, more)))
