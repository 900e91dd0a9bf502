from __future__ import annotations

import dataclasses
import logging

import pytest

from pollux.errors import InvalidValueError, UnknownNameError
from pollux.model.profile import Configuration, Timing
from pollux.policy import make_policy
from pollux.scheduler.knowledge import Knowledge
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.loop import Scheduler, SchedulerConfig
from pollux.scheduler.ports import (
    JobEnded,
    JobHurt,
    JobLost,
    JobReport,
    JobRuns,
    JobStopped,
    MemoryStore,
    NodesChanged,
    ResizeFailed,
    ResizeJob,
    StartJob,
    StopJob,
    TuneJob,
)
from pollux.testing.snapshots import LIMITS, make_nodes
from pollux.types import Allocation, JobSpec, Node, Plan, Snapshot
from tests.fakes import HandClock, SlowEngine


class World:
    """A scheduler with a slow engine; time passes by hand."""

    def __init__(self, policy: str | object = "equal", num_nodes: int = 2, **config: object) -> None:
        self.clock, self.engine, self.store = HandClock(), SlowEngine(make_nodes(num_nodes)), MemoryStore()
        self.scheduler = Scheduler(
            policy=make_policy(policy) if isinstance(policy, str) else policy,  # type: ignore[arg-type]
            engine=self.engine,
            store=self.store,
            clock=self.clock,
            config=SchedulerConfig(**config),  # type: ignore[arg-type]
        )

    def submit(self, name: str, **spec: object) -> None:
        defaults = {"batch": LIMITS, "application": "app", "submitted_at": self.clock.time}
        self.scheduler.submit(JobSpec(name=name, **(defaults | spec)))  # type: ignore[arg-type]

    def round(self, ticks: int = 6) -> None:
        """One interval passes, and then all that was commanded gets done."""
        self.clock.time += 60
        for _ in range(ticks):
            self.scheduler.tick()
            self.engine.finish()
        self.scheduler.tick()

    def replicas(self) -> dict[str, int]:
        return {
            name: record.allocation.num_replicas
            for name, record in self.store.jobs.items()
            if record.state is JobState.RUNNING
        }


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
    world.engine.events.append(_report("long", 1e12))
    world.submit("short", requested_replicas=4)
    world.engine.events.append(_report("short", 1.0))
    world.round()
    assert world.replicas() == {"short": 4}
    assert world.store.jobs["long"].state is JobState.PENDING
    world.engine.end("short", world.clock.time)
    world.round()
    assert world.replicas() == {"long": 4}
    assert world.store.jobs["long"].num_restarts == 1
    assert any(isinstance(command, StopJob) for command in world.engine.commands)


def _report(job: str, remaining: float) -> JobReport:
    times = [(Configuration(1, 4, 128), Timing(0.1, 0.12))]
    return JobReport(job=job, accelerator="gpu", timings=times, noise_scale=500.0, remaining_examples=remaining)


def test_reports_are_learnt_from_and_jobs_are_told():
    world = World("pollux")
    world.submit("a")
    world.round()
    world.engine.events.append(_report("a", 1e9))
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
        world.engine.events.append(dataclasses.replace(_report("a", 1e9), **values))
        world.round()
        view = world.scheduler.snapshot(world.clock.time).jobs[0]
        seen.append((view.noise_scale, view.noise_scale_error, view.noise_scale_low))
    assert seen == [(400.0, 60.0, 340.0), (400.0, 60.0, 340.0), (300.0, None, 300.0)]


def test_profile_memory_serves_the_next_job_of_the_application():
    for remembers in (True, False):
        world = World("pollux", remembers_profiles=remembers)
        world.submit("first")
        world.round()
        world.engine.events.append(_report("first", 1e9))
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


def test_a_lost_node_moves_its_jobs():
    world = World(num_nodes=2)
    world.submit("a", max_replicas=4)
    world.submit("b", max_replicas=4)
    world.round()
    lost = world.store.jobs["a"].allocation.shares[0].node
    world.engine.lose(lost)
    world.round()
    assert all(node != lost for record in world.store.jobs.values() for node, _ in record.allocation.shares)


