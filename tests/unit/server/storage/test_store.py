"""The SQL store on real SQLite files and a real PostgreSQL: what goes in comes out."""

from __future__ import annotations

import dataclasses
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.api.codec import dumps
from pollux.api.report import encode_report
from pollux.api.report import stored as stored_report
from pollux.errors import InvalidValueError, UnknownNameError
from pollux.model.profile import Configuration, Timing
from pollux.policy import make_policy
from pollux.scheduler.knowledge import ProfileMemory
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.loop import Scheduler, SchedulerConfig
from pollux.scheduler.record import JobRecord
from pollux.server.storage import report_bytes
from pollux.server.storage.store import SqlStore
from pollux.server.storage.time_series import TimeSeries
from pollux.testing.examples import examples
from pollux.types import Allocation, JobSpec, Node
from tests.fakes import HandClock, SlowEngine
from tests.long import long
from tests.postgres import open_store
from tests.unit.api.test_codec import (
    REPORT,
    same,
)
from tests.unit.server.storage.values import (
    EMPTY,
    assert_same_record,
    learnt,
    make_record,
    make_round,
    records,
    report_of,
    rounds,
    snapshots,
)

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


def test_a_request_waits_until_the_scheduler_takes_it_in(place):
    with open_store(place) as sql:
        sequence = sql.add_request("resnet", {"command": ["python", "train.py"], "env": {"A": "ü"}}, "hash-1", at=5.0)
        assert sql.records() == []
        [waiting] = sql.requests()
        assert (waiting.name, waiting.sequence, waiting.record) == ("resnet", sequence, None)
        assert (waiting.state, waiting.submitted_at) == (JobState.PENDING, 5.0)
        sql.save_job(make_record(sequence=sequence))
        assert sql.requests() == []
    with open_store(place) as sql:
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
    spec = JobSpec(name="a", application="a\0\ud800")
    sql.save_job(JobRecord(spec=spec, sequence=0, knowledge=ProfileMemory().of(spec)))
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


def test_records_that_share_their_knowledge_share_it_again(place):
    memory = ProfileMemory()
    shared = memory.of(JobSpec(name="a", application="bert"))
    with open_store(place) as sql:
        for name in "abc":
            shared.observe("gpu", Configuration(1, 1, 8), Timing(0.1, 0.2, 3))
            sql.save_job(JobRecord(spec=JobSpec(name=name, application="bert"), sequence=ord(name), knowledge=shared))
        done = make_record("d", state=JobState.SUCCEEDED)
        sql.save_job(done)
    with open_store(place) as sql:
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


def test_a_scheduler_leaves_its_whole_story(place):
    """The loop itself with this store: starts, resizes, restarts of the server, the end."""
    clock, engine = HandClock(), SlowEngine([Node(name="n0", num_slots=4)])
    with open_store(place) as sql:
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

    with open_store(place) as sql:
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


def test_rounds_are_kept_though_their_numbers_begin_again(place):
    for _ in range(2):  # the server restarts
        with open_store(place) as sql:
            for number in (1, 2, 3):
                sql.save_round(make_round(number), EMPTY)
    with open_store(place) as sql:
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


def test_a_page_of_reports_is_bounded_in_bytes_too(sql, monkeypatch):
    sql.save_job(make_record("a"))
    for number in range(7):
        sql.save_report("a", float(number), report_of("a"))
    ids = [entry.id for entry in sql.reports("a")]
    size = len(dumps(encode_report(report_of("a")), "report"))
    monkeypatch.setattr(report_bytes, "ANSWER_BYTES", 3 * size)
    assert [entry.id for entry in sql.reports("a")] == ids[-3:]
    assert [entry.id for entry in sql.reports("a", since=ids[0])] == ids[1:4]
    assert [entry.id for entry in sql.reports("a", since=ids[3])] == ids[4:]
    assert [at for at, _ in TimeSeries(sql).reports("a", 100)] == [0.0, 3.0, 6.0]
    monkeypatch.setattr(report_bytes, "ANSWER_BYTES", 1)
    assert [entry.id for entry in sql.reports("a", since=ids[3])] == [ids[4]]
    assert [at for at, _ in TimeSeries(sql).reports("a", 100)] == [6.0]


def test_reports_of_a_job_are_bounded_in_bytes_too(sql, monkeypatch):
    for name in "ab":
        sql.save_job(make_record(name))
    size = len(dumps(encode_report(report_of("a")), "report"))
    monkeypatch.setattr(report_bytes, "KEEP_BYTES", 10 * size)
    monkeypatch.setattr(report_bytes, "LOOK_BYTES", 3 * size)
    most = 0
    for number in range(40):
        sql.save_reports([(float(number), report_of("a"))])
        most = max(most, len(sql.reports("a")))
    sql.save_reports([(0.0, report_of("b"))])
    kept = [entry.at for entry in sql.reports("a")]
    assert kept == [float(number) for number in range(40 - len(kept), 40)]
    assert 10 <= len(kept) <= most <= 13
    assert len(sql.reports("b")) == 1


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


# Speed (reported, not asserted) ---------------------------------------------------------------


@long
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
