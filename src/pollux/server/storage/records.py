"""What the scheduler has, as the database keeps it: records of jobs, rounds, what was learnt, snapshots.

:mod:`pollux.server.storage.store` writes and reads its rows with this. Most classes are written field by field
(:mod:`pollux.api.codec`); knowledge and snapshots have a compact form of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from pollux.api.codec import Codec, Json, Special, read_estimate, read_integer, read_list, shown
from pollux.api.report import MEASUREMENTS, Measurement, encode_measurement
from pollux.errors import InvalidValueError
from pollux.scheduler.knowledge import Knowledge
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.record import Departure, JobRecord, Reallocation, RoundRecord
from pollux.types import (
    Allocation,
    BatchLimits,
    Explanation,
    FloatArray,
    IntArray,
    JobDecision,
    JobSpec,
    JobView,
    Node,
    Plan,
    ShapeFactors,
    Snapshot,
    ThroughputParams,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJob:
    """A job as it was last saved. ``record`` is None between its request and the scheduler's taking it in."""

    name: str
    sequence: int  # order of arrival here
    state: JobState
    submitted_at: float
    finished_at: float | None
    request: Mapping[str, Json] | None
    record: JobRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResize:
    """A start (``before`` is empty) or a change of replicas. ``runs_at`` is None unless all of them came to train."""

    generation: int
    at: float
    before: Allocation
    after: Allocation
    runs_at: float | None


# Knowledge ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredKnowledge:
    label: str
    timings: Mapping[str, tuple[Measurement, ...]]  # by accelerator
    max_replicas: int
    first_noise_scale: float | None
    owner: str = ""


def encode_knowledge(knowledge: Knowledge) -> Json:
    """What was measured. Not the fitted θ: it follows from that, and is fitted anew in the next round."""
    profile = knowledge.profile
    return {
        "label": knowledge.label,
        "owner": knowledge.owner,
        "timings": {
            accelerator: [encode_measurement(entry) for entry in profile.timings(accelerator).items()]
            for accelerator in profile.accelerators
        },
        "max_replicas": int(profile.max_replicas),
        "first_noise_scale": STORED.encode(knowledge.first_noise_scale),
    }


def decode_knowledge(value: object, where: str = "knowledge") -> Knowledge:
    if isinstance(value, Knowledge):
        return value
    stored = STORED.decode(_StoredKnowledge, value, where)
    knowledge = Knowledge(stored.label, stored.owner, first_noise_scale=stored.first_noise_scale)
    for accelerator, entries in stored.timings.items():
        for index, (configuration, timing) in enumerate(entries):
            if configuration in knowledge.profile.timings(accelerator):
                place = f"{where}.timings.{accelerator}[{index}]"
                raise InvalidValueError(f"{place} = {shown(configuration)}; each configuration is allowed once")
            knowledge.observe(accelerator, configuration, timing)
    measured = knowledge.profile.max_replicas
    # Configurations with the most replicas may have been forgotten since.
    knowledge.profile.max_replicas = read_integer(stored.max_replicas, f"{where}.max_replicas", minimum=measured)
    return knowledge


# Arrays ---------------------------------------------------------------------------------------


def _decode_counts(value: object, where: str) -> IntArray:
    entries = read_list(value, where)
    counts = [read_integer(entry, f"{where}[{index}]", minimum=0) for index, entry in enumerate(entries)]
    return np.array(counts, dtype=np.int64)


def _decode_estimates(value: object, where: str) -> FloatArray:
    entries = read_list(value, where)
    return np.array([read_estimate(entry, f"{where}[{index}]") for index, entry in enumerate(entries)], np.float64)


def _never(value: object) -> Json:
    raise AssertionError("arrays are written by their class")


STORED = Codec(
    special={
        **MEASUREMENTS,
        Knowledge: Special(encode_knowledge, decode_knowledge),
        IntArray: Special(_never, _decode_counts),
        FloatArray: Special(_never, _decode_estimates),
    },
    nonfinite_in=(JobDecision, Explanation),  # a field with a default may be missing: its row is older than the field
)


# Jobs and rounds ------------------------------------------------------------------------------


def encode_record(record: JobRecord) -> dict[str, Json]:
    return _encode(record)


def decode_record(value: object, knowledge: Knowledge | None = None, where: str = "record") -> JobRecord:
    """Several records can share their ``knowledge``: it is then given, and not part of what is read."""
    if knowledge is not None and isinstance(value, Mapping):
        value = {**value, "knowledge": knowledge}
    return STORED.decode(JobRecord, value, where)


