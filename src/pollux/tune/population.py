"""Population-based training: which trial takes over the state of which other one, and with what parameters. Pure.

After each part of the work the trials among the worst quarter copy one of the best quarter (exploit) and go on from
there with parameters near those of the copied one (explore), as Jaderberg et al., 2017, do. Trials are compared at
equal progress with those that have come as far; values are to be minimised. The driver of a study calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pollux.api.space import Parameter, Value
from pollux.tune.rungs import LAST_RUNG, NEAR, ROUNDING, Curve, Verdict

EARLY = 1 - NEAR  # of the way between two rungs, by which one may be missed
QUANTILE = 4  # the worst of so many copy the best of so many
FACTOR = 1.25  # up or down, of a parameter that is searched by its logarithm
SHARE = 0.1  # of a range, up or down, for the others


class Population:
    """A pruner that prunes nothing: its rungs are when trials may copy others."""

    def __init__(self, every: float) -> None:
        self._every = every
        self.rungs = tuple(float(one) for one in np.arange(every, LAST_RUNG + ROUNDING, every))

    def judge(self, trial: Curve, others: Sequence[Curve]) -> Verdict:
        """Only the last rung that was reached counts: a trial that copied another may have passed several at once."""
        reached = sum(trial.progress >= rung - EARLY * self._every for rung in self.rungs)
        return Verdict(max(reached, trial.num_decided))


def find_source(
    trial: Curve, others: Sequence[Curve], rung: float, every: float, num_needed: int, chance: np.random.Generator
) -> int | None:
    """The trial that ``trial`` should copy at ``rung``; None if it is not among the worst, or there is none better.

    ``others`` may be over: they count, but only those that train have a state to give. ``num_needed`` must have come
    as far, this one included.
    """
    own = _value_at(trial, rung, every)
    if own is None:
        return None
    pairs = [(_value_at(one, rung, every), one) for one in others if one.number != trial.number]
    seen = sorted((value, one.number, one.is_live) for value, one in pairs if value is not None)
    if len(seen) + 1 < max(num_needed, 2):
        return None
    num_each = max((len(seen) + 1) // QUANTILE, 1)
    if sum(value > own for value, *_ in seen) >= num_each:
        return None
    best = [number for value, number, is_live in seen[:num_each] if is_live and value < own]
    return int(chance.choice(best)) if best else None


def _value_at(trial: Curve, rung: float, every: float) -> float | None:
    """The first value at about this progress. None where the trial jumped over it by a copy."""
    found = (value for progress, value in trial.points if rung - EARLY * every <= progress < rung + every)
    return next(found, None)


def is_explored(parameter: Parameter) -> bool:
    """Whether it changes while a trial trains. Whole numbers and choices may shape the model, and stay."""
    return parameter.kind == "float"


def are_alike(first: Mapping[str, Value], second: Mapping[str, Value], space: Sequence[Parameter]) -> bool:
    """Whether two trials differ in parameters only that may change while they train."""
    fixed = [one.name for one in space if not is_explored(one)]
    return first.keys() == second.keys() and all(first.get(name) == second.get(name) for name in fixed)


def explore(params: Mapping[str, Value], space: Sequence[Parameter], chance: np.random.Generator) -> dict[str, Value]:
    """Parameters near these, inside the space."""
    found = dict(params)
    for parameter in space:
        value = params.get(parameter.name)
        if not is_explored(parameter) or isinstance(value, str) or value is None:
            continue
        assert parameter.low is not None and parameter.high is not None
        direction = 1.0 if chance.random() < 0.5 else -1.0
        if parameter.is_log:
            moved = float(value) * FACTOR**direction
        else:
            moved = float(value) + direction * (parameter.step or SHARE * (parameter.high - parameter.low))
        found[parameter.name] = float(min(max(moved, parameter.low), parameter.high))
    return found
