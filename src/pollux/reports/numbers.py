"""How durations, counts, rates and shares are written in tables, sentences and report pages.

All commands, report pages and benchmarks use these functions. It imports nothing of ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

UNKNOWN = "-"
_UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
_MULTIPLES = ("", "k", "M", "G", "T", "P")


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def duration(seconds: float | None) -> str:
    """At most two units: ``85µs``, ``1.3ms``, ``0.42s``, ``7.5s``, ``1m05s``, ``2h03m``, ``3d04h``; below 1µs 0."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 1e-6:
        return "0s"  # below 0 by clocks of two machines
    if 0 < seconds < 0.0995:
        return f"{number(seconds * 1e3)}ms" if seconds >= 0.9995e-3 else f"{number(seconds * 1e6)}µs"
    if seconds < 9.95:
        return f"{seconds:.2g}s" if seconds < 0.995 else f"{seconds:.1f}s"
    whole = round(seconds)
    large, small = next(
        ((_UNITS[n], _UNITS[n + 1]) for n in range(3) if whole >= _UNITS[n][1]),
        (_UNITS[3], None),
    )
    if small is None:
        return f"{whole}s"
    return f"{whole // large[1]}{large[0]}{whole % large[1] // small[1]:02}{small[0]}"


def number(value: float | None) -> str:
    """Three digits that matter: ``0.0123``, ``7.5``, ``384``, ``12.8k``, ``3.2M``."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    power = 0
    # Up to 9999 is written out; beyond, thousands, millions, ...
    while abs(value) >= (999.5 if power else 9999.5) and power < len(_MULTIPLES) - 1:
        value, power = value / 1000, power + 1
    if abs(value) >= 99.95 or value == int(value):
        return f"{value:.0f}{_MULTIPLES[power]}"
    return f"{float(f'{value:.3g}'):g}{_MULTIPLES[power]}"


def with_error(value: float | None, error: float | None) -> str:
    """``120 ± 15``; without the error where that is not known."""
    return f"{number(value)} ± {number(error)}" if _is_number(value) and _is_number(error) else number(value)


def rate(per_second: float | None) -> str:
    return f"{number(per_second)}/s" if _is_number(per_second) else UNKNOWN


def share(value: float | None) -> str:
    """``0.0071`` is ``0.7%``; the hundred and the zero need no decimals."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:.0%}" if value == 0 or value >= 0.0995 else f"{value:.1%}"


def size(num_bytes: float | None) -> str:
    return f"{number(num_bytes)}B" if _is_number(num_bytes) else UNKNOWN


def rounded(values: Sequence[float]) -> list[float | None]:
    """Five digits of each, for figures; None where a value is not finite, which JSON cannot say."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    return f"{count} {noun if count == 1 else nouns or noun + 's'}"
