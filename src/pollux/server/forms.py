"""The JSON forms of what only the scheduler has: records of jobs, plans and rounds, what was learnt, snapshots.

Same rules as :mod:`pollux.wire`, on which it builds. These are kept, not sent: a restarted server goes on with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from pollux.errors import InvalidValueError
from pollux.scheduler.knowledge import Knowledge
from pollux.scheduler.lifecycle import JobState, Transition
from pollux.scheduler.record import Departure, JobRecord, Reallocation, RoundRecord
from pollux.types import (
    Allocation,
    BatchLimits,
    Explanation,
    JobDecision,
    JobSpec,
    JobView,
    Plan,
    ShapeFactor,
    ShapeFactors,
    Snapshot,
    ThroughputParams,
)
from pollux.wire import (
    Reader,
    WireReport,
    allocation_from_list,
    allocation_to_list,
    batch_limits_from_dict,
    batch_limits_to_dict,
    estimate_to_json,
    node_from_dict,
    node_to_dict,
    read_estimate,
    read_integer,
    read_list,
    read_mapping,
    read_number,
    read_text,
    shown,
    spec_from_dict,
    spec_to_dict,
    timing_from_list,
    timing_to_list,
)

RECORD_VERSION = 1
KNOWLEDGE_VERSION = 1
PLAN_VERSION = 1
ROUND_VERSION = 1
SNAPSHOT_VERSION = 1


def _optional(value: float | None) -> float | None:
    return None if value is None else float(value)


# Knowledge ------------------------------------------------------------------------------------


def knowledge_to_dict(knowledge: Knowledge) -> dict[str, Any]:
    """What was measured. Not the fitted θ: it follows from that, and is fitted anew in the next round."""
    profile = knowledge.profile
    return {
        "version": KNOWLEDGE_VERSION,
        "label": knowledge.label,
        "timings": {
            accelerator: [timing_to_list(*entry) for entry in profile.timings(accelerator).items()]
            for accelerator in profile.accelerators
        },
        "max_replicas": int(profile.max_replicas),
        "first_noise_scale": _optional(knowledge.first_noise_scale),
    }


def knowledge_from_dict(value: object, where: str = "knowledge") -> Knowledge:
    names = ("label", "timings", "max_replicas", "first_noise_scale")
    reader = Reader(value, where, names, KNOWLEDGE_VERSION)
    knowledge = Knowledge(
        reader.text("label"), first_noise_scale=reader.optional_number("first_noise_scale", minimum=0)
    )
    for accelerator, entries in read_mapping(reader.raw("timings"), reader.where("timings")).items():
        place = f"{reader.where('timings')}.{accelerator}"
        for index, entry in enumerate(read_list(entries, place)):
            configuration, timing = timing_from_list(entry, f"{place}[{index}]")
            if configuration in knowledge.profile.timings(accelerator):
                raise InvalidValueError(f"{place}[{index}] = {shown(entry)}; each configuration is allowed once")
            knowledge.observe(accelerator, configuration, timing)
    measured = knowledge.profile.max_replicas
    # Configurations with the most replicas may have been forgotten since.
    knowledge.profile.max_replicas = reader.integer("max_replicas", minimum=measured)
    return knowledge


# Jobs -----------------------------------------------------------------------------------------


def record_to_dict(record: JobRecord) -> dict[str, Any]:
    return {
        "version": RECORD_VERSION,
        "spec": spec_to_dict(record.spec),
        "sequence": int(record.sequence),
        "knowledge": knowledge_to_dict(record.knowledge),
        "state": record.state.value,
        "allocation": allocation_to_list(record.allocation),
        "leaving": allocation_to_list(record.leaving),
        "generation": int(record.generation),
        "num_crashes": int(record.num_crashes),
        "resize_s": _optional(record.resize_s),
        "attained_s": float(record.attained_s),
        "gpu_s": float(record.gpu_s),
        "accounted_at": float(record.accounted_at),
        "started_at": _optional(record.started_at),
        "finished_at": _optional(record.finished_at),
        "exit_code": None if record.exit_code is None else int(record.exit_code),
        "reason": record.reason,
        "stops_as": record.stops_as.value,
        "stop_reason": record.stop_reason,
        "noise_scale": _optional(record.noise_scale),
        "noise_scale_error": _optional(record.noise_scale_error),
        "remaining_examples": _optional(record.remaining_examples),
        "progress": _optional(record.progress),
        "total_batch": None if record.total_batch is None else int(record.total_batch),
        "history": [[float(t.at), t.source.value, t.target.value, t.reason] for t in record.history],
    }


_RECORD_FIELDS = frozenset(entry.name for entry in fields(JobRecord))


def record_from_dict(value: object, where: str = "record", knowledge: Knowledge | None = None) -> JobRecord:
    """Times and what is added up from them may be negative: clocks step back.

    Several records can share their knowledge: it is then given, and not part of the form.
    """
    names = _RECORD_FIELDS if knowledge is None else _RECORD_FIELDS - {"knowledge"}
    if isinstance(value, Mapping):
        value = {"resize_s": None, "noise_scale_error": None, **value}  # records of before did not have them
    reader = Reader(value, where, names, RECORD_VERSION)
    if knowledge is None:
        knowledge = knowledge_from_dict(reader.raw("knowledge"), reader.where("knowledge"))
    history = []
    for place, entry in reader.entries("history"):
        at, source, target, reason = read_list(entry, place, length=4)
        history.append(
            Transition(
                read_number(at, f"{place}[0]"),
                _state(source, f"{place}[1]"),
                _state(target, f"{place}[2]"),
                read_text(reason, f"{place}[3]"),
            )
        )
    return JobRecord(
        spec=spec_from_dict(reader.raw("spec"), reader.where("spec")),
        sequence=reader.integer("sequence"),
        knowledge=knowledge,
        state=_state(reader.raw("state"), reader.where("state")),
        allocation=reader.allocation("allocation"),
        leaving=reader.allocation("leaving"),
        generation=reader.integer("generation", minimum=0),
        num_crashes=reader.integer("num_crashes", minimum=0),
        resize_s=reader.optional_number("resize_s", minimum=0),
        attained_s=reader.number("attained_s"),
        gpu_s=reader.number("gpu_s"),
        accounted_at=reader.number("accounted_at"),
        started_at=reader.optional_number("started_at"),
        finished_at=reader.optional_number("finished_at"),
        exit_code=reader.optional_integer("exit_code"),
        reason=reader.text("reason"),
        stops_as=_state(reader.raw("stops_as"), reader.where("stops_as")),
        stop_reason=reader.text("stop_reason"),
        noise_scale=reader.optional_number("noise_scale", minimum=0),
        noise_scale_error=reader.optional_number("noise_scale_error", minimum=0),
        remaining_examples=reader.optional_number("remaining_examples", minimum=0),
        progress=reader.optional_number("progress", minimum=0),
        total_batch=reader.optional_integer("total_batch", minimum=0),
        history=history,
    )


def _state(value: object, where: str) -> JobState:
    try:
        return JobState(value)
    except ValueError:
        known = ", ".join(state.value for state in JobState)
        raise InvalidValueError(f"{where} = {shown(value)}; one of {known} is needed") from None


# Plans ----------------------------------------------------------------------------------------

_DECISION_FIELDS = tuple(entry.name for entry in fields(JobDecision))
_DECISION_ESTIMATES = ("speedup_before", "speedup_after", "move_factor")
_EXPLANATION_FIELDS = tuple(entry.name for entry in fields(Explanation))
_EXPLANATION_ESTIMATES = ("fitness_before", "fitness", "upper_bound", "decision_s")


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    why = plan.explanation
    return {
        "version": PLAN_VERSION,
        "allocations": {job: allocation_to_list(allocation) for job, allocation in plan.allocations.items()},
        "explanation": None if why is None else _explanation_to_dict(why),
    }


def plan_from_dict(value: object, where: str = "plan") -> Plan:
    reader = Reader(value, where, ("allocations", "explanation"), PLAN_VERSION)
    place = reader.where("allocations")
    return Plan(
        allocations={
            job: allocation_from_list(entry, f"{place}.{job}")
            for job, entry in read_mapping(reader.raw("allocations"), place).items()
        },
        explanation=None
        if reader.raw("explanation") is None
        else _explanation_from_dict(reader.raw("explanation"), reader.where("explanation")),
    )


def _explanation_to_dict(why: Explanation) -> dict[str, Any]:
    return {
        **{name: estimate_to_json(getattr(why, name)) for name in _EXPLANATION_ESTIMATES},
        "jobs": [_decision_to_dict(decision) for decision in why.jobs],
        "method": why.method,
    }


def _explanation_from_dict(value: object, where: str) -> Explanation:
    reader = Reader(value, where, _EXPLANATION_FIELDS)
    return Explanation(
        **{name: reader.estimate(name) for name in _EXPLANATION_ESTIMATES},
        jobs=tuple(_decision_from_dict(entry, place) for place, entry in reader.entries("jobs")),
        method=reader.text("method"),
    )


def _decision_to_dict(decision: JobDecision) -> dict[str, Any]:
    return {
        "job": decision.job,
        "before": allocation_to_list(decision.before),
        "after": allocation_to_list(decision.after),
        **{name: estimate_to_json(getattr(decision, name)) for name in _DECISION_ESTIMATES},
        "option_replicas": [int(count) for count in decision.option_replicas],
        "option_speedups": [estimate_to_json(speedup) for speedup in decision.option_speedups],
        "note": decision.note,
    }


def _decision_from_dict(value: object, where: str) -> JobDecision:
    reader = Reader(value, where, _DECISION_FIELDS)
    replicas = [read_integer(entry, place, minimum=0) for place, entry in reader.entries("option_replicas")]
    speedups = [read_estimate(entry, place) for place, entry in reader.entries("option_speedups")]
    if len(replicas) != len(speedups):
        raise InvalidValueError(
            f"{reader.where('option_speedups')} has {len(speedups)} entries; "
            f"{len(replicas)} are needed, as many as option_replicas"
        )
    return JobDecision(
        job=reader.text("job"),
        before=reader.allocation("before"),
        after=reader.allocation("after"),
        **{name: reader.estimate(name) for name in _DECISION_ESTIMATES},
        option_replicas=np.array(replicas, dtype=np.int64),  # (num_options,)
        option_speedups=np.array(speedups, dtype=np.float64),  # (num_options,)
        note=reader.text("note"),
    )


# Rounds ---------------------------------------------------------------------------------------


def round_to_dict(record: RoundRecord) -> dict[str, Any]:
    return {
        "version": ROUND_VERSION,
        "number": int(record.number),
        "at": float(record.at),
        "trigger": record.trigger,
        "plan": plan_to_dict(record.plan),
        "num_jobs": int(record.num_jobs),
        "num_slots": int(record.num_slots),
        "decision_s": float(record.decision_s),
        "error": record.error,
        "changes": None if record.changes is None else [_change_to_dict(change) for change in record.changes],
        "departures": [[one.job, one.state.value, one.reason, int(one.num_slots)] for one in record.departures],
    }


def _change_to_dict(change: Reallocation) -> dict[str, Any]:
    return {
        "job": change.job,
        "before": allocation_to_list(change.before),
        "after": allocation_to_list(change.after),
        "has_started": bool(change.has_started),
        "barred": dict(change.barred),
    }


_ROUND_FIELDS = tuple(entry.name for entry in fields(RoundRecord))
_CHANGE_FIELDS = tuple(entry.name for entry in fields(Reallocation))


def round_from_dict(value: object, where: str = "round") -> RoundRecord:
    reader = Reader(value, where, _ROUND_FIELDS, ROUND_VERSION)
    changes = None if reader.raw("changes") is None else reader.entries("changes")
    return RoundRecord(
        number=reader.integer("number", minimum=0),
        at=reader.number("at"),
        trigger=reader.text("trigger"),
        plan=plan_from_dict(reader.raw("plan"), reader.where("plan")),
        num_jobs=reader.integer("num_jobs", minimum=0),
        num_slots=reader.integer("num_slots", minimum=0),
        decision_s=reader.number("decision_s", minimum=0),
        error=reader.text("error"),
        changes=None if changes is None else tuple(_change(entry, place) for place, entry in changes),
        departures=tuple(_departure(entry, place) for place, entry in reader.entries("departures")),
    )


def _change(value: object, where: str) -> Reallocation:
    reader = Reader(value, where, _CHANGE_FIELDS)
    barred = read_mapping(reader.raw("barred"), reader.where("barred"))
    return Reallocation(
        job=reader.text("job"),
        before=reader.allocation("before"),
        after=reader.allocation("after"),
        has_started=reader.flag("has_started"),
        barred={node: read_text(why, f"{reader.where('barred')}.{node}") for node, why in barred.items()},
    )


def _departure(value: object, where: str) -> Departure:
    job, state, reason, num_slots = read_list(value, where, length=4)
    return Departure(
        job=read_text(job, f"{where}[0]"),
        state=_state(state, f"{where}[1]"),
        reason=read_text(reason, f"{where}[2]"),
        num_slots=read_integer(num_slots, f"{where}[3]", minimum=0),
    )


# Snapshots ------------------------------------------------------------------------------------
#
# What a policy saw, so that another can be asked what it would have done. Specs are kept with the jobs, and but for
# the batch limits, which a job tells when it runs, do not change; what was learnt is shared by the jobs of an
# application and is written once.

_Model = tuple[dict[str, ThroughputParams], dict[str, ShapeFactors], BatchLimits | None]


def snapshot_to_dict(snapshot: Snapshot) -> dict[str, Any]:
    """Without the jobs' specs, and without oracles (there are none where anything is kept)."""
    models: list[dict[str, Any]] = []
    number_of: dict[object, int] = {}
    jobs = []
    for job in snapshot.jobs:
        batch = job.spec.batch
        key = (tuple(job.params.items()), tuple(job.shape_factors.items()), batch)
        if key not in number_of:
            number_of[key] = len(models)
            models.append(
                {
                    "params": {name: [float(number) for number in params] for name, params in job.params.items()},
                    "shape_factors": {
                        name: [[bool(f.spans), int(f.num_replicas), float(f.factor)] for f in factors]
                        for name, factors in job.shape_factors.items()
                    },
                    "batch": None if batch is None else batch_limits_to_dict(batch),
                }
            )
        jobs.append(
            {
                "name": job.name,
                "age_s": float(job.age_s),
                "allocation": allocation_to_list(job.allocation),
                "num_restarts": None if job.num_restarts is None else int(job.num_restarts),
                "attained_s": float(job.attained_s),
                "attained_slot_s": float(job.attained_slot_s),
                "resize_s": _optional(job.resize_s),
                "done_examples": _optional(job.done_examples),
                "guessed": sorted(job.guessed),
                "model": number_of[key],
                "noise_scale": _optional(job.noise_scale),
                "noise_scale_error": _optional(job.noise_scale_error),
                "max_profiled_replicas": int(job.max_profiled_replicas),
                "remaining_examples": _optional(job.remaining_examples),
                "is_pinned": bool(job.is_pinned),
            }
        )
    return {
        "version": SNAPSHOT_VERSION,
        "now": float(snapshot.now),
        "nodes": [node_to_dict(node) for node in snapshot.nodes],
        "models": models,
        "jobs": jobs,
    }


