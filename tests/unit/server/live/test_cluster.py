"""The live cluster with a real database and a real thread; only the engine is one that is told when to be done."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pollux.api.cluster import JobOnNode
from pollux.api.job import JobSummary
from pollux.api.report import Report
from pollux.api.request import JobRequest
from pollux.engines.live import ReplicaInfo, UnusableNode
from pollux.errors import InvalidValueError, StoreError, UnknownNameError
from pollux.model.profile import Configuration, Timing
from pollux.scheduler.knowledge import Knowledge
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.ports import (
    Command,
    Event,
    JobEnded,
    JobLost,
    JobRuns,
    JobStopped,
    NodesChanged,
    ResizeFailed,
    ResizeJob,
    StartJob,
    StopJob,
)
from pollux.scheduler.record import Departure, JobRecord, Reallocation, RoundRecord
from pollux.server.config import ClusterConfig
from pollux.server.live import recorder as recorder_module
from pollux.server.live.clock import LiveClock
from pollux.server.live.cluster import Cluster, launch_settings
from pollux.server.live.job_table import JobTable
from pollux.server.live.recorder import DecisionLog, Recorder
from pollux.server.live.state import ClusterState
from pollux.server.present.views import Capacity, round_summary, waiting_reason
from pollux.server.storage.store import SqlStore
from pollux.types import NO_ALLOCATION, Allocation, Explanation, JobDecision, JobSpec, Node, Plan, Snapshot
from tests.reports import report_fields

PATIENCE_S = 20.0


class ObedientEngine:
    """Starts, resizes and stops at once, and remembers; what jobs do by themselves is said by the test."""

    applies_at_once = False

    def __init__(self, *nodes: Node) -> None:
        self._nodes = nodes
        self._events: list[Event] = []
        self._turn = threading.Lock()
        self.commands: list[Command] = []
        self.adopted: list[list[str]] = []
        self.running: dict[str, int] = {}
        self.obeys_stops = True
        self.notes: dict[str, str] = {}
        self.dumped: list[str] = []
        self.unusable_nodes: list[UnusableNode] = []
        self.is_closed: bool | None = None
        self.wake: Callable[[], None] = lambda: None

    def nodes(self) -> Sequence[Node]:
        return self._nodes

    def apply(self, commands: Sequence[Command]) -> None:
        for command in commands:
            self.commands.append(command)
            if isinstance(command, StartJob | ResizeJob):
                self.running[command.job] = command.generation
                self.say(JobRuns(job=command.job, generation=command.generation))
            elif isinstance(command, StopJob) and self.obeys_stops:
                self.running.pop(command.job, None)
                self.say(JobStopped(job=command.job))

    def say(self, *events: Event) -> None:
        with self._turn:
            self._events.extend(events)
        self.wake()

    def end(self, job: str, state: JobState = JobState.SUCCEEDED, at: float | None = None, **more: Any) -> None:
        self.running.pop(job, None)
        self.say(JobEnded(job=job, state=state, at=time.time() if at is None else at, **more))

    def poll(self) -> Sequence[Event]:
        with self._turn:
            events, self._events = self._events, []
        return events

    def adopt(self, records: Sequence[JobRecord]) -> None:
        self.adopted.append([record.name for record in records])
        for record in records:
            if record.state.holds_slots and record.name not in self.running:
                self.say(JobLost(job=record.name, reason="nobody runs it"))

    def replicas(self, job: str) -> Sequence[ReplicaInfo]:
        return ()

    @property
    def unusable(self) -> list[UnusableNode]:
        return self.unusable_nodes

    def note(self, job: str) -> str:
        return self.notes.get(job, "")

    def dump_stacks(self, job: str) -> None:
        self.dumped.append(job)

    trouble = ""

    def close(self, *, stops_jobs: bool, grace_s: float | None = None) -> None:
        self.is_closed = stops_jobs


class World:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.engine = ObedientEngine(Node(name="a", num_slots=4, accelerator="cpu"))
        self.store = SqlStore(path / "pollux.db")
        self.cluster = self.make()

    def make(self, clock: LiveClock | None = None) -> Cluster:
        config = ClusterConfig(
            data_directory=self.path, secret="s" * 32, url="http://x", min_pause_s=0.0, interval_s=0.2
        )
        self.cluster = Cluster(store=self.store, engine=self.engine, config=config, clock=clock)
        self.engine.wake = self.cluster.wake
        return self.cluster

    def submit(self, *command: str, **options: Any) -> str:
        return self.cluster.submit(JobRequest(command=command or ("sleep", "9"), **options))[0].name

    def until(self, condition: Callable[[], object], what: str = "it") -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{what} never happened; problem: {self.cluster.problem}"
            time.sleep(0.01)
        return found

    def until_state(self, name: str, state: str) -> JobSummary:
        self.until(lambda: self.cluster.queries.summary_of(name).state == state, f"{name} {state}")
        return self.cluster.queries.summary_of(name)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    made.cluster.start()
    yield made
    made.cluster.stop(keeps_jobs=True)
    made.store.close()


def report(job: str, **values: Any) -> Report:
    return Report(job=job, **report_fields(**values))


def test_a_job_is_kept_started_and_ended(world):
    name = world.submit(name="first")
    view = world.until_state(name, "running")
    assert (view.num_replicas, view.allocation, view.reason) == (1, (("a", 1),), "generation 1 trains")
    world.engine.end(name, exit_code=0)
    view = world.until_state(name, "succeeded")
    assert view.exit_code == 0 and view.finished_at >= view.started_at >= view.submitted_at
    world.until(lambda: world.cluster.queries.is_ended(name), "its end is kept")
    assert world.store.job(name).state is JobState.SUCCEEDED
    assert [t.target for t in world.cluster.queries.job(name).transitions] == ["starting", "running", "succeeded"]


def test_names_are_made_unique_and_arrays_are_spread(world):
    assert [world.submit(name="a") for _ in range(3)] == ["a", "a-2", "a-3"]
    views = world.cluster.submit(JobRequest(command=("true",), name="many", array="0-2"))
    assert [view.name for view in views] == ["many-0", "many-1", "many-2"]
    assert world.cluster._jobs.launch_of("many-1").env["POLLUX_ARRAY_INDEX"] == "1"


def test_reports_make_an_elastic_job_grow_and_are_kept(world):
    name = world.submit(kind="elastic")
    world.until_state(name, "running")
    timings = ((Configuration(1, 1, 32), Timing(0.1, 0.1, 10)),)
    answer = world.cluster.report(report(name, timings=timings))
    assert answer.report_every_s == 1.0
    view = world.until(lambda: (v := world.cluster.queries.summary_of(name)).num_replicas == 4 and v, "growth")
    assert (view.noise_scale, view.progress, view.total_batch) == (100.0, 0.5, 32)
    # What was learnt is told with the next answer, under the cluster's own name of the type.
    assert list(world.cluster.report(report(name)).params) == ["cpu"]
    world.until(lambda: len(world.cluster.queries.reports(name, None, 10)) == 2, "both reports kept")
    detail = world.cluster.queries.job(name)
    assert detail.models["cpu"].num_configurations == 1
    assert detail.decision.option_replicas and detail.decisions[-1].after == 4
    assert [resize.after for resize in detail.resizes] == [(("a", 1),), (("a", 4),)]


def test_what_a_run_tells_of_its_decisions_is_in_the_history_and_the_log_once(world, caplog):
    caplog.set_level("INFO")
    name = world.submit(kind="elastic", max_replicas=1)
    world.until_state(name, "running")
    note = "step 1200: batch 64 -> 32, because |G|^2 rose 3.1 times after it grew"
    world.cluster.report(report(name, noise_scale_error=15.0, notes=(note,)))
    told = world.until(lambda: world.cluster.queries.job(name).training_notes, "the note kept")
    assert [entry.text for entry in told] == [note] and told[0].at >= world.cluster.queries.summary_of(name).started_at
    world.cluster.report(report(name, notes=("step 1300: batch 32 -> 64",)))
    world.until(lambda: len(world.cluster.queries.job(name).training_notes) == 2, "both notes kept")
    world.cluster.stop(keeps_jobs=True)
    cluster = world.make()
    cluster.start()  # which sees the reports again
    world.until(lambda: cluster.queries.rounds(None, 5), "a round")
    assert [entry.text for entry in cluster.queries.job(name).training_notes] == [note, "step 1300: batch 32 -> 64"]
    assert caplog.text.count(f"job {name}: training: {note}") == 1


def test_a_report_of_a_job_that_is_over_changes_nothing(world):
    name = world.submit()
    world.until_state(name, "running")
    world.engine.end(name)
    world.until_state(name, "succeeded")
    world.until(lambda: world.cluster.queries.is_ended(name))
    world.cluster.report(report(name, progress=0.1))
    assert world.cluster.queries.summary_of(name).progress is None


def test_dependencies_hold_a_job_back(world):
    first = world.submit(name="first")
    second = world.submit(name="second", after=(first,))
    third = world.submit(name="third", after=(second,))
    world.until_state(first, "running")
    assert world.cluster.queries.summary_of(second).reason == "waiting for first"
    world.engine.end(first)
    world.until_state(second, "running")
    assert world.cluster.queries.summary_of(third).state == "pending"
    world.cluster.cancel(second, "not any more")
    view = world.until_state(third, "cancelled")
    assert view.reason == "it was to run after second, which was cancelled"


def test_an_unknown_dependency_and_a_circle_are_refused_whole(world):
    with pytest.raises(InvalidValueError, match="nobody"):
        world.submit(name="a", after=("nobody",))
    with pytest.raises(InvalidValueError, match="wait for each other"):
        world.submit(name="a", after=("a",))
    assert world.cluster.queries.jobs(None, 10, 0, False) == ([], 0)


def test_a_held_job_can_be_cancelled(world):
    first = world.submit()
    held = world.submit(after=(first,))
    assert world.cluster.cancel(held, "changed my mind").state == "cancelled"
    assert world.cluster.queries.summary_of(held).reason == "changed my mind"
    assert world.cluster.cancel(held, "again").reason == "changed my mind"


def test_more_than_the_cluster_has_waits_with_the_reason(world):
    name = world.submit(replicas=8)
    world.until(lambda: world.cluster.queries.rounds(None, 5), "a round")
    view = world.cluster.queries.summary_of(name)
    assert view.state == "pending" and view.reason == "needs 8 slots at once; the cluster has 4"
    other = world.submit(accelerators=("h200",))
    world.until(
        lambda: world.cluster.queries.summary_of(other).reason == "needs a slot of type h200; the cluster has cpu"
    )


def test_a_time_limit_ends_a_job_as_failed(world):
    name = world.submit(time_limit_s=0.2)
    view = world.until_state(name, "failed")
    assert view.reason == "stopped: its time limit of 0.2 s is over"


def test_unknown_jobs_nodes_and_states_are_named_with_their_neighbours(world):
    world.submit(name="resnet")
    with pytest.raises(UnknownNameError, match="resnet"):
        world.cluster.queries.summary_of("resnt")
    with pytest.raises(UnknownNameError, match="resnet"):
        world.cluster.cancel("resnt", "")
    with pytest.raises(UnknownNameError, match="resnet"):
        world.cluster.queries.job_directory("resnt")
    with pytest.raises(UnknownNameError, match="Known: a"):
        world.cluster.drain("b", True)
    with pytest.raises(UnknownNameError, match="running"):
        world.cluster.queries.jobs(["runing"], 10, 0, False)


def test_a_missing_script_is_refused(world, tmp_path):
    with pytest.raises(InvalidValueError, match=r"train\.py cannot be read"):
        world.submit("python", "train.py", cwd=str(tmp_path))


def test_a_job_that_fits_no_type_is_told_so():
    nodes = [Node(name="a", num_slots=4, accelerator="t4"), Node(name="b", num_slots=2, accelerator="a100")]

    def reason(**spec: Any) -> str:
        record = JobRecord(spec=JobSpec(name="j", **spec), sequence=0, knowledge=Knowledge("j"))
        return waiting_reason(record, Capacity.of(nodes))

    # Six slots there are, but a job sits on one type.
    assert reason(min_replicas=5) == (
        "needs 5 slots at once, all of one type; of those it may use the cluster has 2 of type a100, 4 of type t4"
    )
    assert reason(min_replicas=3, accelerators=frozenset({"a100"})) == (
        "needs 3 slots at once, all of one type; of those it may use the cluster has 2 of type a100"
    )
    assert reason(accelerators=frozenset({"h200"})) == "needs a slot of type h200; the cluster has a100, t4"
    assert reason(min_replicas=4) == "waiting for slots"


def test_a_drained_cluster_is_why_a_job_waits(world):
    world.cluster.drain("a", True)
    name = world.submit()
    world.until(
        lambda: world.cluster.queries.rounds(None, 5) or world.cluster.queries.summary_of(name).reason, "a reason"
    )
    world.until(lambda: "drained" in world.cluster.queries.summary_of(name).reason, "the reason")
    assert world.cluster.queries.summary_of(name).reason == "needs 1 slot; 4 of the cluster's 4 are being drained"


def test_the_kind_is_seen_from_the_script(world, tmp_path):
    (tmp_path / "train.py").write_text("from pollux import train\n")
    name = world.submit("python", "train.py", cwd=str(tmp_path))
    assert world.cluster.queries.summary_of(name).kind == "elastic"


def test_the_kind_is_seen_from_a_file_that_the_script_imports(world, tmp_path):
    (tmp_path / "train.py").write_text("import loop\n")
    (tmp_path / "loop.py").write_text("from pollux import train\n")
    name = world.submit("python", "train.py", cwd=str(tmp_path))
    assert world.cluster.queries.summary_of(name).kind == "elastic"


def test_each_job_has_a_token_of_its_own(world):
    one, other = world.submit(), world.submit()
    tokens = [world.cluster._jobs.launch_of(name).env["POLLUX_TOKEN"] for name in (one, other)]
    assert [world.cluster.job_of_token(token) for token in tokens] == [one, other]
    assert world.cluster.job_of_token("x" * 64) is None
    world.cluster.cancel(one, "enough")
    world.until_state(one, "cancelled")
    world.until(lambda: world.cluster.job_of_token(tokens[0]) is None, "the end of its token")
    assert world.cluster.job_of_token(tokens[1]) == other


def test_values_of_a_jobs_environment_do_not_come_back(world):
    name = world.submit(env={"WANDB_API_KEY": "hunter2", "SEED": "1"})
    shown = world.cluster.queries.job(name).request
    assert shown["env"] == {"WANDB_API_KEY": "(hidden)", "SEED": "(hidden)"}
    assert "hunter2" not in repr(world.cluster.queries.job(name))
    assert world.cluster._jobs.launch_of(name).env["WANDB_API_KEY"] == "hunter2"


def test_draining_lets_jobs_end_that_must_not_be_moved(world):
    name = world.submit(kind="fixed")
    world.until_state(name, "running")
    assert world.cluster.drain("a", True).is_draining
    late = world.submit(kind="fixed")
    rounds = len(world.cluster.queries.rounds(None, 100))
    world.until(
        lambda: len(world.cluster.queries.rounds(None, 100)) > rounds or world.cluster.queries.summary_of(late).reason
    )
    assert world.cluster.queries.summary_of(name).state == "running"
    assert world.cluster.queries.summary_of(late).state == "pending"
    assert not world.cluster.drain("a", False).is_draining
    world.until_state(late, "running")


def test_a_drain_is_told_as_what_it_is(world):
    world.engine._nodes = tuple(Node(name=name, num_slots=4, accelerator="cpu") for name in "ab")
    name = world.submit(name="x", kind="elastic", max_replicas=1)
    world.until_state(name, "running")
    (first,) = (node for node, _ in world.cluster.queries.summary_of(name).allocation)
    other = "b" if first == "a" else "a"
    world.cluster.drain(first, True)

    def told(sentence: str) -> Any:
        rounds = world.cluster.queries.rounds(None, 100)
        return next((one for one in rounds if one.words[0].startswith(sentence)), None)

    moved = world.until(lambda: told(f"x leaves {first}, which is drained, for {other}"), "it leaves")
    assert [(change.before, change.after) for change in moved.changes] == [(1, 1)]
    (job,) = world.cluster.queries.round(moved.id).jobs
    assert (job.before, job.after) == (((first, 1),), ((other, 1),))
    assert [one.round for one in world.cluster.queries.job(name).decisions][-1] == moved.id
    world.cluster.drain(other, True)
    stopped = world.until(lambda: told("x stops: its node is drained and there is no room"), "it stops")
    assert [(change.before, change.after) for change in stopped.changes] == [(1, 0)]


def test_who_ended_is_told_with_one_round_whatever_is_asked_for(world):
    """Also where its machine's clock is years behind, and the round before is forgotten."""
    for name in ("one", "two", "three"):
        world.submit(name=name)
        world.until_state(name, "running")
    world.engine.end("one", at=1.0)
    world.engine.end("two", at=time.time() + 1000)

    def told(limit: int) -> dict[int, list[str]]:
        rounds = world.cluster.queries.rounds(None, limit)
        found = {one.id: [words for words in one.words if "succeeded" in words] for one in rounds}
        return {id_: words for id_, words in found.items() if words}

    before = world.until(lambda: sum(len(words) for words in told(1000).values()) == 2 and told(1000), "they are told")
    last = max(before)
    world.until(lambda: world.cluster.queries.rounds(last + 1, 1), "two more rounds")
    world.cluster.stop(keeps_jobs=True)
    assert told(1000) == before
    num_after = len(world.cluster.queries.rounds(last, 1000))
    assert told(num_after) == {}
    world.store.prune(num_after + 1, 100)
    assert told(1000) == told(num_after + 1) == {last: before[last]}
    assert world.cluster.queries.round(last).words == world.cluster.queries.rounds(None, num_after + 1)[0].words


