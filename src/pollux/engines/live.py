"""What the server needs of an engine beyond the scheduler's port. ``local`` and ``ray`` implement it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pollux.api.cluster import CheckedNode, NodeReading
from pollux.engines.preflight import CheckRequest
from pollux.scheduler.ports import Engine
from pollux.scheduler.record import JobRecord

ReplicaState = Literal["starting", "member", "leaving"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaInfo:
    """One living process of a job."""

    replica_id: str
    rank: int | None  # None: not in the group, not yet or not any more
    node: str
    slot: int
    pid: int | None  # None: being started
    state: ReplicaState


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPhase:
    """What a start or resize under way waits for, and since when, in seconds since the epoch."""

    text: str = ""
    since: float | None = None


NO_PHASE = JobPhase()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusableNode:
    """A node that joined and gets no work."""

    name: str
    reason: str


class LiveEngine(Engine, Protocol):
    """An engine whose jobs outlive the scheduler that commanded them."""

    def adopt(self, records: Sequence[JobRecord]) -> None:
        """Take over after a restart: compare what the records say with what really runs.

        The next polls hold an event for every record that holds slots: that it runs, has stopped, has ended or is lost.
        Commands that never arrived are repeated. A job that no record names is stopped and forgotten.
        """

    def dump_stacks(self, job: str) -> None:
        """The replicas of an elastic job write the Python stacks of their threads to their logs."""

    def replicas(self, job: str) -> Sequence[ReplicaInfo]:
        """The processes of a job, members in rank order first; none for an unknown job."""

    def note(self, job: str) -> str:
        """Why a job does not go on although it holds slots; "" when it does."""

    def phase(self, job: str) -> JobPhase:
        """What its start or resize waits for now; no text where none is under way."""

    @property
    def trouble(self) -> str:
        """Why no job can be started, resized or stopped now; "" when all is well. May be asked from any thread."""

    @property
    def unusable(self) -> Sequence[UnusableNode]:
        """Nodes that get no work, and why; they are looked at again. May be asked from any thread."""

    @property
    def readings(self) -> Mapping[str, NodeReading]:
        """What nodes did last, by name; those that have not told yet are missing. May be asked from any thread."""

    def check(self, asked: CheckRequest) -> Sequence[CheckedNode]:
        """Look at every node, also those that get no work. Takes seconds. Raises EngineError: they cannot be asked."""

    def close(self, *, stops_jobs: bool, grace_s: float | None = None) -> None:
        """``stops_jobs``: all jobs checkpoint and leave, and nothing is left. Otherwise they train on.

        ``grace_s``: replicas that have not left by then are killed, even if they were promised more time before.
        """
