from __future__ import annotations

import pytest

from pollux.model.throughput import iteration_s
from pollux.model.transfer import MAX_SHOWN, TIMES, TypeRatios, guess_params, type_ratios
from pollux.types import ThroughputParams

SLOW = ThroughputParams(0.02, 0.001, 0.2, 0.01, 0.05, 0.004, 1.6)


def times(theta: ThroughputParams, factor: float) -> ThroughputParams:
    return theta._replace(**{name: getattr(theta, name) * factor for name in TIMES})


def test_ratios_are_those_of_a_pass_and_the_median_is_typical():
    ratios = type_ratios({"slow": SLOW, "fast": times(SLOW, 0.25)}, 64)
    assert ratios == pytest.approx({("slow", "fast"): 0.25, ("fast", "slow"): 4.0})
    shown = TypeRatios()
    assert shown.typical() == {}
    for job, ratio in (("one", 0.2), ("two", 0.5), ("three", 0.9), ("two", 0.3)):  # the last word of each counts
        shown.add(job, {("a", "b"): ratio})
    shown.add("four", {})
    assert shown.typical() == {("a", "b"): 0.3}


def test_of_many_jobs_the_latest_are_kept_for_every_two_types():
    shown = TypeRatios()
    shown.add("rare", {("a", "c"): 7.0})
    for number in range(3 * MAX_SHOWN):
        shown.add(f"old{number}", {("a", "b"): 0.1})
    for number in range(MAX_SHOWN):
        shown.add(f"new{number}", {("a", "b"): 0.4})
    assert shown.typical() == {("a", "b"): 0.4, ("a", "c"): 7.0}


def test_a_type_not_measured_is_judged_by_what_others_have_shown():
    found = guess_params({"slow": SLOW}, {"slow": 8}, {}, {("slow", "fast"): 0.5}, ["slow", "fast", "unheard of"])
    assert set(found) == {"fast"}
    assert found["fast"] == pytest.approx(times(SLOW, 0.5))


def test_a_type_that_a_job_ran_on_alone_takes_its_synchronisation_from_the_best_known():
    alone = ThroughputParams(0.01, 0.0004, 1e-8, 1e-8, 1e-8, 1e-8, 1.0)
    own = type_ratios({"slow": SLOW, "fast": alone}, 64)
    found = guess_params({"slow": SLOW, "fast": alone}, {"slow": 8, "fast": 1}, own, {}, ["slow", "fast"])
    assert set(found) == {"fast"}
    fast = found["fast"]
    assert (fast.alpha_g, fast.beta_g) == (alone.alpha_g, alone.beta_g)
    assert fast.alpha_n == pytest.approx(SLOW.alpha_n * own["slow", "fast"])
    # Sia's rule: the speedup of eight replicas over one is that of the type it is known on.
    speedup = {
        name: float(iteration_s(t, 1, 1, 64) / iteration_s(t, 1, 8, 64)) for name, t in (("s", SLOW), ("f", fast))
    }
    assert speedup["f"] == pytest.approx(speedup["s"], rel=0.02)


def test_nothing_known_nothing_guessed():
    assert guess_params({}, {}, {}, {("slow", "fast"): 0.5}, ["slow", "fast"]) == {}
