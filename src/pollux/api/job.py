"""What the server says of jobs: at a glance (a row of a table), in short, and in full.

Views of the server return these, the client decodes them, the command line and the dashboard show them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pollux.api.codec import about
from pollux.api.round import Decision, DecisionWithOptions

JobStateName = Literal["pending", "starting", "running", "resizing", "stopping", "succeeded", "failed", "cancelled"]
FINAL_STATES = frozenset({"succeeded", "failed", "cancelled"})
Shares = tuple[tuple[str, int], ...]  # node and number of replicas, in the order of ranks
NonFinite = Literal["nan", "inf", "-inf"]  # JSON has no such numbers: they come as texts
Numbers = tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A job in the page's list. Null where something is not known.

    No field changes as time goes on: the page's stream sends a row again when it differs, and keeps rows of ended jobs.
    """

    name: str
    state: JobStateName
    kind: str
    application: str
    owner: str = field(metadata=about("The user who submitted it."))
    team: str = field(metadata=about("The owner's, now; empty: none."))
    priority: int
    sequence: int = field(metadata=about("Order of arrival."))
    submitted_at: float = field(metadata=about("Seconds since 1970, as all times."))
    started_at: float | None
    finished_at: float | None
    reason: str = field(metadata=about("Why it is in this state: why it waits, failed or was cancelled."))
    note: str = field(metadata=about("Why it does not go on although it has replicas."))
    phase: str = field(metadata=about("What its start or resize waits for now; empty: none is under way."))
    phase_since: float | None
    allocation: Shares = field(metadata=about("Replicas per node, in the order of ranks."))
    num_replicas: int
    min_replicas: int
    max_replicas: int
    progress: float | None
    epoch: int | None
    total_batch: int | None
    device_batch: int | None
    accum_steps: int | None
    gain: float | None
    noise_scale: float | None
    noise_scale_error: float | None = field(metadata=about("Standard error of the noise scale, in examples."))
    efficiency: float | None
    throughput: float | None
    goodput: float | None
    remaining_s: float | None = field(metadata=about("An estimate."))
    num_resizes: int = field(metadata=about("Starts and resizes after the first start."))
    num_crashes: int
    reported_at: float | None
    metric_name: str = field(
        metadata=about("The logged number to show beside it: its study's, else a loss, else the first; empty: none.")
    )
    metric: float | NonFinite | None = field(metadata=about("Its last value."))
    array: str = field(metadata=about("The array that it is a part of; empty: none."))
    study: str = field(metadata=about("The study that it is a trial of; empty: none."))
    exit_code: int | None
    used_slot_s: float | None = field(metadata=about("Slot-seconds that it held, all in all; null until it ends."))

    @property
    def is_over(self) -> bool:
        return self.state in FINAL_STATES


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary(JobRow):
    """A job in short."""

    command: tuple[str, ...]
    cwd: str | None
    weight: float
    is_preemptible: bool
    generation: int
    after: tuple[str, ...]
    standing: str = field(metadata=about("What its team has of its guarantee, in words; empty: it has none."))
    held_back: str = field(metadata=about("Why a limit, guarantee or priority keeps it from having more, if one does."))
    time_limit_s: float | None
    deadline_at: float | None = field(metadata=about("By when it should be through; None: no deadline."))
    deadline: str = field(metadata=about("Whether it can be, or was, in words; empty: no deadline."))
    budget_slot_s: float | None = field(metadata=about("Slot-seconds that it may hold; None: no budget."))
    num_steps: int | None
    metrics: Mapping[str, object] = field(metadata=about("What the script logged last: any JSON values."))
    running_s: float | None = field(metadata=about("Time in which it held slots."))
    attained_slot_s: float | None = field(metadata=about("The same, each second times the slots held."))
    lost_s: float | None = field(
        metadata=about("Time lost to resizes, to starts after the first, and to work that was trained again.")
    )
    lost_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobList:
    jobs: tuple[JobSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    jobs: tuple[JobSummary, ...]
    total: int = field(metadata=about("How many there are in these states."))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobForecast:
    """When a waiting job will start, by playing the queue on several times. Null: it cannot be foreseen."""

    words: str = field(metadata=about("The answer in a sentence."))
    low_s: float | None = field(metadata=about("Seconds from now; in 1 of 10 plays it starts earlier."))
    median_s: float | None
    high_s: float | None = field(metadata=about("In 1 of 10 plays it starts later."))
    num_runs: int = field(metadata=about("How often the queue was played on."))
    num_guessed: int = field(metadata=about("Jobs whose end is guessed by their age."))


# In full --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedModel:
    """What was learnt of a job's throughput on one type of accelerator."""

    params: Mapping[str, float | None]
    num_configurations: int
    max_replicas: int = field(metadata=about("The most that were measured."))
    max_on_a_node: int = field(metadata=about("The most replicas that were measured together on one node."))
    max_nodes: int = field(metadata=about("The most nodes that were measured together."))
    rmsle: float | None = field(metadata=about("How far the fit is off, as a root mean squared logarithmic error."))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    at: float
    source: JobStateName
    target: JobStateName
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingNote:
    """What a run told of one of its decisions."""

    id: int = field(metadata=about("Goes up for ever."))
    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResize:
    """A start (``before`` is empty) or a change of replicas. ``runs_at`` is null until all of them train."""

    generation: int
    at: float
    before: Shares
    after: Shares
    runs_at: float | None
    took_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRestart:
    """A crash after which a job went on from its checkpoint. Null: not known."""

    at: float
    cause: str
    pause_s: float = field(metadata=about("From the crash until it trained again."))
    step: int = field(metadata=about("From which it went on; 0: from the beginning."))
    num_steps_again: int = field(metadata=about("Steps that it had reported before, and trained again."))
    again_s: float | None = field(metadata=about("What those took; an estimate."))
    words: str = field(metadata=about("All of it in a sentence."))


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    replica_id: str
    rank: int | None
    node: str
    slot: int
    pid: int | None
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellPlace:
    """Where a shell beside a replica is to be: what its owner needs to enter, and no secret of the job."""

    replica: Replica
    boot_id: str = field(metadata=about("Of the machine, as the kernel tells it; empty: not known."))
    gpu: str = field(metadata=about("UUID of its GPU or slice; empty: none."))
    unix_user: str = field(metadata=about("That the job runs as; empty: the server's."))
    checkpoint_dir: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDetail(JobSummary):
    """All there is to say about a job."""

    request: Mapping[str, object] = field(metadata=about("What was submitted; values of its environment are hidden."))
    failure: str = field(metadata=about("With the traceback of the first replica that failed."))
    models: Mapping[str, FittedModel] = field(metadata=about("By type of accelerator."))
    decision: DecisionWithOptions | None = field(metadata=about("The last one about this job."))
    decisions: tuple[Decision, ...] = field(metadata=about("The last ones that changed it."))
    why: str = field(
        metadata=about("Why it has the slots that it has, in words; empty: it has none, or it is not known.")
    )
    transitions: tuple[StateChange, ...]
    training_notes: tuple[TrainingNote, ...] = field(metadata=about("What it told of its decisions: the last 100."))
    resizes: tuple[JobResize, ...]
    restarts: tuple[JobRestart, ...] = field(metadata=about("After crashes, from its checkpoint: the last 32."))
    replicas: tuple[Replica, ...]
    idle: str = field(metadata=about("Which of its GPUs have done nothing for long, in words; empty: none."))
    energy_j: float | None = field(metadata=about("Joules that its GPUs took; null: not known."))
    energy_per_percent_j: float | None = field(metadata=about("The same for a hundredth of its work."))
    log_directory: str
    versions: Mapping[str, str] = field(metadata=about("Of what runs, by name: git, workdir, python, torch, pollux."))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLogFile:
    replica: str
    stream: Literal["out", "err"]
    start: int = field(metadata=about("The generation the job was started with."))
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLogFileList:
    files: tuple[JobLogFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancellation:
    """The body of a request to cancel a job."""

    reason: str = field(default="", metadata=about("Shown with the job.", max_length=1000))


JobAction = Literal["cancel", "hold", "release"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSelection:
    """Jobs to do something with: by name, by pattern (``sweep-*``), by the name of their array, or all."""

    action: JobAction
    names: tuple[str, ...] = field(default=(), metadata=about(max_length=10_000))
    is_all: bool = field(default=False, metadata=about("All that are not over; of a member, the own ones."))
    reason: str = field(default="", metadata=about("Shown with the jobs.", max_length=1000))


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedJobs:
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobUpdate:
    """What to change of a job that is not over. Null: as before."""

    weight: float | None = None
    priority: int | None = None
    min_replicas: int | None = None
    max_replicas: int | None = None
    time_limit_s: float | None = None
    max_restarts: int | None = None
    deadline_s: float | None = field(default=None, metadata=about("After its submission."))
    budget_hours: float | None = field(default=None, metadata=about("Slot-hours, what it has held included."))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsUpdate:
    """What to change of many jobs, chosen as for an action."""

    names: tuple[str, ...] = field(default=(), metadata=about(max_length=10_000))
    is_all: bool = field(default=False, metadata=about("All that are not over; of a member, the own ones."))
    change: JobUpdate


# Over time ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCurves:
    """Columns of equal length, from the job's reports."""

    at: tuple[float, ...]
    num_replicas: tuple[int, ...]
    total_batch: tuple[int, ...]
    device_batch: tuple[int, ...]
    accum_steps: tuple[int, ...]
    gain: Numbers
    noise_scale: Numbers
    noise_scale_error: Numbers
    efficiency: Numbers
    throughput: Numbers
    goodput: Numbers
    progress: Numbers
    epoch: tuple[int, ...]
    metrics: Mapping[str, tuple[float | NonFinite | None, ...]] = field(
        metadata=about("What the script logged, where that is a number; null: nothing was logged.")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPoint:
    num_nodes: int
    num_replicas: int
    device_batch: int
    grad_s: float
    step_s: float
    num_steps: int
    predicted_grad_s: float | None
    predicted_step_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedLine:
    num_nodes: int
    num_replicas: int
    device_batch: tuple[int, ...]
    step_s: Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorModel:
    params: Mapping[str, float | None]
    rmsle: float | None = field(metadata=about("How far the fitted step times are off."))
    num_steps: int
    points: tuple[MeasuredPoint, ...]
    lines: tuple[FittedLine, ...] = field(metadata=about("One for every shape that was measured."))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenBatch:
    total_batch: int
    device_batch: int
    accum_steps: int
    goodput: float | None
    throughput: float | None
    efficiency: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputCurve:
    accelerator: str
    num_nodes: int
    num_replicas: int
    noise_scale: float
    noise_scale_error: float | None
    total_batch: tuple[int, ...]
    device_batch: tuple[int, ...]
    accum_steps: tuple[int, ...]
    throughput: Numbers
    efficiency: Numbers
    goodput: Numbers
    chosen: ChosenBatch | None = field(metadata=about("What it trains with, by the same model."))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedupCurve:
    num_replicas: tuple[int, ...]
    speedup: Numbers
    chosen: int
    round: int | None = field(metadata=about("The id of the decision."))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobModel:
    accelerators: Mapping[str, AcceleratorModel]
    goodput: GoodputCurve | None = field(metadata=about("Over the total batch, for what the job holds or held last."))
    speedups: SpeedupCurve | None = field(metadata=about("What the last decision weighed."))
