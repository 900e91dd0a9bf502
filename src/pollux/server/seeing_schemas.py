"""The JSON forms of what is drawn: the cluster over time, curves, models, rounds in full, published simulations.

Stands in ``server``, beside :mod:`pollux.server.schemas`, and as there answers are only described.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from pollux.server.schemas import Body, ClusterView, JobStateName, NodeView, Round, Shares

Numbers = list[float | None]
OddNumber = Literal["nan", "inf", "-inf"]  # as texts: JSON has no such numbers


class Sample(BaseModel):
    """The cluster at one time."""

    at: float
    num_nodes: int
    num_slots: int
    num_used_slots: int
    num_running: int = Field(description="Jobs that hold slots.")
    num_pending: int = Field(description="Jobs that wait for some.")
    efficiency: float | None = Field(description="Mean of the jobs' efficiencies, weighted by their replicas.")
    goodput: float | None = Field(description="Useful work per second, in slots: what a job does with one counts 1.")
    node_hours: float = Field(description="Since the data directory was made.")
    cost: float | None = Field(description="Of those, if the price of an hour is known.")


class SampleList(BaseModel):
    samples: list[Sample]


class JobRow(BaseModel):
    """A job in a list: what does not change by itself as time goes on."""

    name: str
    state: JobStateName
    kind: str
    application: str
    sequence: int
    submitted_at: float
    started_at: float | None
    finished_at: float | None
    reason: str
    note: str
    allocation: Shares
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
    noise_scale_error: float | None
    efficiency: float | None
    throughput: float | None
    goodput: float | None
    remaining_s: float | None
    num_restarts: int
    num_crashes: int
    reported_at: float | None
    loss: float | OddNumber | None = Field(description="The metric of that name, if the script logs one.")


class State(BaseModel):
    """What is new. The first message of a stream is full; rows of later ones replace those of the same name or id."""

    at: float
    is_full: bool = Field(description="Forget what came before.")
    cluster: ClusterView | None = Field(description="Null: as before.")
    jobs: list[JobRow]
    gone_jobs: list[str]
    nodes: list[NodeView]
    gone_nodes: list[str]
    rounds: list[Round]
    samples: list[Sample]


class StateEvent(BaseModel):
    event: Literal["state"]
    id: str = Field(description="Goes up with each.")
    data: str = Field(
        description="A JSON object with at, is_full (forget what came before), cluster (as GET /cluster; null: as "
        "before), jobs and gone_jobs, nodes (as GET /nodes) and gone_nodes, rounds (as GET /rounds), samples (as GET "
        "/samples). Rows replace those of the same name or id.",
        json_schema_extra={"contentMediaType": "application/json"},
    )


class HeldSpan(BaseModel):
    since: float = Field(alias="from")
    until: float | None = Field(alias="to", description="Null: still.")
    num_replicas: int
    allocation: Shares


class TimelineJob(BaseModel):
    name: str
    sequence: int
    state: JobStateName
    submitted_at: float
    finished_at: float | None
    spans: list[HeldSpan]


class Timeline(BaseModel):
    since: float
    until: float
    total: int = Field(description="How many jobs were present; those that had not started are left out first.")
    jobs: list[TimelineJob] = Field(description="By arrival.")


class Curves(BaseModel):
    """Columns of equal length, from the job's reports."""

    at: list[float]
    num_replicas: list[int]
    total_batch: list[int]
    device_batch: list[int]
    accum_steps: list[int]
    gain: Numbers
    noise_scale: Numbers
    noise_scale_error: Numbers
    efficiency: Numbers
    throughput: Numbers
    goodput: Numbers
    progress: Numbers
    epoch: list[int]
    metrics: dict[str, list[float | OddNumber | None]] = Field(
        description="What the script logged, where that is a number; null: nothing was logged."
    )


class MeasuredPoint(BaseModel):
    num_nodes: int
    num_replicas: int
    device_batch: int
    grad_s: float
    step_s: float
    num_steps: int
    predicted_grad_s: float | None
    predicted_step_s: float | None


class FittedLine(BaseModel):
    num_nodes: int
    num_replicas: int
    device_batch: list[int]
    step_s: Numbers


class AcceleratorModel(BaseModel):
    params: dict[str, float | None]
    rmsle: float | None = Field(description="How far the fitted step times are off.")
    num_steps: int
    points: list[MeasuredPoint]
    lines: list[FittedLine] = Field(description="One for every shape that was measured.")


class ChosenBatch(BaseModel):
    total_batch: int
    device_batch: int
    accum_steps: int
    goodput: float | None
    throughput: float | None
    efficiency: float | None


class GoodputCurve(BaseModel):
    accelerator: str
    num_nodes: int
    num_replicas: int
    noise_scale: float
    noise_scale_error: float | None
    total_batch: list[int]
    device_batch: list[int]
    accum_steps: list[int]
    throughput: Numbers
    efficiency: Numbers
    goodput: Numbers
    chosen: ChosenBatch | None = Field(description="What it trains with, by the same model.")


class SpeedupCurve(BaseModel):
    num_replicas: list[int]
    speedup: Numbers
    chosen: int
    round: int | None = Field(description="The id of the decision.")


class JobModel(BaseModel):
    accelerators: dict[str, AcceleratorModel]
    goodput: GoodputCurve | None = Field(description="Over the total batch, for what the job holds or held last.")
    speedups: SpeedupCurve | None = Field(description="What was weighed in the last decision.")


class RoundJob(BaseModel):
    job: str
    before: Shares
    after: Shares
    speedup_before: float | None
    speedup_after: float | None
    move_factor: float | None = Field(description="What a move would multiply the speedup with.")
    note: str
    option_replicas: list[int]
    option_speedups: Numbers


class RoundNode(BaseModel):
    name: str
    num_slots: int
    accelerator: str


class RoundDetail(Round):
    method: str
    jobs: list[RoundJob] = Field(description="All, or of many jobs those that changed.")
    nodes: list[RoundNode] | None = Field(description="Null: there were too many to keep.")


SimulationKind = Literal["compare", "replay", "simulate"]
SummaryRow = dict[str, float | int | str | None]


class SimulationForm(Body):
    title: str = Field(min_length=1, max_length=200)
    command: str = Field(max_length=10_000, description="What to type to repeat it.")
    kind: SimulationKind
    summary: list[SummaryRow] = Field(
        max_length=1000, description="A row for each workload and policy, with numbers by name."
    )
    html: str = Field(min_length=1, description="The page, complete in itself.")


class Simulation(BaseModel):
    id: str
    at: float
    title: str
    command: str
    kind: SimulationKind
    summary: list[SummaryRow]
    report_url: str = Field(description="Where the page is; whoever knows it may see it.")


class PublishedSimulation(Simulation):
    forgotten: list[str] = Field(description="Ids of older ones that went, as there were too many.")


class SimulationList(BaseModel):
    simulations: list[Simulation] = Field(description="Newest first.")
