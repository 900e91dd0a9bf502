"""How far the noise scale can be trusted: its error and its bounds, on problems whose noise scale is known."""

from __future__ import annotations

import math
import random

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from pollux.errors import InvalidValueError
from pollux.model.efficiency import MAX_NOISE_SCALE
from pollux.train.moments import CONFIDENCE, GradientMoments, NoiseStats, PartStats, share_of_mean_scale
from pollux.train.progress import gain_of
from tests.long import long

NUM_TRIALS = 300


def trial(
    seed: int, phi: float, num_samples: int, *, count: int = 2, batch: int = 16, width: int = 50, decay: float = 0.999
) -> NoiseStats:
    """Gaussian gradients of ``width`` independent coordinates, |G|² = 1, tr(Σ) = φ."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.zeros(width)
    mean[: width // 2] = 1 / math.sqrt(width // 2)
    shape = (num_samples, count, width)
    gradients = mean + torch.randn(shape, generator=generator) * math.sqrt(phi / width / batch)
    mean_sqr, sqr_mean = gradients.square().sum(2).mean(1), gradients.mean(1).square().sum(1)
    moments = GradientMoments(decay)
    for index in range(num_samples):
        moments.update(mean_sqr[index], sqr_mean[index], batch_size=batch, count=count)
    stats = moments.read()
    assert stats is not None
    return stats


@pytest.mark.parametrize(
    ("phi", "num_samples", "count", "decay"),
    [
        pytest.param(16, 40, 2, 0.999, id="little noise"),
        pytest.param(64, 60, 2, 0.999, id="as much noise as signal", marks=long),
        pytest.param(64, 40, 4, 0.999, id="four gradients"),
        pytest.param(200, 120, 2, 0.999, id="much noise", marks=long),
        pytest.param(64, 120, 2, 0.96, id="a short window"),
    ],
)
def test_bounds_and_error_hold_as_often_as_they_say(phi, num_samples, count, decay):
    """Above ``low``, below ``high``, and 68 % within ``error``; 300 trials tell within some 4 %."""
    nominal = 0.5 * (1 + math.erf(CONFIDENCE / math.sqrt(2)))
    trials = [trial(seed, phi, num_samples, count=count, decay=decay) for seed in range(NUM_TRIALS)]
    above = sum(stats.noise_scale_low <= phi for stats in trials) / NUM_TRIALS
    below = sum(phi <= stats.noise_scale_high for stats in trials) / NUM_TRIALS
    within = sum(abs(stats.noise_scale - phi) <= stats.error for stats in trials) / NUM_TRIALS
    assert nominal - 0.05 <= above <= nominal + 0.05, above
    assert nominal - 0.05 <= below <= nominal + 0.05, below
    assert 0.60 <= within <= 0.80, within
    assert all(stats.noise_scale_low <= stats.noise_scale <= stats.noise_scale_high for stats in trials)


def test_there_is_no_upper_bound_while_the_signal_is_not_resolved():
    """φ is ten thousand times the batch: a few samples cannot tell |G|² from 0, but they can tell tr(Σ)."""
    phi = 160_000
    trials = [trial(seed, phi, 20) for seed in range(100)]
    unbounded = [stats for stats in trials if stats.noise_scale_high == MAX_NOISE_SCALE]
    assert len(unbounded) >= 80
    assert sum(stats.noise_scale_low <= phi for stats in trials) >= 90
    assert all(0 < stats.noise_scale_low <= stats.noise_scale and math.isfinite(stats.error) for stats in unbounded)
    assert sum(phi <= stats.noise_scale_high for stats in trials) >= 90


def test_a_gradient_without_noise_has_a_noise_scale_of_zero():
    moments = GradientMoments()
    for _ in range(20):
        moments.update(torch.tensor(2.0), torch.tensor(2.0), batch_size=8, count=2)
    stats = moments.read()
    assert stats is not None
    assert (stats.noise_scale, stats.noise_scale_low, stats.noise_scale_high) == (0.0, 0.0, 0.0)


def test_noise_without_a_gradient_is_bounded_from_below_alone():
    trials = []
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        moments = GradientMoments()
        for _ in range(30):
            pair = torch.randn(2, 200, generator=generator)
            moments.update(
                pair.square().sum(1).mean(), pair.mean(0).square().sum(), batch_size=8, count=2
            )  # fmt: skip
        trials.append(moments.read())
    assert sum(stats is not None and stats.noise_scale_high == MAX_NOISE_SCALE for stats in trials) >= 44
    assert all(stats is not None and stats.noise_scale_low > 8 for stats in trials)


@pytest.mark.parametrize("num_samples", [1, 2, 3, 5])
def test_few_samples_promise_little(num_samples):
    """One says nothing of its error; bounds of a few are wide, and never the wrong way round."""
    for seed in range(50):
        stats = trial(seed, 64, num_samples)
        assert 0 <= stats.noise_scale_low <= stats.noise_scale_high
        assert math.isfinite(stats.error) and math.isfinite(stats.noise_scale)
        if num_samples == 1:
            assert stats.low is None and stats.error == 0


def test_more_samples_narrow_the_bounds():
    widths = [
        sum(stats.noise_scale_high - stats.noise_scale_low for stats in (trial(seed, 64, n) for seed in range(30)))
        for n in (40, 160, 640)
    ]
    assert widths[0] > 1.5 * widths[1] > 2 * widths[2]


@given(
    st.lists(
        st.tuples(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1, 64), st.integers(2, 16), st.floats(0.1, 64)),
        min_size=1,
        max_size=30,
    )
)
def test_whatever_is_measured_the_statistics_are_finite_and_in_order(samples):
    moments = GradientMoments()
    for a, b, batch, count, scale in samples:
        moments.update(
            torch.tensor(max(a, b)), torch.tensor(min(a, b)), batch_size=batch, count=count, scale=scale
        )  # fmt: skip
    stats = moments.read()
    assert stats is not None
    assert 0 <= stats.noise_scale <= MAX_NOISE_SCALE
    assert 0 <= stats.noise_scale_low <= stats.noise_scale_high <= MAX_NOISE_SCALE * (1 + 1e-6)
    assert math.isfinite(stats.error) and stats.error >= 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_samples_that_are_not_finite_leave_no_trace(bad):
    moments, clean = GradientMoments(), GradientMoments()
    for index in range(10):
        sample = torch.tensor(3.0 + index % 2), torch.tensor(2.0)
        for one in (moments, clean):
            one.update(*sample, batch_size=8, count=2)
        moments.update(torch.tensor(bad), torch.tensor(2.0), batch_size=8, count=2)
        moments.update(torch.tensor(3.0), torch.tensor(bad), batch_size=8, count=2)
    assert moments.read() == clean.read()


def test_bounds_survive_a_checkpoint():
    stats = trial(0, 64, 30)
    moments = GradientMoments()
    for index in range(30):
        moments.update(torch.tensor(3.0 + index % 3), torch.tensor(2.0), batch_size=8, count=2)
    other = GradientMoments()
    other.load_state_dict(moments.state_dict())
    assert other.read() == moments.read() != stats
    with pytest.raises(InvalidValueError):
        NoiseStats(sqr=1.0, var=1.0, error=math.nan)


def test_parts_that_are_alike_have_the_mean_as_their_noise_scale():
    parts = [PartStats(sqr=share, var=share * 50.0, error_2=0.0) for share in (0.1, 0.3, 0.6)]
    assert share_of_mean_scale(parts, 32) == pytest.approx(1.0)


@pytest.mark.parametrize("batch", [1.0, 64.0, 1e4, 1e9])
def test_a_part_with_much_noise_does_not_speak_for_the_others(batch):
    """An embedding has a tenth of |G|², and a noise scale of 5,000; the rest has 50. The mean is 545."""
    parts = [PartStats(sqr=0.9, var=45.0, error_2=0.0), PartStats(sqr=0.1, var=500.0, error_2=0.0)]
    scale = 545 * share_of_mean_scale(parts, batch)
    assert 1 / (scale + batch) == pytest.approx(0.9 / (50 + batch) + 0.1 / (5000 + batch))
    assert 50 < scale <= 545.001


def test_parts_that_differ_within_their_errors_count_as_alike():
    parts = [PartStats(sqr=0.9, var=45.0, error_2=0.9), PartStats(sqr=0.1, var=500.0, error_2=0.9)]
    assert share_of_mean_scale(parts, 32) == pytest.approx(1.0)


@pytest.mark.parametrize("num_samples", [10, 30])
def test_parts_that_are_alike_hardly_differ_by_chance(num_samples):
    """Sixteen parts with the same noise scale of 500, whose |G|² is measured with the error of so few samples."""
    rng = random.Random(num_samples)
    shares = []
    for _ in range(200):
        error = 1 / 16 * 500 / 32 / math.sqrt(num_samples * 500)  # as for parts of 500 elements
        parts = [PartStats(sqr=1 / 16 + rng.gauss(0, error), var=500 / 16, error_2=error**2) for _ in range(16)]
        shares.append(share_of_mean_scale(parts, 32))
    assert sorted(shares)[100] > 0.98 and min(shares) > 0.7


@pytest.mark.parametrize("scale", [2, 8, 32])
def test_gains_count_as_much_as_the_parts_make_together(scale):
    """By one noise scale, taken at M0, the gain of a larger batch is nearly that of the parts, and never far above."""
    initial, weights, scales = 32, (0.9, 0.1), (50.0, 5000.0)
    parts = [PartStats(sqr=w, var=w * phi, error_2=0.0) for w, phi in zip(weights, scales, strict=True)]

    def progress(batch: float) -> float:
        return sum(w * batch / (phi + batch) for w, phi in zip(weights, scales, strict=True))

    phi = 545 * share_of_mean_scale(parts, initial)
    counted = gain_of(phi, initial, scale * initial)
    assert counted == pytest.approx(progress(scale * initial) / progress(initial), rel=0.1)


def test_the_noise_scale_of_a_model_with_an_embedding_is_below_its_mean():
    """Samples of the two parts above, from gradients with that noise; and the state holds the parts."""
    generator = torch.Generator().manual_seed(0)
    moments, whole = GradientMoments(is_relative=True), GradientMoments(is_relative=True)
    size, batch = 4000, 16  # elements of each part, examples in each of two gradients
    true = torch.tensor([0.9, 0.1]).div(size).sqrt()[:, None].expand(2, size)
    spread = torch.tensor([45.0, 500.0]).div(size * batch).sqrt()[:, None]
    for _ in range(200):
        grads = [true + spread * torch.randn(2, size, generator=generator) for _ in range(2)]
        mean_sqr = sum(grad.square().sum(1) for grad in grads) / 2
        sqr_mean = (sum(grads) / 2).square().sum(1)
        moments.update(mean_sqr, sqr_mean, batch_size=batch, count=2)
        whole.update(mean_sqr.sum(), sqr_mean.sum(), batch_size=batch, count=2)
    assert whole.noise_scale == pytest.approx(545, rel=0.15)
    expected = 1 / (0.9 / (50 + 32) + 0.1 / (5000 + 32)) - 32
    assert moments.noise_scale == pytest.approx(expected, rel=0.2)
    stats, other = moments.read(), GradientMoments(is_relative=True)
    assert stats is not None and stats.low is not None and stats.high is not None
    assert stats.low < stats.noise_scale < stats.high
    other.load_state_dict(moments.state_dict())
    assert other.read() == stats
