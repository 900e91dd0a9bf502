"""What a job asks of its nodes' labels, and the labels of nodes: text read and checked once.

``zone=a``, ``zone=a,b`` (one of them), ``zone!=a``. :class:`~pollux.api.request.JobRequest` and the server's
configuration call it. A wrong text raises :class:`InvalidValueError`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pollux.errors import InvalidValueError

MAX_CONSTRAINTS = 32
_KEY = r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?"  # as Ray and Kubernetes have them
_VALUE = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_CONSTRAINT = re.compile(rf"({_KEY})\s*(!=|=|==)\s*({_VALUE}(?:,{_VALUE})*)")
_LABEL = re.compile(rf"(?:([A-Za-z0-9._-]+):)?({_KEY})=({_VALUE})")


class LabelTest(NamedTuple):
    """A label's key, and the values that it must have, or must not."""

    key: str
    values: tuple[str, ...]
    is_not: bool

    def __str__(self) -> str:
        return f"{self.key}{'!=' if self.is_not else '='}{','.join(self.values)}"


class Label(NamedTuple):
    """Of all nodes, or of the one that is named."""

    node: str
    key: str
    value: str


def parse_constraint(text: object) -> LabelTest:
    match = _CONSTRAINT.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise InvalidValueError(
            f"constraint {text!r:.80}; a label and its values are needed, as in zone=a, zone=a,b or zone!=c"
        )
    return LabelTest(match[1], tuple(dict.fromkeys(match[3].split(","))), match[2] == "!=")


def check_constraints(texts: Sequence[str]) -> tuple[str, ...]:
    """The same constraints, each once and written alike.

    Raises:
        InvalidValueError: one cannot be read, or two leave a label no value.
    """
    if len(texts) > MAX_CONSTRAINTS:
        raise InvalidValueError(f"{len(texts)} constraints; at most {MAX_CONSTRAINTS} are allowed")
    tests = list(dict.fromkeys(parse_constraint(text) for text in texts))
    for key in dict.fromkeys(test.key for test in tests if not test.is_not):
        mine = [test for test in tests if test.key == key]
        if not _left(mine):
            said = " and ".join(map(str, mine))
            raise InvalidValueError(f"constraints {said}; no value of {key} meets them together: drop one")
    return tuple(map(str, tests))


def _left(tests: Iterable[LabelTest]) -> set[str]:
    """Values that all tests of one key admit, of those that they name."""
    tests = list(tests)
    left = set(next(test.values for test in tests if not test.is_not))
    for test in tests:
        left = left - set(test.values) if test.is_not else left & set(test.values)
    return left


def parse_label(text: str) -> Label:
    """``zone=a`` for all nodes, ``node-1:zone=a`` for one."""
    match = _LABEL.fullmatch(text.strip())
    if match is None:
        raise InvalidValueError(f"label {text!r:.80}; KEY=VALUE or NODE:KEY=VALUE is needed, as in zone=a")
    return Label(match[1] or "", match[2], match[3])
