"""Enough of PromQL to say which metrics and labels an expression names: a tokenizer, and what stands where.

Every name must be accounted for: as a function, a keyword, a label, or a metric. What is none of these is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

FUNCTIONS = {"histogram_quantile", "increase", "label_values", "rate", "time"}
AGGREGATIONS = {"avg", "max", "min", "sum"}
GROUPING = {"by", "without", "on", "ignoring"}  # a list of labels follows
WORDS = {"and", "or", "unless", "bool"}

_TOKEN = re.compile(
    r"""
    (?P<space>\s+)
  | (?P<text>"(?:[^"\\]|\\.)*")
  | (?P<duration>\[(?:\d+[smhdw]|\$__rate_interval|\$__range)\])
  | (?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)
  | (?P<name>[A-Za-z_:][A-Za-z0-9_:]*)
  | (?P<sign>=~|!~|!=|==|>=|<=|[=<>+\-*/%^(){},])
    """,
    re.VERBOSE,
)


@dataclass(slots=True)
class Named:
    """The metrics of an expression; with each, the labels that are said of it."""

    metrics: dict[str, set[str]] = field(default_factory=dict)
    grouped: set[str] = field(default_factory=set)  # labels that aggregations and vector matching name


def tokens(expression: str) -> list[tuple[str, str]]:
    found, position = [], 0
    while position < len(expression):
        match = _TOKEN.match(expression, position)
        if match is None:
            raise ValueError(f"not understood: {expression[position:]!r} in {expression!r}")
        if match.lastgroup != "space":
            found.append((str(match.lastgroup), match.group()))
        position = match.end()
    return found


def named(expression: str) -> Named:
    """Raises ValueError for what cannot be understood, or is not closed."""
    result, rest = Named(), tokens(expression)
    depth = 0
    while rest:
        kind, word = rest.pop(0)
        if word in "()":
            depth += 1 if word == "(" else -1
        if kind != "name":
            continue
        if word in GROUPING:
            result.grouped |= _list(rest)
        elif word == "label_values":  # of Grafana: a metric, and the label whose values are asked for
            _expect(rest, "(")
            metric = rest.pop(0)[1]
            result.metrics.setdefault(metric, set()).update(_matchers(rest))
            _expect(rest, ",")
            result.metrics[metric].add(rest.pop(0)[1])
            _expect(rest, ")")
        elif word in FUNCTIONS | AGGREGATIONS:
            if not rest or (rest[0][1] != "(" and rest[0][1] not in GROUPING):
                raise ValueError(f"{word} of nothing in {expression!r}")
        elif word not in WORDS:
            result.metrics.setdefault(word, set()).update(_matchers(rest))
    if depth != 0:
        raise ValueError(f"brackets do not match in {expression!r}")
    return result


def _matchers(rest: list[tuple[str, str]]) -> set[str]:
    """Labels in braces, if there are any."""
    labels: set[str] = set()
    if not rest or rest[0][1] != "{":
        return labels
    rest.pop(0)
    while True:
        kind, label = rest.pop(0)
        sign, text = rest.pop(0)[1], rest.pop(0)[0]
        if (kind, text) != ("name", "text") or sign not in ("=", "!=", "=~", "!~"):
            raise ValueError(f"no matcher: {label} {sign}")
        labels.add(label)
        if (word := rest.pop(0)[1]) == "}":
            return labels
        if word != ",":
            raise ValueError(f"{word} after a matcher")


def _list(rest: list[tuple[str, str]]) -> set[str]:
    _expect(rest, "(")
    labels = set()
    while True:
        kind, word = rest.pop(0)
        if kind != "name":
            raise ValueError(f"{word} in a list of labels")
        labels.add(word)
        if (word := rest.pop(0)[1]) == ")":
            return labels
        if word != ",":
            raise ValueError(f"{word} in a list of labels")


def _expect(rest: list[tuple[str, str]], sign: str) -> None:
    if not rest or rest.pop(0)[1] != sign:
        raise ValueError(f"{sign} is missing")
