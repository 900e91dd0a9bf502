"""The JSON forms of the HTTP interface, as pydantic models: what the OpenAPI description is made from.

Stands in ``server``, below :mod:`pollux.server.app`. Bodies are checked against their form first and by the class they
describe afterwards (:class:`pollux.jobs.JobRequest`, :class:`pollux.wire.WireReport`), from whose fields the forms are
made, so that none can be forgotten here. Answers are only described: they come ready from the cluster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from pollux.jobs import FORMAT_VERSION, OPTIONS, JobRequest
from pollux.wire import REPORT_VERSION, WireReport

JobStateName = Literal["pending", "starting", "running", "resizing", "stopping", "succeeded", "failed", "cancelled"]
Shares = list[list[str | int]]  # [node, number of replicas]
MAX_REASON_LENGTH = 1000


# Bodies ---------------------------------------------------------------------------------------


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


def _form_of(
    described: type[Any], name: str, version: int, descriptions: Mapping[str, str], types: Mapping[str, Any]
) -> type[Body]:
    """A form with the fields of a dataclass; ``types`` are of those that look otherwise in JSON."""
    hints = get_type_hints(described)
    parts: dict[str, Any] = {"version": (Literal[version], Field(version, description="Of this form."))}
    for entry in dataclasses.fields(described):
        is_required = entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
        default: Any = ... if is_required else entry.default
        if default is dataclasses.MISSING:
            default = {}
        elif isinstance(default, tuple):
            default = list(default)
        kind = types.get(entry.name, hints[entry.name])
        parts[entry.name] = (kind, Field(default, description=descriptions.get(entry.name)))
    return create_model(name, __base__=Body, **parts)


_HELP = {
    **{option.field: option.help for option in OPTIONS},
    "command": "Program and arguments; they never go through a shell.",
    "array_index": "Set by the server for the jobs of an array.",
}
_TEXTS = dict.fromkeys(("command", "after", "accelerators"), list[str])
JobForm = _form_of(JobRequest, "JobForm", FORMAT_VERSION, _HELP, {**_TEXTS, "env": dict[str, str]})
JOB_EXAMPLE = {"command": ["python", "train.py"], "cwd": "/home/me/project", "name": "mnist", "max_replicas": 4}

_REPORT_HELP = {
    "job": "Whose report this is; the one in the address.",
    "replica": "Who reports: its POLLUX_REPLICA_ID.",
    "generation": "Which membership of its replicas it trains with.",
    "timings": "Lists [num_nodes, num_replicas, device_batch, grad_s, step_s, num_steps].",
    "batch": "The batch sizes its script allows.",
    "metrics": "What the script logged: any JSON values.",
    "noise_scale_error": "Standard error of the noise scale, in examples.",
    "notes": "What the run decided since its last report, a sentence each: at most 20 of 300 characters are kept.",
    "remaining_examples": "Useful examples still to be trained on.",
    "stalled_s": "Time lost to resizes and restarts since the job began.",
    "progress": "Share of its work that is done, 0 to 1.",
}
_REPORT_TYPES = {
    "batch": dict[str, int] | None,
    "timings": list[list[float]],
    "metrics": dict[str, Any],
    "notes": list[str],
}
ReportForm = _form_of(WireReport, "ReportForm", REPORT_VERSION, _REPORT_HELP, _REPORT_TYPES)


class CancelForm(Body):
    reason: str = Field("", max_length=MAX_REASON_LENGTH, description="Shown with the job.")


class ShutdownForm(Body):
    keep_jobs: bool = Field(
        False, description="Replicas train on and the next server adopts them; otherwise they checkpoint and leave."
    )


def body_schema(form: type[Body], *, is_required: bool, example: object = None) -> dict[str, Any]:
    """The ``requestBody`` of OpenAPI for a body that we read ourselves."""
    content: dict[str, Any] = {"schema": form.model_json_schema()}
    if example is not None:
        content["example"] = example
    return {"requestBody": {"required": is_required, "content": {"application/json": content}}}


# Answers --------------------------------------------------------------------------------------


class ErrorText(BaseModel):
    type: str = Field(description="The name of the error's class in pollux.errors, or of the HTTP status.")
    message: str = Field(description="What was wrong, what was seen, what is allowed.")
    known: list[str] | None = Field(None, description="Names there are, where an unknown one was asked for.")


class ErrorAnswer(BaseModel):
    error: ErrorText


class JobView(BaseModel):
    """A job at a glance; null where something is not known."""

    name: str
    state: JobStateName
    kind: str
    application: str
    command: list[str]
    cwd: str | None
    sequence: int = Field(description="Order of arrival.")
    submitted_at: float = Field(description="Seconds since 1970, as all times.")
    started_at: float | None
    finished_at: float | None
    reason: str = Field(description="Why it is in this state: why it waits, failed or was cancelled.")
    note: str = Field(description="Why it does not go on although it has replicas.")
    allocation: Shares = Field(description="Replicas per node, in the order of ranks.")
    num_replicas: int
    min_replicas: int
    max_replicas: int
    weight: float
    is_preemptible: bool
    generation: int
    num_restarts: int
    num_crashes: int
    exit_code: int | None
    after: list[str]
    time_limit_s: float | None
    progress: float | None
    epoch: int | None
    num_steps: int | None
    total_batch: int | None
    device_batch: int | None
    accum_steps: int | None
    noise_scale: float | None
    noise_scale_error: float | None = Field(description="Standard error of the noise scale, in examples.")
    efficiency: float | None
    gain: float | None
    throughput: float | None
    goodput: float | None
    metrics: dict[str, Any]
    reported_at: float | None
    running_s: float | None
    gpu_s: float | None
    lost_s: float | None = Field(description="Time lost to starts, resizes and restarts.")
    lost_share: float | None
    remaining_s: float | None = Field(description="An estimate.")


class JobList(BaseModel):
    jobs: list[JobView]


class JobPage(JobList):
    total: int = Field(description="How many there are in these states.")


class Model(BaseModel):
    """What was learnt of a job's throughput on one type of accelerator."""

    params: dict[str, float | None]
    num_configurations: int
    max_replicas: int
    rmsle: float | None = Field(description="How far the fit is off, as a root mean squared logarithmic error.")