def test_a_job_that_ends_is_always_shown(world, monkeypatch):
    """As one that runs or as one that ended, and as what it is; there is no moment between the two."""
    name, seen, save_job, close = world.submit(kind="fixed"), [], world.store.save_job, world.cluster._jobs.close
    world.until_state(name, "running")

    def look() -> None:
        ended = {one: world.cluster.queries.row(one) for one in world.cluster.queries.last_ended(10)}
        row = {**ended, **world.cluster.queries.active_rows()}.get(name)
        seen.append(None if row is None else (row.kind, row.state))

    def save(record: JobRecord) -> None:
        look()
        save_job(record)
        look()

    def closed(job: str) -> None:
        close(job)
        look()

    monkeypatch.setattr(world.store, "save_job", save)
    monkeypatch.setattr(world.cluster._jobs, "close", closed)
    world.engine.end(name)
    world.until_state(name, "succeeded")
    world.until(lambda: len(seen) == 3, "all looks")
    assert {kind for kind, _ in seen} == {"fixed"}
    assert seen[-1] == ("fixed", "succeeded")


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


def test_a_storm_of_reports_is_taken_in_and_none_is_lost(world):
    names = [world.submit(kind="elastic", max_replicas=1) for _ in range(4)]
    for name in names:
        world.until_state(name, "running")

    def storm(name: str) -> None:
        for step in range(500):
            world.cluster.report(report(name, num_steps=step))

    threads = [threading.Thread(target=storm, args=[name]) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    for name in names:
        world.until(lambda name=name: len(world.cluster.queries.reports(name, None, 1000)) == 500, "all kept")
        assert world.cluster.queries.summary_of(name).num_steps == 499
    assert world.cluster.is_ready


def test_what_is_shown_of_the_whole(world):
    name = world.submit()
    world.until_state(name, "running")
    summary = world.cluster.queries.summary()
    assert (summary.num_slots, summary.num_used_slots, summary.jobs["running"]) == (4, 1, 1)
    assert summary.num_rounds >= 1 and summary.last_decision_s > 0
    (node,) = world.cluster.queries.nodes()
    assert node.used == 1 and node.jobs == (JobOnNode(name=name, num_replicas=1),)
    world.until(lambda: world.cluster.queries.jobs(["running"], 10, 0, True)[1], "the state saved")
    views, total = world.cluster.queries.jobs(["running"], 10, 0, True)
    assert total == 1 and views[0].name == name
    (change,) = [change for round_ in world.cluster.queries.rounds(None, 10) for change in round_.changes]
    assert (change.job, change.before, change.after) == (name, 0, 1)


def test_a_second_array_gets_a_name_of_its_own(world):
    names = [
        [view.name for view in world.cluster.submit(JobRequest(command=("true",), name="sweep", array="0-1"))]
        for _ in range(2)
    ]
    assert names == [["sweep-0", "sweep-1"], ["sweep-2-0", "sweep-2-1"]]
    assert world.submit(name="sweep") == "sweep"


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


def test_a_job_over_its_time_limit_is_not_looked_at_all_the_time(world, monkeypatch):
    world.engine.obeys_stops = False
    name = world.submit(time_limit_s=0.1)
    world.until_state(name, "stopping")
    num_polls = 0
    poll = world.engine.poll

    def counted() -> Sequence[Event]:
        nonlocal num_polls
        num_polls += 1
        return poll()

    monkeypatch.setattr(world.engine, "poll", counted)
    time.sleep(1.5)
    assert num_polls <= 2 * 1.5 / 0.2 + 2  # the interval is 0.2 s


def test_a_folder_of_a_job_that_the_database_does_not_know_is_left_alone(world, tmp_path):
    """Whoever moved the database away begins anew, and not from the checkpoints of another life."""
    (tmp_path / "jobs" / "train" / "checkpoints").mkdir(parents=True)
    (tmp_path / "jobs" / "many-3").mkdir()
    assert world.submit(name="train") == "train-2"
    assert world.submit(name="many", array="0-4") == "many-2-0"
    with pytest.raises(UnknownNameError):
        world.cluster.queries.summary_of("train")


def test_a_script_that_is_a_pipe_holds_up_nobody(world, tmp_path):
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(InvalidValueError, match="it is no file"):
        world.submit("python", "pipe.py", cwd=str(tmp_path))


def make_recorder(store: SqlStore, directory: Path) -> tuple[Recorder, DecisionLog, ClusterState]:
    config = ClusterConfig(data_directory=directory, secret="s" * 32)
    state = ClusterState(jobs=JobTable(store, launch_settings(config)))
    decisions = DecisionLog(store, state)
    recorder = Recorder(store, state, decisions, keep_rounds=1, keep_reports=1, on_ended=lambda record: None)
    return recorder, decisions, state


def test_the_last_decision_about_a_job_does_not_hold_those_about_all_others(world, tmp_path):
    """Thousands of ended jobs are remembered, each with a round of its own."""
    decision = JobDecision(
        job="one",
        before=NO_ALLOCATION,
        after=Allocation.of(("a", 1)),
        speedup_before=0.0,
        speedup_after=1.0,
        move_factor=1.0,
        option_replicas=np.array([1]),
        option_speedups=np.array([1.0]),
    )
    decisions = (decision, *(dataclasses.replace(decision, job=f"other-{number}") for number in range(5000)))
    explanation = Explanation(fitness_before=0.0, fitness=1.0, upper_bound=1.0, jobs=decisions)
    plan = Plan(allocations={one.job: one.after for one in decisions}, explanation=explanation)
    with SqlStore(tmp_path / "another.db") as store:
        recorder, decisions_of, state = make_recorder(store, tmp_path)
        record = RoundRecord(number=1, at=1.0, trigger="submit", plan=plan, num_jobs=5001, num_slots=4, decision_s=0.1)
        for _ in range(7):
            store.save_round(dataclasses.replace(record, plan=Plan(allocations={})), None)
        recorder.save_round(record, Snapshot.of(1.0, [], []))
        for other in decisions[1:]:
            state.jobs._ended.pop(other.job)
        state.last_round = None
    shown = decisions_of.last("one")
    assert shown is not None and (shown.round, shown.fitness) == (8, 1.0)  # its id, which is for ever
    del record, plan, explanation, decisions, other
    gc.collect()
    held = sum(type(one) is JobDecision and one.job.startswith("other-") for one in gc.get_objects())
    assert held == 0


def test_what_changed_among_many_jobs_is_kept_though_the_policy_explains_nothing(tmp_path):
    plan = Plan(allocations={f"job-{number}": Allocation.of(("a", 1)) for number in range(500)})
    change = Reallocation(job="job-7", before=NO_ALLOCATION, after=Allocation.of(("a", 1)), has_started=False)
    record = RoundRecord(
        number=1,
        at=1.0,
        trigger="submit",
        plan=plan,
        num_jobs=500,
        num_slots=500,
        decision_s=0.1,
        changes=(change,),
        departures=(Departure(job="gone", state=JobState.SUCCEEDED, reason="succeeded", num_slots=0),),
    )
    with SqlStore(tmp_path / "another.db") as store:
        recorder, _, _ = make_recorder(store, tmp_path)
        recorder.save_round(record, Snapshot.of(1.0, [], []))
        (kept,) = store.rounds()
    assert kept.record.plan.allocations == {"job-7": change.after}  # writing all of it would take long
    view = round_summary(kept)
    assert view.words == ("gone succeeded", "job-7 starts with 1 slot on a")
    assert [(one.job, one.before, one.after) for one in view.changes] == [("job-7", 0, 1)]


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


def test_the_log_tells_what_becomes_of_jobs(world, caplog):
    with caplog.at_level(logging.INFO, logger="pollux.server"):
        name = world.submit(name="bert")
        world.until_state(name, "running")
        world.cluster.drain("a", True)
        world.engine.end(name, JobState.FAILED, reason="bert: rank 0 exited with 1\nTraceback ...")
        world.until_state(name, "failed")
        world.cluster.stop(keeps_jobs=False)
    told = [record.getMessage() for record in caplog.records]
    expected = ["submitted", "starting: 1 replica", "running: generation 1 trains", "failed: rank 0 exited with 1"]
    assert [line for line in told if line.startswith("job ")] == [f"job bert: {what}" for what in expected]
    assert {"node a: drained: jobs leave it", "stopping: jobs checkpoint and leave"} <= set(told)


def test_a_cluster_whose_engine_is_in_trouble_is_not_ready_and_says_why(world):
    world.until(lambda: world.cluster.is_ready)
    world.engine.trouble = "paused: another server commands its replicas"
    assert not world.cluster.is_ready and world.cluster.problem == world.engine.trouble
    world.engine.trouble = ""
    assert world.cluster.is_ready and world.cluster.problem == ""


def test_weights_of_jobs_outside_of_a_study_and_new_ones(world):
    world.submit(name="other", weight=2.0)
    name = world.submit(name="s-0", study="s", metric="loss", params={"lr": 0.1})
    world.until(lambda: len(world.cluster.weights_outside("t")) == 2)
    assert world.cluster.weights_outside("s") == [2.0]
    assert world.cluster.queries.summary_of(name).study == "s"
    world.cluster.reweigh({name: 0.25})
    world.until(lambda: world.cluster.queries.summary_of(name).weight == 0.25)
    environment = world.cluster._jobs.launch_of(name).env
    assert (environment["POLLUX_PARAMS"], environment["POLLUX_METRIC"]) == ('{"lr": 0.1}', "loss")


def test_a_node_without_the_storage_is_shown_with_the_reason(world):
    world.engine.unusable_nodes = [UnusableNode(name="b", reason="it does not see the storage at /mnt")]
    shown = {node.name: node for node in world.cluster.queries.nodes()}
    assert (shown["a"].health, shown["a"].problem) == ("ok", "")
    assert (shown["b"].health, shown["b"].num_slots) == ("unusable", 0)
    assert shown["b"].problem == "it does not see the storage at /mnt"


def test_a_cluster_without_usable_nodes_says_so(world):
    world.engine._nodes = []
    world.engine.unusable_nodes = [UnusableNode(name="b", reason="it cannot write to the storage at /mnt")]
    name = world.submit()
    reason = world.until(lambda: world.cluster.queries.summary_of(name).reason, "a reason")
    world.until(lambda: "b: it cannot write" in world.cluster.queries.summary_of(name).reason, reason)


def test_a_lost_node_is_shown_for_a_while(world):
    both = [*world.engine._nodes, Node(name="b", num_slots=4, accelerator="cpu")]
    world.engine._nodes = both
    world.engine.say(NodesChanged())
    world.until(lambda: "b" in world.cluster._state.scheduler.health._names, "it is seen")
    world.engine._nodes = both[:1]
    world.engine.say(NodesChanged())
    world.until(lambda: [(n.name, n.health) for n in world.cluster.queries.nodes()] == [("a", "ok"), ("b", "lost")])


def test_a_resize_that_failed_is_told_with_node_and_cause(world):
    name = world.submit(kind="elastic")
    world.until_state(name, "running")
    held = world.cluster._state.records[name].allocation
    world.engine.say(ResizeFailed(job=name, generation=1, allocation=held, node="bad", reason="no GPU"))
    transitions = world.until(
        lambda: [t for t in world.cluster.queries.job(name).transitions if "bad (no GPU)" in t.reason], "it is told"
    )
    assert transitions[0].target == "resizing"
    world.until_state(name, "running")
