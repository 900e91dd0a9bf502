"""Deadlines and budgets on a live cluster: the answer at submission, how a job stands, and a budget that is spent."""

from __future__ import annotations

import pytest

from pollux.api.job import JobUpdate
from pollux.api.request import JobRequest
from pollux.errors import InvalidValueError, UnknownNameError
from pollux.model.profile import Configuration, Timing
from tests.unit.server.live.world import World, report

TIMINGS = ((Configuration(1, 1, 32), Timing(0.1, 0.1, 10)), (Configuration(1, 2, 32), Timing(0.1, 0.11, 10)))


def teach(world: World) -> None:
    """A job of application resnet tells its speed, and that all of it are 40,000 examples: two minutes at 320/s."""
    name = world.submit(name="first", kind="elastic", application="resnet", max_replicas=1)
    world.until_state(name, "running")
    world.cluster.report(report(name, timings=TIMINGS, progress=0.5, remaining_examples=20_000.0))
    world.until(lambda: world.cluster.queries.job(name).models, "a model")
    world.engine.end(name)
    world.until_state(name, "succeeded")


def test_a_deadline_of_an_unknown_application_is_taken_and_said_to_be_unknown(world: World) -> None:
    request = JobRequest(command=("sleep", "9"), name="new", kind="elastic", deadline_s=3600.0)
    (summary,) = world.cluster.submit(request)
    assert summary.deadline.startswith("not known yet")
    assert summary.deadline_at == pytest.approx(summary.submitted_at + 3600.0)
    world.until_state("new", "running")


def test_a_deadline_is_answered_at_once_and_shown(world: World) -> None:
    teach(world)
    request = JobRequest(command=("sleep", "9"), name="due", kind="elastic", application="resnet", deadline_s=7200.0)
    (summary,) = world.cluster.submit(request)
    assert summary.deadline.startswith("can be met: it needs 1 slot now, which leaves 3")
    world.until_state("due", "running")
    world.until(lambda: "can be met" in world.cluster.queries.summary_of("due").deadline, "the standing")
    world.engine.end("due")
    world.until_state("due", "succeeded")
    world.until(lambda: world.cluster.queries.summary_of("due").deadline.startswith("met, "), "the deadline was met")


def test_a_running_job_that_has_told_its_length_is_told_that_its_deadline_cannot_be_met(world: World) -> None:
    name = world.submit(name="new", kind="elastic", max_replicas=1, deadline_s=60.0)
    world.until_state(name, "running")
    world.cluster.report(report(name, timings=TIMINGS, progress=0.5, remaining_examples=200_000.0))
    world.until(lambda: world.cluster.queries.job(name).models, "a model")

    def told() -> str:
        world.cluster.reweigh({name: 1.0})  # so that it decides again
        return world.cluster.queries.summary_of(name).deadline

    world.until(lambda: told().startswith("cannot be met: "), "that it is late")


def test_a_deadline_that_is_past_is_said_to_be_missed(world: World) -> None:
    name = world.submit(name="new", kind="elastic", deadline_s=0.2)
    world.until_state(name, "running")
    world.until(lambda: world.cluster.queries.summary_of(name).deadline.startswith("missed "), "that it was missed")
    world.cluster.reweigh({name: 2.0})
    world.until(lambda: world.cluster._state.deadline_of(name) is None, "a round that counts it no more")
    assert world.cluster.queries.summary_of(name).deadline.startswith("missed ")


def test_a_deadline_that_cannot_be_met_is_refused_with_the_best_there_is(world: World) -> None:
    teach(world)
    request = JobRequest(command=("sleep", "9"), name="due", kind="elastic", application="resnet", deadline_s=5.0)
    with pytest.raises(InvalidValueError, match=r"cannot be met in 5.*: at best .*; give it more time"):
        world.cluster.submit(request)
    with pytest.raises(UnknownNameError):
        world.cluster.queries.summary_of("due")


@pytest.mark.parametrize("field", ["deadline_s", "budget_hours"])
@pytest.mark.parametrize("value", [0.0, -5.0])
def test_a_deadline_in_the_past_or_no_budget_is_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidValueError, match="a positive number is needed"):
        JobRequest.from_dict({"command": ["sleep", "9"], field: value})


def test_a_job_whose_budget_is_spent_waits_and_goes_on_with_more(world: World) -> None:
    name = world.submit(name="dear", kind="elastic", max_replicas=1, budget_hours=1e-5)
    world.until(lambda: "its budget of 1e-05 slot-hours is spent" in world.cluster.queries.summary_of(name).reason)
    assert world.until_state(name, "pending").held_back.startswith("its budget")
    operations = world.cluster.operations
    operations.update([operations.active(name)], JobUpdate(budget_hours=100.0))
    world.until_state(name, "running")
