"""What an elastic job keeps of its replicas, and what happened to them. :class:`ElasticJob` uses it."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field

from pollux.engines.processes.slots import Slot
from pollux.engines.processes.starters import ReplicaProcess
from pollux.membership.leave import LEAVE_NOW
from pollux.membership.roster import Member


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    at: float
    formed: int  # the newest generation that had formed
    rank: int
    process: ElasticReplica
