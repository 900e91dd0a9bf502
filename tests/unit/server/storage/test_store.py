"""The SQL store on real SQLite files: what goes in comes out, also after kill -9, a full disk and years of versions."""

from __future__ import annotations

import dataclasses
import os
import random
import sqlite3
import stat
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.api.codec import dumps, loads
from pollux.api.report import Report
from pollux.api.report import stored as stored_report
from pollux.errors import InvalidValueError, StoreError, UnknownNameError
from pollux.model.profile import Configuration, Timing
from pollux.policy import make_policy
from pollux.scheduler.knowledge import Knowledge, ProfileMemory
from pollux.scheduler.lifecycle import JobState, Transition
from pollux.scheduler.loop import Scheduler, SchedulerConfig
from pollux.scheduler.record import Departure, JobRecord, Reallocation, RoundRecord
from pollux.server.storage import database
from pollux.server.storage import records as kept
from pollux.server.storage.store import SqlStore
from pollux.testing.examples import examples
from pollux.types import Allocation, JobSpec, JobView, Node, Plan, ShapeFactor, Snapshot, ThroughputParams
from tests.fakes import HandClock, SlowEngine
from tests.unit.api.test_codec import (
    PLAN,
    REPORT,
    allocations,
    any_json,
    counts,
    integers,
    measurements,
    nodes,
    numbers,
    places,
    plans,
    proper_names,
    same,
    signed,
    specs,
    texts,
    through_json,
    with_value,
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
        num_restarts=st.none() | integers,
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


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pollux.db"


@pytest.fixture
def sql(path: Path):
    with SqlStore(path) as opened:
        yield opened


# Forms of the scheduler's values --------------------------------------------------------------


@given(records())
def test_a_record_is_read_as_it_was_written(record):
    form = loads(dumps(kept.encode_record(record), "record"), "record")
    assert_same_record(kept.decode_record(form), record)


@given(rounds)
def test_a_round_is_read_as_it_was_written(record):
    assert same(kept.STORED.decode(RoundRecord, through_json(kept.STORED.encode(record)), "round"), record)


@given(snapshots())
def test_a_snapshot_is_read_as_it_was_written(snapshot):
    stored = kept.decode_snapshot(through_json(kept.encode_snapshot(snapshot)))
    assert stored.restored({job.name: job.spec for job in snapshot.jobs}) == snapshot


def test_what_was_fitted_for_an_application_is_written_once():
    theta = ThroughputParams(1, 2, 3, 4, 5, 6, 7)
    jobs = tuple(JobView(spec=JobSpec(name=name), age_s=0, params={"gpu": theta}) for name in "abc")
    form = kept.encode_snapshot(Snapshot(now=0, nodes=(), jobs=jobs))
    assert len(form["models"]) == 1


def test_restored_knowledge_is_fitted_in_the_next_round():
    knowledge = Knowledge("job a")
    for count in (1, 2, 4):
        knowledge.observe("gpu", Configuration(1, count, 32), Timing(0.1, 0.1 + 0.01 * count, 5))
    knowledge.refit()
    restored = kept.decode_knowledge(kept.encode_knowledge(knowledge))
    assert restored.params == {}
    assert restored.refit()
    assert restored.params["gpu"] == pytest.approx(knowledge.params["gpu"])


def test_the_most_replicas_ever_measured_are_remembered_when_their_times_are_forgotten():
    knowledge = Knowledge("job a")
    knowledge.profile.max_replicas = 64
    assert kept.decode_knowledge(kept.encode_knowledge(knowledge)).profile.max_replicas == 64


SCHEDULER_FORMS: dict[str, tuple[Any, Any]] = {
    "record": (
        kept.encode_record(
            make_record(
                allocation=Allocation.of(("n0", 2)),
                history=[Transition(1.0, JobState.PENDING, JobState.STARTING, "2 replicas")],
            )
        ),
        kept.decode_record,
    ),
    "round": (
        kept.STORED.encode(
            RoundRecord(
                number=1,
                at=2.0,
                trigger="submit",
                plan=PLAN,
                num_jobs=1,
                num_slots=4,
                decision_s=0.01,
                changes=(
                    Reallocation(
                        job="a",
                        before=Allocation.of(("n0", 2)),
                        after=Allocation.of(("n1", 2)),
                        has_started=True,
                        barred={"n0": "drained"},
                    ),
                ),
                departures=(Departure(job="b", state=JobState.FAILED, reason="why", num_slots=2),),
            )
        ),
        lambda form: kept.STORED.decode(RoundRecord, form, "round"),
    ),
    "snapshot": (
        kept.encode_snapshot(
            Snapshot(
                now=1.0,
                nodes=(Node(name="n0", num_slots=4),),
                jobs=(
                    JobView(
                        spec=JobSpec(name="a"),
                        age_s=1.0,
                        params={"gpu": ThroughputParams(1, 2, 3, 4, 5, 6, 7)},
                        shape_factors={"gpu": (ShapeFactor(False, 2, 1.1),)},
                    ),
                ),
            )
        ),
        lambda form: kept.decode_snapshot(form).restored({"a": JobSpec(name="a")}),
    ),
}


@pytest.mark.parametrize("kind", SCHEDULER_FORMS)
@given(data=st.data())
def test_a_form_with_anything_put_in_its_place_is_refused_or_read(kind, data):
    form, read = SCHEDULER_FORMS[kind]
    changed = with_value(form, data.draw(st.sampled_from(places(form))), data.draw(any_json))
    try:
        read(changed)
    except InvalidValueError as error:
        assert len(str(error)) < 2000


@pytest.mark.parametrize("kind", SCHEDULER_FORMS)
def test_missing_or_extra_fields_are_refused_by_name(kind):
    form, read = SCHEDULER_FORMS[kind]
    with pytest.raises(InvalidValueError, match="surprise"):
        read(form | {"surprise": 2})
    for name in form:
        with pytest.raises(InvalidValueError, match=name):
            read({key: value for key, value in form.items() if key != name})


# Jobs -----------------------------------------------------------------------------------------


@examples(30)
@given(found=st.lists(records(), max_size=4, unique_by=lambda record: record.name))
def test_records_come_back_from_the_file_as_they_were(found):
    with tempfile.TemporaryDirectory() as folder:
        with SqlStore(Path(folder) / "pollux.db") as sql:
            for record in found:
                sql.save_job(record)
        with SqlStore(Path(folder) / "pollux.db") as sql:
            for record in found:
                stored = sql.job(record.name)
                assert_same_record(stored.record, record)
                assert (stored.state, stored.finished_at) == (record.state, record.finished_at)
                assert stored.submitted_at == record.spec.submitted_at
            active = [record for record in found if not record.state.is_final]
            for restored, record in zip(sql.records(), sorted(active, key=lambda r: r.sequence), strict=True):
                assert_same_record(restored, record)


def test_a_request_waits_until_the_scheduler_takes_it_in(path):
    with SqlStore(path) as sql:
        sequence = sql.add_request("resnet", {"command": ["python", "train.py"], "env": {"A": "ü"}}, "hash-1", at=5.0)
        assert sql.records() == []
        [waiting] = sql.requests()
        assert (waiting.name, waiting.sequence, waiting.record) == ("resnet", sequence, None)
        assert (waiting.state, waiting.submitted_at) == (JobState.PENDING, 5.0)
        sql.save_job(make_record(sequence=sequence))
        assert sql.requests() == []
    with SqlStore(path) as sql:
        stored = sql.job("resnet")
        assert stored.request == {"command": ["python", "train.py"], "env": {"A": "ü"}}
        assert stored.record is not None
        assert stored.record.sequence == stored.sequence == sequence


def test_names_are_unique_for_ever(sql):
    sql.add_request("a", {}, "hash-1")
    sql.save_job(make_record("a", state=JobState.SUCCEEDED, finished_at=1.0))
    with pytest.raises(InvalidValueError, match="there is a job named 'a' already"):
        sql.add_request("a", {}, "hash-2")
    assert sql.job_of_token("hash-2") is None  # nothing of it was taken


def test_sequence_numbers_go_up(sql):
    numbers = [sql.add_request(f"job-{index}", {}, f"hash-{index}") for index in range(5)]
    assert numbers == sorted(set(numbers))
    assert [job.sequence for job in sql.jobs()] == numbers


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800"])
def test_names_that_cannot_be_kept_are_refused(sql, name):
    with pytest.raises(InvalidValueError, match="cannot be kept"):
        sql.add_request(name, {}, "hash")
    if name:
        with pytest.raises(InvalidValueError, match="cannot be kept"):
            sql.save_job(make_record(name))
    with pytest.raises(UnknownNameError):
        sql.job(name)
    with pytest.raises(UnknownNameError):
        sql.reports(name)
    with pytest.raises(UnknownNameError):
        sql.save_report(name, 1.0, REPORT)


def test_odd_names_are_names(sql):
    for name in ("Robert'); DROP TABLE jobs;--", "ünïcödé 🚀", "a/b", "%", " "):
        sql.save_job(make_record(name))
        assert sql.job(name).name == name


def test_a_request_that_is_no_json_is_refused(sql):
    with pytest.raises(InvalidValueError, match="request of job 'a'"):
        sql.add_request("a", {"x": float("nan")}, "hash")
    assert sql.jobs() == []


def test_tokens_tell_whose_they_are(sql):
    sql.add_request("a", {}, "hash-a")
    sql.add_request("b", {}, "hash-b")
    assert [sql.job_of_token(token) for token in ("hash-a", "hash-b", "other")] == ["a", "b", None]


def test_an_odd_application_does_not_keep_its_jobs_from_being_kept(sql):
    knowledge = ProfileMemory().of("a\0\ud800")
    sql.save_job(JobRecord(spec=JobSpec(name="a", application="a\0\ud800"), sequence=0, knowledge=knowledge))
    [record] = sql.records()
    assert (record.spec.application, record.knowledge.label) == ("a\0\ud800", "application a\0\ud800")


def test_an_unknown_job_is_answered_with_known_names(sql):
    for index in range(30):
        sql.save_job(make_record(f"resnet-{index}"))
    asked = (sql.job, sql.transitions, sql.training_notes, sql.reports, sql.resizes)
    for ask in (*asked, lambda name: sql.save_report(name, 1.0, REPORT)):
        with pytest.raises(UnknownNameError, match=r"unknown job 'resnet_7'\. Did you mean 'resnet-7'") as caught:
            ask("resnet_7")
        assert len(caught.value.known) <= 20


def test_a_store_without_jobs_knows_no_name(sql):
    with pytest.raises(UnknownNameError):
        sql.job("a")


def test_jobs_are_listed_by_state_and_page(sql):
    for index in range(10):
        final = JobState.SUCCEEDED if index % 2 else JobState.RUNNING
        sql.save_job(make_record(f"job-{index}", index, state=final))
    assert [job.name for job in sql.jobs(limit=3, offset=2)] == ["job-2", "job-3", "job-4"]
    assert [job.name for job in sql.jobs(limit=2, newest_first=True)] == ["job-9", "job-8"]
    assert [job.name for job in sql.jobs([JobState.SUCCEEDED], limit=2)] == ["job-1", "job-3"]
    assert sql.jobs([]) == []
    assert [record.name for record in sql.records()] == [f"job-{index}" for index in range(0, 10, 2)]
    for bad in (-1, "3", 1 << 70):
        with pytest.raises(InvalidValueError, match="limit"):
            sql.jobs(limit=bad)


def test_records_that_share_their_knowledge_share_it_again(path):
    memory = ProfileMemory()
    shared = memory.of("bert")
    with SqlStore(path) as sql:
        for name in "abc":
            shared.observe("gpu", Configuration(1, 1, 8), Timing(0.1, 0.2, 3))
            sql.save_job(JobRecord(spec=JobSpec(name=name, application="bert"), sequence=ord(name), knowledge=shared))
        done = make_record("d", state=JobState.SUCCEEDED)
        sql.save_job(done)
    with SqlStore(path) as sql:
        restored = sql.records()
        assert len({id(record.knowledge) for record in restored}) == 1
        assert learnt(restored[0].knowledge) == learnt(shared)  # the newest, though "a" was saved before
        assert set(sql.knowledge()) == {"application bert", "job d"}
        assert learnt(sql.knowledge()["application bert"]) == learnt(shared)


# Transitions and resizes ----------------------------------------------------------------------


def test_transitions_are_appended_once_however_often_a_job_is_saved(sql):
    record = make_record()
    moves = [JobState.STARTING, *[JobState.RUNNING, JobState.RESIZING] * 60, JobState.RUNNING, JobState.SUCCEEDED]
    expected = []
    for number, target in enumerate(moves):  # more than a record remembers
        record.move(target, float(number // 3), "the same reason")
        expected.append(record.history[-1])
        for _ in range(number % 3):
            sql.save_job(record)
        if number % 3 == 0 and number % 2:
            sql.save_job(record)
    sql.save_job(record)
    assert len(record.history) == 64 < len(expected)
    assert sql.transitions("resnet") == expected


def test_equal_transitions_are_kept_apart(sql):
    record = make_record(state=JobState.STARTING)
    for _ in range(3):
        record.move(JobState.STARTING, 1.0, "again")
        sql.save_job(record)
    assert len(sql.transitions("resnet")) == 3


def test_reasons_that_no_database_takes_are_kept_readable(sql):
    record = make_record()
    record.move(JobState.FAILED, 1.0, "bad byte \udcff and \0")
    sql.save_job(record)
    sql.save_job(record)
    assert [t.reason for t in sql.transitions("resnet")] == ["bad byte \\udcff and \\x00"]
    assert_same_record(sql.job("resnet").record, record)


def test_a_scheduler_leaves_its_whole_story(path):
    """The loop itself with this store: starts, resizes, restarts of the server, the end."""
    clock, engine = HandClock(), SlowEngine([Node(name="n0", num_slots=4)])
    with SqlStore(path) as sql:
        scheduler = Scheduler(
            policy=make_policy("equal"), engine=engine, store=sql, clock=clock, config=SchedulerConfig(interval_s=10)
        )
        sequence = sql.add_request("a", {}, "hash-a")
        scheduler.submit(JobSpec(name="a"), sequence)
        for step in range(1, 8):
            clock.time = 10.0 * step
            if step == 3:
                scheduler.submit(JobSpec(name="b", submitted_at=clock.time), sql.add_request("b", {}, "hash-b"))
            scheduler.tick()
            engine.finish()
        engine.end("b", at=71.0)
        clock.time = 72.0
        scheduler.tick()
        kept = {record.name: record for record in scheduler.active_jobs}
        engine_saw = [command for command in engine.commands if getattr(command, "job", "") == "a"]

    with SqlStore(path) as sql:
        [restored] = sql.records()
        saved = sql.job("a").record
        assert saved is not None
        assert restored.name == "a"
        assert restored.history == kept["a"].history == sql.transitions("a")
        assert sql.job("b").state is JobState.SUCCEEDED
        assert sql.job("b").finished_at == 71.0
        resizes = sql.resizes("a")
        assert [r.generation for r in resizes] == [command.generation for command in engine_saw]
        assert [r.after for r in resizes] == [command.allocation for command in engine_saw]
        assert not resizes[0].before
        assert [r.before for r in resizes[1:]] == [r.after for r in resizes[:-1]]
        assert all(r.runs_at is not None and r.runs_at > r.at for r in resizes)
        found = sql.rounds()
        assert len(found) == scheduler.num_rounds
        specs = {job.name: job.record.spec for job in sql.jobs() if job.record is not None}
        for entry in found:
            snapshot = entry.snapshot.restored(specs)
            assert len(snapshot.jobs) == entry.record.num_jobs
            assert same(make_policy("equal").decide(snapshot).allocations, entry.record.plan.allocations)  # replay


def test_a_start_after_a_stop_begins_from_nothing(sql):
    record = make_record()
    for generation, target in enumerate([JobState.STARTING, JobState.RUNNING, JobState.PENDING, JobState.STARTING]):
        if target is JobState.STARTING:
            record.generation += 1
            record.allocation = Allocation.of(("n0", 2))
        elif target is JobState.PENDING:
            record.allocation = Allocation()
        record.move(target, float(generation), "")
        sql.save_job(record)
    first, second = sql.resizes("resnet")
    assert (first.at, first.runs_at, second.at, second.runs_at) == (0.0, 1.0, 3.0, None)
    assert not first.before
    assert not second.before


# Rounds and reports ---------------------------------------------------------------------------


def make_round(number: int, plan: Plan = PLAN) -> RoundRecord:
    return RoundRecord(
        number=number, at=float(number), trigger="interval", plan=plan, num_jobs=1, num_slots=4, decision_s=0.01
    )


EMPTY = Snapshot(now=0.0, nodes=(), jobs=())


def test_rounds_are_kept_though_their_numbers_begin_again(path):
    for _ in range(2):  # the server restarts
        with SqlStore(path) as sql:
            for number in (1, 2, 3):
                sql.save_round(make_round(number), EMPTY)
    with SqlStore(path) as sql:
        found = sql.rounds()
        assert [entry.record.number for entry in found] == [1, 2, 3, 1, 2, 3]
        assert same(found[0].record, make_round(1))
        ids = [entry.id for entry in found]
        assert ids == sorted(set(ids))
        assert [entry.id for entry in sql.rounds(limit=2)] == ids[-2:]
        assert [entry.id for entry in sql.rounds(since=ids[1], limit=2)] == ids[2:4]
        assert sql.rounds(since=ids[-1]) == []


@examples(30)
@given(record=rounds, snapshot=snapshots())
def test_any_round_comes_back_from_the_file(record, snapshot):
    printable = dataclasses.replace(record, trigger="submit", error=record.error.encode("utf-8", "replace").decode())
    printable = dataclasses.replace(printable, error=printable.error.replace("\0", ""))
    with tempfile.TemporaryDirectory() as folder, SqlStore(Path(folder) / "pollux.db") as sql:
        sql.save_round(printable, snapshot)
        [found] = sql.rounds()
    assert same(found.record, printable)
    assert found.snapshot.restored({job.name: job.spec for job in snapshot.jobs}) == snapshot


def test_reports_are_read_from_where_one_left_off(sql):
    for name in "ab":
        sql.save_job(make_record(name))
    for number in range(6):
        sql.save_report("ab"[number % 2], float(-number), report_of("ab"[number % 2]))  # clocks step back
    found = sql.reports("a")
    assert [entry.at for entry in found] == [0.0, -2.0, -4.0]
    assert all(stored_report(report_of("a"), entry.id, entry.at) == entry for entry in found)
    assert [entry.at for entry in sql.reports("a", limit=1)] == [-4.0]
    assert [entry.at for entry in sql.reports("a", since=found[0].id, limit=1)] == [-2.0]
    assert sql.reports("a", since=found[-1].id) == []


def test_the_last_training_notes_of_each_job_are_kept(sql):
    for name in "ab":
        sql.save_job(make_record(name))
    assert sql.training_notes("a") == []
    for number in range(60):
        notes = (f"first of {number}", f"second of {number}")
        sql.save_reports([(float(number), dataclasses.replace(report_of("a"), notes=notes))])
    sql.save_report("b", 7.0, dataclasses.replace(report_of("b"), notes=("its own \0",)))
    found = sql.training_notes("a")
    expected = [(float(number), f"{which} of {number}") for number in range(60) for which in ("first", "second")]
    assert [(note.at, note.text) for note in found] == expected[-100:]
    assert [note.id for note in found] == sorted({note.id for note in found})
    assert [(note.at, note.text) for note in sql.training_notes("b")] == [(7.0, "its own \\x00")]


def test_a_report_at_no_time_is_refused(sql):
    sql.save_job(make_record())
    with pytest.raises(InvalidValueError, match="at = nan"):
        sql.save_report("resnet", float("nan"), REPORT)


def test_pruning_keeps_the_newest(sql):
    for name in "ab":
        sql.save_job(make_record(name))
    for number in range(10):
        sql.save_round(make_round(number), EMPTY)
        sql.save_report("a", float(number), report_of("a"))
    sql.save_report("b", 0.0, report_of("b"))
    assert sql.prune(keep_rounds=20, keep_reports_per_job=20) == (0, 0)
    assert sql.prune(keep_rounds=3, keep_reports_per_job=4) == (7, 6)
    assert [entry.record.number for entry in sql.rounds()] == [7, 8, 9]
    assert [entry.at for entry in sql.reports("a")] == [6.0, 7.0, 8.0, 9.0]
    assert len(sql.reports("b")) == 1
    last = sql.rounds()[-1].id
    assert sql.prune(0, 0) == (3, 5)
    sql.save_round(make_round(10), EMPTY)
    assert sql.rounds()[-1].id > last  # ids are not used again
    with pytest.raises(InvalidValueError, match="keep_rounds"):
        sql.prune(-1, 0)


# The file -------------------------------------------------------------------------------------


def test_the_file_is_private_and_set_up_for_one_writer_and_many_readers(path):
    with SqlStore(path) as sql:
        sql.save_job(make_record())
        for file in path.parent.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
        with sql.reading() as connection:
            pragmas = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
            values = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in pragmas]
        assert values == ["wal", 1, 1, 10_000]
    assert [file.name for file in path.parent.iterdir()] == ["pollux.db"]  # all of it is in the one file again


def test_a_url_is_taken_as_it_is(path):
    with SqlStore(f"sqlite:///{path}") as sql:
        sql.save_job(make_record())
    with SqlStore(str(path)) as sql:
        assert sql.job("resnet").name == "resnet"


@pytest.mark.parametrize(
    ("place", "error", "says"),
    [
        ("sqlite://", InvalidValueError, "in memory"),
        (":memory:", InvalidValueError, "in memory"),
        ("://", InvalidValueError, "no place for a database"),
        ("nosuch://host/db", StoreError, "no driver"),
        ("/nonexistent/folder/pollux.db", StoreError, "its folder must exist"),
    ],
)
def test_a_place_that_cannot_be_is_refused(place, error, says):
    with pytest.raises(error, match=says):
        SqlStore(place)


def test_a_closed_store_says_so(path):
    sql = SqlStore(path)
    sql.close()
    sql.close()
    with pytest.raises(StoreError, match="was closed"):
        sql.jobs()


@pytest.mark.parametrize("version", [database.SCHEMA_VERSION - 1, database.SCHEMA_VERSION + 1])
def test_a_database_of_another_version_is_left_alone(path, version):
    with SqlStore(path) as sql:
        sql.save_job(make_record())
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE meta SET version = {version}")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(
        StoreError,
        match=rf"written by another Pollux \(schema version {version}; this one reads {database.SCHEMA_VERSION}\)",
    ):
        SqlStore(path)
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_left_alone(path):
    path.write_text("these are my notes, please keep them\n" * 100)
    before = path.read_bytes()
    with pytest.raises(StoreError, match="it is no database: move the file away"):
        SqlStore(path)
    assert path.read_bytes() == before


def test_somebody_elses_database_is_refused(path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE photos (name TEXT)")
    connection.close()
    with pytest.raises(StoreError, match="not Pollux's: it holds photos"):
        SqlStore(path)


def test_a_folder_is_no_database(tmp_path):
    with pytest.raises(StoreError, match="cannot be opened"):
        SqlStore(tmp_path)


def test_a_damaged_database_is_reported(path):
    with SqlStore(path) as sql:
        for index in range(200):
            sql.save_job(make_record(f"job-{index}"))
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xab" * (path.stat().st_size - 4096))
    with pytest.raises(StoreError, match="damaged"), SqlStore(path) as sql:
        sql.jobs()


@pytest.mark.parametrize(
    ("statement", "ask", "says"),
    [
        ("UPDATE jobs SET record = 'oops'", lambda sql: sql.records(), "job 'a' cannot be read"),
        ("UPDATE jobs SET record = '[]'", lambda sql: sql.records(), "job 'a' cannot be read"),
        ("UPDATE jobs SET knowledge = NULL", lambda sql: sql.records(), "job 'a' cannot be read"),
        ("UPDATE jobs SET state = 'dreaming'", lambda sql: sql.job("a"), "dreaming"),
        ("UPDATE knowledge SET form = '{}'", lambda sql: sql.records(), "knowledge of job a"),
        ("UPDATE knowledge SET form = '{}'", lambda sql: sql.knowledge(), "knowledge"),
        ("UPDATE reports SET report = '{}'", lambda sql: sql.reports("a"), r"report \d+ cannot be read"),
        ("UPDATE rounds SET plan = '{}'", lambda sql: sql.rounds(), r"round \d+ cannot be read"),
        ("UPDATE transitions SET target = 'x'", lambda sql: sql.transitions("a"), "transitions of job 'a'"),
        ("UPDATE resizes SET after = 'x'", lambda sql: sql.resizes("a"), "resizes of job 'a'"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(sql, path, statement, ask, says):
    record = make_record("a", generation=1, allocation=Allocation.of(("n0", 1)))
    record.move(JobState.STARTING, 1.0, "1 replica")
    sql.save_job(record)
    sql.save_report("a", 1.0, report_of("a"))
    sql.save_round(make_round(1), EMPTY)
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()
    with pytest.raises(StoreError, match=says):
        ask(sql)


def test_a_database_that_another_process_holds_is_reported_as_busy(path, monkeypatch):
    monkeypatch.setattr(database, "_BUSY_TIMEOUT_S", 0.05)
    with SqlStore(path) as sql:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        assert sql.jobs() == []  # reading goes on
        with pytest.raises(StoreError, match="busy"):
            sql.save_job(make_record())
        other.execute("ROLLBACK")
        other.close()
        sql.save_job(make_record())


# Threads --------------------------------------------------------------------------------------


def test_readers_see_whole_transactions_while_writers_write(sql):
    """Each save of a job writes three tables: no reader may ever see one without the others."""
    sql.save_job(make_record())
    problems: list[str] = []
    is_over = threading.Event()

    def watch() -> None:
        try:
            while not is_over.is_set():
                stored = sql.job("resnet").record
                moves = sql.transitions("resnet")
                if stored is None or stored.history != moves[: len(stored.history)]:
                    problems.append(f"{stored} {moves}")
        except Exception as error:
            problems.append(repr(error))

    def report(name: str) -> None:
        try:
            for _ in range(30):
                sql.save_report("resnet", 1.0, report_of("resnet"))
                sql.add_request(f"{name}-{random.random()}", {}, f"{name}-{random.random()}")
        except Exception as error:
            problems.append(repr(error))

    readers = [threading.Thread(target=watch) for _ in range(3)]
    writers = [threading.Thread(target=report, args=(name,)) for name in "ab"]
    for thread in (*readers, *writers):
        thread.start()
    record = make_record()
    for target in [JobState.STARTING, *[JobState.RUNNING, JobState.RESIZING] * 15]:
        record.move(target, 1.0, "")
        sql.save_job(record)
    for thread in writers:
        thread.join()
    is_over.set()
    for thread in readers:
        thread.join()
    assert problems == []
    assert len(sql.reports("resnet", limit=1000)) == 60
    assert len(sql.jobs(limit=1000)) == 61


# Faults, in processes of their own ------------------------------------------------------------

PRELUDE = """
import os, resource, sys
from pathlib import Path
from pollux.errors import StoreError
from pollux.scheduler.lifecycle import JobState
from pollux.server.storage.store import SqlStore
from tests.unit.server.storage.test_store import EMPTY, make_record, make_round, report_of
path = Path(sys.argv[1])
"""
ROOT = Path(__file__).resolve().parents[4]


def child(code: str, path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PRELUDE + code, str(path)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.splitlines()


def assert_sound(path: Path) -> None:
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    connection.close()


WRITE_FOR_EVER = """
number = len(SqlStore(path).jobs(limit=10**6))
sql = SqlStore(path)
while True:
    number += 1
    name = f"job-{number}"
    sql.add_request(name, {}, f"hash-{number}")
    record = make_record(name, number)
    record.move(JobState.STARTING, 1.0, "")
    sql.save_job(record)
    sql.save_report(name, 1.0, report_of(name))
    sql.save_round(make_round(number), EMPTY)
    print(name, flush=True)  # acknowledged
"""


def test_after_kill_9_every_acknowledged_write_is_there(path):
    chance = random.Random(4)
    acknowledged: set[str] = set()
    for _ in range(6):
        process = child(WRITE_FOR_EVER, path)
        assert process.stdout is not None
        acknowledged.add(process.stdout.readline().strip())  # it is writing now
        time.sleep(chance.uniform(0.0, 0.1))
        process.kill()
        out, err = process.communicate(timeout=60)
        assert process.returncode == -9, err
        acknowledged |= {line.strip() for line in out.splitlines(keepends=True) if line.endswith("\n")}
        with SqlStore(path) as sql:
            stored = {job.name: job for job in sql.jobs(limit=10**6)}
            assert acknowledged <= stored.keys()
            for name in acknowledged:
                assert stored[name].record is not None
                assert len(sql.transitions(name)) == len(sql.reports(name)) == 1
            assert acknowledged <= {f"job-{entry.record.number}" for entry in sql.rounds(limit=10**6)}
        assert_sound(path)
    assert len(acknowledged) > 6


FILL_THE_DISK = """
sql = SqlStore(path)
sql.save_job(make_record())
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))
written = 0
try:
    while written < 10_000:
        sql.save_report("resnet", float(written), report_of("resnet"))
        written += 1
except StoreError as error:
    print(written)
    print(error)
assert len(sql.reports("resnet", limit=10**6)) == written  # reading goes on
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
sql.save_report("resnet", float(written), report_of("resnet"))  # and writing, once there is space
sql.close()
"""


def test_a_full_disk_is_reported_and_loses_nothing(path):
    written, message = finish(child(FILL_THE_DISK, path))
    assert "full" in message
    assert "free some space" in message
    assert str(path) in message
    assert_sound(path)
    with SqlStore(path) as sql:
        expected = [float(number) for number in range(int(written) + 1)]
        assert [entry.at for entry in sql.reports("resnet", limit=10**6)] == expected


OPEN_AS_A_STRANGER = """
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    SqlStore(path)
except StoreError as error:
    print(error)
"""


def test_a_read_only_file_is_reported():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pollux.db"
        with SqlStore(path) as sql:
            sql.save_job(make_record())
        path.chmod(0o444)
        os.chmod(folder, 0o555)
        before = path.read_bytes()
        try:
            [message] = finish(child(OPEN_AS_A_STRANGER, path))
        finally:
            os.chmod(folder, 0o755)
        assert "writable for this user" in message
        assert path.read_bytes() == before


# Speed (reported, not asserted) ---------------------------------------------------------------


def test_two_thousand_jobs_report(sql, capsys):
    for index in range(2000):
        sql.add_request(f"job-{index}", {}, f"hash-{index}")
    taken = []
    for index in range(2000):
        report = report_of(f"job-{index}")
        began = time.perf_counter()
        sql.save_report(report.job, 1.0, report)
        taken.append(time.perf_counter() - began)
    with capsys.disabled():
        print(f"\nsave_report: {statistics.mean(taken) * 1e3:.2f} ms mean, {statistics.median(taken) * 1e3:.2f} median")
    assert len(sql.reports("job-1999")) == 1