def test_survivors_of_a_lost_node_are_what_a_job_holds_and_stay_where_they_are():
    world = World("pollux", num_nodes=2, decides_on_events=True)
    world.submit("a")
    a = world.store.jobs["a"]
    for count in (1, 2, 4):  # it may ask for twice what it has been profiled with
        world.engine.events.append(
            JobReport(
                job="a",
                accelerator="gpu",
                timings=[(Configuration(1, count, 64), Timing(0.1, 0.101))],
                noise_scale=1e6,
            )
        )
        world.round()
    assert a.allocation.as_mapping() == {"n0": 4, "n1": 4}
    generation, attained_slot_s = a.generation, a.attained_slot_s
    lost = a.allocation.shares[0].node
    stays = a.allocation.shares[1].node
    num_commands = len(world.engine.commands)
    world.clock.time += 10
    world.engine.lose(lost)
    world.scheduler.tick()
    assert (a.state, a.allocation, a.generation) == (JobState.RESIZING, Allocation.of((stays, 4)), generation + 1)
    assert a.attained_slot_s == attained_slot_s + 80
    assert a.history[-1].reason == f"lost {lost}: 8 -> 4 replicas"
    # What the engine was told before may be on its way, and names a node that is gone.
    told = [command for command in world.engine.commands[num_commands:] if isinstance(command, ResizeJob)]
    assert told == [ResizeJob(job="a", allocation=a.allocation, generation=generation + 1)]
    assert world.store.rounds[-1].trigger == "nodes"
    view = world.scheduler.snapshot(world.clock.time).jobs[0]
    assert view.allocation == a.allocation


@pytest.mark.parametrize(("spec", "note"), [({"min_replicas": 6}, "too few"), ({"min_replicas": 8}, "not elastic")])
def test_a_job_that_cannot_do_with_its_survivors_waits_for_the_engines_word(spec, note):
    world = World(num_nodes=2, decides_on_events=True)
    world.submit("a", max_replicas=8, **spec)
    world.round()
    held = world.store.jobs["a"].allocation
    assert held.num_replicas == 8
    world.engine.node_list.pop()
    world.engine.events.append(NodesChanged())
    world.scheduler.tick()
    assert world.store.jobs["a"].allocation == held, note
    assert any("lost n1: what is left is not enough" in move.reason for move in world.store.jobs["a"].history)
    world.engine.held.clear()
    world.engine.events.append(JobLost(job="a", reason="too few are left"))
    world.scheduler.tick()
    assert world.store.jobs["a"].state is JobState.PENDING


def test_a_job_that_lost_all_its_nodes_is_left_to_the_engine_and_starts_elsewhere():
    world = World(num_nodes=3, decides_on_events=True)
    world.submit("a", max_replicas=4)
    world.round()
    (node,) = world.store.jobs["a"].allocation.as_mapping()
    world.engine.lose(node)
    world.round()
    assert world.replicas() == {"a": 4}
    assert node not in world.store.jobs["a"].allocation.as_mapping()
    assert world.store.jobs["a"].num_crashes == 1


def test_a_node_lost_in_the_middle_of_a_resize_leaves_the_rest():
    world = World(num_nodes=2, decides_on_events=True)
    world.submit("a", max_replicas=8)
    world.submit("b", max_replicas=2)
    world.round()
    world.engine.end("b", world.clock.time)
    world.scheduler.tick()
    a = world.store.jobs["a"]
    assert (a.state, a.allocation.num_replicas) == (JobState.RESIZING, 8)
    world.engine.lose("n1")
    world.scheduler.tick()
    assert a.allocation.as_mapping() == {"n0": 4}
    world.round()
    assert (a.state, world.replicas()) == (JobState.RUNNING, {"a": 4})


