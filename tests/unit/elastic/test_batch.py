"""The batch of a job that is resized by restart: the same model as the scheduler's, without numpy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.elastic.batch import Batch, BatchBounds, choose_batch, gain_of, step_s
from pollux.errors import InvalidValueError
from pollux.model.efficiency import gain
from pollux.model.goodput import best_batch
from pollux.model.throughput import iteration_s
from pollux.types import BatchLimits, ThroughputParams

THETA = ThroughputParams(0.05, 0.001, 0.1, 0.01, 0.03, 0.005, 1.6)
positive = st.floats(1e-4, 1.0)
seconds = (positive,) * 6
shapes = (st.floats(1.0, 5.0), st.floats(0.5, 1.5), st.sampled_from([0.0, 1.0]))  # γ, δ, ring
thetas = st.builds(ThroughputParams, *seconds, *shapes)


@given(theta=thetas, replicas=st.integers(1, 16), nodes=st.integers(1, 4), device=st.integers(1, 64))
def test_step_times_are_those_of_the_throughput_model(theta, replicas, nodes, device):
    nodes = min(nodes, replicas)
    for passes in (1, 3):
        batch = Batch(replicas * device * passes, device, passes)
        expected = float(iteration_s(theta, nodes, replicas, device, passes - 1))
        assert step_s(theta, nodes, replicas, batch) == pytest.approx(expected, rel=1e-9)


@given(phi=st.floats(0, 1e12), initial=st.integers(1, 512), factor=st.integers(1, 64))
def test_the_gain_is_adascales(phi, initial, factor):
    assert gain_of(phi, initial, initial * factor) == pytest.approx(float(gain(phi, initial, initial * factor)))


@pytest.mark.parametrize(("replicas", "total"), [(1, 64), (2, 64), (3, 66), (5, 65), (100, 100)])
def test_until_the_job_is_known_the_batch_is_the_tuned_one(replicas, total):
    batch = choose_batch(BatchBounds.of(64, 512, None), replicas)
    assert (batch.total, batch.num_passes) == (total, 1)
    assert batch.total == replicas * batch.share


def test_a_batch_that_does_not_fit_the_device_takes_several_passes():
    assert choose_batch(BatchBounds.of(64, None, (1, 10)), 2) == Batch(64, 8, 4)


@pytest.mark.parametrize("phi", [10.0, 300.0, 1e5])
@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_the_batch_is_near_the_one_that_the_scheduler_plans_with(phi, replicas):
    bounds = BatchBounds.of(64, 2048, (4, 256))
    limits = BatchLimits(initial=64, maximum=2048, device_min=4, device_max=256)
    planned, _ = best_batch(THETA, phi, limits, 1, replicas)
    chosen = choose_batch(bounds, replicas, 1, THETA, phi)

    def goodput(total: int, device: int, passes: int) -> float:
        return gain_of(phi, 64, total) / step_s(THETA, 1, replicas, Batch(total, device, passes))

    of_planned = goodput(planned.total(replicas), planned.device_batch, planned.accum_steps + 1)
    assert goodput(chosen.total, chosen.device, chosen.num_passes) >= 0.97 * of_planned
    assert 64 <= chosen.total <= 2048 and 4 <= chosen.device <= 256


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, None, None), "batch_size is 0"),
        ((64, 32, None), "max_batch_size is 32"),
        ((64, None, 0), "device_batch_size is 0"),
        ((64, None, (8, 4)), "8 to 4"),
        ((64, None, (65, 80)), "begin below 64"),
    ],
)
def test_bounds_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(InvalidValueError, match=message):
        BatchBounds.of(*arguments)
