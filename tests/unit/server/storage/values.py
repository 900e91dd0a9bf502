"""Records, rounds and snapshots of the scheduler, made at random or by name, for the store's tests."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st

from pollux.api.report import Report
from pollux.scheduler.knowledge import Knowledge
from pollux.scheduler.lifecycle import JobState, Transition
from pollux.scheduler.record import Departure, JobRecord, Reallocation, RoundRecord
from pollux.scheduler.setbacks import Break, Setback, Told
from pollux.types import JobSpec, JobView, Plan, ShapeFactor, Snapshot, ThroughputParams
from tests.unit.api.test_codec import (
    PLAN,
    REPORT,
    allocations,
    counts,
    integers,
    measurements,
    nodes,
    numbers,
    plans,
    proper_names,
    signed,
    specs,
    texts,
)

# Values that can be ---------------------------------------------------------------------------

states = st.sampled_from(JobState)

transitions = st.builds(Transition, at=signed, source=states, target=states, reason=texts)


@st.composite
def knowledges(draw: st.DrawFn, label: str = "job a") -> Knowledge:
    knowledge = Knowledge(label, first_noise_scale=draw(st.none() | numbers))
    for accelerator in draw(st.lists(texts, max_size=2, unique=True)):
        for configuration, timing in draw(st.lists(measurements(), max_size=4, unique_by=lambda entry: entry[0])):
            knowledge.observe(accelerator, configuration, timing)
    return knowledge


tolds = st.builds(
    Told,
    at=signed,
    replica=texts,
    generation=integers,
    num_steps=integers,
    stalled_s=numbers,
    step_s=st.none() | numbers,
)
breaks = st.builds(Break, at=signed, cause=texts, keeps_slots=st.booleans())
setbacks = st.builds(
    Setback,
    at=signed,
    cause=texts,
    pause_s=numbers,
    step=integers,
    num_steps=integers,
    again_s=st.none() | numbers,
    lost_s=numbers,
)
job_names = proper_names.filter(lambda name: "\0" not in name)


@st.composite
def records(draw: st.DrawFn) -> JobRecord:
    spec = draw(specs(job_names))
    return JobRecord(
        spec=spec,
        sequence=draw(integers),
        knowledge=draw(knowledges(f"job {spec.name}")),
        state=draw(states),
        allocation=draw(allocations),
        leaving=draw(allocations),
        generation=draw(integers),
        num_crashes=draw(integers),
        attained_s=draw(signed),
        attained_slot_s=draw(signed),
        accounted_at=draw(signed),
        finished_at=draw(st.none() | signed),
        reason=draw(texts),
        stops_as=draw(states),
        stop_reason=draw(texts),
        noise_scale=draw(st.none() | numbers),
        noise_scale_error=draw(st.none() | numbers),
        remaining_examples=draw(st.none() | numbers),
        progress=draw(st.none() | numbers),
        total_batch=draw(st.none() | integers),
        history=draw(st.lists(transitions, max_size=4)),
        told=draw(st.none() | tolds),
        broken=draw(st.none() | breaks),
        setbacks=draw(st.lists(setbacks, max_size=2)),
        num_setbacks=draw(integers),
        set_back_s=draw(numbers),
    )


reallocations = st.builds(
    Reallocation,
    job=texts,
    before=allocations,
    after=allocations,
    has_started=st.booleans(),
    barred=st.dictionaries(proper_names, texts, max_size=2),
)

departures = st.builds(Departure, job=texts, state=st.sampled_from(JobState), reason=texts, num_slots=integers)

rounds = st.builds(
    RoundRecord,
    number=integers,
    at=signed,
    trigger=texts,
    plan=plans,
    num_jobs=integers,
    num_slots=integers,
    decision_s=numbers,
    error=texts,
    changes=st.lists(reallocations, max_size=2).map(tuple),
    departures=st.lists(departures, max_size=2).map(tuple),
)

params = st.builds(ThroughputParams, *[signed] * 9)

factors = st.lists(st.builds(ShapeFactor, spans=st.booleans(), num_replicas=counts, factor=signed), max_size=2)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    views = st.builds(
        JobView,
        spec=specs(),
        age_s=signed,
        allocation=allocations,
        num_resizes=st.none() | integers,
        attained_s=signed,
        params=st.dictionaries(texts, params, max_size=2),
        shape_factors=st.dictionaries(texts, factors.map(tuple), max_size=2),
        noise_scale=st.none() | numbers,
        noise_scale_error=st.none() | numbers,
        max_profiled_replicas=integers,
        remaining_examples=st.none() | numbers,
        is_pinned=st.booleans(),
    )
    return Snapshot.of(
        draw(signed),
        draw(st.lists(nodes, max_size=3, unique_by=lambda node: node.name)),
        draw(st.lists(views, max_size=3, unique_by=lambda view: view.name)),
    )


def learnt(knowledge: Knowledge) -> tuple[Any, ...]:
    profile = knowledge.profile
    return knowledge.label, list(profile), profile.max_replicas, knowledge.first_noise_scale


def assert_same_record(found: JobRecord | None, expected: JobRecord) -> None:
    assert found is not None
    assert learnt(found.knowledge) == learnt(expected.knowledge)
    assert dataclasses.replace(found, knowledge=expected.knowledge) == expected


def make_record(name: str = "resnet", sequence: int = 0, **changes: Any) -> JobRecord:
    return JobRecord(spec=JobSpec(name=name), sequence=sequence, knowledge=Knowledge(f"job {name}"), **changes)


def report_of(job: str) -> Report:
    return dataclasses.replace(REPORT, job=job)


# Rounds and reports ---------------------------------------------------------------------------


def make_round(number: int, plan: Plan = PLAN) -> RoundRecord:
    return RoundRecord(
        number=number, at=float(number), trigger="interval", plan=plan, num_jobs=1, num_slots=4, decision_s=0.01
    )


EMPTY = Snapshot(now=0.0, nodes=(), jobs=())
