"""What a live cluster keeps over restarts, a failing store, a full disk and a clock that steps back."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Sequence

import pytest

from pollux.errors import StoreError, UnknownNameError
from pollux.model.profile import Configuration, Timing
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.ports import (
    JobStopped,
    StartJob,
)
from pollux.scheduler.record import JobRecord
from pollux.server.live import recorder as recorder_module
from pollux.server.live.clock import LiveClock
from pollux.server.notify.notifier import Notifier
from pollux.server.storage.cancellations import Cancellations
from pollux.types import Node
from tests.unit.server.live.world import PATIENCE_S, World, report


def test_a_drained_node_stays_drained_after_a_restart(world):
    world.cluster.drain("a", True)
    world.cluster.stop(keeps_jobs=True)
    cluster = world.make()
    cluster.start()
    name = world.submit()
    assert cluster.queries.nodes()[0].is_draining
    before = cluster.queries.summary().now
    world.until(lambda: cluster.queries.summary().now > before + 0.5)
    assert cluster.queries.summary_of(name).state == "pending"
    cluster.drain("a", False)
    world.until_state(name, "running")


def test_another_cluster_takes_over_without_starting_anything_twice(world):
    names = [world.submit(name=name) for name in ("one", "two")]
    held = world.submit(name="three", after=("one",))
    for name in names:
        world.until_state(name, "running")
    world.cluster.stop(keeps_jobs=True)
    assert world.engine.is_closed is False
    world.engine.running.pop("two")  # died with the machine's memory, say
    started = len(world.engine.commands)
    cluster = world.make()
    cluster.start()
    assert world.engine.adopted[-1] == names
    world.until(lambda: world.engine.running.get("two") == 2, "a second start")
    assert [type(command) for command in world.engine.commands[started:]] == [StartJob]
    assert cluster.queries.summary_of("one").generation == 1 and cluster.queries.summary_of("two").num_crashes == 1
    world.engine.end("one")
    world.until_state(held, "running")


def test_stopping_lets_jobs_checkpoint_and_wait(world):
    name = world.submit()
    world.until_state(name, "running")
    world.cluster.stop(keeps_jobs=False)
    assert world.engine.is_closed is True
    assert world.store.job(name).state is JobState.PENDING
    cluster = world.make()
    cluster.start()
    world.until_state(name, "running")


def test_a_store_that_fails_for_a_while_stops_nothing_for_ever(world, monkeypatch, caplog):
    name = world.submit()
    world.until_state(name, "running")
    saved = world.store.save_job

    def full(record: JobRecord) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(world.store, "save_job", full)
    world.engine.end(name)
    world.until(lambda: not world.cluster.is_ready, "a problem")
    assert world.cluster.problem == "the disk is full"
    monkeypatch.setattr(world.store, "save_job", saved)
    world.engine.running.pop(name, None)
    world.until(lambda: world.cluster.is_ready, "recovery")
    world.until_state(name, "running")  # its end was never kept: the engine had nothing of it, so it starts again


def test_the_clock_may_step_back(tmp_path):
    wall = [1_000_000.0]
    world = World(tmp_path)
    world.make(LiveClock(world.store.latest_time(), wall=lambda: wall[0]))
    world.cluster.start()
    name = world.submit()
    world.until_state(name, "running")
    wall[0] -= 5000
    view = world.cluster.queries.summary_of(name)
    assert 0 <= view.running_s < PATIENCE_S
    world.cluster.stop(keeps_jobs=True)
    world.make(LiveClock(world.store.latest_time(), wall=lambda: wall[0]))
    world.cluster.start()
    assert world.cluster.queries.summary().now >= 1_000_000.0
    world.engine.end(name, at=world.cluster.queries.summary().now)
    view = world.until_state(name, "succeeded")
    assert view.finished_at >= view.started_at >= view.submitted_at
    world.cluster.stop(keeps_jobs=True)
    world.store.close()


def test_fewer_slots_than_before_the_restart(world):
    names = [world.submit(kind="fixed", replicas=2, name="kept"), world.submit(kind="elastic", min_replicas=2)]
    for name in names:
        world.until_state(name, "running")
    world.cluster.stop(keeps_jobs=True)
    world.engine._nodes = (Node(name="a", num_slots=2, accelerator="cpu"),)
    cluster = world.make()
    cluster.start()
    world.until_state(names[1], "pending")
    assert cluster.queries.summary_of("kept").state == "running" and cluster.queries.summary_of("kept").generation == 1
    assert cluster.is_ready


def test_a_full_disk_does_not_keep_jobs_from_being_stopped(world, monkeypatch):
    name = world.submit()
    world.until_state(name, "running")

    def full(reports: Sequence[object]) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(world.store, "save_reports", full)
    world.cluster.stop(keeps_jobs=False)
    assert world.engine.is_closed is True


def test_reports_that_cannot_be_kept_are_kept_later(world, monkeypatch):
    name = world.submit()
    world.until_state(name, "running")
    saved = world.store.save_reports

    def full(reports: Sequence[object]) -> None:
        if reports:
            raise StoreError("the disk is full")

    monkeypatch.setattr(world.store, "save_reports", full)
    world.cluster.report(report(name, num_steps=1))
    world.until(lambda: not world.cluster.is_ready, "a problem")
    world.cluster.report(report(name, num_steps=2))
    monkeypatch.setattr(world.store, "save_reports", saved)
    world.until(lambda: len(world.cluster.queries.reports(name, None, 9)) == 2, "both are kept")
    assert [kept.num_steps for kept in world.cluster.queries.reports(name, None, 9)] == [1, 2]


def test_an_array_is_kept_whole_or_not_at_all(world, tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / "pollux.db")) as database:
        database.execute(
            "CREATE TRIGGER full BEFORE INSERT ON jobs WHEN NEW.name = 'many-2' BEGIN SELECT RAISE(FAIL, 'full'); END"
        )
        with pytest.raises(StoreError):
            world.submit(name="many", array="0-4")
        database.execute("DROP TRIGGER full")
    assert world.cluster.queries.jobs(None, 10, 0, False) == ([], 0)
    assert world.submit(name="many", array="0-4") == "many-0"
    world.until_state("many-4", "pending")


def test_a_cancelled_job_that_was_stopping_already_stays_cancelled_after_a_restart(world):
    world.engine.obeys_stops = False
    name = world.submit(checkpoints=True)
    world.until_state(name, "running")
    world.cluster.drain("a", True)
    world.until_state(name, "stopping")
    world.cluster.cancel(name, "enough")
    world.cluster.stop(keeps_jobs=True)
    cluster = world.make()
    cluster.start()
    world.engine.say(JobStopped(job=name))
    assert world.until_state(name, "cancelled").reason == "enough"


def test_a_folder_of_a_job_that_the_database_does_not_know_is_left_alone(world, tmp_path):
    """Whoever moved the database away begins anew, and not from the checkpoints of another life."""
    (tmp_path / "jobs" / "train" / "checkpoints").mkdir(parents=True)
    (tmp_path / "jobs" / "many-3").mkdir()
    assert world.submit(name="train") == "train-2"
    assert world.submit(name="many", array="0-4") == "many-2-0"
    with pytest.raises(UnknownNameError):
        world.cluster.queries.summary_of("train")


def test_what_was_measured_last_is_known_after_a_restart(world):
    name = world.submit(kind="elastic", max_replicas=1)
    world.until_state(name, "running")
    timings = ((Configuration(1, 1, 32), Timing(0.1, 0.1, 10)),)
    world.cluster.report(report(name, timings=timings, noise_scale=321.0, noise_scale_error=12.0))
    world.until(lambda: world.cluster.queries.reports(name, None, 10), "the report kept")
    world.cluster.stop(keeps_jobs=True)
    cluster = world.make()
    cluster.start()
    world.until(lambda: cluster.queries.job(name).models.get("cpu"), "its model")
    assert cluster.queries.summary_of(name).noise_scale == 321.0
    assert cluster.queries.summary_of(name).noise_scale_error == 12.0
    world.until(lambda: cluster._state.records[name].noise_scale_error == 12.0, "the scheduler knows it")
    assert len(cluster.queries.reports(name, None, 10)) == 1


def test_decisions_about_a_job_outlive_the_server(world, monkeypatch):
    """However many rounds ago they were made, and also of a job that is over."""
    monkeypatch.setattr(recorder_module, "NUM_RECALLED", 1)
    name = world.submit(kind="elastic", max_replicas=1)
    world.until_state(name, "running")
    made = world.until(lambda: world.cluster.queries.job(name).decisions, "a decision")
    world.until(lambda: world.cluster.queries.rounds(None, 100)[-1].id > made[-1].round + 1, "more rounds")
    world.engine.end(name)
    world.until_state(name, "succeeded")
    world.submit(name="other")
    world.until_state("other", "running")
    world.cluster.stop(keeps_jobs=True)
    cluster = world.make()
    cluster.start()
    detail = cluster.queries.job(name)
    assert detail.decisions == made
    assert detail.decision.round == made[-1].round


UNREADABLE = (
    "job: t-0 exited with 1: pollux.errors.UnreadableCheckpointError: /x: none of the 2 checkpoints can be used"
)


def test_a_job_that_can_use_no_checkpoint_waits_for_its_owner_and_goes_on_when_released(world, monkeypatch):
    notices = []
    monkeypatch.setattr(Notifier, "tell", lambda self, notice: notices.append(notice))
    name = world.submit(kind="elastic", max_replicas=1, max_restarts=100_000)
    world.until_state(name, "running")
    world.engine.end(name, JobState.FAILED, reason=UNREADABLE, exit_code=1)
    told = world.until_state(name, "pending")
    world.until(lambda: notices, "a notice")  # right after it is saved
    assert [notice.event for notice in notices] == ["job.held"]
    assert f"then: pollux release {name}" in told.reason and str(world.path) in told.reason
    world.cluster.stop(keeps_jobs=True)
    world.make().start()  # which knows it, too
    time.sleep(0.5)
    told = world.cluster.queries.summary_of(name)
    assert (told.state, told.num_replicas) == ("pending", 0) and "pollux release" in told.reason
    operations = world.cluster.operations
    operations.act(operations.select([name], is_all=False, owner=None), "release", "")
    world.until_state(name, "running")


def test_a_trial_that_can_use_no_checkpoint_has_failed_as_nobody_looks_after_it(world):
    name = world.submit(kind="elastic", max_replicas=1, study="sweep")
    world.until_state(name, "running")
    world.engine.end(name, JobState.FAILED, reason=UNREADABLE, exit_code=1)
    world.until_state(name, "failed")


def test_a_cancellation_does_not_wait_for_a_decision_and_is_kept(world):
    name = world.submit()
    world.until_state(name, "running")
    old, decided = world.cluster, threading.Event()
    old._queue(lambda: decided.wait(PATIENCE_S))  # a round that takes long
    began = time.monotonic()
    told = old.cancel(name, "enough")
    assert time.monotonic() - began < 1.0
    assert (told.state, told.note) == ("running", "it is being cancelled")
    old.cancel(name, "again")  # and again: kept once
    assert [one.reason for one in Cancellations(world.store).all()] == ["enough"]
    world.make().start()  # the server was killed, and another one starts
    assert world.until_state(name, "cancelled").reason == "enough"
    assert Cancellations(world.store).all() == []
    old._is_stopping = True
    decided.set()
    old._thread.join()


def test_a_drain_does_not_wait_for_a_decision_and_is_kept(world):
    old, decided = world.cluster, threading.Event()
    old._queue(lambda: decided.wait(PATIENCE_S))
    began = time.monotonic()
    assert old.drain("a", True).is_draining
    assert time.monotonic() - began < 1.0
    world.make().start()  # the server was killed, and another one starts
    assert world.cluster.queries.nodes()[0].is_draining
    assert not world.cluster.drain("a", False).is_draining
    old._is_stopping = True
    decided.set()
    old._thread.join()
    assert not world.cluster.queries.nodes()[0].is_draining


def test_what_was_refused_for_time_is_not_done_later(world, monkeypatch):
    name = world.submit(kind="elastic")
    world.until_state(name, "running")
    decided, asked = threading.Event(), world.cluster._ask
    world.cluster._queue(lambda: decided.wait(PATIENCE_S))
    monkeypatch.setattr(world.cluster, "_ask", lambda call, timeout_s=0.0: asked(call, 0.05))
    with pytest.raises(StoreError, match=r"no answer from the scheduler in .* and nothing was done: try again"):
        world.cluster.operations.requeue(name)
    decided.set()
    asked(lambda: None)
    assert world.engine.running[name]
    assert [type(command) for command in world.engine.commands] == [StartJob]


def test_a_job_that_ends_while_it_is_to_be_cancelled_stays_what_it_is(world):
    name = world.submit()
    world.until_state(name, "running")
    Cancellations(world.store).add(name, "enough")
    world.engine.end(name)
    world.until_state(name, "succeeded")
    world.cluster.stop(keeps_jobs=True)
    world.make().start()
    assert Cancellations(world.store).all() == []
    assert world.cluster.queries.summary_of(name).state == "succeeded"
