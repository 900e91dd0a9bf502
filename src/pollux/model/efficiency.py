"""How much of a large batch is useful: statistical efficiency and the AdaScale gain. Scheduler and jobs use it.

The noise scale φ = tr(Σ)/|G|² is in examples. An example in a batch of M teaches
(φ + M0)/(φ + M) as much as one in a batch of M0 (OSDI'21, section 3.1).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pollux.types import FloatArray

MAX_NOISE_SCALE = 1e15  # means that the gradient is lost in its noise; a finite number, since inf/inf is not one


def noise_scale(initial_batch: float, grad_sqr: npt.ArrayLike, grad_var: npt.ArrayLike) -> FloatArray:
    """φ from |G|² and the variance of a gradient over M0 examples (v = tr(Σ)/M0)."""
    grad_sqr = np.maximum(np.asarray(grad_sqr, dtype=float), 0.0)
    signal = initial_batch * np.maximum(np.asarray(grad_var, dtype=float), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        phi = np.where(signal > 0, signal / grad_sqr, 0.0)
    return np.minimum(phi, MAX_NOISE_SCALE)


def efficiency(phi: npt.ArrayLike, initial_batch: npt.ArrayLike, total_batch: npt.ArrayLike) -> FloatArray:
    """Progress per example relative to training with M0; at most 1 for M >= M0."""
    noise: FloatArray = np.minimum(np.asarray(phi, dtype=float), MAX_NOISE_SCALE)
    initial, total = np.asarray(initial_batch, dtype=float), np.asarray(total_batch, dtype=float)
    result: FloatArray = (noise + initial) / (noise + total)
    return result


def gain(phi: npt.ArrayLike, initial_batch: npt.ArrayLike, total_batch: npt.ArrayLike) -> FloatArray:
    """AdaScale's r: how many steps at M0 one step at M is worth; S·efficiency with S = M/M0."""
    scale = np.asarray(total_batch, dtype=float) / np.asarray(initial_batch, dtype=float)
    result: FloatArray = scale * efficiency(phi, initial_batch, total_batch)
    return result


# The share of its gain that a larger batch has while the rate stays at the user's. On a quadratic the gain is then
# 2 - 1/gain (share 0) if the rate was the best one for M0, and more than the full gain if the rate was too high for M0.
# Measured at 4 times the batch and the same rate: ResNet-18 with SGD 2.9 of 3.5, a vision transformer with AdamW 3.3 of
# 3.0, an LSTM with Adam 1.6 of 2.8. A higher share lets batches grow more, before the rate has followed.
SAME_RATE = 0.5


def earned_gain(gain: float, earned: float) -> float:
    """The gain of a step at a learning rate that gives only the share ``earned`` of it.

    On a quadratic, a step with f times the best rate of M0 teaches f·(2 - f/r) as much as one at M0, where r is
    AdaScale's gain: r at f = r, but only 2 - 1/r, less than two, at the unchanged rate f = 1.
    """
    if gain <= 1:
        return gain
    return earned * gain + (1 - earned) * (2 - 1 / gain)


def earned_efficiency(
    phi: npt.ArrayLike, initial_batch: npt.ArrayLike, total_batch: npt.ArrayLike, earned: float
) -> FloatArray:
    """:func:`efficiency` where only the share ``earned`` of a larger batch's gain counts: see :func:`earned_gain`."""
    full = efficiency(phi, initial_batch, total_batch)
    if earned == 1:
        return full
    scale = np.asarray(total_batch, dtype=float) / np.asarray(initial_batch, dtype=float)
    rate = scale * full
    result: FloatArray = np.where(rate > 1, (earned * rate + (1 - earned) * (2 - 1 / rate)) / scale, full)
    return result
