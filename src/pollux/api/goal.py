"""What a study wants beside its first metric: further metrics, and limits that reported values are to keep.

The command line, a TOML file and Python write them as text; the server reads them. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pollux.api.codec import about
from pollux.errors import InvalidValueError

Direction = Literal["minimize", "maximize"]
MOST_METRICS = 8  # beyond a few, hardly any trial beats another one in all of them
MOST_LIMITS = 16
_DIRECTIONS: dict[str, Direction] = {"min": "minimize", "max": "maximize"}
_LIMIT = re.compile(r"\s*(.*?)\s*(<=|>=)\s*(.*?)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One more that the study improves."""

    name: str = field(metadata=about("What run.log reports.", min_length=1, max_length=256))
    direction: Direction = "minimize"

    @property
    def sign(self) -> float:
        """What makes the metric one to minimise."""
        return 1.0 if self.direction == "minimize" else -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A value that run.log reports is at most, or at least, so large. A trial that breaks it is not the best."""

    name: str = field(metadata=about(min_length=1, max_length=256))
    relation: Literal["<=", ">="]
    bound: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.bound):
            raise InvalidValueError(f"limit {self.name}{self.relation}{self.bound}; a finite number is needed")

    def excess(self, value: float) -> float:
        """By how much a value breaks it; at most 0 where it is kept. A value that is not a number breaks it."""
        found = value - self.bound if self.relation == "<=" else self.bound - value
        return math.inf if math.isnan(found) else found

    def __str__(self) -> str:
        return f"{self.name}{self.relation}{self.bound:g}"


def parse_metric(text: str) -> tuple[str, Direction | None]:
    """Of ``val_loss``, ``val_loss:min`` or ``accuracy:max``; None: it does not say.

    Raises:
        InvalidValueError: it can be neither of these.
    """
    name, colon, end = text.strip().rpartition(":")
    if not colon:
        name, end = end, ""
    if not name.strip() or (colon and end not in _DIRECTIONS):
        raise InvalidValueError(f"metric {text!r:.80}; NAME, NAME:min or NAME:max is needed")
    return name.strip(), _DIRECTIONS.get(end)


def parse_limit(text: str) -> Limit:
    """Of ``latency<=20`` or ``accuracy>=0.9``.

    Raises:
        InvalidValueError: it has another form.
    """
    found = _LIMIT.fullmatch(text)
    try:
        if found is not None and found[1]:
            return Limit(name=found[1], relation="<=" if found[2] == "<=" else ">=", bound=float(found[3]))
    except InvalidValueError:
        raise
    except ValueError:
        pass
    raise InvalidValueError(
        f"limit {text!r:.80}; NAME<=NUMBER or NAME>=NUMBER is needed, in quotes, as in 'latency<=20'"
    )


def watched(further: Sequence[Metric], limits: Sequence[Limit]) -> tuple[str, ...]:
    """The names of further metrics, and of what has a limit."""
    return tuple(dict.fromkeys([*(one.name for one in further), *(one.name for one in limits)]))


def check_goals(first: str, further: Sequence[Metric], limits: Sequence[Limit]) -> None:
    """Every metric once, and no two limits that no value keeps.

    Raises:
        InvalidValueError: says which one is wrong.
    """
    names = [first, *(one.name for one in further)]
    if len(names) > MOST_METRICS or len(limits) > MOST_LIMITS:
        raise InvalidValueError(
            f"{len(names)} metrics and {len(limits)} limits; at most {MOST_METRICS} and {MOST_LIMITS} are allowed"
        )
    if twice := [name for name in names if names.count(name) > 1]:
        raise InvalidValueError(f"the metric {twice[0]!r} is named twice; name each once")
    for one in limits:
        for other in limits:
            if one.name == other.name and one.relation == "<=" and other.relation == ">=" and one.bound < other.bound:
                raise InvalidValueError(f"no value keeps both {one} and {other}; drop one")
    if len(set(map(str, limits))) < len(limits):
        raise InvalidValueError(f"limits {', '.join(map(str, limits))}; name each once")
