"""Chances to win from learning curves, and weights by which a study counts as one job."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pollux.policy import make_policy
from pollux.policy.base import PolicySettings
from pollux.tune.promise import chances, job_weights, predict, shares, slots_of_study
from pollux.types import BatchLimits, JobSpec, JobView, Node, Snapshot, ThroughputParams


def falling(end, until=0.5, start=2.0, exponent=1.0):
    t = np.arange(0.05, until + 1e-9, 0.05)
    return [(float(x), end + (start - end) * (0.05 / float(x)) ** exponent) for x in t]


@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_a_power_law_is_extrapolated_to_its_end(exponent):
    points = falling(0.2, exponent=exponent)
    truth = 0.2 + 1.8 * 0.05**exponent
    mean, deviation = predict(points, 1.0)
    assert abs(mean - truth) < max(3 * deviation, 0.05)


def test_a_trial_that_is_done_is_certain():
    assert predict([*falling(0.2), (1.0, 0.123)], 1.0) == (0.123, pytest.approx(0, abs=1e-6))


def test_a_rising_curve_is_not_expected_to_come_down():
    rising = [(0.1 * index, 1.0 + index) for index in range(1, 6)]
    assert predict(rising, 1.0)[0] >= 3.0


def test_the_better_curve_has_the_better_chance_and_they_sum_to_one():
    found = chances({0: falling(0.1), 1: falling(0.5), 2: falling(0.9)})
    assert found[0] > found[1] >= found[2]
    assert math.fsum(found.values()) == pytest.approx(1.0)


def test_a_trial_that_cannot_beat_the_best_so_far_has_no_chance():
    assert chances({0: falling(0.9, until=0.9)}, best=0.01)[0] < 0.05


def test_a_diverging_trial_has_none_and_a_new_one_that_of_an_average_one():
    rising = [(0.1 * index, 1.0 + index) for index in range(1, 6)]
    found = chances({0: falling(0.1), 1: rising, 2: []})
    assert found[1] < 0.01
    assert found[2] == pytest.approx(1 / 3)


def test_every_trial_has_a_share():
    found = shares({0: 1.0, 1: 0.0, 2: 0.0})
    assert math.fsum(found.values()) == pytest.approx(1.0)
    assert found[0] > 5 * found[1] > 0


PARAMS = ThroughputParams(0.01, 0.01, 1e-4, 1e-5, 1e-4, 1e-5, 2.0)


def view(name, weight, noise_scale=2000.0):
    limits = BatchLimits(initial=128, maximum=8192, device_max=512)
    return JobView(
        spec=JobSpec(name=name, weight=weight, batch=limits),
        age_s=600.0,
        params={"gpu": PARAMS},
        noise_scale=noise_scale,
        max_profiled_replicas=64,
    )


def slots(weights, num_slots=32):
    nodes = tuple(Node(name=f"n{index}", num_slots=4) for index in range(num_slots // 4))
    jobs = tuple(view(name, weight) for name, weight in weights.items())
    plan = make_policy("pollux", PolicySettings()).decide(Snapshot(now=600.0, nodes=nodes, jobs=jobs))
    return {name: plan.allocation_of(name).num_replicas for name in weights}


@pytest.mark.parametrize("num_trials", [1, 4, 8])
def test_a_study_of_any_number_of_trials_counts_as_one_job(num_trials):
    """Against the policy itself: the other job keeps half of the slots, give or take what whole slots make of it."""
    own = job_weights(shares({number: 1 / num_trials for number in range(num_trials)}), 1.0, -1.0)
    found = slots({"other": 1.0} | {f"t{number}": weight for number, weight in own.items()})
    assert 14 <= found["other"] <= 18, found
    naive = slots({"other": 1.0} | {f"t{number}": 1.0 for number in range(8)})
    assert naive["other"] <= 5  # what eight trials with a job's weight each would leave


def test_the_study_s_slots_follow_its_weight():
    assert slots_of_study(32, 1.0, [], -1.0) == 32
    assert slots_of_study(32, 1.0, [1.0], -1.0) == pytest.approx(16)
    assert slots_of_study(30, 4.0, [1.0], -1.0) == pytest.approx(20)


def test_a_diverging_trial_wins_no_slots_by_a_huge_noise_scale():
    good = falling(0.1)
    rising = [(0.1 * index, 1.0 + index) for index in range(1, 6)]
    weights = job_weights(shares(chances({0: good, 1: rising})), 1.0, -1.0)
    nodes = tuple(Node(name=f"n{index}", num_slots=4) for index in range(4))
    jobs = (view("good", weights[0], 500.0), view("bad", weights[1], 1e6))
    plan = make_policy("pollux", PolicySettings()).decide(Snapshot(now=600.0, nodes=nodes, jobs=jobs))
    assert plan.allocation_of("good").num_replicas > 2 * plan.allocation_of("bad").num_replicas


def test_after_a_good_end_beginners_are_told_apart_from_a_trial_that_never_learnt():
    """All had a chance of 0 there, and the trial with the lowest number was trained to its end on all slots."""
    good = [(0.1, 2.2), (0.3, 0.8), (0.6, 0.3), (1.0, 0.11)]
    flat = [(step / 10, 2.31) for step in range(1, 5)]
    found = chances({4: flat, 9: [(0.1, 2.25)], 14: [(0.1, 2.15)]}, best=0.11, complete=[good])
    assert found[4] < 0.01 < found[9] < found[14]
    assert chances({4: flat, 9: [(0.1, 2.25)]}, best=0.11, complete=[[]])[9] == 0.0  # nothing to learn from
