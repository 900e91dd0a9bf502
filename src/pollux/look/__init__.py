"""One look for everything that is seen in a browser: reports and dashboard share colours, cards, tables and figures.

Imports ``errors`` alone, beside plotly, which no other module needs: its JavaScript comes out of the installed package.
Reports put the text into their page; the server hands it out as files.
"""

from __future__ import annotations

import functools
from importlib.resources import files
from importlib.util import find_spec

from pollux.errors import PolluxError

__all__ = ["plotly_js", "require_plotly", "script", "style"]


@functools.cache
def style() -> str:
    """The style sheet. ``data-theme="light|dark"`` on ``<html>`` overrides what the system prefers."""
    return (files(__name__) / "look.css").read_text(encoding="utf-8")


@functools.cache
def script() -> str:
    """``window.Look``: figures of plotly's in the look's colours. A plain script, not a module."""
    return (files(__name__) / "figures.js").read_text(encoding="utf-8")


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
