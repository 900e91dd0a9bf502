"""Rounds of the loop: what is decided, kept and told."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from pollux.errors import InvalidValueError
from pollux.model.profile import Configuration, Timing
from pollux.scheduler.knowledge import Knowledge
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.loop import SchedulerConfig
from pollux.scheduler.ports import (
    JobReport,
    ResizeJob,
    StartJob,
    StopJob,
    TuneJob,
)
from pollux.testing.snapshots import LIMITS
from pollux.types import Allocation, JobSpec, Plan, Snapshot
from tests.unit.scheduler.world import World, report


def test_jobs_start_grow_and_shrink_without_overlap():
    world = World()
    world.submit("a")
    world.round()
    assert world.replicas() == {"a": 8}
    world.submit("b")
    world.round()
    assert world.replicas() == {"a": 4, "b": 4}
    world.engine.end("a", world.clock.time)
    world.round()
    assert world.replicas() == {"b": 8}
    assert world.store.jobs["a"].state is JobState.SUCCEEDED
    assert [type(command) for command in world.engine.commands] == [StartJob, ResizeJob, StartJob, ResizeJob]


def test_a_job_that_is_weighed_anew_gets_more_without_waiting_for_the_interval():
    world = World("pollux", decides_on_events=True)
    world.submit("a")
    world.submit("b")
    world.round()
    before = world.replicas()
    world.scheduler.reweigh({"a": 100.0, "b": 1.0, "unknown": 5.0})
    assert world.store.jobs["a"].spec.weight == 100.0
    world.clock.time += 1
    num_rounds = world.scheduler.num_rounds
    for _ in range(6):
        world.scheduler.tick()
        world.engine.finish()
    assert world.scheduler.num_rounds > num_rounds
    assert world.replicas()["a"] >= before["a"]
    world.scheduler.reweigh({"a": 100.0})
    num_rounds = world.scheduler.num_rounds
    world.scheduler.tick()
    assert world.scheduler.num_rounds == num_rounds  # nothing has changed


def test_nothing_is_decided_between_rounds_unless_events_count():
    quiet, alert = World(), World(decides_on_events=True)
    for world in (quiet, alert):
        world.round()
        world.submit("a")
        world.scheduler.tick()
    assert quiet.engine.commands == []
    assert len(alert.engine.commands) == 1
    assert alert.store.rounds[-1].trigger == "submit"


def test_a_preempted_job_waits_and_comes_back():
    world = World("srtf", num_nodes=1)
    world.submit("long", requested_replicas=4)
    world.round()
    world.scheduler.active_jobs[0].remaining_examples = 1e12
    world.engine.events.append(report("long", 1e12))
    world.submit("short", requested_replicas=4)
    world.engine.events.append(report("short", 1.0))
    world.round()
    assert world.replicas() == {"short": 4}
    assert (world.store.jobs["long"].state, world.store.jobs["long"].reason) == (JobState.PENDING, "preempted")
    world.engine.end("short", world.clock.time)
    world.round()
    assert world.replicas() == {"long": 4}
    assert world.store.jobs["long"].num_resizes == 1
    assert any(isinstance(command, StopJob) for command in world.engine.commands)


def test_reports_are_learnt_from_and_jobs_are_told():
    world = World("pollux")
    world.submit("a")
    world.round()
    world.engine.events.append(report("a", 1e9))
    world.round()
    record = world.store.jobs["a"]
    assert (record.noise_scale, record.noise_scale_error) == (500.0, None)
    assert record.knowledge.profile.max_replicas == 4
    assert "gpu" in record.knowledge.params
    tuned = [command for command in world.engine.commands if isinstance(command, TuneJob)]
    assert tuned and tuned[-1].params == record.knowledge.params


def test_a_noise_scale_is_kept_with_its_own_error():
    world = World("pollux")
    world.submit("a")
    world.round()
    seen = []
    for values in ({"noise_scale": 400.0, "noise_scale_error": 60.0}, {"noise_scale": None}, {"noise_scale": 300.0}):
        world.engine.events.append(dataclasses.replace(report("a", 1e9), **values))
        world.round()
        view = world.scheduler.snapshot(world.clock.time).jobs[0]
        seen.append((view.noise_scale, view.noise_scale_error, view.noise_scale_low))
    assert seen == [(400.0, 60.0, 340.0), (400.0, 60.0, 340.0), (300.0, None, 300.0)]


def test_profile_memory_serves_the_next_job_of_the_application():
    for remembers in (True, False):
        world = World("pollux", remembers_profiles=remembers)
        world.submit("first")
        world.round()
        world.engine.events.append(report("first", 1e9))
        world.round()
        world.engine.end("first", world.clock.time)
        world.submit("second")
        world.round()
        view = world.scheduler.snapshot(world.clock.time).jobs[0]
        assert (view.max_profiled_replicas == 4) == remembers
        assert (view.noise_scale == 500.0) == remembers
        start = next(c for c in world.engine.commands if isinstance(c, StartJob) and c.job == "second")
        assert (start.allocation.num_replicas > 4) == remembers
        assert bool(start.params) == remembers


class Reckless:
    """Gives away more than there is."""

    name = "reckless"
    adapts_batch = True
    needs_oracle = False
    shares_slots = False

    def decide(self, snapshot: Snapshot) -> Plan:
        return Plan(allocations={job.name: Allocation.of(("n0", 3)) for job in snapshot.jobs})

    def reset(self) -> None:
        pass


def test_an_invalid_plan_changes_nothing_and_is_recorded(caplog):
    world = World(Reckless())
    world.submit("a")
    world.round()
    assert world.replicas() == {"a": 3}
    world.submit("b")
    with caplog.at_level(logging.ERROR):
        world.round()
    assert world.replicas() == {"a": 3}
    assert "given away" in world.store.rounds[-1].error
    assert world.store.rounds[-1].changes == ()
    assert "no valid plan" in caplog.text
    with caplog.at_level(logging.ERROR):
        world.round()
    assert caplog.text.count("no valid plan") == 1  # said once, however often it is tried


def test_impossible_requests_are_refused():
    world = World()
    world.submit("a")
    with pytest.raises(InvalidValueError, match="unique"):
        world.submit("a")
    with pytest.raises(InvalidValueError, match="positive"):
        SchedulerConfig(interval_s=0)


def test_jobs_keep_their_order_of_submission():
    world = World()
    for sequence, name in ((5, "late"), (1, "early")):
        world.scheduler.submit(JobSpec(name=name, batch=LIMITS), sequence)
    assert [record.name for record in world.scheduler.active_jobs] == ["early", "late"]


class Scripted:
    """Plans what it is told to."""

    name = "scripted"
    adapts_batch = True
    needs_oracle = False
    shares_slots = False

    def __init__(self) -> None:
        self.next: dict[str, Allocation] = {}

    def decide(self, snapshot: Snapshot) -> Plan:
        names = {job.name for job in snapshot.jobs}
        return Plan(allocations={name: allocation for name, allocation in self.next.items() if name in names})

    def reset(self) -> None:
        pass


def test_a_second_resize_remembers_what_the_first_has_yet_to_leave():
    policy = Scripted()
    world = World(policy, num_nodes=3)
    world.submit("a")
    policy.next = {"a": Allocation.of(("n0", 4))}
    world.round()
    for node in ("n1", "n2"):
        policy.next = {"a": Allocation.of((node, 4))}
        world.clock.time += 60
        world.scheduler.tick()  # none of these gets done in time
    world.submit("b")
    policy.next["b"] = Allocation.of(("n0", 4))
    world.round()  # SlowEngine refuses to over-commit n0
    assert world.replicas() == {"a": 4, "b": 4}


def test_later_jobs_do_not_overtake_earlier_ones():
    world = World()
    for name in "abc":
        world.submit(name)
    world.round()
    for name in "ab":
        world.engine.end(name, world.clock.time)
    world.round()
    for name in "de":
        world.submit(name)
    assert [record.name for record in world.scheduler.active_jobs] == ["c", "d", "e"]


@pytest.mark.parametrize(
    "bad",
    [
        {"noise_scale": float("nan")},
        {"noise_scale": -1.0},
        {"noise_scale_error": float("inf")},
        {"remaining_examples": float("inf")},
    ],
)
def test_a_report_that_cannot_be_true_is_refused_whole(bad, caplog):
    world = World("pollux")
    world.submit("a")
    world.round()
    world.engine.events.append(dataclasses.replace(report("a", 1e6), **bad))
    timing = (Configuration(1, 1, 64), Timing(float("nan"), 1.0))
    world.engine.events.append(dataclasses.replace(report("a", 1e6), timings=[timing]))
    world.round()
    record = world.store.jobs["a"]
    assert (record.noise_scale, record.remaining_examples, len(record.knowledge.profile)) == (None, None, 0)
    assert caplog.text.count("report refused") == 2


@pytest.mark.parametrize("policy", ["equal", "fifo", "optimus", "pollux", "srtf", "tiresias"])
def test_a_job_that_fits_no_accelerator_waits_alone(policy):
    world = World(policy)
    world.submit("picky", accelerators=frozenset({"a100"}))
    world.submit("ok")
    world.round()
    assert set(world.replicas()) == {"ok"}


def test_a_policy_that_fails_changes_nothing():
    class Failing(Scripted):
        def decide(self, snapshot: Snapshot) -> Plan:
            if self.next:
                raise InvalidValueError("cannot")
            return Plan(allocations={job.name: Allocation.of(("n0", 2)) for job in snapshot.jobs})

    policy = Failing()
    world = World(policy)
    world.submit("a")
    world.round()
    policy.next = {"a": Allocation()}
    world.round()
    assert world.replicas() == {"a": 2}
    assert world.store.rounds[-1].error == "cannot"


def test_batch_limits_come_with_a_report():
    world = World("pollux")
    world.submit("a", batch=None)
    world.engine.events.append(JobReport(job="a", accelerator="gpu", batch=LIMITS))
    world.scheduler.tick()
    assert world.store.jobs["a"].spec.batch == LIMITS


def test_events_wait_for_the_pause_between_decisions():
    world = World(decides_on_events=True, min_pause_s=10)
    world.submit("a")
    world.scheduler.tick()
    world.submit("b")
    world.clock.time += 9
    world.scheduler.tick()
    assert world.scheduler.num_rounds == 1 and world.scheduler.next_tick_at == 10
    world.clock.time += 1
    world.scheduler.tick()
    assert world.scheduler.num_rounds == 2 and world.scheduler.next_tick_at == 70


def test_a_new_configuration_asks_for_a_decision():
    world = World("pollux", decides_on_events=True, decides_on_models=True)
    world.submit("a")
    world.round()
    num_rounds = world.scheduler.num_rounds
    for is_new in (True, False):
        timings = [(Configuration(1, 1, 32), Timing(0.1, 0.1, 10))]
        world.engine.events.append(JobReport(job="a", accelerator="gpu", timings=timings))
        world.scheduler.tick()
        num_rounds += is_new
        assert world.scheduler.num_rounds == num_rounds


@pytest.mark.parametrize("policy", ["pollux", "equal"])
def test_a_round_keeps_what_jobs_really_held(policy):
    """Though policies are shown that a job on a node that is drained holds nothing."""
    world = World(policy)
    world.submit("a", max_replicas=1)
    world.round()
    before = world.store.jobs["a"].allocation
    (node,) = before.as_mapping()
    world.scheduler.drain([node])
    world.round()
    after = world.store.jobs["a"].allocation
    moved = next(kept for kept in world.store.rounds if kept.changes and kept.changes[0].before)
    (change,) = moved.changes
    assert (change.job, change.before, change.after) == ("a", before, after)
    assert (change.has_started, change.barred) == (True, {node: "drained"})
    if moved.plan.explanation is not None:
        (decision,) = moved.plan.explanation.jobs
        assert (decision.before, decision.after) == (before, after)
    world.scheduler.drain(["n0", "n1"])
    world.round()
    (change,) = next(kept for kept in world.store.rounds if kept.changes and not kept.changes[0].after).changes
    assert (change.before, change.barred) == (after, {next(iter(after.as_mapping())): "drained"})
    world.round()
    assert world.store.rounds[-1].changes == ()  # it waits, as before


def test_a_round_keeps_who_ended_since_the_one_before():
    """Once, whatever the clock of their machines says."""
    world = World()
    for name in "abc":
        world.submit(name)
    world.round()
    assert [kept.departures for kept in world.store.rounds] == [()]
    held = world.store.jobs["a"].allocation.num_replicas
    world.engine.end("a", at=-1e9)
    world.scheduler.tick()
    world.scheduler.cancel("b", "enough\nof it")
    world.round()
    world.round()
    first, *others = [kept.departures for kept in world.store.rounds[1:]]
    told = {one.job: (one.state, one.reason, one.num_slots) for one in first}
    assert told["a"] == (JobState.SUCCEEDED, "succeeded", held)
    told |= {one.job: (one.state, one.reason, one.num_slots) for later in others for one in later}
    assert told == {"a": told["a"], "b": (JobState.CANCELLED, "enough", held)}
    assert sum(len(kept.departures) for kept in world.store.rounds) == 2


def test_what_was_learnt_of_an_application_outlives_its_jobs_and_the_scheduler():
    world = World(decides_on_events=True, remembers_profiles=True)
    learnt = Knowledge("application app")
    learnt.observe("gpu", Configuration(1, 2, 32), Timing(0.1, 0.2, 10))
    world.scheduler.restore([], [learnt, Knowledge("job other")])
    world.submit("a")
    assert world.store.jobs["a"].knowledge is learnt
