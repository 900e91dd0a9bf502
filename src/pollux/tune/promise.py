"""How likely each trial is to end as the best of its study, and what weight in the scheduler follows from that.

A learning curve is extrapolated by power laws v(t) = a + b·t^-c, t the progress: a and b by least squares for each of a
few c, which are averaged by how well they fit (as Domhan et al., 2015, do for more families). Pure; values are to be
minimised.

The weight: the policy minimises the sum of w·s^p over jobs, so that slots go as w^(1/(1-p)). A study of weight W whose
trials have shares q_1 + ... + q_n = 1 counts as one job of weight W exactly if w_i = W·q_i^(1-p): the slots of all its
trials together are then those of one job, however many trials there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_EXPONENTS = np.array([0.25, 0.5, 1.0, 2.0])
_NUM_DRAWS = 2048
_SEED = 0  # of the draws: the same curves give the same chances
_LEAST_POINTS = 3  # below which a curve cannot be extrapolated
_LEAST_NOISE = 0.02  # of a value
_RIDGE = 1e-3  # keeps b near 0 where the points do not say more
FLOOR = 0.25  # share of an average trial that one without any chance has: it goes on, slowly, until it is pruned
MOST_WEIGHT_STEP = 0.2  # relative change of a weight below which the scheduler is not told


def predict(points: Sequence[tuple[float, float]], spread: float) -> tuple[float, float]:
    """Mean and standard deviation of the value at the end (progress 1).

    ``spread``: of the values of different trials; the uncertainty of a trial that nothing is known of.
    """
    if not points:
        return math.nan, spread
    t = np.maximum(np.array([progress for progress, _ in points]), 1e-3)
    v = np.array([value for _, value in points])
    last, reached = float(v[-1]), min(float(t.max()), 1.0)
    if reached >= 1.0:
        return last, 1e-9
    if len(points) < _LEAST_POINTS:
        return last, spread * (1 - reached)
    ends, errors = [], []
    for exponent in _EXPONENTS:
        x = t**-exponent - 1.0  # 0 at the end: a is the value there
        mean_x, mean_v = float(np.average(x, weights=t)), float(np.average(v, weights=t))
        slope = float(np.sum(t * (x - mean_x) * (v - mean_v)) / (np.sum(t * (x - mean_x) ** 2) + _RIDGE * np.sum(t)))
        slope = max(slope, 0.0)  # a curve that rises is not expected to come down again
        ends.append(mean_v - slope * mean_x)
        residual = v - (ends[-1] + slope * x)
        errors.append(float(np.sum(t * residual**2) / np.sum(t)))
    noise = max(math.sqrt(min(errors)), _LEAST_NOISE * abs(last), 1e-12)  # late points say what it is now
    fits = -0.5 * len(points) * np.array(errors) / noise**2
    likelihood = np.exp(fits - fits.max())
    likelihood /= likelihood.sum()
    mean = float(likelihood @ np.array(ends))
    between = float(likelihood @ (np.array(ends) - mean) ** 2)
    horizon = (1 - reached) * max(abs(last - mean), noise)  # the further the end, the less is certain
    return mean, math.sqrt(between + noise**2 + horizon**2)


def chances(curves: Mapping[int, Sequence[tuple[float, float]]], best: float | None = None) -> dict[int, float]:
    """By trial: the chance that it ends below all the others and below ``best``, the best end so far.

    A trial without any value has the chance of an average one: it has to be tried.
    """
    if not curves:
        return {}
    values = np.sort([value for points in curves.values() for _, value in points[-1:] if math.isfinite(value)])
    good = values[: (len(values) + 1) // 2]  # the worse half may be worse by any amount; it says nothing of the best
    spread = float(np.std(good)) if len(good) > 1 else 0.0
    spread = max(spread, 1e-6, 0.05 * float(np.abs(good).mean()) if len(good) else 1.0)
    typical = float(np.mean(good)) if len(good) else 0.0
    numbers = sorted(curves)
    draws = np.random.default_rng(_SEED).standard_normal((_NUM_DRAWS, len(numbers)))
    for column, number in enumerate(numbers):
        mean, deviation = predict(curves[number], spread)
        draws[:, column] = (typical if math.isnan(mean) else mean) + deviation * draws[:, column]
    winners = draws.argmin(axis=1)
    wins = draws.min(axis=1) < (math.inf if best is None else best)
    found = {number: float(np.mean((winners == column) & wins)) for column, number in enumerate(numbers)}
    return {number: one if curves[number] else 1 / len(numbers) for number, one in found.items()}


def shares(chance: Mapping[int, float]) -> dict[int, float]:
    """Of the study's slots, summing to 1: by chance, above a floor, so that every trial goes on."""
    if not chance:
        return {}
    average, total = 1 / len(chance), sum(chance.values())
    raw = {
        number: FLOOR * average + (1 - FLOOR) * (one / total if total > 0 else average)
        for number, one in chance.items()
    }
    return {number: one / sum(raw.values()) for number, one in raw.items()}


def job_weights(share: Mapping[int, float], study_weight: float, p: float) -> dict[int, float]:
    """Of the trials' jobs, for a policy with a power mean of exponent ``p``; see above."""
    return {number: max(study_weight * one ** (1 - p), 1e-9) for number, one in share.items()}


def slots_of_study(num_slots: int, study_weight: float, other_weights: Sequence[float], p: float) -> float:
    """How many slots the study has if it is one job among others."""
    power = 1 / (1 - p)
    own = study_weight**power
    return float(num_slots * own / (own + math.fsum(weight**power for weight in other_weights)))