def test_a_job_that_was_moving_to_a_lost_node_stays_where_it_was():
    world = World(num_nodes=2, decides_on_events=True)
    world.submit("a", max_replicas=2)
    world.round()
    a = world.store.jobs["a"]
    (before,) = a.allocation.as_mapping()
    world.scheduler.drain({before})
    world.scheduler.tick()
    (moves_to,) = a.allocation.as_mapping()
    assert (a.state, moves_to != before) == (JobState.RESIZING, True)
    world.engine.node_list = [node for node in world.engine.node_list if node.name != moves_to]
    world.engine.events.append(NodesChanged())
    world.scheduler.drain(())
    world.scheduler.tick()
    assert a.allocation.as_mapping() == {before: 2}
    assert world.engine.commands[-1] == ResizeJob(job="a", allocation=a.allocation, generation=3)


def test_a_node_that_comes_back_is_used_again():
    world = World(num_nodes=2, decides_on_events=True)
    world.submit("a", max_replicas=8)
    world.round()
    world.engine.lose("n1")
    world.round()
    assert world.replicas() == {"a": 4}
    world.engine.node_list = list(make_nodes(2))
    world.engine.events.append(NodesChanged())
    world.round()
    assert world.replicas() == {"a": 8}


def test_draining_a_node_empties_it():
    world = World(num_nodes=2)
    world.submit("a")
    world.round()
    assert world.store.jobs["a"].allocation.num_nodes == 2
    world.scheduler.drain({"n0"})
    world.round()
    assert world.store.jobs["a"].allocation == Allocation.of(("n1", 4))


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


def test_events_of_jobs_long_gone_are_ignored():
    world = World()
    world.engine.events.append(_report("ghost", 1.0))
    world.round()
    assert world.store.jobs == {}


def test_late_and_repeated_events_do_no_harm():
    world = World()
    world.submit("a", max_replicas=2)
    world.engine.events.append(JobStopped(job="a"))  # it never started
    world.round()
    assert world.replicas() == {"a": 2}
    world.engine.events.append(JobRuns(job="a", generation=99))
    world.round()
    assert world.store.jobs["a"].state is JobState.RUNNING
    world.engine.events.append(JobStopped(job="a"))  # it left unasked: it is started again
    world.engine.held.clear()
    world.round()
    assert world.replicas() == {"a": 2}
    assert world.store.jobs["a"].generation == 2


def test_time_held_ends_when_the_job_did():
    world = World()
    world.submit("a", max_replicas=2)
    world.round()
    started = world.clock.time
    world.clock.time += 30
    world.engine.end("a", world.clock.time)
    world.round()
    assert world.store.jobs["a"].attained_s == world.store.jobs["a"].finished_at - started == 30
    assert world.store.jobs["a"].attained_slot_s == 60


def test_jobs_keep_their_order_of_submission():
    world = World()
    for sequence, name in ((5, "late"), (1, "early")):
        world.scheduler.submit(JobSpec(name=name, batch=LIMITS), sequence)
    assert [record.name for record in world.scheduler.active_jobs] == ["early", "late"]


def test_a_stop_that_takes_several_rounds_is_not_undone():
    world = World("srtf", num_nodes=1)
    world.submit("long", requested_replicas=4)
    world.round()
    world.submit("short", requested_replicas=4)
    world.engine.events += [_report("long", 1e12), _report("short", 1.0)]
    for _ in range(3):  # rounds pass while the job writes its checkpoint
        world.clock.time += 60
        world.scheduler.tick()
    world.round()  # it has stopped
    world.round()
    assert world.replicas() == {"short": 4}
    told = [type(command) for command in world.engine.commands if command.job == "long"]
    assert (told.count(StartJob), told.count(StopJob)) == (1, 1)


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
    world.engine.events.append(dataclasses.replace(_report("a", 1e6), **bad))
    timing = (Configuration(1, 1, 64), Timing(float("nan"), 1.0))
    world.engine.events.append(dataclasses.replace(_report("a", 1e6), timings=[timing]))
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


