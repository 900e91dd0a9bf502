"""The space that a study searches: parameters, each a range or a choice, and how they are written as text.

The command line, a TOML file and Python make parameters; the server reads them. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pollux.api.codec import about
from pollux.errors import InvalidValueError

Value = bool | int | float | str
MAX_PARAMETERS = 100
MAX_CHOICES = 1000
MAX_WHOLE = 1 << 53  # a larger whole number is not kept exactly
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,62}")
_WHOLE = re.compile(r"[+-]?[0-9]{1,15}")
_LATE = re.compile(r"(.*) from ([0-9]*\.?[0-9]+)")
_FORM = "LOW..HIGH, log:LOW..HIGH, LOW..HIGH step STEP, or choice:A,B,C is needed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A parameter exists only where another one has this value."""

    name: str
    value: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One dimension of a space. ``low`` and ``high`` are both included; whole numbers if ``kind`` is ``int``."""

    name: str = field(metadata=about("As the script asks for it: run.param(name, default)."))
    kind: Literal["float", "int", "choice"]
    low: float | None = None
    high: float | None = None
    is_log: bool = field(default=False, metadata=about("Search the logarithm."))
    step: float | None = None
    choices: tuple[Value, ...] = ()
    when: Condition | None = field(default=None, metadata=about("It exists only where this holds."))
    late_from: float | None = field(
        default=None, metadata=about("It has no effect before this share of a trial's work, says the script.")
    )

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidValueError(
                f"parameter {self.name!r:.80}; a name of letters, digits, _ . and - is needed, the first a letter or _"
            )
        if self.late_from is not None and not 0 < self.late_from < 1:
            raise InvalidValueError(
                f"parameter {self.name!r}: from {self.late_from:g}; a share of a trial's work between 0 and 1 is needed"
            )
        if self.kind == "choice":
            self._check_choices()
        else:
            self._check_range()

    def _check_choices(self) -> None:
        if not self.choices or len(set(map(repr, self.choices))) < len(self.choices):
            raise InvalidValueError(
                f"parameter {self.name!r}: choices {list(self.choices)!r:.80}; at least one is needed, each once"
            )
        if len(self.choices) > MAX_CHOICES:
            raise InvalidValueError(
                f"parameter {self.name!r}: {len(self.choices)} choices; at most {MAX_CHOICES} are allowed"
            )
        if self.low is not None or self.high is not None or self.step is not None or self.is_log:
            raise InvalidValueError(f"parameter {self.name!r}; a choice has no low, high, step or log")

    def _check_range(self) -> None:
        if self.low is None or self.high is None:
            raise InvalidValueError(f"parameter {self.name!r}; a range needs low and high")
        low, high = float(self.low), float(self.high)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise InvalidValueError(f"parameter {self.name!r}: range {low}..{high}; two finite numbers are needed")
        if self.choices:
            raise InvalidValueError(f"parameter {self.name!r}; a range has no choices")
        if low >= high:
            raise InvalidValueError(
                f"parameter {self.name!r}: the range {low:g}..{high:g} is empty; the low end must be below the high end"
            )
        if self.is_log and low <= 0:
            raise InvalidValueError(
                f"parameter {self.name!r}: log:{low:g}..{high:g}; the low end must be above 0 for a logarithm"
            )
        if not math.isfinite(high - low):
            raise InvalidValueError(f"parameter {self.name!r}: the range {low:g}..{high:g} is too wide to draw from")
        if self.kind == "int" and not (low.is_integer() and high.is_integer() and max(-low, high) <= MAX_WHOLE):
            raise InvalidValueError(
                f"parameter {self.name!r}: range {low:g}..{high:g}; whole numbers up to 2^53 are needed"
            )
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)
        if self.step is not None and (self.is_log or not 0 < self.step <= high - low):
            raise InvalidValueError(
                f"parameter {self.name!r}: step {self.step:g}; a step above 0 that fits into the range is needed, "
                "and none beside log"
            )
        if self.kind == "int" and self.step is not None and not float(self.step).is_integer():
            raise InvalidValueError(
                f"parameter {self.name!r}: step {self.step:g} between whole numbers; a whole step is needed"
            )

    @property
    def num_values(self) -> float:
        """How many it has; infinite for real numbers without a step."""
        if self.kind == "choice":
            return len(self.choices)
        assert self.low is not None and self.high is not None
        step = self.step or (1.0 if self.kind == "int" else None)
        return math.inf if step is None else (self.high - self.low) / step + 1

    def __str__(self) -> str:
        """As it is written on the command line."""
        if self.kind == "choice":
            text = "choice:" + ",".join(map(value_text, self.choices))
        else:
            assert self.low is not None and self.high is not None
            shown = "{:.0f}..{:.0f}" if self.kind == "int" else "{!r}..{!r}"
            text = ("log:" if self.is_log else "") + shown.format(self.low, self.high)
            text += "" if self.step is None else f" step {self.step:g}"
        text += "" if self.late_from is None else f" from {self.late_from:g}"
        return f"{self.name}={text}" + (
            "" if self.when is None else f" if {self.when.name}={value_text(self.when.value)}"
        )


def parse_parameter(text: str) -> Parameter:
    """Of ``lr=log:1e-4..1e-1``, ``layers=1..8``, ``model=choice:small,large``, ``momentum=0.8..0.99 if opt=sgd``,
    ``decay=0.0..0.5 from 0.6`` (no effect in the first 60 % of the work).

    A range between two whole numbers has whole numbers; write 1.0..8.0 for others.

    Raises:
        InvalidValueError: it cannot be read, or nothing lies in the range.
    """
    name, equals, rest = text.partition("=")
    body, _, condition = rest.partition(" if ")
    late = _LATE.fullmatch(body.strip())
    body, late_from = (late[1], float(late[2])) if late else (body, None)
    body, _, step = body.partition(" step ")
    body = body.strip()
    if not equals or not body:
        raise InvalidValueError(f"space {text!r:.80}; NAME=RANGE is needed, as in lr=log:1e-4..1e-1")
    when = _condition(text, condition) if condition else None
    name = name.strip()
    if body.startswith("choice:"):
        words = tuple(parse_value(word.strip()) for word in body.removeprefix("choice:").split(",") if word.strip())
        return Parameter(name=name, kind="choice", choices=words, when=when, late_from=late_from)
    is_log = body.startswith("log:")
    low, dots, high = body.removeprefix("log:").partition("..")
    try:
        is_whole = bool(dots and _WHOLE.fullmatch(low.strip()) and _WHOLE.fullmatch(high.strip()))
        return Parameter(
            name=name,
            kind="int" if is_whole else "float",
            low=float(low),
            high=float(high),
            is_log=is_log,
            step=float(step) if step else None,
            when=when,
            late_from=late_from,
        )
    except InvalidValueError:
        raise
    except ValueError:
        raise InvalidValueError(f"space {text!r:.80}; {_FORM}") from None


def _condition(text: str, condition: str) -> Condition:
    name, equals, value = condition.partition("=")
    if not equals or not value.strip():
        raise InvalidValueError(f"space {text!r:.80}; NAME=VALUE is needed behind 'if'")
    return Condition(name=name.strip(), value=parse_value(value.strip()))


def parse_value(word: str) -> Value:
    """A number or true/false where it reads as one, else the word itself."""
    if word in ("true", "false"):
        return word == "true"
    if _WHOLE.fullmatch(word):
        return int(word)
    try:
        number = float(word)
    except ValueError:
        return word
    return number if math.isfinite(number) else word


def value_text(value: Value) -> str:
    """As :func:`parse_value` reads it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_value(parameter: Parameter, value: object) -> None:
    """Raises InvalidValueError: it does not lie in the parameter's range."""
    if parameter.kind == "choice":
        if not any(value == one and type(value) is type(one) for one in parameter.choices):
            allowed = ", ".join(map(value_text, parameter.choices))
            raise InvalidValueError(f"parameter {parameter.name!r}: {value!r:.80}; one of {allowed} is needed")
        return
    assert parameter.low is not None and parameter.high is not None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not parameter.low <= value <= parameter.high:  # type: ignore[operator]
        raise InvalidValueError(f"parameter {parameter.name!r}: {value!r:.80}; a number within {parameter} is needed")
    if parameter.kind == "int" and value != int(value):  # type: ignore[call-overload]
        raise InvalidValueError(f"parameter {parameter.name!r}: {value!r}; a whole number is needed")
    if parameter.step is not None:
        steps = (float(value) - parameter.low) / parameter.step  # type: ignore[arg-type]
        if abs(steps - round(steps)) > 1e-8:
            raise InvalidValueError(f"parameter {parameter.name!r}: {value!r} is none of the steps of {parameter}")


