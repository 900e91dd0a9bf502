"""What an elastic job keeps of its replicas, and what happened to them. :class:`ElasticJob` uses it."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from pollux.engines.processes.failure import how_it_ended
from pollux.engines.processes.slots import ReplicaState, ReplicaView, Slot
from pollux.engines.processes.starters import ReplicaProcess
from pollux.membership.leave import LEAVE_NOW
from pollux.membership.roster import Member

CRASH_WINDOW_S = 300.0  # crashes further apart than this have different causes


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """``kind``: spawned, ready, published, formed, exited, killed, restarting, stopping, failed or finished.

    ``time`` is in seconds since the epoch; that of "formed" was taken by the replica that came last.
    """

    time: float
    kind: str
    detail: str = ""
    replica_id: str | None = None
    generation: int | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class ElasticReplica:
    member: Member
    slot: Slot
    handle: ReplicaProcess
    is_ready: bool = False
    first_generation: int | None = None  # with this one among its members
    is_noted: bool = False  # its end is among the events
    kill_at: float | None = None  # only while leaving
    spawned_at: float = field(default_factory=time.monotonic)  # later by the time that the job was held since

    @property
    def was_member(self) -> bool:
        return self.first_generation is not None

    def stop_signal(self, saves: bool) -> signal.Signals:
        """One that was never in a group has nothing to save, and may wait for a group for a long time."""
        if not self.was_member:
            return signal.SIGKILL
        return signal.SIGTERM if saves else LEAVE_NOW

    @property
    def exit_code(self) -> int | None:
        return self.handle.exit_code

    @property
    def how(self) -> str:
        """It has ended, in words."""
        return how_it_ended(self.exit_code or 0)


def slots_for(
    num_replicas: int, members: list[ElasticReplica], newcomers: list[ElasticReplica], node_of: Callable[[int], str]
) -> list[Slot]:
    """Those of members first, then of newcomers, who hold no state, then the lowest free ones."""
    ready_first = sorted(newcomers, key=lambda process: not process.is_ready)
    slots = [process.slot for process in [*members, *ready_first]][:num_replicas]
    taken = {slot.number for slot in slots}
    free = (index for index in itertools.count() if index not in taken)
    return slots + [Slot(node_of(index), index) for index in itertools.islice(free, num_replicas - len(slots))]


def views_of(*groups: tuple[ReplicaState, list[ElasticReplica]]) -> tuple[ReplicaView, ...]:
    """Those that live, by their state; the place among the members is the rank."""
    return tuple(
        ReplicaView(
            process.member.replica_id,
            rank if state == "member" else None,
            process.slot,
            process.handle.pid,
            state,
        )
        for state, group in groups
        for rank, process in enumerate(group)
        if process.exit_code is None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    at: float
    formed: int  # the newest generation that had formed
    rank: int
    process: ElasticReplica


class RecentCrashes:
    """Of the last minutes, the first of each formed generation: what comes after it follows from it, mostly."""

    def __init__(self) -> None:
        self.recent: list[Crash] = []

    def add(self, process: ElasticReplica, rank: int, formed: int) -> None:
        now = time.monotonic()
        self.recent = [crash for crash in self.recent if now - crash.at < CRASH_WINDOW_S]
        if not any(crash.formed == formed for crash in self.recent):
            self.recent.append(Crash(at=now, formed=formed, rank=rank, process=process))

    def forget(self, slots: Collection[Slot]) -> None:
        """They are gone, which may be why."""
        self.recent = [crash for crash in self.recent if crash.process.slot not in slots]
