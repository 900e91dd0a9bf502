from __future__ import annotations

import pytest

from pollux.errors import InvalidTransitionError
from pollux.scheduler.knowledge import Knowledge
from pollux.scheduler.lifecycle import TRANSITIONS, JobState
from pollux.scheduler.record import JobRecord
from pollux.types import Allocation, JobSpec


def record() -> JobRecord:
    return JobRecord(spec=JobSpec(name="a"), sequence=0, knowledge=Knowledge("a"))


def test_every_state_has_a_row_and_final_states_are_final():
    assert set(TRANSITIONS) == set(JobState)
    for state, targets in TRANSITIONS.items():
        assert state.is_final == (not targets)
        assert state.is_final or any(target.is_final for target in targets)


def test_every_state_can_be_reached():
    reached = {JobState.PENDING}
    while True:
        more = {target for state in reached for target in TRANSITIONS[state]} | reached
        if more == reached:
            break
        reached = more
    assert reached == set(JobState)


def test_an_illegal_transition_tells_the_story():
    job = record()
    job.move(JobState.STARTING, 10.0, "2 replicas")
    job.move(JobState.SUCCEEDED, 20.0, "done")
    with pytest.raises(InvalidTransitionError, match=r"succeeded to running.*it has ended.*10s pending->starting"):
        job.move(JobState.RUNNING, 30.0, "late event")
    assert job.state is JobState.SUCCEEDED


def test_history_is_bounded():
    job = record()
    job.move(JobState.STARTING, 0.0, "start")
    for i in range(500):
        job.move(JobState.STARTING, float(i), "again")
    assert len(job.history) == 64


def test_time_is_charged_to_what_was_held():
    job = record()
    job.account(100.0)
    assert (job.attained_s, job.attained_slot_s) == (0.0, 0.0)
    job.allocation = Allocation.of(("n0", 3))
    job.account(160.0)
    assert (job.attained_s, job.attained_slot_s) == (60.0, 180.0)
    job.account(150.0)  # a clock that steps back gives nothing back
    assert (job.attained_s, job.attained_slot_s) == (60.0, 180.0)
