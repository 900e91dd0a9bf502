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
_LOG_NOISE = 0.8  # of the logarithm of a value at the end, seen from the beginning
_STEP = 0.05
_GRID = np.arange(0.0, 1.0 + _STEP / 2, _STEP)  # progress
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


def chances(
    curves: Mapping[int, Sequence[tuple[float, float]]],
    best: float | None = None,
    complete: Sequence[Sequence[tuple[float, float]]] = (),
) -> dict[int, float]:
    """By trial: the chance that it ends below all the others and below ``best``, the best end so far.

    A trial without any value has the chance of an average one: it has to be tried. Trials are not compared by what they
    have now, as some have trained longer: each is expected to fall from here on as those did that have come further,
    among them ``complete`` ones, which were trained to their end. Its own curve counts the more the longer it is.
    """
    if not curves:
        return {}
    numbers, scale = sorted(curves), _Scale([*curves.values(), *complete])
    draws = np.random.default_rng(_SEED).standard_normal((_NUM_DRAWS, len(numbers)))
    for column, number in enumerate(numbers):
        mean, deviation = scale.end_of(curves[number])
        draws[:, column] = mean + deviation * draws[:, column]
    winners = draws.argmin(axis=1)
    wins = draws.min(axis=1) < (math.inf if best is None else scale.read(best))
    found = {number: float(np.mean((winners == column) & wins)) for column, number in enumerate(numbers)}
    return {number: one if curves[number] else 1 / len(numbers) for number, one in found.items()}


class _Scale:
    """The curves of a study on one scale (logarithms where all values are positive), and how they fall together."""

    def __init__(self, curves: Sequence[Sequence[tuple[float, float]]]) -> None:
        known = [np.array(sorted(curve)) for curve in curves if curve]
        values = np.concatenate([one[:, 1] for one in known]) if known else np.ones(1)
        self.is_log = bool((values > 0).all())
        lasts = np.sort([self.read(float(one[-1, 1])) for one in known]) if known else np.zeros(1)
        good = lasts[: (len(lasts) + 1) // 2]  # the worse half may be worse by any amount; it says nothing of the best
        self._typical = float(np.mean(good))
        self._falls = self._typical_falls(known)
        total = float(self._falls.sum())
        spread = max(float(np.std(good)), 0.05 * abs(self._typical), 0.25 * abs(total), 1e-6)
        self._noise = _LOG_NOISE if self.is_log else spread

    def read(self, value: float) -> float:
        return math.log(max(value, 1e-300)) if self.is_log else value

    def _typical_falls(self, known: Sequence[Floats]) -> Floats:
        """Between each two points of the grid: what a curve fell there, the median of those that have been there."""
        steps = np.full((max(len(known), 1), len(_GRID) - 1), np.nan)
        for row, curve in enumerate(known):
            read = [self.read(float(value)) for value in curve[:, 1]]
            at = np.interp(_GRID, curve[:, 0], read)
            is_inside = (_GRID[:-1] >= curve[0, 0] - _STEP) & (_GRID[1:] <= curve[-1, 0] + _STEP / 2)
            steps[row] = np.where(is_inside, at[:-1] - at[1:], np.nan)
        falls = [float(np.median(one[~np.isnan(one)])) if not np.isnan(one).all() else 0.0 for one in steps.T]
        return np.array(falls)

    def end_of(self, points: Sequence[tuple[float, float]]) -> tuple[float, float]:
        """Mean and standard deviation of a trial's end, on this scale."""
        if not points:
            return self._typical, self._noise
        reached, last = min(max(max(points)[0], 1e-3), 1.0), self.read(points[-1][1])
        left = np.clip((_GRID[1:] - reached) / _STEP, 0.0, 1.0)  # of each step, what is ahead
        as_others = last - float(left @ self._falls)
        deviation = max(self._noise * math.sqrt(1 - reached), 1e-9)
        if len(points) < _LEAST_POINTS or reached >= 1.0:
            return as_others, deviation
        own = self.read(predict(points, 0.0)[0])
        return (1 - reached) * as_others + reached * min(own, last), deviation


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
