"""``POLLUX_TEST_ALL=1 make test`` also runs the repetitions that a usual run leaves out for time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

IS_THOROUGH = bool(os.environ.get("POLLUX_TEST_ALL"))
only_thorough = pytest.mark.skipif(not IS_THOROUGH, reason="one of several like it; all run with POLLUX_TEST_ALL=1")

_T = TypeVar("_T")


def some_of(values: Sequence[_T], number: int) -> Sequence[_T]:
    """All of them, or the first few."""
    return values if IS_THOROUGH else values[:number]