def test_a_stop_reported_late_does_not_start_the_job_twice():
    world = World()
    world.submit("a", max_replicas=2)
    world.clock.time += 60
    world.scheduler.tick()
    assert world.store.jobs["a"].state is JobState.STARTING
    world.engine.events.append(JobStopped(job="a"))
    world.scheduler.tick()
    assert [type(command) for command in world.engine.commands] == [StartJob]


# Cancelling, and taking over from a scheduler that is gone


def test_a_waiting_job_is_cancelled_at_once_and_a_running_one_when_it_has_stopped():
    world = World(num_nodes=1, decides_on_events=True)
    world.submit("runs", min_replicas=4)
    world.round()
    world.submit("waits", min_replicas=4)
    world.scheduler.cancel("waits", "not wanted")
    assert world.store.jobs["waits"].state is JobState.CANCELLED
    assert world.store.jobs["waits"].reason == "not wanted"
    world.scheduler.cancel("runs")
    world.scheduler.cancel("runs")  # again does no harm
    assert world.store.jobs["runs"].state is JobState.STOPPING
    assert [type(command) for command in world.engine.commands] == [StartJob, StopJob]
    world.round()
    assert world.store.jobs["runs"].state is JobState.CANCELLED
    assert world.store.jobs["runs"].finished_at == world.clock.time
    assert world.scheduler.active_jobs == []
    with pytest.raises(UnknownNameError, match="runs"):
        world.scheduler.cancel("runs")


def test_a_job_can_be_stopped_as_failed():
    world = World()
    world.submit("slow")
    world.round()
    world.scheduler.cancel("slow", "time limit of 60 s", JobState.FAILED)
    world.round()
    assert world.store.jobs["slow"].state is JobState.FAILED and "time limit" in world.store.jobs["slow"].reason


def test_a_job_that_ends_while_it_is_cancelled_has_ended_as_it_did():
    world = World()
    world.submit("a")
    world.round()
    world.scheduler.cancel("a")
    world.engine.end("a", world.clock.time)
    world.round()
    assert world.store.jobs["a"].state is JobState.SUCCEEDED


def test_another_scheduler_takes_over_without_starting_anything_twice():
    world = World(decides_on_events=True)
    world.submit("a")
    world.submit("b")
    world.round()
    before = world.replicas()
    num_commands = len(world.engine.commands)
    heir = Scheduler(
        policy=make_policy("equal"),
        engine=world.engine,
        store=world.store,
        clock=world.clock,
        config=SchedulerConfig(decides_on_events=True, remembers_profiles=True),
    )
    heir.restore(world.store.jobs.values())
    world.scheduler = heir
    world.round()
    assert world.replicas() == before and len(world.engine.commands) == num_commands
    world.engine.end("a", world.clock.time)
    world.submit("c")
    world.round()
    assert world.replicas() == {"b": 4, "c": 4}
    assert world.store.jobs["c"].sequence == 2


def test_batch_limits_come_with_a_report():
    world = World("pollux")
    world.submit("a", batch=None)
    world.engine.events.append(JobReport(job="a", accelerator="gpu", batch=LIMITS))
    world.scheduler.tick()
    assert world.store.jobs["a"].spec.batch == LIMITS


def test_a_lost_job_starts_again_and_a_lost_one_that_was_cancelled_is_over():
    world = World(decides_on_events=True)
    world.submit("a")
    world.submit("b")
    world.round()
    world.scheduler.cancel("b")
    for name in ("a", "b"):
        world.engine.held.pop(name)
        world.engine.under_way.clear()
        world.engine.events.append(JobLost(job=name, reason="its machine is gone"))
    world.round()
    a, b = world.store.jobs["a"], world.store.jobs["b"]
    assert (a.state, a.generation, a.num_crashes) == (JobState.RUNNING, 2, 1)
    assert "its machine is gone" in [t.reason for t in a.history]
    assert (b.state, b.reason) == (JobState.CANCELLED, "cancelled")


