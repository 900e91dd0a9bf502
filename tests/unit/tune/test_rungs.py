"""Pruning compares trials at equal progress, whatever order, batch and speed they have."""

from __future__ import annotations

import numpy as np
import pytest

from pollux.tune.rungs import Asha, Curve, Extrapolation, Median, Never, geometric, make_pruner


def curve(number, *values, decided=0, step=0.1):
    return Curve(number, tuple(((index + 1) * step, value) for index, value in enumerate(values)), decided)


def test_rungs_are_geometric_and_end_before_the_work_does():
    assert geometric(0.1, 3) == pytest.approx((0.1, 0.3, 0.9))
    assert geometric(0.25, 2) == pytest.approx((0.25, 0.5))
    assert geometric(0.5, 10) == (0.5,)


def test_nothing_is_decided_before_the_first_rung():
    trial = Curve(0, ((0.05, 1.0),))
    assert Asha(0.1, 3).judge(trial, [trial]).num_decided == 0


def test_the_first_at_a_rung_goes_on_and_a_worse_second_is_pruned():
    asha, first, second = Asha(0.1, 3), curve(0, 1.0), curve(1, 2.0)
    assert asha.judge(first, [first, second]).reason == ""
    verdict = asha.judge(second, [first, second])
    assert verdict.num_decided == 1 and "number 2 of 2 at 10 % of the work; only the best goes on" in verdict.reason


def test_of_nine_the_best_three_go_on():
    trials = [curve(number, float(number)) for number in range(9)]
    kept = [one.number for one in trials if not Asha(0.1, 3).judge(one, trials).reason]
    assert kept == [0, 1, 2]


def test_a_rung_is_judged_once():
    slow, fast = curve(0, 5.0, 5.0, decided=1), curve(1, 1.0)
    assert Asha(0.1, 3).judge(slow, [slow, fast]).reason == ""


def test_a_trial_that_skips_a_rung_between_two_reports_is_judged_at_both():
    trial, other = Curve(1, ((0.5, 3.0),)), curve(0, 2.0, 2.0, 2.0)
    assert Asha(0.1, 3).judge(trial, [trial, other]).reason  # at 10 % already, by its first value past it


def test_trials_are_compared_at_equal_progress_and_not_at_their_last_value():
    far = Curve(0, ((0.1, 2.0), (0.9, 0.1)))  # better by now, because it has learnt for longer
    near = Curve(1, ((0.1, 1.9),))
    assert Asha(0.1, 3).judge(near, [far, near]).reason == ""


def test_what_a_crashed_trial_repeats_does_not_change_its_rung():
    assert Curve(0, ((0.1, 2.0), (0.2, 1.5), (0.1, 9.0))).at(0.1) == 2.0


def test_brackets_are_judged_apart_and_later():
    hyperband = make_pruner("hyperband", 0.1, 3)
    zero, one, three = curve(0, 1.0), curve(1, 5.0), curve(3, 2.0)
    assert hyperband.judge(one, [zero, one, three]).reason == ""  # bracket 1 begins at 30 %
    assert hyperband.judge(three, [zero, one, three]).reason  # bracket 0, as trial 0


def test_the_median_needs_some_trials():
    others = [curve(number, 1.0, 0.9) for number in range(4)]
    bad = curve(9, 2.0, 1.9)
    assert Median(0.1).judge(bad, [*others[:3], bad]).reason == ""
    assert "median of 4" in Median(0.1).judge(bad, [*others, bad]).reason
    assert Median(0.1).judge(others[0], [*others, bad]).reason == ""


def falling(number, end, until, start=2.0):
    t = np.arange(0.05, until + 1e-9, 0.05)
    return Curve(number, tuple((float(x), end + (start - end) * 0.05 / float(x)) for x in t))


def test_a_curve_that_levels_out_far_above_the_others_is_pruned():
    good = [falling(number, 0.1 + 0.01 * number, 1.0) for number in range(4)]
    assert Extrapolation(0.1).judge(falling(8, 1.2, 0.5), good).reason
    assert not Extrapolation(0.1).judge(falling(9, 0.05, 0.5), good).reason


def test_never():
    assert Never().judge(curve(0, 9.0), [curve(1, 1.0)]).reason == ""
