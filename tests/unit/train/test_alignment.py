"""Whether a higher learning rate may be tried, by how far the last updates overshoot."""

from __future__ import annotations

import pytest
import torch

from pollux.train.alignment import FIRST_EVERY, LEAST_SAMPLES, SAMPLES, Alignment, without_curvature

SIZE = 4096


class Quadratic:
    """Minimise ½·x² in each of SIZE places, from 1, with noise of variance ``noise`` in the whole gradient."""

    def __init__(self, rate: float, noise: float = 0.0, momentum: float = 0.9, seed: int = 0) -> None:
        self.x = torch.nn.Parameter(torch.ones(SIZE))
        self.optimizer = torch.optim.SGD([self.x], lr=rate, momentum=momentum)
        self.alignment = Alignment(self.optimizer)
        self._noise = noise
        self._generator = torch.Generator().manual_seed(seed)

    def verdicts(self, num_steps: int, noise_to_batch: float, slope: float | None = None) -> list[int]:
        """With ``slope`` the gradient is that constant, as without curvature."""
        verdicts = []
        for step in range(num_steps):
            gradient = self.x.detach().clone() if slope is None else torch.full((SIZE,), slope)
            noise = torch.randn(SIZE, generator=self._generator) * (self._noise / SIZE) ** 0.5
            self.x.grad = gradient + noise
            if self.alignment.is_due(step):
                self.alignment.sample()
            verdicts.append(self.alignment.verdict(noise_to_batch))
            self.optimizer.step()
        return verdicts


def test_nothing_is_said_before_there_are_samples():
    assert set(Quadratic(rate=0.01).verdicts(FIRST_EVERY * (LEAST_SAMPLES - 1), 0.0)) == {0}


def test_short_updates_may_become_longer():
    assert Quadratic(rate=1e-4).verdicts(200, 0.0)[-1] == 2


def test_a_rate_beyond_the_rule_needs_all_samples():
    assert set(Quadratic(rate=1e-4).verdicts(FIRST_EVERY * LEAST_SAMPLES + 8, 0.0)) == {0, 1}


@pytest.mark.parametrize("rate", [3.5, 3.7])
def test_updates_that_go_far_beyond_the_lowest_point_are_shortened(rate):
    """With momentum 0.9 a quadratic of curvature 1 diverges above a rate of 3.8."""
    assert Quadratic(rate=rate).verdicts(100, 0.0)[-1] == -1


@pytest.mark.parametrize("seed", range(4))
def test_chance_does_not_lower_a_rate_where_noise_dominates(seed):
    """A recommender with a noise scale far above its batch lost a rate that worked, by a few negative samples."""
    slope = 1e-3
    noise = 1e4 * slope**2 * SIZE
    verdicts = Quadratic(rate=1e-6, noise=noise, seed=seed).verdicts(40 * SAMPLES, 1e4, slope)
    assert verdicts.count(-1) == 0 and verdicts[-1] == 1


def test_the_value_without_curvature_is_the_expected_cosine():
    noise_to_batch, decay, slope = 3.0, 0.9, 1.0
    problem = Quadratic(rate=1e-6, noise=noise_to_batch * slope**2 * SIZE, momentum=decay)
    problem.verdicts(300, noise_to_batch, slope)
    cosines = list(problem.alignment._recent)
    expected = without_curvature(noise_to_batch, decay)
    assert sum(cosines) / len(cosines) == pytest.approx(expected, rel=0.03)
