"""Minimum satisfactory shares: what is promised fits, and is enough."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.policy import make_policy
from pollux.policy.deadlines import DeadlineJob, Promises, can_admit, earliest_deadline, minimum_shares
from pollux.testing.snapshots import make_job, make_nodes
from pollux.types import Snapshot


def job(name: str, deadline_at: float, work: float, most: int = 8, power: float = 1.0) -> DeadlineJob:
    """``work`` seconds on one replica; speed grows as the count to ``power``."""
    return DeadlineJob.of(name, deadline_at, (1, most), lambda count: work / count**power)


def test_the_smallest_share_that_is_enough() -> None:
    shares = minimum_shares(0.0, 8, [job("a", 50.0, 100.0), job("b", 100.0, 100.0)])
    assert shares.now == {"a": 2, "b": 1}
    assert shares.ends_at == {"a": 50.0, "b": 100.0}
    assert not shares.missed


def test_a_later_deadline_waits_for_slots_that_become_free() -> None:
    shares = minimum_shares(0.0, 2, [job("later", 100.0, 100.0), job("first", 50.0, 100.0)])
    assert shares.now == {"first": 2, "later": 0}
    assert shares.ends_at["later"] == pytest.approx(100.0)


def test_what_cannot_be_met_comes_last_and_has_its_best_end() -> None:
    shares = minimum_shares(0.0, 2, [job("hopeless", 10.0, 100.0), job("fine", 60.0, 100.0)])
    assert shares.now == {"fine": 2, "hopeless": 0}
    assert shares.missed == {"hopeless": pytest.approx(100.0)}


def test_a_newcomer_must_not_break_a_promise() -> None:
    promised = [job("promised", 60.0, 100.0)]
    assert not can_admit(0.0, 2, promised, job("new", 50.0, 40.0))
    best_at = earliest_deadline(0.0, 2, promised, job("new", 50.0, 40.0))
    assert best_at == pytest.approx(70.0, rel=0.05)
    assert can_admit(0.0, 2, promised, job("new", best_at, 40.0))


def test_a_promise_stays_and_the_next_is_tested_against_it() -> None:
    promises = Promises()
    first, second = job("first", 50.0, 100.0), job("second", 40.0, 60.0)
    promises.shares(0.0, 2, [first])
    promises.shares(0.0, 2, [first, second])
    assert promises.has("first") and not promises.has("second")
    promises.shares(0.0, 2, [second])  # the first has ended
    assert promises.has("second")


def test_a_job_of_unknown_speed_is_promised_nothing() -> None:
    unknown = DeadlineJob.of("unknown", 50.0, (1, 4), lambda count: math.inf)
    assert not unknown.is_known
    assert earliest_deadline(0.0, 4, [], unknown) == math.inf
    promises = Promises()
    assert promises.shares(0.0, 4, [unknown]).now == {}


@given(
    st.lists(
        st.tuples(st.floats(10, 200), st.floats(5, 400), st.integers(1, 8), st.sampled_from([0.5, 0.8, 1.0])),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 8),
)
@settings(max_examples=100, deadline=None)
def test_reservations_fit_now_and_end_in_time(cases: list[tuple[float, float, int, float]], num_slots: int) -> None:
    jobs = [job(f"j{i}", at, work, most, power) for i, (at, work, most, power) in enumerate(cases)]
    shares = minimum_shares(0.0, num_slots, jobs)
    assert sum(shares.now.values()) <= num_slots
    for one in jobs:
        if one.name not in shares.missed:
            assert shares.ends_at[one.name] <= one.deadline_at + 1e-6


def test_edf_takes_the_earliest_deadline_that_is_not_past() -> None:
    jobs = (
        make_job("none", requested_replicas=4),
        make_job("past", requested_replicas=4, deadline_at=5.0),
        make_job("late", requested_replicas=4, deadline_at=900.0),
        make_job("soon", requested_replicas=4, deadline_at=500.0),
    )
    plan = make_policy("edf").decide(Snapshot(now=10.0, nodes=make_nodes(1), jobs=jobs))
    assert {name for name, allocation in plan.allocations.items() if allocation} == {"soon"}


def test_elasticflow_meets_a_deadline_and_gives_the_rest_away() -> None:
    long = 1e6
    alone = make_job("alone", remaining_examples=long, requested_batch_size=128)
    due = make_job("due", remaining_examples=long, requested_batch_size=128)
    whole = Snapshot(now=0.0, nodes=make_nodes(2), jobs=(alone, due))
    shared = make_policy("elasticflow").decide(whole)
    assert all(shared.allocation_of(name) for name in ("alone", "due"))
    assert sum(one.num_replicas for one in shared.allocations.values()) <= 8


def test_a_job_that_cannot_be_met_any_more_takes_nothing_from_the_others() -> None:
    promises = Promises()
    first, second = job("first", 50.0, 100.0), job("second", 120.0, 100.0)
    assert promises.shares(0.0, 4, [first, second]).now == {"first": 2, "second": 1}
    behind = job("first", 50.0, 300.0)  # it would need more than there is
    shares = promises.shares(1.0, 4, [behind, second])
    assert shares.now["second"] == 1 and shares.now.get("first", 0) == 0
    assert "first" in shares.missed


def test_reservations_stay_as_they_were_made_while_jobs_keep_to_them() -> None:
    promises = Promises()
    jobs = [job("a", 100.0, 150.0), job("b", 100.0, 150.0)]
    made = promises.shares(0.0, 4, jobs).now
    assert made == {"a": 2, "b": 2}
    # One is ahead: a reservation that is made anew would shrink it, and grow it again after the next delay.
    ahead = [job("a", 100.0, 60.0), job("b", 100.0, 110.0)]
    assert promises.shares(20.0, 4, ahead).now == made
    assert minimum_shares(20.0, 4, ahead).now["a"] == 1


def test_a_job_that_is_behind_may_use_up_the_time_that_was_spared() -> None:
    promises = Promises()
    planned = DeadlineJob.of("a", 90.0, (1, 2), lambda count: 180.0 / count, spare_s=20.0)
    promises.shares(0.0, 2, [planned])
    behind = DeadlineJob.of("a", 90.0, (1, 2), lambda count: 190.0 / count, spare_s=20.0)
    assert promises.shares(10.0, 2, [behind]).now == {"a": 2}
    lost = DeadlineJob.of("a", 90.0, (1, 2), lambda count: 220.0 / count, spare_s=20.0)
    assert promises.shares(10.0, 2, [lost]).missed.keys() == {"a"}
