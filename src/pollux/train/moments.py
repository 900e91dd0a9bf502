"""Smoothed statistics of the gradient: |G|², its expectation's squared norm, and tr(Σ), the variance of one example's.

Stands in ``train``, below :mod:`pollux.train.noise`. It never sees a gradient, only two squared norms per step, so a
communication hook can feed it from flat buffers. Letters as there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pollux.errors import InvalidValueError
from pollux.model.efficiency import MAX_NOISE_SCALE

DEFAULT_SMOOTHING = 0.999  # AdaScale (Johnson et al., 2020) averages over about a thousand steps of the tuned batch


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseStats:
    """What is known of the gradient, on the host: |G|² and tr(Σ) of one example, both at least 0."""

    sqr: float
    var: float
    is_biased: bool = False  # from differences of successive steps only

    def __post_init__(self) -> None:
        for name in ("sqr", "var"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidValueError(f"noise statistic {name} is {value}; it must be a number >= 0")

    @property
    def noise_scale(self) -> float:
        """φ in examples; :func:`pollux.model.efficiency.noise_scale` on plain numbers, as every step asks for it."""
        if self.var <= 0:
            return 0.0
        return min(self.var / self.sqr, MAX_NOISE_SCALE) if self.sqr > 0 else MAX_NOISE_SCALE


class _Average:
    """A debiased exponential average of |G|² and tr(Σ), and how far the first can be trusted.

    One tensor (|G|², tr(Σ), weight, |G|⁴) on the device of the norms: one operation updates it, one transfer reads it.
    """

    def __init__(self) -> None:
        self.sums: Tensor | None = None  # (4,) float32
        self.sqr_weights = 0.0  # Σw², on the host: what the variance of a weighted mean needs
        self.num_samples = 0

    def clear(self) -> None:
        self.sums, self.sqr_weights, self.num_samples = None, 0.0, 0

    def add(self, sqr: Tensor, var: Tensor, decay: float) -> None:
        sums = torch.zeros(4, device=sqr.device) if self.sums is None else self.sums.to(sqr.device)
        sample = torch.stack((sqr, var, torch.ones_like(sqr), sqr.square()))
        sample = torch.where(torch.isfinite(sample).all(), sample, sums)
        self.sums = sums.lerp_(sample, 1.0 - decay)
        self.sqr_weights = decay**2 * self.sqr_weights + (1.0 - decay) ** 2
        self.num_samples += 1

    def read(self, is_biased: bool) -> NoiseStats | None:
        if self.sums is None:
            return None
        sqr, var, weight, fourth = self.sums.tolist()
        if weight <= 0:
            return None
        sqr /= weight
        num_samples = weight**2 / self.sqr_weights  # as many equal ones would tell as much
        variance = max(fourth / weight - sqr**2, 0.0) / max(1.0 - 1.0 / num_samples, 1e-9)
        # A single sample shows no variance: its own size is then all that is known of its error.
        error = math.sqrt(variance / num_samples) if num_samples > 1.5 else abs(sqr)
        return NoiseStats(sqr=max(sqr, error), var=max(var / weight, 0.0), is_biased=is_biased)

    def state_dict(self) -> dict[str, Any]:
        sums = None if self.sums is None else self.sums.clone()
        return {"sums": sums, "sqr_weights": self.sqr_weights, "num_samples": self.num_samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        sums, sqr_weights, num_samples = (entry(state, name) for name in ("sums", "sqr_weights", "num_samples"))
        if sums is not None and not (isinstance(sums, Tensor) and sums.shape == (4,)):
            raise InvalidValueError("the noise scale's state is not ours: 'sums' must be a tensor of 4 numbers")
        self.sums = None if sums is None else sums.detach().float().clone()
        self.sqr_weights, self.num_samples = float(sqr_weights), int(num_samples)


class GradientMoments:
    """Smoothed |G|² and tr(Σ) from squared norms of micro-gradients and of their mean.

    Both estimates are unbiased for every c >= 2 (McCandlish et al., 2018, appendix A), hence may be negative; they
    are averaged apart and clipped only when read, since clipping each would add a bias that no averaging removes.
    The average is exponential and debiased; a step at batch scale S counts as S steps (factor smoothing^S).

    |G|² cannot be told from 0 while it lies within the standard error of its average: what is read is never below
    that error. So the noise scale grows as far as the samples can resolve it, and not to infinity by chance.

    Samples from successive steps are biased, and kept apart from the unbiased ones. What is read are those of the kind
    that arrives: SWITCH_SAMPLES of the other kind in a row take over, so that neither a lone sample counts for an
    average nor a statistic outlives the batch sizes it was measured with.
    """

    SWITCH_SAMPLES = 5

    def __init__(self, smoothing: float = DEFAULT_SMOOTHING) -> None:
        if not 0 <= smoothing < 1:
            raise InvalidValueError(f"smoothing is {smoothing}; it must lie in [0, 1)")
        self.smoothing = smoothing
        self._averages = {False: _Average(), True: _Average()}  # by whether biased
        self._is_biased = True
        self._in_a_row = 0  # samples of the other kind since the last of this

    @property
    def is_biased(self) -> bool:
        """What is read comes from successive steps; so it is before the first sample."""
        return self._is_biased

    @property
    def num_samples(self) -> int:
        """How many samples what is read is made of."""
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

        ``batch_size`` is m; where the micro-batches differ in size, their harmonic mean h, and ``count`` is M/h where
        ḡ weighs each by its size: both estimates stay unbiased. ``scale`` is S = M/M0. A sample that is not finite (an
        overflowed loss scale) is ignored, on the device.
        """
        if count < 2:
            raise InvalidValueError(f"{count} micro-gradients; the noise shows only between at least 2")
        require_positive("batch size", batch_size)
        require_positive("batch scale", scale)
        if is_biased == self._is_biased:
            self._in_a_row = 0
        else:
            if self._in_a_row == 0:
                self._averages[is_biased].clear()
            self._in_a_row += 1
        mean_sqr, sqr_mean = mean_sqr.detach().float(), sqr_mean.detach().float()
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

    def state_dict(self) -> dict[str, Any]:
        """The state, with tensors left on their device."""
        return {
            "unbiased": self._averages[False].state_dict(),
            "biased": self._averages[True].state_dict(),
            "is_biased": self._is_biased,
            "in_a_row": self._in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave, on whatever device; it moves with the next sample."""
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


def entry(state: Mapping[str, Any], name: str) -> Any:
    if name not in state:
        raise InvalidValueError(
            f"the noise scale's state lacks {name!r}; it has {', '.join(map(repr, state)) or 'nothing'}"
        )
    return state[name]
