"""Averages the two statistics of the noise scale: |G|², and tr(Σ), the variance of one example's gradient.

The noise scale, the step exchange and the normalisation layers add samples. A sample is two squared norms per step, so
a communication hook can compute it from flat buffers. Letters as in :mod:`pollux.train.noise`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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

    def averaged(self, num_steps: float) -> NoiseStats:
        """That of a mean over the gradients of so many steps."""
        return replace(
            self,
            var=self.var / num_steps,
            error=self.error / num_steps,
            low=None if self.low is None else self.low / num_steps,
            high=None if self.high is None else self.high / num_steps,
        )

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


def share_of_mean_scale(parts: Sequence[PartStats], batch: float) -> float:
    """The noise scale by which a model learns at ``batch``, as a share (0..1) of the mean over its parts.

    tr(Σ)/|G|² of a whole model is the mean of its parts' noise scales φ_g, weighted by w_g = |G_g|²/|G|², the share of
    the progress that a part makes. But a step of M examples makes Σ w_g·M/(φ_g + M) of the progress of a step without
    noise. That is concave in φ_g, so a part with a very high φ_g (an embedding, where each example uses a few rows) may
    lift the mean, and the other parts gain nothing from a batch as large as that. The noise scale φ that describes such
    a model satisfies 1/(φ + M) = Σ w_g/(φ_g + M). It is lowest for small M and becomes the mean for large ones.

    Of few samples, parts differ by chance. So a part counts as different from the mean only as far as it is beyond its
    error: the surplus x becomes x·max(1 - λ/x², 0) (the garrote of Breiman, 1995), with λ = 2·ln(parts)·error², which
    the largest of so many chance values hardly exceeds (Donoho and Johnstone, 1994).
    """
    total_sqr, total_var = sum(part.sqr for part in parts), sum(part.var for part in parts)
    if total_sqr <= 0 or total_var <= 0:
        return 1.0
    weight = denominator = 0.0
    threshold = 2 * math.log(max(len(parts), 2))
    for part in parts:
        expected = part.var * total_sqr / total_var
        surplus = part.sqr - expected
        kept = max(1 - threshold * part.error_2 / surplus**2, 0.0) if surplus else 0.0
        sqr = max(expected + surplus * kept, 0.0)
        weight += sqr
        denominator += sqr**2 / (part.var + sqr * batch) if sqr > 0 else 0.0
    if weight <= 0 or denominator <= 0:
        return 1.0
    scale, mean = weight / denominator - batch, total_var / weight
    return min(max(scale / mean, 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class PartStats:
    """|G|² and tr(Σ) of some of a model's parameters."""

    sqr: float
    var: float
    error_2: float  # squared standard error of ``sqr``


class AverageState(TypedDict):
    sums: Tensor | None
    parts: Tensor | None
    num_samples: int
    batch: float


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
    NUM_PART_SUMS = 3  # of a part of the model: |G|², tr(Σ), |G|⁴

    def __init__(self) -> None:
        self.sums: Tensor | None = None  # (NUM_SUMS,) float32, of the whole model
        self.parts: Tensor | None = None  # (NUM_PART_SUMS, parts) float32; None if it is one part
        self.num_samples = 0
        self.batch = 1.0  # M0, at which the parts are compared

    def clear(self) -> None:
        self.sums, self.parts, self.num_samples = None, None, 0

    def add(self, sqrs: Tensor, variances: Tensor, decay: float, batch: float) -> None:
        """Add a sample, by part of the model."""
        self.batch = batch
        sqr, var = sqrs.sum(), variances.sum()
        if len(sqrs) > 1:
            by_part = torch.stack((sqrs, variances, sqrs.square()))
            parts = self.parts
            if parts is None or parts.shape != by_part.shape:
                parts = torch.zeros_like(by_part)
            parts = parts.to(sqr.device)
            is_good = torch.isfinite(sqr.square() + var.square())
            self.parts = torch.where(is_good, parts * decay + by_part * (1.0 - decay), parts)
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
        effective = self._share_of_mean_scale(weight, share)
        return NoiseStats(
            sqr=least,
            var=max(var, 0.0) * effective,
            is_biased=is_biased,
            error=error * effective,
            low=low * effective,
            high=high if high >= MAX_NOISE_SCALE else high * effective,
        )

    def _share_of_mean_scale(self, weight: float, share: float) -> float:
        if self.parts is None:
            return 1.0
        rows = ((value / weight for value in part) for part in self.parts.T.tolist())
        parts = [PartStats(sqr, max(var, 0.0), max(sqr_2 - sqr**2, 0.0) * share) for sqr, var, sqr_2 in rows]
        return share_of_mean_scale(parts, self.batch)

    def state_dict(self) -> AverageState:
        return {
            "sums": None if self.sums is None else self.sums.clone(),
            "parts": None if self.parts is None else self.parts.clone(),
            "num_samples": self.num_samples,
            "batch": self.batch,
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        sums, parts, num_samples, batch = (entry(state, name) for name in ("sums", "parts", "num_samples", "batch"))
        if sums is not None and not (isinstance(sums, Tensor) and sums.shape == (self.NUM_SUMS,)):
            raise InvalidValueError(
                f"this is not a state of the noise scale: 'sums' must be a tensor of {self.NUM_SUMS} numbers"
            )
        if parts is not None and not (
            isinstance(parts, Tensor) and parts.ndim == 2 and len(parts) == self.NUM_PART_SUMS
        ):
            raise InvalidValueError(
                f"this is not a state of the noise scale: 'parts' must be a tensor of {self.NUM_PART_SUMS} rows"
            )
        self.sums = None if sums is None else sums.detach().float().clone()
        self.parts = None if parts is None else parts.detach().float().clone()
        self.num_samples, self.batch = int(num_samples), float(batch)


class GradientMoments:
    """Smoothed |G|² and tr(Σ) from squared norms of micro-gradients and of their mean.

    Both estimates are unbiased for every c >= 2 (McCandlish et al., 2018, appendix A), so a sample may be negative.
    They are averaged separately and clipped only when read: clipping each sample would add a bias that stays.
    The average is exponential and debiased; a step at batch scale S counts as S steps (factor smoothing^S).

    |G|² is at least the standard error of its average, so that φ is not overestimated from few samples. Where samples
    tell the parts of a model apart, tr(Σ) is the one of :func:`share_of_mean_scale`.

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
        initial_batch: float | None = None,
    ) -> None:
        """Add one sample: mean_i |g_i|² and |ḡ|² of ``count`` micro-gradients.

        0-d tensors, or 1-d ones with the squared norms of each part of the model; these are compared at
        ``initial_batch``, M0, as gains count from there (by default at this batch).
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
        mean_sqr, sqr_mean = mean_sqr.detach().float().reshape(-1), sqr_mean.detach().float().reshape(-1)
        if self._is_relative:
            root = mean_sqr.sum().sqrt()
            mean_sqr, sqr_mean = mean_sqr / root, sqr_mean / root  # 0/0 is not finite, so that sample is ignored
        spread = mean_sqr - sqr_mean
        sqr = torch.add(sqr_mean, spread, alpha=-1.0 / (count - 1))  # = (c·|ḡ|² − mean|g_i|²)/(c − 1)
        var = spread * (batch_size * count / (count - 1))
        self._averages[is_biased].add(sqr, var, self.smoothing**scale, initial_batch or batch_size * count)
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
