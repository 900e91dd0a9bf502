"""What the scheduler needs from outside: a clock, a store and an engine; and what it says to them.

Commands go to the engine, events come back; both are plain values. Engines decide nothing: they carry out
commands, report what happened, and say which nodes there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pollux.errors import InvalidValueError, ProfileError
from pollux.model.profile import Configuration, Timing, check_measurement
from pollux.scheduler.lifecycle import JobState
from pollux.types import Allocation, BatchLimits, JobSpec, Node, Snapshot, ThroughputParams

if TYPE_CHECKING:
    from pollux.scheduler.record import JobRecord, RoundRecord


# Commands -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StartJob:
    """Bring a job up from nothing (or from its last checkpoint)."""

    job: str
    spec: JobSpec
    allocation: Allocation
    generation: int
    params: Mapping[str, ThroughputParams] = field(default_factory=dict)
    noise_scale: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeJob:
    """Change a running job's replicas, in place where the engine can."""

    job: str
    allocation: Allocation
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopJob:
    """Let a job checkpoint and leave; its slots are free once the engine says it has stopped.

    Not ``saves``: it need not checkpoint, as nothing of it is needed any more.
    """

    job: str
    reason: str
    saves: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneJob:
    """Tell a job what was learnt of its throughput, so that it can choose its batch size."""

    job: str
    params: Mapping[str, ThroughputParams]


Command = StartJob | ResizeJob | StopJob | TuneJob


# Events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRuns:
    """All replicas of this generation are training."""

    job: str
    generation: int
    took_s: float | None = field(default=None, compare=False)
    """What a resize costs this job, if the engine knows; otherwise the scheduler's clock tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStopped:
    """A job that was asked to stop has left its slots; it can be started again."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded:
    """A job is over: it succeeded, was cancelled, or failed more often than it may."""

    job: str
    state: JobState
    at: float
    reason: str = ""  # the first line is a summary; a traceback may follow
    exit_code: int | None = None
    node: str = ""  # that may be the cause of a failure; "": the job itself is
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeFailed:
    """New replicas ended on a node before they were ready. The job goes on with those it had.

    ``node`` is "" when slots of the job are gone, and no node is to blame: it goes on with those it has left.
    """

    job: str
    generation: int
    allocation: Allocation | None  # what it holds now; None: a newer command is under way
    node: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLost:
    """The engine has nothing of a job any more; it starts again from its last checkpoint.

    One that ``is_halted`` would fail in the same way again: it waits, and holds nothing, until it is released.
    """

    job: str
    reason: str
    is_halted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHurt:
    """Some of a job's processes crashed. The engine mends that by survivors or the checkpoint, or tells the end."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """What a job tells while it trains."""

    job: str
    accelerator: str
    timings: Sequence[tuple[Configuration, Timing]] = ()
    noise_scale: float | None = None
    noise_scale_error: float | None = None  # standard error, in examples
    remaining_examples: float | None = None
    progress: float | None = None  # share of its work that is done, 0..1
    total_batch: int | None = None
    throughput: float | None = None  # examples per second
    batch: BatchLimits | None = None  # which batch sizes its script allows
    at: float | None = None  # when it came; None: nothing follows from when
    replica: str = ""  # that told it
    generation: int = 0
    num_steps: int | None = None
    stalled_s: float = 0.0  # in resizes, since the job began
    resumed_at: int | None = None  # the step of the checkpoint that it has just gone on from


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesChanged:
    """Nodes came or went; ask the engine which there are."""


Event = JobRuns | JobStopped | JobEnded | JobLost | JobHurt | JobReport | ResizeFailed | NodesChanged


def check_report(report: JobReport) -> None:
    """Refuse a report that cannot be true; nothing of it is then used.

    Raises:
        InvalidValueError: says which value and why.
    """
    try:
        for configuration, timing in report.timings:
            check_measurement(configuration, timing)
    except ProfileError as error:
        raise InvalidValueError(str(error)) from error
    for name in ("noise_scale", "noise_scale_error", "remaining_examples", "progress", "total_batch", "throughput"):
        value = getattr(report, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise InvalidValueError(f"{name} = {value}; a number of at least 0 is needed")


# Ports ----------------------------------------------------------------------------------------


class Engine(Protocol):
    """Runs jobs on nodes."""

    applies_at_once: bool
    """All releases of a batch of commands happen before its grabs, so a batch may trade slots."""

    def nodes(self) -> Sequence[Node]:
        """The nodes that can be used now."""

    def apply(self, commands: Sequence[Command]) -> None:
        """Begin to carry out commands, in order; outcomes arrive as events."""

    def poll(self) -> Sequence[Event]:
        """What happened since the last call. Never blocks."""


class NodePool(Protocol):
    """An engine whose nodes can come and go."""

    @property
    def template(self) -> Node:
        """What a new node looks like; its name does not matter, a new one is named by the pool."""

    def scale_to(self, keeping: Sequence[str], num_more: int, like: Node | None = None) -> None:
        """Keep these nodes; ``num_more`` should join; any other leaves once no replica is on it.

        ``like``: what those look like; None: as the template.

        Asked again every round, with all that is wanted and not up yet: asking twice is asking once, nodes may take
        minutes to join or never do, and ``num_more`` falls as they join or are needed no longer.
        """


class Clock(Protocol):
    def now(self) -> float:
        """Seconds; only differences mean anything."""

    def wait_until(self, deadline: float) -> None:
        """Return at ``deadline``, or earlier when something happened that the scheduler should see."""


class Store(Protocol):
    """Keeps what must survive: jobs, rounds. Called on every change, in order."""

    def save_job(self, record: JobRecord) -> None:
        """A job was submitted or changed."""

    def save_round(self, round_record: RoundRecord, snapshot: Snapshot) -> None:
        """A decision was made."""


class MemoryStore:
    """Forgets everything with the process: for simulations and tests."""

    def __init__(self, keep_rounds: bool = True) -> None:
        self.jobs: dict[str, JobRecord] = {}
        self._rounds: list[RoundRecord] = []
        self._keep_rounds = keep_rounds

    @property
    def rounds(self) -> Sequence[RoundRecord]:
        return self._rounds

    def save_job(self, record: JobRecord) -> None:
        self.jobs[record.name] = record

    def save_round(self, round_record: RoundRecord, snapshot: Snapshot) -> None:
        if self._keep_rounds:
            self._rounds.append(round_record)
