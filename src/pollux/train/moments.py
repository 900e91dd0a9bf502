"""Averages the two statistics of the noise scale: |G|², and tr(Σ), the variance of one example's gradient.

The noise scale, the step exchange and the normalisation layers add samples. A sample is two squared norms per step, so
a communication hook can compute it from flat buffers. Letters as in :mod:`pollux.train.noise`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor

from pollux.errors import InvalidValueError
from pollux.model.efficiency import MAX_NOISE_SCALE

DEFAULT_SMOOTHING = 0.999  # AdaScale (Johnson et al., 2020) averages over about a thousand steps of the tuned batch
# Standard errors of a one-sided 90 % bound. More make batches and rates change later, on surer evidence.
CONFIDENCE = 1.28
LEAST_EFFECTIVE_SAMPLES = 1.5  # below this many the samples show no variance of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseStats:
    """|G|² and tr(Σ) of one example's gradient, both at least 0, on the host.

    ``error`` is the standard error of φ in examples. ``low`` and ``high`` are its one-sided 90 % bounds; None where
    there are too few samples to tell.
    """

    sqr: float
    var: float
    is_biased: bool = False  # from differences of successive steps only
    error: float = 0.0
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        for name in ("sqr", "var", "error"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidValueError(f"noise statistic {name} is {value}; it must be a number >= 0")

    @property
    def noise_scale(self) -> float:
        """φ in examples. :func:`pollux.model.efficiency.noise_scale` without numpy, as every step calls it."""
        if self.var <= 0:
            return 0.0
        return min(self.var / self.sqr, MAX_NOISE_SCALE) if self.sqr > 0 else MAX_NOISE_SCALE

    @property
    def noise_scale_low(self) -> float:
        """The lower 90 % bound of φ, which decides whether a batch or a rate grows."""
        return self.noise_scale if self.low is None else self.low

    @property
    def noise_scale_high(self) -> float:
        """The upper 90 % bound of φ, which decides whether a batch shrinks."""
        return self.noise_scale if self.high is None else self.high


@dataclass(frozen=True, slots=True)
class _Ratio:
    """v/q of two correlated averages, with bounds on the true ratio (Fieller's theorem, 1954)."""

    q: float  # the average of |G|² samples
    v: float  # the average of tr(Σ) samples
    var_q: float  # variances of these averages
    var_v: float
    covariance: float

    def error(self, q: float) -> float:
        """The standard error of v/q, to first order, with ``q`` > 0 in place of the raw average."""
        ratio = self.v / q
        return math.sqrt(max(self.var_v - 2 * ratio * self.covariance + ratio**2 * self.var_q, 0.0)) / q

    def bounds(self) -> tuple[float, float]:
        """The lowest and highest ratio r for which v - r·q is within CONFIDENCE standard errors of 0."""
        z2 = CONFIDENCE**2
        q = max(self.q, 0.0)  # an average below 0 means a small |G|², not a small ratio
        a = q**2 - z2 * self.var_q
        b = q * self.v - z2 * self.covariance
        c = self.v**2 - z2 * self.var_v
        root = math.sqrt(max(b * b - a * c, 0.0))
        if a > 0:
            return max((b - root) / a, 0.0), max((b + root) / a, 0.0)
        # |G|² may be 0, so there is no upper bound. If c > 0, tr(Σ) is not 0, which gives a lower bound.
        return (max(c / (b + root), 0.0) if c > 0 and b + root > 0 else 0.0), MAX_NOISE_SCALE


class AverageState(TypedDict):
    sums: Tensor | None
    num_samples: int


class MomentsState(TypedDict):
    unbiased: AverageState
    biased: AverageState
    is_biased: bool
    in_a_row: int


class _Average:
    """A debiased exponential average of |G|² and tr(Σ), with the sums for their variances.

    All in one tensor on the device of the norms: few operations update it, and one transfer reads it.
    """

    NUM_SUMS = 7  # |G|², tr(Σ), weight, |G|⁴, tr(Σ)², |G|²·tr(Σ), and the sum of squared weights

    def __init__(self) -> None:
        self.sums: Tensor | None = None  # (NUM_SUMS,) float32
        self.num_samples = 0

    def clear(self) -> None:
        self.sums, self.num_samples = None, 0

    def add(self, sqr: Tensor, var: Tensor, decay: float) -> None:
        sums = torch.zeros(self.NUM_SUMS, device=sqr.device) if self.sums is None else self.sums.to(sqr.device)
        one = torch.ones_like(sqr)
        sample = torch.stack((sqr, var, one, sqr.square(), var.square(), sqr * var, one * (1.0 - decay)))
        decays = torch.full_like(sums, decay)
        decays[-1] = decay**2
        updated = sums * decays + sample * (1.0 - decay)
        self.sums = torch.where(torch.isfinite(sample).all(), updated, sums)
        self.num_samples += 1

    def read(self, is_biased: bool) -> NoiseStats | None:
        if self.sums is None:
            return None
        sqr, var, weight, sqr_2, var_2, product, sqr_weights = self.sums.tolist()
        if weight <= 0:
            return None
        sqr, var = sqr / weight, var / weight
        num_samples = weight**2 / sqr_weights  # the number of equally weighted samples with the same error
        if num_samples <= LEAST_EFFECTIVE_SAMPLES:
            # A single sample shows no variance, so there are no bounds.
            return NoiseStats(sqr=abs(sqr), var=max(var, 0.0), is_biased=is_biased)
        share = 1.0 / max(num_samples - 1.0, 1e-9)  # from a sample's variance to that of the mean, unbiased
        ratio = _Ratio(
            q=sqr,
            v=var,
            var_q=max(sqr_2 / weight - sqr**2, 0.0) * share,
            var_v=max(var_2 / weight - var**2, 0.0) * share,
            covariance=(product / weight - sqr * var) * share,
        )
        # Within its standard error |G|² may be 0: take the standard error instead, so that φ is not too high.
        least = max(sqr, math.sqrt(ratio.var_q))
        low, high = ratio.bounds()
        error = min(ratio.error(least), MAX_NOISE_SCALE) if least > 0 else 0.0
        return NoiseStats(sqr=least, var=max(var, 0.0), is_biased=is_biased, error=error, low=low, high=high)

    def state_dict(self) -> AverageState:
        return {"sums": None if self.sums is None else self.sums.clone(), "num_samples": self.num_samples}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        sums, num_samples = (entry(state, name) for name in ("sums", "num_samples"))
        if sums is not None and not (isinstance(sums, Tensor) and sums.shape == (self.NUM_SUMS,)):
            raise InvalidValueError(
                f"this is not a state of the noise scale: 'sums' must be a tensor of {self.NUM_SUMS} numbers"
            )
        self.sums = None if sums is None else sums.detach().float().clone()
        self.num_samples = int(num_samples)


class GradientMoments:
    """Smoothed |G|² and tr(Σ) from squared norms of micro-gradients and of their mean.

    Both estimates are unbiased for every c >= 2 (McCandlish et al., 2018, appendix A), so a sample may be negative.
    They are averaged separately and clipped only when read: clipping each sample would add a bias that stays.
    The average is exponential and debiased; a step at batch scale S counts as S steps (factor smoothing^S).

    |G|² is at least the standard error of its average, so that φ is not overestimated from few samples.

    With ``is_relative`` every sample is divided by √mean|g_i|². Otherwise the few steps with gradients ten times as
    long as the others' would dominate the average. φ is the ratio of the two averages in both cases; |G|² and tr(Σ)
    alone are then in units of a norm.

    Samples from successive steps are biased, and are averaged apart from the unbiased ones. ``read`` uses the kind that
    arrives at present: it switches after SWITCH_SAMPLES of the other kind in a row.
    """

    SWITCH_SAMPLES = 5  # fewer would read an average of one or two samples; more keep an outdated kind longer

    def __init__(self, smoothing: float = DEFAULT_SMOOTHING, *, is_relative: bool = False) -> None:
        if not 0 <= smoothing < 1:
            raise InvalidValueError(f"smoothing is {smoothing}; it must lie in [0, 1)")
        self.smoothing, self._is_relative = smoothing, is_relative
        self._averages = {False: _Average(), True: _Average()}  # by whether biased
        self._is_biased = True
        self._in_a_row = 0  # samples of the other kind since the last of this

    @property
    def is_biased(self) -> bool:
        """Whether ``read`` uses samples from successive steps. True before the first sample."""
        return self._is_biased

    @property
    def num_samples(self) -> int:
        """The number of samples in the average that ``read`` uses."""
        return self._averages[self._is_biased].num_samples

    def update(
        self,
        mean_sqr: Tensor,
        sqr_mean: Tensor,
        *,
        batch_size: float,
        count: float,
        scale: float = 1.0,
        is_biased: bool = False,
    ) -> None:
        """Add one sample: mean_i |g_i|² and |ḡ|² of ``count`` micro-gradients, as 0-d tensors.

        ``batch_size`` is m. If the micro-batches differ in size and ḡ weighs each by its size, pass their harmonic mean
        h, and M/h as ``count``: both estimates stay unbiased. ``scale`` is S = M/M0. A sample that is not finite (the
        loss scale overflowed) is ignored, on the device.
        """
        if count < 2:
            raise InvalidValueError(f"{count} micro-gradients; at least 2 are needed to measure noise")
        require_positive("batch size", batch_size)
        require_positive("batch scale", scale)
        if is_biased == self._is_biased:
            self._in_a_row = 0
        else:
            if self._in_a_row == 0:
                self._averages[is_biased].clear()
            self._in_a_row += 1
        mean_sqr, sqr_mean = mean_sqr.detach().float(), sqr_mean.detach().float()
        if self._is_relative:
            root = mean_sqr.sqrt()
            mean_sqr, sqr_mean = root, sqr_mean / root  # 0/0 is not finite, so that sample is ignored
        spread = mean_sqr - sqr_mean
        sqr = torch.add(sqr_mean, spread, alpha=-1.0 / (count - 1))  # = (c·|ḡ|² − mean|g_i|²)/(c − 1)
        var = spread * (batch_size * count / (count - 1))
        self._averages[is_biased].add(sqr, var, self.smoothing**scale)
        if self._in_a_row >= self.SWITCH_SAMPLES or self.num_samples == 0:
            self._is_biased, self._in_a_row = is_biased, 0

    def read(self) -> NoiseStats | None:
        """The statistics now, or None before the first sample. Waits for the device."""
        return self._averages[self._is_biased].read(self._is_biased)

    @property
    def sqr(self) -> float:
        """|G|², NaN before the first sample. Waits for the device."""
        stats = self.read()
        return math.nan if stats is None else stats.sqr

    @property
    def var(self) -> float:
        """tr(Σ) of one example, NaN before the first sample. Waits for the device."""
        stats = self.read()
        return math.nan if stats is None else stats.var

    @property
    def noise_scale(self) -> float:
        """φ in examples, NaN before the first sample. Waits for the device."""
        stats = self.read()
        return math.nan if stats is None else stats.noise_scale

    def reset(self) -> None:
        """Forget every sample."""
        for average in self._averages.values():
            average.clear()
        self._is_biased, self._in_a_row = True, 0

    def state_dict(self) -> MomentsState:
        """The state, with tensors left on their device."""
        return {
            "unbiased": self._averages[False].state_dict(),
            "biased": self._averages[True].state_dict(),
            "is_biased": self._is_biased,
            "in_a_row": self._in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore a :meth:`state_dict` from any device; the next sample moves it to its own."""
        unbiased, biased, is_biased, in_a_row = (
            entry(state, name) for name in ("unbiased", "biased", "is_biased", "in_a_row")
        )
        averages = {False: _Average(), True: _Average()}
        averages[False].load_state_dict(unbiased)
        averages[True].load_state_dict(biased)
        self._averages, self._is_biased, self._in_a_row = averages, bool(is_biased), int(in_a_row)


def require_positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise InvalidValueError(f"{name} is {value}; it must be a positive number")


def entry(state: Mapping[str, object], name: str) -> Any:
    """The value of that name, which may come from a file. Raises InvalidValueError if it is missing."""
    if name not in state:
        raise InvalidValueError(
            f"the noise scale's state lacks {name!r}; it has {', '.join(map(repr, state)) or 'nothing'}"
        )
    return state[name]
