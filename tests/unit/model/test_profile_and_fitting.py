from __future__ import annotations

import csv
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import approx_fprime, minimize

from pollux.errors import FitError, ProfileError
from pollux.model import fitting
from pollux.model.fitting import LOWER_BOUND, fit
from pollux.model.profile import Configuration, Observations, Profile, Timing
from pollux.model.throughput import grad_s, iteration_s
from pollux.testing.examples import examples
from pollux.testing.snapshots import params
from pollux.types import ThroughputParams

SHAPES = [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (2, 8), (4, 16)]


def observe(theta: ThroughputParams, shapes=SHAPES, batches=(32, 64, 128, 256), noise: float = 0.0) -> Observations:
    rng = np.random.default_rng(0)
    profile = Profile()
    for nodes, replicas in shapes:
        for m in batches:
            factor = np.exp(rng.normal(0, noise, 2)) if noise else (1.0, 1.0)
            times = Timing(
                float(grad_s(theta, m)) * float(factor[0]),
                float(iteration_s(theta, nodes, replicas, m)) * float(factor[1]),
            )
            profile.add("gpu", Configuration(nodes, replicas, m), times)
    return profile.observations("gpu")


def by_lbfgs(problem: fitting._Problem) -> float:
    """The same loss, minimised by scipy's L-BFGS-B from several places."""

    def loss(z):
        x = problem.fixed_x.copy()
        x[problem.free] = z
        value, slope, _ = problem.expand(x)
        return value, slope[problem.free]

    start = problem.initial_guess()[problem.free]
    bounds = list(zip(fitting._LOWER[problem.free], fitting._UPPER[problem.free], strict=True))
    rng = np.random.default_rng(1)
    with np.errstate(all="ignore"):
        results = [
            minimize(
                loss,
                start + rng.normal(0, 0.5 * (i > 0), len(start)),
                jac=True,
                method="L-BFGS-B",
                bounds=bounds,
                options={"ftol": 1e-12, "maxiter": 500},
            )
            for i in range(3)
        ]
    return min(float(result.fun) for result in results)


@pytest.mark.parametrize("num_observations", [1, 2, 5, 20, 60])
@pytest.mark.parametrize("application", ["bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3"])
def test_reaches_what_lbfgs_reaches_on_published_traces(osdi21, application, num_observations):
    with (osdi21 / "traces" / application / "placements.csv").open() as file:
        rows = list(csv.DictReader(file))
    profile = Profile()
    for index in np.random.default_rng(num_observations).choice(len(rows), num_observations, replace=False):
        digits = rows[index]["placement"]
        step, sync = float(rows[index]["step_time"]), float(rows[index]["sync_time"])
        configuration = Configuration(len(digits), sum(map(int, digits)), int(rows[index]["local_bsz"]))
        profile.add("gpu", configuration, Timing(step - sync, step))
    problem = fitting._Problem(profile.observations("gpu"), is_published=num_observations % 2 == 0)
    with np.errstate(all="ignore"):
        _, ours = fitting._descend(problem, problem.initial_guess())
    assert ours <= by_lbfgs(problem) * 1.03 + 2e-4


@examples(50)
@given(params)
def test_gradient_is_the_numerical_one(theta):
    problem = fitting._Problem(observe(ThroughputParams(0.02, 0.001, 0.3, 0.01, 0.05, 0.002, 2.0), noise=0.1))
    x = problem.project(np.array(theta)) + 1e-3
    x[6], x[7] = min(max(x[6], 1.01), 9.9), min(max(x[7], 1.01), 1.99)
    _, slope, _ = problem.expand(x)
    numerical = approx_fprime(x, lambda z: problem.expand(z)[0], 1e-7)
    assert slope == pytest.approx(numerical, abs=2e-4, rel=1e-3)


@examples(50)
@given(params)
def test_explains_noise_free_data(theta):
    # The priors hold that a further replica costs little beside the first; data must not contradict them.
    theta = theta._replace(beta_n=min(theta.beta_n, theta.alpha_n / 10), beta_r=min(theta.beta_r, theta.alpha_r / 10))
    if not theta.ring:
        theta = theta._replace(delta=1.0)
    found = fit(observe(theta), is_published=not theta.ring)
    assert found.rmsle_grad < 0.02
    assert found.rmsle_step < 0.05


@pytest.mark.parametrize("is_published", [False, True])
def test_predicts_what_was_not_measured(is_published):
    theta = ThroughputParams(0.02, 0.001, 0.3, 0.01, 0.05, 0.002, 2.0)
    found = fit(observe(theta, noise=0.02), is_published=is_published).params
    assert found.ring == float(not is_published)
    for nodes, replicas, m in [(1, 3, 100), (2, 6, 48), (4, 12, 200)]:
        expected = float(iteration_s(theta, nodes, replicas, m))
        assert float(iteration_s(found, nodes, replicas, m)) == pytest.approx(expected, rel=0.1)


