"""The loop when jobs end: stopped, cancelled, lost, told late or twice, and after a restart."""

from __future__ import annotations

import pytest

from pollux.errors import UnknownNameError
from pollux.policy import make_policy
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.loop import Scheduler, SchedulerConfig
from pollux.scheduler.ports import (
    JobHurt,
    JobLost,
    JobRuns,
    JobStopped,
    MemoryStore,
    StartJob,
    StopJob,
)
from pollux.server.storage.records import decode_record, encode_record
from tests.unit.scheduler.world import World, report


def test_events_of_jobs_long_gone_are_ignored():
    world = World()
    world.engine.events.append(report("ghost", 1.0))
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


def test_a_stop_that_takes_several_rounds_is_not_undone():
    world = World("srtf", num_nodes=1)
    world.submit("long", requested_replicas=4)
    world.round()
    world.submit("short", requested_replicas=4)
    world.engine.events += [report("long", 1e12), report("short", 1.0)]
    for _ in range(3):  # rounds pass while the job writes its checkpoint
        world.clock.time += 60
        world.scheduler.tick()
    world.round()  # it has stopped
    world.round()
    assert world.replicas() == {"short": 4}
    told = [type(command) for command in world.engine.commands if command.job == "long"]
    assert (told.count(StartJob), told.count(StopJob)) == (1, 1)


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


def test_a_job_that_would_fail_again_waits_for_its_release_and_holds_nothing():
    world = World()
    world.submit("a", max_replicas=2)
    world.submit("b", max_replicas=2)
    world.round()
    world.engine.held.pop("a")
    world.engine.events.append(JobLost(job="a", reason="held: mend it\nTraceback", is_halted=True))
    for _ in range(3):
        world.round()
    record = world.store.jobs["a"]
    assert (record.state, record.halted, bool(record.allocation)) == (JobState.PENDING, "held: mend it", False)
    assert decode_record(encode_record(record)).halted == "held: mend it"  # known to the next server
    assert sum(isinstance(one, StartJob) and one.job == "a" for one in world.engine.commands) == 1
    world.scheduler.hold((), released=["a"])
    world.round()
    assert world.replicas()["a"] == 2 and not world.store.jobs["a"].halted
