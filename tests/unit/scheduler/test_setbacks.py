"""What a crash costs: the scheduler compares the reports before and after it."""

from __future__ import annotations

from typing import Any

import pytest

from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.ports import JobHurt, JobLost, JobReport
from pollux.scheduler.record import JobRecord
from pollux.server.storage.records import decode_record, encode_record
from tests.unit.scheduler.world import World

KILLED = "a-0 was killed by SIGKILL"


def trained() -> World:
    """A job that has reported step 800, at ten steps a second."""
    world = World(decides_on_events=True)
    world.submit("a", max_replicas=1)
    world.round()
    tell(world, 500, seconds=0)
    tell(world, 800, seconds=30)
    return world


def tell(world: World, num_steps: int, *, seconds: float, replica: str = "a-0", **more: Any) -> JobRecord:
    world.clock.time += seconds
    known = {"accelerator": "gpu", "total_batch": 100, "throughput": 1000.0, "generation": 1, "stalled_s": 0.0}
    values = {**known, "at": world.clock.time, "replica": replica, "num_steps": num_steps, **more}
    world.engine.events.append(JobReport(job="a", **values))
    world.scheduler.tick()
    return world.store.jobs["a"]


def crash(world: World) -> None:
    world.engine.events.append(JobHurt(job="a", reason=KILLED))
    world.scheduler.tick()


def test_a_crash_costs_its_pause_and_what_is_trained_again():
    world = trained()
    began = world.clock.time
    crash(world)
    record = tell(world, 542, seconds=6, replica="a-1", generation=2, resumed_at=532)
    (found,) = record.setbacks
    assert (found.at, found.cause, found.step, found.num_steps) == (began, KILLED, 532, 268)
    assert found.pause_s == pytest.approx(5.0)  # it had trained ten steps when it told of itself
    assert found.again_s == pytest.approx(26.8)
    assert record.set_back_s == pytest.approx(31.8) and record.num_setbacks == 1
    assert record.history[-1].reason == "started again from step 532; about 268 steps are trained again"
    assert record.state is JobState.RUNNING and record.broken is None
    assert decode_record({**encode_record(record), "knowledge": record.knowledge}).setbacks == [found]
    for step in (600, 900):
        assert tell(world, step, seconds=10, replica="a-1", generation=2).num_setbacks == 1


def test_steps_that_go_back_tell_of_a_crash_without_a_note_or_an_event():
    record = tell(trained(), 500, seconds=5, replica="a-1")
    (found,) = record.setbacks
    assert (found.cause, found.num_steps) == ("its replicas were lost", 300)
    assert record.set_back_s == pytest.approx(35.0)


def test_the_pause_of_a_job_that_lost_its_slots_is_counted_as_a_start():
    world = trained()
    world.engine.held.pop("a")
    world.engine.events.append(JobLost(job="a", reason="it is gone\nTraceback"))
    world.scheduler.tick()
    world.round()
    record = tell(world, 700, seconds=0, replica="a-1", generation=2, resumed_at=700)
    (found,) = record.setbacks
    assert found.cause == "it is gone" and found.pause_s == pytest.approx(60.0)
    assert found.lost_s == record.set_back_s == pytest.approx(10.0)


def test_what_it_had_stood_still_since_its_checkpoint_is_not_forgotten():
    world = trained()
    tell(world, 810, seconds=1, stalled_s=4.0)
    crash(world)
    assert tell(world, 800, seconds=1, replica="a-1", generation=2, resumed_at=800).set_back_s == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("crashes", "after"),
    [
        (False, {"num_steps": 400}),  # it took over the state of another trial
        (False, {"num_steps": 805, "replica": "a-1", "generation": 2, "resumed_at": 803}),  # stopped as it was asked to
        (True, {"num_steps": 820, "generation": 2}),  # the others went on
        (True, {"num_steps": 400, "seconds": 0}),  # sent before the crash
    ],
)
def test_what_is_no_setback(crashes: bool, after: dict[str, Any]):
    world = trained()
    if crashes:
        crash(world)
    record = tell(world, **{"seconds": 2, **after})
    assert (record.setbacks, record.set_back_s) == ([], 0.0)


def test_reports_that_a_restarted_server_reads_again_are_no_setback():
    world = trained()
    crash(world)
    record = tell(world, 700, seconds=0, at=world.clock.time - 20)
    assert record.setbacks == [] and record.broken is not None
    assert tell(world, 800, seconds=3, replica="a-1", generation=2, resumed_at=780).num_setbacks == 1
