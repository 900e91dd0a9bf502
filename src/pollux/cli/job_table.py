"""The table of jobs, as ``ls``, ``top`` and ``demo`` show it.

What a job wrote into its name or reason is shown as text, never as markup, and without characters that move the cursor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from rich.table import Table
from rich.text import Text

from pollux.api.job import FINAL_STATES, JobSummary
from pollux.reports import numbers

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


def plain(value: object) -> str:
    """One line of it, without control characters."""
    return "".join(character if character.isprintable() else " " for character in str(value))


def short_reason(view: JobSummary) -> str:
    """Its first line, without the job's name before it: every table and sentence has that already."""
    return plain((view.reason or "").split("\n", 1)[0].removeprefix(f"{view.name}: "))


def age_s(view: JobSummary, now: float) -> float:
    """Since it was submitted, until it ended."""
    end = view.finished_at
    return max((now if end is None else end) - view.submitted_at, 0.0)


def replicas(view: JobSummary) -> str:
    """How many it has, or is being brought to."""
    return str(view.num_replicas or numbers.UNKNOWN)


def batch(view: JobSummary) -> str:
    """The total batch and what it is made of, where that is more than one part: ``512 = 4×64×2``."""
    total = view.total_batch
    if total is None:
        return numbers.UNKNOWN
    parts = [view.num_replicas or 0, view.device_batch or 0, (view.accum_steps or 0) + 1]
    # After a resize the next report is yet to come; parts that do not make the total would only confuse.
    is_whole = parts[0] * parts[1] * parts[2] == total
    shown = "×".join(str(part) for part in parts if part != 1)
    return f"{total} = {shown}" if is_whole and "×" in shown else str(total)


def reason(view: JobSummary) -> str:
    """Why it is as it is: what holds it up, first of all; nothing for a job that just runs."""
    note = view.note or view.phase
    if note or view.state in ("running", "succeeded"):
        return plain(note)
    return short_reason(view)


def deadline(view: JobSummary, now: float) -> str:
    """Time to it, or by how much it was missed."""
    if view.deadline_at is None:
        return ""
    left_s = view.deadline_at - (now if view.finished_at is None else view.finished_at)
    if view.finished_at is not None and left_s >= 0:
        return "met"
    return f"in {numbers.duration(left_s)}" if left_s >= 0 else f"{numbers.duration(-left_s)} late"


def metric(view: JobSummary) -> str:
    """The number that it logs, with its name: ``loss 0.31``."""
    if not view.metric_name:
        return numbers.UNKNOWN
    value = view.metric if isinstance(view.metric, str) else numbers.number(view.metric)
    return f"{plain(view.metric_name)[:_LONGEST_METRIC]} {value}"


_Column = tuple[str, Literal["left", "right"], Callable[[JobSummary, float], str]]
COLUMNS: tuple[_Column, ...] = (
    ("replicas", "right", lambda view, now: replicas(view)),
    ("batch", "right", lambda view, now: batch(view)),
    ("noise scale", "right", lambda view, now: numbers.number(view.noise_scale)),
    ("efficiency", "right", lambda view, now: numbers.share(view.efficiency)),
    ("goodput", "right", lambda view, now: numbers.rate(view.goodput)),
    ("progress", "right", lambda view, now: numbers.share(view.progress)),
    ("left", "right", lambda view, now: numbers.duration(view.remaining_s)),
    ("age", "right", lambda view, now: numbers.duration(age_s(view, now))),
)
_DEADLINE: _Column = ("deadline", "right", lambda view, now: deadline(view, now))
_METRIC: _Column = ("metric", "right", lambda view, now: metric(view))
_LEFT_OUT_IN_TURN = ("noise scale", "efficiency", "metric", "age", "batch", "left", "goodput")  # in a narrow terminal
_LONGEST_METRIC = 16
_SHORTEST_NAME, _SHORTEST_REASON = 16, 12
_GAP = 2


def job_table(
    views: Iterable[JobSummary],
    now: float,
    *,
    title: str | None = None,
    width: int | None = None,
    marks: Mapping[str, Text] | None = None,
    chosen: str | None = None,
) -> Table:
    """A row per view, in their order.

    ``now`` is the server's time in seconds since 1970; ``width`` that of the terminal, where there is one; ``marks``
    stand before the names of jobs that have one; ``chosen`` is the job whose row stands out.
    """
    views = list(views)
    columns = _fitting(views, now, width, has_marks=marks is not None)
    has_reasons = width is None or any(map(reason, views))
    table = Table(box=None, pad_edge=False, title=title and Text(title), title_justify="left", header_style="bold")
    if marks is not None:
        table.add_column("", no_wrap=True, width=1)
    table.add_column("job")
    table.add_column("state", no_wrap=True)
    for name, justify, _ in columns:
        table.add_column(name, justify=justify, no_wrap=True)
    if has_reasons:
        table.add_column("reason")
    for view in views:
        state = plain(view.state)
        name = str(view.name)
        table.add_row(
            *(() if marks is None else (marks.get(name, Text(" ")),)),
            _cut(name),
            Text(state, style=STATE_STYLES.get(state, "")),
            *(Text(cell(view, now)) for _, _, cell in columns),
            *((_cut(reason(view)),) if has_reasons else ()),
            style="reverse" if name == chosen else "dim" if state in FINAL_STATES - {"failed"} else None,
        )
    return table


def _fitting(views: Sequence[JobSummary], now: float, width: int | None, *, has_marks: bool) -> list[_Column]:
    """As many columns as there is room for beside names and reasons, which give way to a certain point."""
    columns = list(COLUMNS)
    if any(view.metric_name for view in views):
        columns.insert(-1, _METRIC)  # before the age
    if any(view.deadline_at is not None for view in views):
        columns.append(_DEADLINE)
    if width is None:
        return columns

    def widest(head: str, cells: Iterable[str]) -> int:
        return max(len(head), *map(len, cells), 0) + _GAP

    names = min(widest("job", (plain(view.name) for view in views)), _SHORTEST_NAME + _GAP)
    has_reasons = any(map(reason, views))
    reasons = min(widest("reason", map(reason, views)), _SHORTEST_REASON + _GAP) if has_reasons else 0
    room = width - names - reasons - widest("state", (plain(view.state) for view in views)) - (1 + _GAP) * has_marks
    widths = {head: widest(head, (cell(view, now) for view in views)) for head, _, cell in columns}
    for head in _LEFT_OUT_IN_TURN:
        if sum(widths[column[0]] for column in columns) <= room:
            break
        columns = [column for column in columns if column[0] != head]
    return columns


def _cut(value: object) -> Text:
    """Names and reasons give way where the terminal is too narrow; figures are never cut."""
    return Text(plain(value), no_wrap=True, overflow="ellipsis")