class Decision(BaseModel):
    round: int
    at: float
    trigger: str
    before: int
    after: int
    speedup_before: float | None
    speedup_after: float | None
    move_factor: float | None = None
    note: str
    fitness: float | None = None
    upper_bound: float | None = None


class DecisionWithOptions(Decision):
    option_replicas: list[int]
    option_speedups: list[float | None]


class Transition(BaseModel):
    at: float
    source: JobStateName
    target: JobStateName
    reason: str


class TrainingNote(BaseModel):
    """What a run told of one of its decisions."""

    id: int
    at: float
    text: str


class Resize(BaseModel):
    generation: int
    at: float
    before: Shares
    after: Shares
    runs_at: float | None
    took_s: float | None


class Replica(BaseModel):
    replica_id: str
    rank: int | None
    node: str
    slot: int
    pid: int | None
    state: str


class JobDetail(JobView):
    request: dict[str, Any] | None
    failure: str = Field(description="With the traceback of the first replica that failed.")
    models: dict[str, Model] = Field(description="By type of accelerator.")
    decision: DecisionWithOptions | None = Field(description="The last one about this job.")
    decisions: list[Decision] = Field(description="The last ones that changed it.")
    transitions: list[Transition]
    training_notes: list[TrainingNote] = Field(description="What it told of its decisions: the last 100.")
    resizes: list[Resize]
    replicas: list[Replica]
    log_directory: str


class StoredReport(ReportForm):  # type: ignore[valid-type, misc]
    id: int
    at: float


class ReportList(BaseModel):
    reports: list[StoredReport]


class ReportAnswer(BaseModel):
    params: dict[str, list[float]] | None = Field(description="Fitted throughput model by type of accelerator.")
    report_every_s: float = Field(description="How long to wait before the next report.")


class LogFileView(BaseModel):
    replica: str
    stream: Literal["out", "err"]
    start: int = Field(description="The generation the job was started with.")
    size_bytes: int


class LogFileList(BaseModel):
    files: list[LogFileView]


class JobOnNode(BaseModel):
    name: str
    num_replicas: int


class NodeView(BaseModel):
    name: str
    num_slots: int
    accelerator: str
    is_draining: bool
    is_leaving: bool = Field(description="It is given back once nobody is on it.")
    used: int
    jobs: list[JobOnNode]


class NodeList(BaseModel):
    nodes: list[NodeView]


class Change(BaseModel):
    job: str
    before: int
    after: int
    speedup_before: float | None
    speedup_after: float | None
    note: str


class Round(BaseModel):
    id: int
    number: int
    at: float
    trigger: str
    decision_s: float
    num_jobs: int
    num_slots: int
    error: str
    fitness_before: float | None
    fitness: float | None
    upper_bound: float | None
    gap: float | None = Field(description="No allocation is better by more than this share.")
    words: list[str] = Field(description="What changed and why, in sentences.")
    changes: list[Change]


class RoundList(BaseModel):
    rounds: list[Round]


class SizingView(BaseModel):
    """How large the cluster should be, where its nodes come and go; and what they have cost."""

    min_nodes: int | None
    max_nodes: int | None
    budget_slots: float | None = Field(description="Slot-hours per hour.")
    num_wanted: int | None
    utility: float | None
    reason: str
    node_hours: dict[str, float] = Field(description="By accelerator, since the data directory was made.")
    node_price: float | None = Field(description="For an hour.")
    cost: float | None


class ClusterView(BaseModel):
    version: str
    engine: str
    policy: str
    started_at: float
    now: float
    num_slots: int
    num_used_slots: int
    nodes: int
    jobs: dict[str, int] = Field(description="How many there are in each state.")
    num_rounds: int
    last_decision_s: float | None
    lost_share: float | None = Field(description="Share of the jobs' time lost to resizes.")
    sizing: SizingView
    data_directory: str
    interval_s: float


class Health(BaseModel):
    status: Literal["ok"]


class Ending(BaseModel):
    keep_jobs: bool
