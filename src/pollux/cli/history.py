"""``pollux history``: jobs that are over, with their ends and exit codes, as ``sacct`` lists them."""

from __future__ import annotations

import csv
import sys
import time
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from pollux.api.job import FINAL_STATES, JobSummary
from pollux.api.request import parse_duration
from pollux.cli.connect import DataOption, JsonOption, ServerOption, connect, moment, print_json, show
from pollux.cli.job_table import STATE_STYLES, plain
from pollux.cli.listing import StateOption, check_states
from pollux.cli.terminal import for_file
from pollux.reports import numbers

_COLUMNS = ("name", "owner", "team", "state", "exit_code", "submitted_at", "started_at", "finished_at", "running_s")


def history(
    since: Annotated[str, typer.Option("--since", metavar="TIME", help="That ended within this time: 12h, 7d.")] = "1d",
    states: StateOption = None,
    user: Annotated[str | None, typer.Option("--user", metavar="NAME", help="Only this owner's.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV; times are seconds since 1970.")] = False,
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """List jobs that are over, the last one first: when they began and ended, how, with which exit code."""
    check_states(states or ())
    first = time.time() - parse_duration(since)
    with connect(data, server) as client:
        found = [job.last_seen for job in client.jobs(states or sorted(FINAL_STATES), newest_first=True)]
    views = [view for view in found if view is not None and (view.finished_at or 0.0) >= first]
    views = [view for view in views if user in (None, view.owner)]
    views.sort(key=lambda view: -(view.finished_at or 0.0))
    if as_json:
        print_json({"jobs": views})
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow((*_COLUMNS, "slot_s", "reason"))
        for view in views:
            writer.writerow(
                (*(getattr(view, name) for name in _COLUMNS), view.attained_slot_s, for_file(view.reason, sys.stdout))
            )
    else:
        show(_table(views))


def _table(views: list[JobSummary]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("job", "owner", "state", "exit", "started", "ended", "ran", "slot-hours", "reason"):
        table.add_column(title)
    for view in views:
        table.add_row(
            Text(plain(view.name)),
            Text(plain(view.owner)),
            Text(view.state, style=STATE_STYLES.get(view.state, "")),
            "-" if view.exit_code is None else str(view.exit_code),
            moment(view.started_at),
            moment(view.finished_at),
            numbers.duration(view.running_s),
            f"{(view.attained_slot_s or 0.0) / 3600:.2f}",
            Text(plain("" if view.state == "succeeded" else view.reason[:80])),
        )
    return table