def encode_plan(plan: Plan) -> dict[str, Json]:
    return _encode(plan)


def decode_plan(value: object, where: str = "plan") -> Plan:
    plan = STORED.decode(Plan, value, where)
    for index, decision in enumerate(() if plan.explanation is None else plan.explanation.jobs):
        num_options, num_speedups = len(decision.option_replicas), len(decision.option_speedups)
        if num_options != num_speedups:
            raise InvalidValueError(
                f"{where}.explanation.jobs[{index}].option_speedups has {num_speedups} entries; "
                f"{num_options} are needed, as many as option_replicas"
            )
    return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundChanges:
    """What a round changed, which jobs had ended since the one before, and what it said of the number of nodes."""

    changes: tuple[Reallocation, ...]
    departures: tuple[Departure, ...]
    sizing: str


def encode_changes(record: RoundRecord) -> dict[str, Json]:
    return _encode(RoundChanges(changes=record.changes, departures=record.departures, sizing=record.sizing))


def decode_changes(value: object) -> RoundChanges:
    # Recordings that are kept for replays were made before sizes were told.
    return STORED.decode(RoundChanges, {"sizing": "", **value} if isinstance(value, dict) else value, "changes")


def _encode(value: object) -> dict[str, Json]:
    encoded = STORED.encode(value)
    assert isinstance(encoded, dict)
    return encoded


# Snapshots ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """What was learnt; jobs of one application share it, and it is written once."""

    params: Mapping[str, ThroughputParams]
    shape_factors: Mapping[str, ShapeFactors]
    batch: BatchLimits | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJobView:
    """A job as the policy saw it. ``model`` is a place in the snapshot's list; the spec is kept with the job."""

    name: str
    model: int
    age_s: float
    allocation: Allocation
    num_resizes: int | None
    resize_s: float | None
    attained_s: float
    attained_slot_s: float
    guessed: frozenset[str]
    noise_scale: float | None
    noise_scale_error: float | None
    max_profiled_replicas: int
    remaining_examples: float | None
    done_examples: float | None
    is_pinned: bool
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSnapshot:
    """What a policy saw, so that another can be asked what it would have done."""

    now: float
    nodes: tuple[Node, ...]
    models: tuple[StoredModel, ...]
    jobs: tuple[StoredJobView, ...]

    @classmethod
    def of(cls, snapshot: Snapshot) -> StoredSnapshot:
        """Without the jobs' specs, and without oracles (a live cluster has none)."""
        models: list[StoredModel] = []
        number_of: dict[object, int] = {}
        jobs = []
        for job in snapshot.jobs:
            key = (tuple(job.params.items()), tuple(job.shape_factors.items()), job.spec.batch)
            if key not in number_of:
                number_of[key] = len(models)
                models.append(StoredModel(params=job.params, shape_factors=job.shape_factors, batch=job.spec.batch))
            values = {name: getattr(job, name) for name in _KEPT_OF_VIEW}
            jobs.append(StoredJobView(name=job.name, model=number_of[key], **values))
        return cls(now=snapshot.now, nodes=snapshot.nodes, models=tuple(models), jobs=tuple(jobs))

    def restored(self, specs: Mapping[str, JobSpec]) -> Snapshot:
        """The snapshot again, given the specs of its jobs.

        Raises:
            InvalidValueError: one is not there.
        """
        jobs = []
        for index, job in enumerate(self.jobs):
            if job.name not in specs:
                raise InvalidValueError(f"snapshot.jobs[{index}].name = {shown(job.name)}; its spec is needed too")
            model = self.models[read_integer(job.model, f"snapshot.jobs[{index}].model", 0, len(self.models) - 1)]
            values = {name: getattr(job, name) for name in _KEPT_OF_VIEW}
            spec = replace(specs[job.name], batch=model.batch)
            jobs.append(JobView(spec=spec, params=model.params, shape_factors=model.shape_factors, **values))
        return Snapshot(now=self.now, nodes=self.nodes, jobs=tuple(jobs))


_KEPT_OF_VIEW = tuple(name for name in StoredJobView.__dataclass_fields__ if name not in ("name", "model"))


def encode_snapshot(snapshot: Snapshot) -> dict[str, Json]:
    return _encode(StoredSnapshot.of(snapshot))


def decode_snapshot(value: object) -> StoredSnapshot:
    return STORED.decode(StoredSnapshot, value, "snapshot")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRound:
    """A decision and what it was made from."""

    id: int  # goes up for ever; ``record.number`` begins again with the scheduler
    record: RoundRecord
    snapshot: StoredSnapshot | None  # None: too large to keep one for every round