def test_suspending_frees_all_slots_and_decides_nothing():
    world = World(decides_on_events=True)
    world.submit("a")
    world.round()
    num_rounds = world.scheduler.num_rounds
    world.scheduler.suspend("the server is stopping")
    assert not world.scheduler.settle()
    world.engine.finish()
    assert world.scheduler.settle() and not world.engine.held
    assert world.store.jobs["a"].state is JobState.PENDING and world.scheduler.num_rounds == num_rounds


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


def test_draining_leaves_jobs_alone_that_must_not_be_moved():
    world = World(decides_on_events=True, num_nodes=2)
    for name in ("a", "b"):
        world.submit(name, batch=None, requested_replicas=3, min_replicas=3, max_replicas=3, is_preemptible=False)
    world.submit("c")
    world.round()
    sits = world.store.jobs["a"].allocation
    (node,) = sits.as_mapping()
    commands = len(world.engine.commands)
    world.scheduler.drain([node])
    world.round()
    assert world.store.jobs["a"].allocation == sits
    assert not any(command.job == "a" for command in world.engine.commands[commands:])
    assert node not in world.store.jobs["c"].allocation.as_mapping()
    world.engine.end("a", world.clock.time)
    world.round()
    assert node not in {name for node_ in world.scheduler.snapshot(0).nodes for name in [node_.name]}


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


def test_a_job_that_may_not_run_on_what_is_left_is_told_of():
    """The policy is not even shown it."""
    world = World("pollux")
    world.engine.node_list = [Node(name="rare", num_slots=1, accelerator="tpu")]
    world.submit("a", accelerators=frozenset({"tpu"}))
    world.round()
    world.submit("b")
    world.scheduler.drain(["rare"])
    world.round()
    changes = {change.job: change for kept in world.store.rounds[1:] for change in kept.changes}
    assert (changes["a"].after, changes["a"].barred) == (Allocation(), {"rare": "drained"})


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


def test_the_last_jobs_end_is_told_when_it_ends():
    """Not when the next job comes, which may be tomorrow."""
    world = World(decides_on_events=True)
    world.submit("a")
    world.round()
    world.engine.end("a", world.clock.time)
    world.scheduler.tick()
    last = world.store.rounds[-1]
    assert (last.trigger, last.num_jobs, [one.job for one in last.departures]) == ("end", 0, ["a"])
    num_rounds = len(world.store.rounds)
    world.round()
    assert len(world.store.rounds) == num_rounds  # nobody is left, and nothing to tell


def test_a_job_that_ends_is_kept_before_it_is_active_no_longer():
    """Whoever looks meanwhile finds it in one of the two."""
    world, seen = World(), []

    class Watching(MemoryStore):
        def save_job(self, record):
            if record.state.is_final:
                seen.append(record in world.scheduler.active_jobs)
            super().save_job(record)

    world.scheduler._store = world.store = Watching()
    world.submit("a")
    world.round()
    world.engine.end("a", world.clock.time)
    world.round()
    assert seen == [True]
    assert world.scheduler.active_jobs == []


def test_what_was_learnt_of_an_application_outlives_its_jobs_and_the_scheduler():
    world = World(decides_on_events=True, remembers_profiles=True)
    learnt = Knowledge("application app")
    learnt.observe("gpu", Configuration(1, 2, 32), Timing(0.1, 0.2, 10))
    world.scheduler.restore([], [learnt, Knowledge("job other")])
    world.submit("a")
    assert world.store.jobs["a"].knowledge is learnt


def test_time_after_a_loss_that_nobody_saw_is_not_charged():
    """The machine was off for a day; whoever takes over hears of the loss then."""
    world = World(decides_on_events=True)
    world.submit("a")
    world.round()
    world.engine.held.pop("a")
    world.engine.under_way.clear()
    a = world.store.jobs["a"]
    before = a.attained_s, a.attained_slot_s
    world.clock.time += 86400
    heir = Scheduler(
        policy=make_policy("equal"),
        engine=world.engine,
        store=world.store,
        clock=world.clock,
        config=SchedulerConfig(decides_on_events=True),
    )
    heir.restore([a])
    world.engine.events.append(JobLost(job="a", reason="its machine is gone"))
    heir.tick()
    assert a.state is JobState.STARTING
    assert (a.attained_s, a.attained_slot_s) == before


