"""Number formats of report pages; the commands' tests cover the rest."""

from __future__ import annotations

import math

import pytest

from pollux.reports.numbers import duration, rounded


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (95, "1m35s"), (600, "10m00s"), (7199, "1h59m"), (7200, "2h00m"), (400_000, "4d15h"), (0.002, "2ms")],
)
def test_durations_have_at_most_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_figures_get_five_digits_and_no_infinity() -> None:
    assert rounded([1 / 3, 12_345.67, math.inf, math.nan]) == [0.33333, 12_346.0, None, None]
