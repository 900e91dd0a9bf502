"""The marker ``long``: ``make test`` leaves such tests out for time, ``make test-all`` and CI run them too.

Long are repetitions, soak runs, and further variants of a slow scenario of which one runs every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

long = pytest.mark.long


def first_of(values: Sequence[Any], number: int = 1) -> list[Any]:
    """Parameters of which the first few run every time; the others are long."""
    return [*values[:number], *(pytest.param(value, marks=long) for value in values[number:])]