@pytest.mark.parametrize("off_s", [-7200.0, 7200.0])
def test_an_end_told_by_a_clock_that_was_set_is_still_after_the_start_and_not_to_come(off_s):
    world = World(decides_on_events=True)
    world.clock.time = 100_000.0
    world.submit("a")
    world.round()
    world.clock.time += 60
    world.scheduler.tick()
    world.engine.end("a", world.clock.time + off_s)
    world.scheduler.tick()
    a = world.store.jobs["a"]
    assert a.state is JobState.SUCCEEDED and a.started_at is not None and a.finished_at is not None
    assert a.started_at <= a.finished_at <= world.clock.time
    assert 0.0 <= a.attained_s <= 120.0 and a.attained_slot_s >= 0.0


def test_a_node_that_shrank_below_what_must_stay_there_stops_nobody_else():
    world = World(decides_on_events=True)
    world.submit("a", is_preemptible=False, max_replicas=4)
    world.round()
    held = world.store.jobs["a"].allocation
    assert held.as_mapping() == {"n0": 4}
    world.engine.node_list = [dataclasses.replace(node, num_slots=2) for node in world.engine.node_list]
    world.engine.check_capacity = lambda: None  # it is over-committed, and that is the point
    world.submit("b", max_replicas=2)
    world.round()
    assert (world.store.jobs["a"].allocation, world.replicas()) == (held, {"a": 4, "b": 2})
    assert world.store.jobs["b"].allocation.as_mapping() == {"n1": 2}
    assert world.store.rounds[-1].error == ""


def test_crashes_that_the_engine_mends_are_told_and_change_nothing():
    world = World(decides_on_events=True)
    world.submit("a")
    world.round()
    before = world.replicas()
    world.engine.events.append(JobHurt(job="a", reason="a-1 was killed by SIGKILL"))
    world.round()
    record = world.store.jobs["a"]
    assert world.replicas() == before and record.num_crashes == 1
    assert (record.history[-1].source, record.history[-1].target) == (JobState.RUNNING, JobState.RUNNING)
    assert record.history[-1].reason == "a-1 was killed by SIGKILL"


class OnNodes:
    """A policy that gives every job what a test says."""

    name, needs_oracle, shares_slots = "on-nodes", False, False

    def __init__(self, **allocations: Allocation) -> None:
        self.allocations = allocations

    def decide(self, snapshot: Snapshot) -> Plan:
        there = {node.name for node in snapshot.nodes}
        wanted = {job.name: self.allocations.get(job.name, Allocation()) for job in snapshot.jobs}
        return Plan(
            allocations={
                job: Allocation(tuple(share for share in allocation.shares if share.node in there))
                for job, allocation in wanted.items()
            }
        )

    def reset(self) -> None: ...


def fail_on(world: World, job: str, node: str) -> None:
    """A job that was just started ends there before it is ready."""
    del world.engine.held[job]
    world.engine.under_way = [command for command in world.engine.under_way if command.job != job]
    end = JobEnded(job=job, state=JobState.FAILED, at=world.clock.time, reason="x", node=node, cause="no script")
    world.engine.events.append(end)


