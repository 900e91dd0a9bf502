"""A restartable job trains when it has reported, and its restart costs what it took until then."""

from __future__ import annotations

import pytest

from pollux.api.report import Report
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.ports import JobEnded, JobRuns, JobStopped, ResizeJob, StartJob
from pollux.server.live.restarts import MAX_SILENCE_S, Restarts
from pollux.types import Allocation, JobSpec
from tests.reports import report_fields

SPEC = JobSpec(name="jax", submitted_at=0.0)
ONE = Allocation.of(("node0", 1))
RUNS = JobRuns(job="jax", generation=2)


class World:
    def __init__(self) -> None:
        self.now, self.living = 100.0, {"jax-1"}
        self.restarts = Restarts(lambda job: job == "jax", lambda job: self.living, lambda: self.now)

    def report(self, replica="jax-1"):
        return Report(**report_fields(job="jax", replica=replica))


@pytest.fixture
def world():
    return World()


@pytest.mark.parametrize(
    "command",
    [StartJob(job="jax", spec=SPEC, allocation=ONE, generation=2), ResizeJob(job="jax", allocation=ONE, generation=2)],
)
def test_it_runs_when_a_replica_of_the_new_start_has_reported(world, command):
    world.restarts.note([command])
    world.now += 3.0
    assert world.restarts.pass_on([RUNS], [world.report("jax-0")]) == []  # of a replica of before
    world.now += 4.0
    (runs,) = world.restarts.pass_on([], [world.report(), world.report()])
    assert runs == RUNS and runs.took_s == 7.0
    assert world.restarts.pass_on([], [world.report()]) == []


def test_after_a_new_server_its_cost_is_not_known(world):
    assert world.restarts.pass_on([RUNS], []) == []  # told again by the supervisor
    (runs,) = world.restarts.pass_on([], [world.report()])
    assert runs == RUNS and runs.took_s is None


def test_a_job_that_never_reports_counts_as_running_in_the_end(world, caplog):
    assert world.restarts.pass_on([RUNS], []) == []
    world.now += MAX_SILENCE_S + 1
    assert world.restarts.pass_on([], []) == [RUNS]
    assert "no report" in caplog.text


def test_other_jobs_and_other_events_pass(world):
    other = JobRuns(job="torch", generation=1)
    ended = JobEnded(job="jax", state=JobState.SUCCEEDED, at=1.0)
    assert world.restarts.pass_on([other, RUNS, ended], []) == [other, ended]
    assert world.restarts.pass_on([JobStopped(job="x")], [world.report()]) == [JobStopped(job="x")]


def test_a_resize_while_it_starts_waits_for_the_newest_start(world):
    world.restarts.note([ResizeJob(job="jax", allocation=ONE, generation=2)])
    world.restarts.pass_on([RUNS], [])
    world.restarts.note([ResizeJob(job="jax", allocation=ONE, generation=3)])
    assert world.restarts.pass_on([], [world.report()]) == []
    world.living = {"jax-2"}
    newest = JobRuns(job="jax", generation=3)
    assert world.restarts.pass_on([newest], [world.report("jax-2")]) == [newest]
