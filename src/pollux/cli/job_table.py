"""The table of jobs, as ``ls``, ``top`` and ``demo`` show it. Takes job views of the HTTP interface and draws them.

What a job wrote into its name or reason is shown as text, never as markup, and without characters that move the cursor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from pollux.cli import figures

View = Mapping[str, Any]  # a JobView of the HTTP interface

STATE_STYLES = {
    "pending": "yellow",
    "starting": "cyan",
    "running": "green",
    "resizing": "magenta",
    "stopping": "cyan",
    "succeeded": "dim green",
    "failed": "bold red",
    "cancelled": "dim",
}
FINAL_STATES = frozenset({"succeeded", "failed", "cancelled"})


def plain(value: object) -> str:
    """One line of it, without control characters."""
    return "".join(character if character.isprintable() else " " for character in str(value))


def age_s(view: View, now: float) -> float:
    """Since it was submitted, until it ended."""
    end = view.get("finished_at")
    return max(float(now if end is None else end) - float(view["submitted_at"]), 0.0)


def replicas(view: View) -> str:
    """How many it has, or is being brought to."""
    return str(view.get("num_replicas") or figures.UNKNOWN)


def batch(view: View) -> str:
    """The total batch and what it is made of, where that is more than one part: ``512 = 4×64×2``."""
    total = view.get("total_batch")
    if total is None:
        return figures.UNKNOWN
    parts = [view.get("num_replicas") or 0, view.get("device_batch") or 0, (view.get("accum_steps") or 0) + 1]
    # After a resize the next report is yet to come; parts that do not make the total would only confuse.
    is_whole = parts[0] * parts[1] * parts[2] == total
    shown = "×".join(str(part) for part in parts if part != 1)
    return f"{total} = {shown}" if is_whole and "×" in shown else str(total)


def reason(view: View) -> str:
    """Why it is as it is: what holds it up, first of all; nothing for a job that just runs."""
    note = view.get("note") or ""
    if note or view["state"] in ("running", "succeeded"):
        return plain(note)
    return plain((view.get("reason") or "").split("\n", 1)[0])


_Column = tuple[str, Literal["left", "right"], Callable[[View, float], str]]
COLUMNS: tuple[_Column, ...] = (
    ("replicas", "right", lambda view, now: replicas(view)),
    ("batch", "right", lambda view, now: batch(view)),
    ("noise scale", "right", lambda view, now: figures.number(view.get("noise_scale"))),
    ("efficiency", "right", lambda view, now: figures.share(view.get("efficiency"))),
    ("goodput", "right", lambda view, now: figures.rate(view.get("goodput"))),
    ("progress", "right", lambda view, now: figures.share(view.get("progress"))),
    ("age", "right", lambda view, now: figures.duration(age_s(view, now))),
)
NARROW = 100  # columns; below, there is no room for the two that are least missed
_LEFT_OUT_IF_NARROW = ("noise scale", "efficiency")


def job_table(views: Iterable[View], now: float, *, title: str | None = None, width: int | None = None) -> Table:
    """A row per view, in their order.

    ``now`` is the server's time in seconds since 1970; ``width`` that of the terminal, where there is one.
    """
    is_narrow = width is not None and width < NARROW
    columns = [column for column in COLUMNS if not (is_narrow and column[0] in _LEFT_OUT_IF_NARROW)]
    table = Table(box=None, pad_edge=False, title=title and Text(title), title_justify="left", header_style="bold")
    table.add_column("job")
    table.add_column("state", no_wrap=True)
    for name, justify, _ in columns:
        table.add_column(name, justify=justify, no_wrap=True)
    table.add_column("reason")
    for view in views:
        state = plain(view["state"])
        table.add_row(
            _cut(view["name"]),
            Text(state, style=STATE_STYLES.get(state, "")),
            *(Text(cell(view, now)) for _, _, cell in columns),
            _cut(reason(view)),
            style="dim" if state in FINAL_STATES - {"failed"} else None,
        )
    return table


def _cut(value: object) -> Text:
    """Names and reasons give way where the terminal is too narrow; figures are never cut."""
    return Text(plain(value), no_wrap=True, overflow="ellipsis")