def check_space(space: Sequence[Parameter]) -> None:
    """Every name once; a condition names an earlier choice and one of its values.

    Raises:
        InvalidValueError: says which parameter is wrong.
    """
    if not 1 <= len(space) <= MAX_PARAMETERS:
        raise InvalidValueError(f"a space of {len(space)} parameters; 1 to {MAX_PARAMETERS} are needed")
    before: dict[str, Parameter] = {}
    for one in space:
        if one.name in before:
            raise InvalidValueError(f"parameter {one.name!r} is named twice; each needs a name of its own")
        if one.when is not None:
            other = before.get(one.when.name)
            if other is None or one.when.value not in other.choices:
                allowed = f"its values are {', '.join(map(str, other.choices))}" if other else "name an earlier choice"
                raise InvalidValueError(
                    f"parameter {one.name!r} depends on {one.when.name}={one.when.value}, which cannot be; {allowed}"
                )
            if other.late_from is not None and (one.late_from or 0.0) < other.late_from:
                raise InvalidValueError(
                    f"parameter {one.name!r} depends on {other.name!r}, which has no effect before "
                    f"{other.late_from:g} of the work; write 'from {other.late_from:g}' here too"
                )
        before[one.name] = one


def early_part(space: Sequence[Parameter], params: Mapping[str, Value]) -> dict[str, Value]:
    """Those that have an effect from the start."""
    late = {one.name for one in space if one.late_from is not None}
    return {name: value for name, value in params.items() if name not in late}


def exists(parameter: Parameter, chosen: Mapping[str, Value]) -> bool:
    """Whether a parameter has a value beside those chosen so far."""
    return parameter.when is None or chosen.get(parameter.when.name) == parameter.when.value
