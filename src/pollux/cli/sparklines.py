"""Curves that are one line high, and the bar of how much of something is used."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

_LEVELS = "▁▂▃▄▅▆▇█"
_GAP = " "


def sparkline(values: Sequence[float | None], width: int, *, least: float | None = None) -> str:
    """The last of ``values`` at the right end; ``least`` is where the line's bottom is, if not at its lowest value.

    More values than there is room for are averaged piece by piece; what is unknown is a gap.
    """
    if width < 1 or not values:
        return ""
    means = _pieces(values, width)
    known = [value for value in means if value is not None]
    if not known:
        return _GAP * len(means)
    low, high = min(known) if least is None else min(least, *known), max(known)
    steps = (high - low) / (len(_LEVELS) - 1)
    flat = _LEVELS[0] if high <= (0.0 if least is None else least) else _LEVELS[len(_LEVELS) // 2]
    return "".join(
        _GAP if value is None else flat if steps <= 0 else _LEVELS[min(round((value - low) / steps), len(_LEVELS) - 1)]
        for value in means
    )


def _pieces(values: Sequence[float | None], width: int) -> list[float | None]:
    finite = [value if value is not None and math.isfinite(value) else None for value in values]
    if len(finite) <= width:
        return finite
    means: list[float | None] = []
    for piece in range(width):
        part = finite[piece * len(finite) // width : (piece + 1) * len(finite) // width]
        known = [value for value in part if value is not None]
        means.append(math.fsum(known) / len(known) if known else None)
    return means


def bar(share: float, width: int, style: str = "green") -> Text:
    """So much of ``width`` characters."""
    filled = min(max(round(width * share), 0), width)
    return Text().append("█" * filled, style=style).append("░" * (width - filled), style="dim")