def test_a_resize_that_fails_on_a_node_is_given_up_and_not_the_job() -> None:
    policy = OnNodes(a=Allocation.of(("n0", 2)))
    world = World(policy)
    world.submit("a")
    world.round()
    policy.allocations["a"] = Allocation.of(("n0", 2), ("n1", 2))
    world.clock.time += 60
    world.scheduler.tick()
    resize = world.engine.under_way.pop()
    assert isinstance(resize, ResizeJob) and resize.generation == 2
    world.engine.held["a"] = [Allocation.of(("n0", 2))]
    failed = ResizeFailed(job="a", generation=2, allocation=Allocation.of(("n0", 2)), node="n1", reason="no GPU")
    world.engine.events.append(failed)
    world.scheduler.tick()
    record = world.store.jobs["a"]
    assert record.state is JobState.RESIZING and record.allocation == Allocation.of(("n0", 2))
    assert "n1 (no GPU)" in record.reason
    world.round()
    assert record.state is JobState.RUNNING
    assert record.allocation.as_mapping() == {"n0": 4}  # the policy wants n1; the job gets slots elsewhere
    assert world.scheduler.health.conditions(world.clock.time)["n1"].state == "suspect"
    policy.allocations["a"] = Allocation.of(("n0", 2), ("n1", 2))
    world.clock.time += 120
    world.round()
    assert record.allocation.as_mapping() == {"n0": 2, "n1": 2}  # it is tried again
    assert not world.scheduler.health.conditions(world.clock.time)


def test_jobs_that_fail_on_a_bad_node_start_elsewhere_and_it_is_quarantined() -> None:
    names = [f"j{number}" for number in range(3)]
    world = World(OnNodes(**{name: Allocation.of(("n0", 1)) for name in names}))
    for name in names:
        world.submit(name, min_replicas=1, max_replicas=1)
    world.clock.time += 60
    world.scheduler.tick()
    for name in names:
        fail_on(world, name, "n0")
    world.round()
    assert {name: world.store.jobs[name].state for name in names} == dict.fromkeys(names, JobState.RUNNING)
    assert all(world.store.jobs[name].allocation.as_mapping() == {"n1": 1} for name in names)
    condition = world.scheduler.health.conditions(world.clock.time)["n0"]
    assert condition.state == "quarantined" and "no script" in condition.reason
    assert [node.name for node in world.scheduler.snapshot(world.clock.time).nodes] == ["n1"]


def test_a_job_that_fails_on_every_node_has_failed_and_no_node_is_blamed() -> None:
    policy = OnNodes(a=Allocation.of(("n0", 1)))
    world = World(policy)
    world.submit("a", max_replicas=1)
    world.clock.time += 60
    world.scheduler.tick()
    fail_on(world, "a", "n0")
    world.clock.time += 60
    world.scheduler.tick()
    assert world.store.jobs["a"].allocation.as_mapping() == {"n1": 1}
    fail_on(world, "a", "n1")
    world.scheduler.tick()
    assert world.store.jobs["a"].state is JobState.FAILED
    assert not world.scheduler.health.conditions(world.clock.time)


def test_replicas_that_train_on_a_quarantined_node_stay() -> None:
    world = World(OnNodes(a=Allocation.of(("n0", 2))))
    world.submit("a")
    world.round()
    for job in ("x", "y"):
        world.scheduler.health.fail(job, "n0", "no GPU", world.clock.time, is_proven=True)
    world.round()
    assert world.store.jobs["a"].allocation.as_mapping() == {"n0": 2}
    snapshot = world.scheduler.snapshot(world.clock.time)
    assert {node.name: node.num_slots for node in snapshot.nodes} == {"n0": 2, "n1": 4}


def test_a_job_with_an_excluded_node_changes_places_with_one_that_has_not_started() -> None:
    policy = OnNodes(a=Allocation.of(("n0", 4)), b=Allocation.of(("n1", 4)))
    world = World(policy)
    world.scheduler.health.fail("a", "n0", "no module", 0.0, is_proven=False)
    world.scheduler.health.fail("a", "n0", "no module", 0.0, is_proven=False)
    world.submit("a", min_replicas=4, max_replicas=4)
    world.submit("b", min_replicas=4, max_replicas=4)
    world.scheduler.health.see(["n0", "n1"], (), 0.0)
    world.round()
    assert world.store.jobs["a"].allocation.as_mapping() == {"n1": 4}
    assert world.store.jobs["b"].allocation.as_mapping() == {"n0": 4}
