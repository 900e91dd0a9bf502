"""Which trials keep a study's limits, and which of them no other one beats in all metrics. Pure.

The driver of a study asks, and what shows it. With one metric the best trial is one number; with several it is a front:
the trials for which no other one is at least as good in every metric and better in one (Pareto).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pollux.api.goal import Limit

Vector = tuple[float, ...]  # of one trial, each metric to be minimised


def read_values(names: Sequence[str], logged: Mapping[str, object]) -> dict[str, float]:
    """Those of ``names`` that were logged as numbers. JSON has NaN and infinities as texts."""
    return {name: value for name in names if (value := _number(logged.get(name))) is not None}


def _number(value: object) -> float | None:
    if value in ("nan", "inf", "-inf"):
        return float(str(value))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def breaks(limits: Sequence[Limit], values: Mapping[str, float]) -> bool:
    """Whether one is known to be broken."""
    return any(one.excess(values[one.name]) > 0 for one in limits if one.name in values)


def keeps(limits: Sequence[Limit], values: Mapping[str, float]) -> bool:
    """Whether all are known to be kept."""
    return all(one.name in values for one in limits) and not breaks(limits, values)


def front(vectors: Mapping[int, Vector]) -> tuple[int, ...]:
    """Trials that no other one beats, by number."""
    finite = {number: one for number, one in vectors.items() if all(map(math.isfinite, one))}
    return tuple(
        number for number, one in sorted(finite.items()) if not any(_beats(other, one) for other in finite.values())
    )


def _beats(one: Vector, other: Vector) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