def test_a_curve_of_passes_is_found():
    theta = ThroughputParams(0.05, 1e-4, 0.01, 1e-4, 0.01, 1e-4, 1.5, delta=1.4, ring=1.0)
    data = observe(theta, shapes=[(1, 1)], batches=(8, 16, 32, 64, 128, 256))
    assert fit(data).rmsle_grad < 0.02 < 0.05 < fit(data, is_published=True).rmsle_grad
    assert fit(observe(theta, shapes=[(1, 1)], batches=(8, 64))).params.delta == 1.0  # a line goes through two points


def test_four_replicas_do_not_say_that_sixteen_are_slower():
    """ElasticFlow's deepspeech2 with 32 examples on A100s: the published line predicts 3.6 times what was measured."""
    measured = {1: 0.3308, 2: 0.1864, 4: 0.1326, 16: 0.0776}
    passes = {1: 0.3308, 2: 0.175, 4: 0.0926}
    profile = Profile()
    for replicas, pass_s in passes.items():
        profile.add("gpu", Configuration(1, replicas, 32 // replicas), Timing(pass_s, measured[replicas]))
    data = profile.observations("gpu")
    ours, published = fit(data).params, fit(data, is_published=True).params
    assert float(iteration_s(published, 2, 16, 2)) > 2.5 * measured[16]
    assert float(iteration_s(ours, 2, 16, 2)) == pytest.approx(measured[16], rel=0.6)
    assert float(iteration_s(ours, 1, 8, 4)) < measured[4]


class TestPriors:
    theta = ThroughputParams(0.02, 0.001, 0.3, 0.01, 0.05, 0.002, 2.0)

    def test_one_replica_makes_scaling_look_free(self):
        found = fit(observe(self.theta, shapes=[(1, 1)])).params
        assert found.alpha_r == pytest.approx(LOWER_BOUND)
        assert found.alpha_n == pytest.approx(1.1 * LOWER_BOUND)

    def test_one_batch_size_splits_the_time_in_half(self):
        data = observe(self.theta, shapes=[(1, 1)], batches=(64,))
        assert fit(data).params.alpha_g == pytest.approx(float(data.grad_s[0]) / 2)

    def test_two_replicas_say_nothing_about_more(self):
        found = fit(observe(self.theta, shapes=[(1, 1), (1, 2)])).params
        assert found.beta_r == pytest.approx(LOWER_BOUND)

    def test_without_multi_node_data_nodes_are_a_little_dearer(self):
        found = fit(observe(self.theta, shapes=[(1, 1), (1, 2), (1, 4)])).params
        assert found.alpha_n == pytest.approx(1.1 * found.alpha_r)
        assert found.beta_n == pytest.approx(1.1 * found.beta_r)

    def test_without_single_node_data_local_sync_looks_free(self):
        found = fit(observe(self.theta, shapes=[(1, 1), (2, 2), (2, 4)])).params
        assert found.alpha_r == pytest.approx(LOWER_BOUND)


def test_falls_back_to_the_last_good_fit(monkeypatch):
    data = observe(TestPriors.theta)
    monkeypatch.setattr(fitting, "_descend", lambda problem, start: (start, math.nan))
    with pytest.raises(FitError, match="no earlier fit"):
        fit(data)
    found = fit(data, TestPriors.theta)
    assert found.params == TestPriors.theta
    assert not found.has_converged
    assert "last good" in found.message


class TestProfile:
    at = Configuration(1, 2, 64)

    def test_repeated_measurements_average(self):
        profile = Profile()
        assert profile.add("gpu", self.at, Timing(1.0, 2.0))
        assert not profile.add("gpu", self.at, Timing(4.0, 5.0, 2))
        assert profile.timings("gpu")[self.at] == Timing(3.0, 4.0, 3)
        assert len(profile) == 1

    def test_types_are_kept_apart(self):
        profile = Profile()
        profile.add("v100", self.at, Timing(1.0, 2.0))
        profile.add("a100", self.at, Timing(0.5, 1.0))
        assert profile.accelerators == ("v100", "a100")
        assert profile.observations("a100").step_s.tolist() == [1.0]
        with pytest.raises(ProfileError, match="t4"):
            profile.observations("t4")

    def test_stays_bounded_and_remembers_the_largest(self):
        profile = Profile(max_configurations=4)
        for batch in range(1, 11):
            profile.add("gpu", Configuration(1, 3 if batch == 1 else 1, batch), Timing(1.0, 1.0))
        assert [c.device_batch for c in profile.timings("gpu")] == [7, 8, 9, 10]
        assert profile.max_replicas == 3

    @pytest.mark.parametrize("bad", [math.nan, 0.0, -1.0, math.inf])
    @pytest.mark.parametrize("field", ["grad_s", "step_s"])
    def test_impossible_times_are_refused_with_the_reason(self, bad, field):
        timing = Timing(1.0, 1.0)._replace(**{field: bad})
        profile = Profile()
        with pytest.raises(ProfileError, match=f"{field} = "):
            profile.add("gpu", self.at, timing)
        assert len(profile) == 0

    @pytest.mark.parametrize("at", [Configuration(3, 2, 64), Configuration(0, 1, 64), Configuration(1, 1, 0)])
    def test_impossible_configurations_are_refused(self, at):
        with pytest.raises(ProfileError, match="cannot profile"):
            Profile().add("gpu", at, Timing(1.0, 1.0))

    @given(st.lists(st.tuples(st.floats(0.01, 10), st.integers(1, 50)), min_size=1, max_size=20))
    def test_mean_is_weighted_by_steps_where_all_count_the_same(self, timings):
        profile = Profile(window_steps=None)
        told = [profile.add("gpu", self.at, Timing(value, value, steps)) for value, steps in timings]
        num_steps = sum(steps for _, steps in timings)
        expected = sum(value * steps for value, steps in timings) / num_steps
        seen = profile.timings("gpu")[self.at]
        assert seen.step_s == pytest.approx(expected) and seen.num_steps == num_steps
        assert told == [True] + [False] * (len(timings) - 1)

    def told(self, profile: Profile, factors: Sequence[float], num_steps: int = 10) -> list[int]:
        """At which measurements :meth:`Profile.add` was true."""
        return [
            number
            for number, factor in enumerate(factors)
            if profile.add("gpu", self.at, Timing(0.1 * factor, 0.2 * factor, num_steps))
        ]

    @pytest.mark.parametrize("num_steps", [1, 10, 500])
    @pytest.mark.parametrize("seed", range(5))
    def test_noise_is_not_told(self, seed, num_steps):
        factors = 1 + np.random.default_rng(seed).uniform(-0.03, 0.03, 2000)
        profile = Profile()
        assert self.told(profile, factors.tolist(), num_steps) == [0]
        assert profile.timings("gpu")[self.at].step_s == pytest.approx(0.2, rel=0.03)

    @pytest.mark.parametrize("factor", [1.3, 0.7, 3.0])
    @pytest.mark.parametrize("seed", range(5))
    def test_another_speed_is_followed_within_a_few_reports(self, factor, seed):
        noise = 1 + np.random.default_rng(seed).uniform(-0.03, 0.03, 300)
        profile = Profile()
        assert self.told(profile, noise.tolist()) == [0]
        after = self.told(profile, (factor * noise).tolist())
        assert len(after) in (1, 2) and after[-1] < 6
        assert profile.timings("gpu")[self.at].step_s == pytest.approx(0.2 * factor, rel=0.02)

    def test_what_it_was_by_then_is_replaced_at_once(self):
        profile = Profile()
        self.told(profile, [1.0] * 300)
        (when,) = self.told(profile, [1.3] * 5)
        assert when <= 4
        assert profile.timings("gpu")[self.at] == Timing(pytest.approx(0.13), pytest.approx(0.26), 3050)

    def test_a_stray_measurement_is_not_told(self):
        profile = Profile()
        assert self.told(profile, ([1.0] * 30 + [3.0]) * 10) == [0]

    def test_jobs_of_two_speeds_settle_between_them(self):
        """Jobs of one application share a profile, and need not be equally fast."""
        profile = Profile()
        self.told(profile, [1.0] * 30)
        assert len(self.told(profile, [1.0, 1.3] * 500)) <= 2
        assert profile.timings("gpu")[self.at].step_s == pytest.approx(0.23, rel=0.08)

    def test_a_slow_drift_is_told_each_time_it_adds_up(self):
        profile = Profile()
        told = self.told(profile, np.geomspace(1.0, 1.3, 1000).tolist())
        assert 2 < len(told) <= 4
        assert profile.timings("gpu")[self.at].step_s == pytest.approx(0.26, rel=0.02)

    def test_a_configuration_that_was_forgotten_is_new(self):
        profile = Profile(max_configurations=1)
        for _ in range(2):
            assert profile.add("gpu", self.at, Timing(1.0, 2.0, 10))
            assert profile.add("gpu", self.at._replace(device_batch=1), Timing(0.1, 0.2, 10))