_VIEW_FIELDS = frozenset(entry.name for entry in fields(JobView)) - {"spec", "params", "shape_factors", "oracle"}
_VIEW_FIELDS |= {"name", "model"}
_LATER_FIELDS: dict[str, Any] = {
    "attained_slot_s": 0.0,
    "resize_s": None,
    "done_examples": None,
    "guessed": [],
    "noise_scale_error": None,
}  # not in old ones


def snapshot_from_dict(value: object, specs: Mapping[str, JobSpec], where: str = "snapshot") -> Snapshot:
    """The snapshot again, given the specs of its jobs."""
    reader = Reader(value, where, ("now", "nodes", "models", "jobs"), SNAPSHOT_VERSION)
    models = [_model(entry, place) for place, entry in reader.entries("models")]
    jobs = []
    for place, entry in reader.entries("jobs"):
        view = Reader(_LATER_FIELDS | entry if isinstance(entry, dict) else entry, place, _VIEW_FIELDS)
        name = view.text("name")
        if name not in specs:
            raise InvalidValueError(f"{view.where('name')} = {shown(name)}; its spec is needed too")
        params, shape_factors, batch = models[view.integer("model", 0, len(models) - 1)]
        jobs.append(
            JobView(
                spec=replace(specs[name], batch=batch),
                age_s=view.number("age_s"),
                allocation=view.allocation("allocation"),
                num_restarts=view.optional_integer("num_restarts", minimum=0),
                attained_s=view.number("attained_s"),
                attained_slot_s=view.number("attained_slot_s"),
                resize_s=view.optional_number("resize_s", minimum=0),
                done_examples=view.optional_number("done_examples", minimum=0),
                guessed=frozenset(read_text(name, place) for place, name in view.entries("guessed")),
                params=params,
                shape_factors=shape_factors,
                noise_scale=view.optional_number("noise_scale", minimum=0),
                noise_scale_error=view.optional_number("noise_scale_error", minimum=0),
                max_profiled_replicas=view.integer("max_profiled_replicas", minimum=0),
                remaining_examples=view.optional_number("remaining_examples", minimum=0),
                is_pinned=view.flag("is_pinned"),
            )
        )
    return Snapshot(
        now=reader.number("now"),
        nodes=tuple(node_from_dict(entry, place) for place, entry in reader.entries("nodes")),
        jobs=tuple(jobs),
    )


