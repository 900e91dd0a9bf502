from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.model.efficiency import efficiency, gain, noise_scale
from pollux.model.throughput import grad_s, iteration_s, overlap, sync_s, throughput
from pollux.testing.snapshots import params
from pollux.types import ThroughputParams

THETA = ThroughputParams(0.02, 0.001, 0.3, 0.01, 0.05, 0.002, 2.0)


def obvious_iteration_s(theta: ThroughputParams, nodes: int, replicas: int, m: int, s: int) -> float:
    """The formula of the paper with our two extensions, one configuration at a time."""
    compute = theta.alpha_g + theta.beta_g * m**theta.delta
    more = 1 - 2 / replicas if theta.ring else replicas - 2
    if replicas == 1:
        sync = 0.0
    elif nodes == 1:
        sync = theta.alpha_r + theta.beta_r * more
    else:
        sync = theta.alpha_n + theta.beta_n * more
    return s * compute + (compute**theta.gamma + sync**theta.gamma) ** (1 / theta.gamma)


@given(params, st.integers(1, 4), st.integers(1, 16), st.integers(1, 1024), st.integers(0, 8))
def test_iteration_time_is_the_formula(theta, nodes, replicas, m, s):
    nodes = min(nodes, replicas)
    expected = obvious_iteration_s(theta, nodes, replicas, m, s)
    assert float(iteration_s(theta, nodes, replicas, m, s)) == pytest.approx(expected, rel=1e-9)


def test_broadcasts_over_jobs_and_configurations():
    thetas = np.array([THETA, THETA._replace(alpha_g=0.5)])[:, None, :]  # (2, 1, 7)
    replicas = np.array([1, 2, 8])
    table = throughput(thetas, np.array([1, 1, 2]), replicas, 64)
    assert table.shape == (2, 3)
    assert float(table[1, 2]) == pytest.approx(8 * 64 / obvious_iteration_s(THETA._replace(alpha_g=0.5), 2, 8, 64, 0))


def test_the_papers_model_is_what_its_seven_parameters_mean():
    """By default nothing is added to it, and an array of seven is enough."""
    assert THETA.delta == 1.0 and THETA.ring == 0.0
    seven = np.array(THETA)[:7]
    for nodes, replicas, m in ((1, 1, 64), (1, 4, 100), (4, 16, 32)):
        assert float(iteration_s(seven, nodes, replicas, m)) == float(iteration_s(THETA, nodes, replicas, m))


def test_a_ring_costs_no_more_than_a_bound_however_many_replicas():
    ring = THETA._replace(ring=1.0)
    assert float(sync_s(ring, 2, 1 << 20)) == pytest.approx(0.31, rel=1e-4)
    assert float(sync_s(ring, 2, 2)) == pytest.approx(0.3)
    assert float(grad_s(THETA._replace(delta=1.5), 100)) == pytest.approx(0.02 + 1.0)


def test_parts():
    assert float(grad_s(THETA, 100)) == pytest.approx(0.12)
    assert float(sync_s(THETA, 1, 1)) == 0.0
    assert float(sync_s(THETA, 1, 4)) == pytest.approx(0.054)
    assert float(sync_s(THETA, 2, 4)) == pytest.approx(0.32)


@given(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3), st.floats(1.0, 10.0))
def test_overlap_lies_between_maximum_and_sum(a, b, gamma):
    both = float(overlap(np.float64(a), np.float64(b), gamma))
    assert max(a, b) * (1 - 1e-12) <= both <= (a + b) * (1 + 1e-12)


@given(st.floats(0, 1e9), st.integers(1, 512), st.floats(1, 100))
def test_efficiency_falls_from_one_and_gain_grows(phi, initial, scale):
    total = initial * scale
    value = float(efficiency(phi, initial, total))
    assert 1 / scale * (1 - 1e-9) <= value <= 1 + 1e-12
    assert 1 - 1e-9 <= float(gain(phi, initial, total)) <= scale * (1 + 1e-9)


def test_gain_is_adascales():
    sqr, var, scale = 0.2, 1.9, 8.0
    phi = noise_scale(128, sqr, var)
    assert float(gain(phi, 128, 128 * scale)) == pytest.approx((var + sqr) / (var / scale + sqr))


def test_noise_scale_of_degenerate_gradients_is_finite():
    assert math.isfinite(float(noise_scale(128, 0.0, 1.0)))
    assert float(noise_scale(128, 0.0, 0.0)) == 0.0
    assert float(efficiency(noise_scale(128, 0.0, 1.0), 128, 4096)) == pytest.approx(1.0)
