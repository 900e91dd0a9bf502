"""What is asked of longer times."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.api.cluster import ClusterSample
from pollux.scheduler.lifecycle import JobState
from pollux.server.storage.time_series import TimeSeries, thinned
from pollux.types import NO_ALLOCATION, Allocation
from tests.postgres import open_store
from tests.unit.server.storage.values import make_record, report_of

on = Allocation.of


@pytest.fixture
def store(place):
    with open_store(place) as store:
        yield store


@pytest.fixture
def past(store):
    return TimeSeries(store)


def sample(at, **values):
    numbers = dict(num_nodes=1, num_slots=4, num_used_slots=2, num_running=1, num_pending=0, node_hours=0.5)
    return ClusterSample(**{"at": at, "efficiency": None, "goodput": None, "cost": None, **numbers, **values})


# Samples --------------------------------------------------------------------------------------


def test_samples_are_kept_and_read_again(past):
    first = sample(1.0, efficiency=0.9, goodput=1.7, cost=2.5)
    assert past.last_sample_id() == 0
    ids = [past.add_sample(first), past.add_sample(sample(2.0))]
    assert past.last_sample_id() == ids[1]
    assert past.samples(0, 10, 600) == [first, sample(2.0)]
    assert past.samples(1.5, 10, 600) == [sample(2.0)]
    assert past.samples(3, 10, 600) == []
    assert past.samples_after(ids[0]) == [(ids[1], sample(2.0))]


def test_only_the_newest_samples_are_kept(past):
    for at in range(20):
        past.add_sample(sample(float(at)), keep=5)
    assert [one.at for one in past.samples(0, 100, 600)] == [15, 16, 17, 18, 19]


def test_samples_are_thinned_evenly(past):
    for at in range(101):
        past.add_sample(sample(float(at)))
    assert [one.at for one in past.samples(0, 1000, 5)] == [0, 25, 50, 75, 100]
    assert [one.at for one in past.samples(10, 20, 3)] == [10, 15, 20]


@given(st.integers(0, 5000), st.integers(1, 700))
def test_thinning_keeps_the_ends_and_the_order(count, points):
    places = thinned(count, points)
    assert len(places) == min(count, points)
    assert places == sorted(set(places))
    if places:
        assert places[-1] == count - 1
        assert places[0] == 0 or points == 1
        steps = {after - before for before, after in itertools.pairwise(places)}
        assert not steps or max(steps) - min(steps) <= 1


# Jobs -----------------------------------------------------------------------------------------


def live(store, record, *steps):
    """A job that goes through these: (time, state, allocation)."""
    store.save_job(record)
    for at, state, allocation in steps:
        if allocation and allocation != record.allocation:
            record.generation += 1
        record.allocation = allocation
        if state.is_final:
            record.finished_at = at
        record.move(state, at, f"because of {state.value}")
        store.save_job(record)
    return record


S = JobState


def test_a_timeline_tells_who_held_what(store, past):
    two, one = on(("a", 2)), on(("a", 1), ("b", 1))
    live(
        store,
        make_record("first", sequence=0),
        *((10, S.STARTING, two), (11, S.RUNNING, two), (20, S.RESIZING, one), (21, S.RUNNING, one)),
        *((30, S.STOPPING, one), (31, S.PENDING, NO_ALLOCATION), (40, S.STARTING, two), (41, S.RUNNING, two)),
        (50, S.SUCCEEDED, NO_ALLOCATION),
    )
    live(store, make_record("second", sequence=1), (15, S.STARTING, two), (16, S.RUNNING, two))
    live(store, make_record("third", sequence=2))
    jobs, total = past.timeline(0, 100, 10)
    assert [(job.name, job.state) for job in jobs] == [
        ("first", "succeeded"),
        ("second", "running"),
        ("third", "pending"),
    ]
    assert total == 3
    assert [(s.since, s.until, s.allocation) for s in jobs[0].spans] == [
        (10, 20, two.shares),
        (20, 31, one.shares),
        (40, 50, two.shares),
    ]
    assert [(s.since, s.until) for s in jobs[1].spans] == [(15, None)]
    assert jobs[2].spans == ()
    later, total = past.timeline(60, 100, 10)
    assert [job.name for job in later] == ["second", "third"]
    (window, _) = past.timeline(25, 28, 10)
    assert [(s.since, s.until) for s in window[0].spans] == [(20, 31)]


def test_of_too_many_jobs_those_are_shown_that_ran(store, past):
    ran = live(store, make_record("ran", sequence=0), (10, S.STARTING, on(("a", 1))))
    for index in range(1, 5):
        live(store, make_record(f"waits-{index}", sequence=index))
    jobs, total = past.timeline(0, 100, 2)
    assert [job.name for job in jobs] == [ran.name, "waits-4"]
    assert total == 5


def test_who_ended_last(store, past):
    live(store, make_record("ran", sequence=0), (10, S.STARTING, on(("a", 3))), (20, S.CANCELLED, NO_ALLOCATION))
    live(store, make_record("waited", sequence=1), (30, S.CANCELLED, NO_ALLOCATION))
    assert past.last_ended(10) == ["waited", "ran"]
    assert past.last_ended(1) == ["waited"]


def test_reports_are_thinned_and_keep_their_ends(store, past):
    store.save_job(make_record("job"))
    for at in range(50):
        store.save_report("job", float(at), dataclasses.replace(report_of("job"), num_steps=at))
    assert [report.num_steps for _, report in past.reports("job", 3)] == [0, 24, 49]
    assert [at for at, _ in past.reports("job", 1)] == [49]
    assert len(past.reports("job", 600)) == 50
    assert past.reports("nobody", 5) == []