def _model(value: object, where: str) -> _Model:
    reader = Reader(value, where, ("params", "shape_factors", "batch"))
    params = {}
    for name, entry in read_mapping(reader.raw("params"), reader.where("params")).items():
        place = f"{reader.where('params')}.{name}"
        numbers = read_list(entry, place, length=len(ThroughputParams._fields))
        params[name] = ThroughputParams(*(read_number(number, place) for number in numbers))
    shape_factors = {}
    for name, entry in read_mapping(reader.raw("shape_factors"), reader.where("shape_factors")).items():
        place = f"{reader.where('shape_factors')}.{name}"
        shape_factors[name] = tuple(_shape_factor(factor, place) for factor in read_list(entry, place))
    limits = reader.raw("batch")
    return params, shape_factors, None if limits is None else batch_limits_from_dict(limits, reader.where("batch"))


def _shape_factor(value: object, where: str) -> ShapeFactor:
    spans, num_replicas, factor = read_list(value, where, length=3)
    if not isinstance(spans, bool):
        raise InvalidValueError(f"{where}[0] = {shown(spans)}; true or false is needed")
    return ShapeFactor(spans, read_integer(num_replicas, where, minimum=1), read_number(factor, where))


# What the store answers with ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJob:
    """A job as it was last saved. ``record`` is None between its request and the scheduler's taking it in."""

    name: str
    sequence: int  # order of arrival here
    state: JobState
    submitted_at: float
    finished_at: float | None
    request: dict[str, Any] | None
    record: JobRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRound:
    """A decision and what it was made from (see :func:`snapshot_from_dict`)."""

    id: int  # goes up for ever; ``record.number`` begins again with the scheduler
    record: RoundRecord
    snapshot: dict[str, Any] | None  # None: too large to keep one for every round


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredReport:
    id: int  # goes up for ever
    at: float
    report: WireReport


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNote:
    """What a run told of one of its decisions."""

    id: int  # goes up for ever
    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResize:
    """A start (``before`` is empty) or a change of replicas. ``runs_at`` is None unless all of them came to train."""

    generation: int
    at: float
    before: Allocation
    after: Allocation
    runs_at: float | None
