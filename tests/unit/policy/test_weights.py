"""Who counts for more where jobs tell how much is left of them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.policy import PolicySettings
from pollux.policy.weights import job_weights
from pollux.types import JobSpec, JobView

REMAINING = PolicySettings(weights="remaining")


def jobs(*left: float | None, weight: float = 1.0) -> list[JobView]:
    return [
        JobView(spec=JobSpec(name=f"j{index}", weight=weight), age_s=0.0, remaining_examples=examples)
        for index, examples in enumerate(left)
    ]


def test_all_count_the_same_unless_asked():
    assert job_weights(jobs(10, 1000, weight=2.0), np.ones(2), PolicySettings()).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("p", [-1.0, 0.0, 0.5])
def test_slots_go_by_the_optimal_rule_for_a_speedup_of_the_square_root(p):
    """The i-th longest of n jobs gets (2i - 1)/n² of them: the fitness makes k proportional to w^(1/(1 - p/2))."""
    weights = job_weights(jobs(400, 100, 300, 200), np.ones(4), PolicySettings(weights="remaining", p=p))
    slots = weights ** (1 / (1 - p / 2))
    assert slots / slots.sum() == pytest.approx(np.array([1, 7, 3, 5]) / 16)


def test_time_counts_not_examples():
    slow, fast = job_weights(jobs(100, 1000), np.array([1.0, 100.0]), REMAINING)
    assert fast > slow


def test_a_job_of_unknown_length_or_speed_counts_as_a_typical_one():
    weights = job_weights(jobs(1, None, 5, 100, 7), np.array([1.0, 1.0, 1.0, 1.0, np.nan]), REMAINING)
    assert weights[0] > weights[[1, 2, 4]].max() and weights[[1, 2, 4]].min() > weights[3]


def test_where_nobody_tells_all_count_the_same():
    assert job_weights(jobs(None, None), np.ones(2), REMAINING).tolist() == [1.0, 1.0]
    assert job_weights(jobs(5, 6), np.full(2, np.nan), REMAINING).tolist() == [1.0, 1.0]


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=40), st.floats(-10, 1))
def test_weights_are_positive_finite_and_fall_with_what_is_left(left, p):
    if 0 < abs(p) < 0.01:
        p = 0.0
    weights = job_weights(jobs(*left), np.ones(len(left)), PolicySettings(weights="remaining", p=p))
    assert np.isfinite(weights).all() and (weights > 0).all()
    order = np.argsort(left, kind="stable")
    for one, other in pairwise(order):
        assert left[one] == left[other] or weights[one] > weights[other]
