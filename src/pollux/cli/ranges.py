"""Ranges as they are typed, ``MIN..MAX``: nodes to scale between, a band of utility to keep to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pollux.errors import InvalidValueError

Number = TypeVar("Number", int, float)


def parse_range(option: str, text: str, kind: Callable[[str], Number], example: str) -> tuple[Number, Number]:
    """The two ends of ``text``; whether they make sense together is for others to say.

    Raises:
        InvalidValueError: it is not two numbers with two dots between them.
    """
    words = text.split("..")
    try:
        first, last = (kind(word.strip()) for word in words)
    except ValueError as error:
        raise InvalidValueError(f"{option} {text!r}; two numbers with two dots between, as in {example}") from error
    return first, last


def parse_nodes(text: str) -> tuple[int, int]:
    """Of ``--autoscale``."""
    return parse_range("--autoscale", text, int, "1..16")


def parse_band(text: str) -> tuple[float, float]:
    """Of ``--band``."""
    return parse_range("--band", text, float, "0.55..0.75")
