from __future__ import annotations

import pytest

from pollux.model.profile import Configuration, Timing
from pollux.model.throughput import iteration_s
from pollux.model.transfer import guess_params, type_ratios, typical_ratios
from pollux.scheduler.knowledge import Knowledge, guess_all
from pollux.types import Node, ThroughputParams

SLOW = ThroughputParams(0.02, 0.001, 0.2, 0.01, 0.05, 0.004, 1.6)
NODES = (Node(name="a", num_slots=4, accelerator="slow"), Node(name="b", num_slots=4, accelerator="fast"))


def times(theta: ThroughputParams, factor: float) -> ThroughputParams:
    return ThroughputParams(*(value * factor for value in theta))._replace(gamma=theta.gamma)


def test_ratios_are_those_of_a_pass_and_the_median_is_typical():
    ratios = type_ratios({"slow": SLOW, "fast": times(SLOW, 0.25)}, 64)
    assert ratios == pytest.approx({("slow", "fast"): 0.25, ("fast", "slow"): 4.0})
    typical = typical_ratios([{("a", "b"): 0.2}, {("a", "b"): 0.3}, {("a", "b"): 0.9}, {}])
    assert typical == {("a", "b"): 0.3}


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


def knowledge(label: str, **factors: float) -> Knowledge:
    known = Knowledge(label)
    for kind, factor in factors.items():
        for replicas in (1, 2, 4):
            for batch in (32, 64):
                step_s = float(iteration_s(SLOW, 1, replicas, batch)) * factor
                grad_s = (SLOW.alpha_g + SLOW.beta_g * batch) * factor
                known.observe(kind, Configuration(1, replicas, batch), Timing(grad_s, step_s, 10))
    known.refit()
    return known


def test_what_one_job_showed_of_two_types_serves_another():
    both, one = knowledge("both", slow=1.0, fast=0.25), knowledge("one", slow=2.0)
    assert guess_all([both, one], NODES[:1]) == []
    assert "fast" not in one.params
    assert guess_all([both, one], NODES) == [one]
    assert one.params["fast"].beta_g == pytest.approx(one.params["slow"].beta_g / 4, rel=0.1)
    assert set(one.guesses) == {"fast"} and not both.guesses
    assert guess_all([both, one], NODES) == []  # nothing new


def test_a_measurement_takes_the_place_of_a_guess():
    both, one = knowledge("both", slow=1.0, fast=0.25), knowledge("one", slow=2.0)
    guess_all([both, one], NODES)
    fresh = knowledge("one", slow=2.0, fast=1.0)
    one.profile, one.fits = fresh.profile, fresh.fits
    assert guess_all([both, one], NODES) == [one]
    assert not one.guesses
    assert one.params["fast"].beta_g == pytest.approx(SLOW.beta_g, rel=0.1)
