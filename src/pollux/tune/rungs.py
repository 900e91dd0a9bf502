"""Which trials are pruned, and when: by their metric at equal progress.

Progress is that of :mod:`pollux.train`, which does not depend on the batch: trials of different batch size, number of
replicas and speed are compared after they have learnt for equally long. Pure; the driver and the simulator call it.
Values are to be minimised here: the driver changes the sign where a metric is to be maximised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pollux.tune.promise import chances

Point = tuple[float, float]  # progress 0..1, value
ROUNDING = 1e-6
# A rung counts as reached at this share of it: a pass in which larger batches were tried ends a little early, and
# waiting for the end of the next one would cost as much again.
NEAR = 0.85
LAST_RUNG = 0.95  # pruning later than this saves nothing
NUM_BRACKETS = 3
LEAST_CHANCE = 0.02  # of ending as the best
NUM_STARTUP = 4  # trials that must be past a point before a median means anything


@dataclass(frozen=True, slots=True)
class Curve:
    """A trial as a pruner sees it. ``points`` in order of arrival; ``num_decided`` rungs were looked at before."""

    number: int
    points: tuple[Point, ...]
    num_decided: int = 0
    is_live: bool = True

    @property
    def progress(self) -> float:
        return max((progress for progress, _ in self.points), default=0.0)

    def at(self, rung: float) -> float | None:
        """The first value near or past this progress: it stays the same when a crashed trial repeats a part."""
        return next((value for progress, value in self.points if progress >= NEAR * rung), None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """``num_decided`` rungs have been looked at by now; a ``reason`` says why the trial is pruned."""

    num_decided: int
    reason: str = ""


class Pruner(Protocol):
    @property
    def rungs(self) -> tuple[float, ...]:
        """Progress at which trials are judged, rising."""

    def judge(self, trial: Curve, others: Sequence[Curve]) -> Verdict: ...


def geometric(first: float, eta: int) -> tuple[float, ...]:
    """``first``, and each ``eta`` times the one before."""
    count = 1 + max(0, math.floor(math.log(LAST_RUNG / first) / math.log(eta) + ROUNDING))
    return tuple(first * eta**index for index in range(count) if first * eta**index <= LAST_RUNG)


class Asha:
    """Asynchronous successive halving: at each rung the best 1/eta of those that came so far go on (Li et al., 2018).

    ``num_brackets`` above 1 is Hyperband: trials take turns in brackets, and bracket b is first judged at rung b.
    """

    def __init__(self, first: float, eta: int, num_brackets: int = 1) -> None:
        self.rungs, self._eta = geometric(first, eta), eta
        self._num_brackets = min(num_brackets, len(self.rungs))

    def judge(self, trial: Curve, others: Sequence[Curve]) -> Verdict:
        bracket = trial.number % self._num_brackets
        peers = [one for one in others if one.number % self._num_brackets == bracket and one.number != trial.number]
        for index in range(trial.num_decided, len(self.rungs)):
            value = trial.at(self.rungs[index])
            if value is None:
                return Verdict(index)
            if index < bracket:
                continue
            seen = [other for peer in peers if (other := peer.at(self.rungs[index])) is not None]
            num_kept = max((len(seen) + 1) // self._eta, 1)
            rank = 1 + sum(other < value for other in seen)
            if rank > num_kept:
                kept = "only the best goes on" if num_kept == 1 else f"the best {num_kept} go on"
                text = f"number {rank} of {len(seen) + 1} at {100 * self.rungs[index]:.0f} % of the work; {kept}"
                return Verdict(index + 1, text)
        return Verdict(len(self.rungs))


class Median:
    """Prunes a trial whose best value is worse than the median of the others' best at the same progress."""

    def __init__(self, first: float) -> None:
        self.rungs = tuple(float(one) for one in np.arange(first, LAST_RUNG + ROUNDING, 0.1))

    def judge(self, trial: Curve, others: Sequence[Curve]) -> Verdict:
        for index in range(trial.num_decided, len(self.rungs)):
            rung = self.rungs[index]
            if trial.at(rung) is None:
                return Verdict(index)
            best = _best_until(trial, rung)
            seen = [_best_until(one, rung) for one in others if one.number != trial.number and one.at(rung) is not None]
            if len(seen) >= NUM_STARTUP and best > (median := float(np.median(seen))):
                return Verdict(index + 1, f"worse than the median of {len(seen)} trials ({median:.4g}) at {rung:.0%}")
        return Verdict(len(self.rungs))


def _best_until(trial: Curve, rung: float) -> float:
    """The best value up to the first one at or past ``rung``."""
    best = math.inf
    for progress, value in trial.points:
        best = min(best, value)
        if progress >= NEAR * rung:
            break
    return best


class Extrapolation:
    """Prunes a trial whose learning curve says that it will hardly end as the best."""

    def __init__(self, first: float) -> None:
        self.rungs = tuple(float(one) for one in np.arange(first, LAST_RUNG + ROUNDING, 0.1))

    def judge(self, trial: Curve, others: Sequence[Curve]) -> Verdict:
        reached = sum(1 for rung in self.rungs if trial.at(rung) is not None)
        if reached <= trial.num_decided:
            return Verdict(trial.num_decided)
        past = [one for one in others if one.number != trial.number and one.progress >= trial.progress - ROUNDING]
        if len(past) < NUM_STARTUP:
            return Verdict(reached)
        points = {one.number: one.points for one in (*past, trial)}
        chance = chances(points)[trial.number] * len(points)  # 1: an average one
        if chance < LEAST_CHANCE:
            return Verdict(
                reached, f"its learning curve says that it ends as the best with {chance:.1%} of a fair chance"
            )
        return Verdict(reached)


class Never:
    """Prunes nothing."""

    rungs: tuple[float, ...] = ()

    def judge(self, trial: Curve, others: Sequence[Curve]) -> Verdict:
        return Verdict(0)


def make_pruner(name: str, first: float, eta: int) -> Pruner:
    """``name``: one of :data:`pollux.api.study.PrunerName`."""
    from pollux.tune.population import Population

    made: dict[str, Pruner] = {
        "asha": Asha(first, eta),
        "hyperband": Asha(first, eta, NUM_BRACKETS),
        "median": Median(first),
        "curve": Extrapolation(first),
        "pbt": Population(first),
        "none": Never(),
    }
    return made[name]
