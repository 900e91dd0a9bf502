"""The style sheet, the script that draws figures, and plotly.js: reports and dashboard look alike.

Report pages embed these texts, and the server serves them as files. It imports ``errors`` alone, so the server does
not load the simulator. No other module imports plotly.
"""

from __future__ import annotations

import functools
from importlib.resources import files
from importlib.util import find_spec

from pollux.errors import PolluxError

__all__ = ["plotly_js", "require_plotly", "script", "style"]


@functools.cache
def style() -> str:
    """The style sheet. ``data-theme="light|dark"`` on ``<html>`` overrides the system's preference."""
    return (files("pollux.reports") / "look.css").read_text(encoding="utf-8")


@functools.cache
def script() -> str:
    """``window.Look``, which draws plotly figures in the style sheet's colours. A plain script, not a module."""
    return (files("pollux.reports") / "figures.js").read_text(encoding="utf-8")


def plotly_js() -> str:
    """plotly.js, some four megabytes.

    Raises:
        PolluxError: plotly is not installed.
    """
    require_plotly()
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def require_plotly() -> None:
    """Say now, not after a long simulation, that figures cannot be drawn.

    Raises:
        PolluxError: plotly is not installed.
    """
    if find_spec("plotly") is None:
        raise PolluxError('an HTML report needs plotly, which is not installed: pip install "pollux-scheduler[cli]"')
