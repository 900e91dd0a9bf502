"""``pollux usage``: slot-hours, GPU-hours, goodput-hours and cost, by user, team, job and month."""

from __future__ import annotations

import csv
import sys
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from pollux.api.usage import USAGE_KEYS, UsageKey, UsageRow
from pollux.cli.connect import DataOption, JsonOption, ServerOption, connect, print_json, show
from pollux.cli.job_table import plain
from pollux.errors import UnknownNameError

_AMOUNTS = ("slot_hours", "gpu_hours", "goodput_hours", "cost")


def usage(
    by: Annotated[
        list[str] | None,
        typer.Option("--by", metavar="|".join(USAGE_KEYS), help="Sum by these; by team and user if left out."),
    ] = None,
    since: Annotated[str | None, typer.Option("--since", metavar="DAY", help="From this day on: 2026-11-01.")] = None,
    until: Annotated[str | None, typer.Option("--until", metavar="DAY", help="Until this day, it included.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Show usage: slot-hours, GPU-hours, goodput-hours and cost."""
    keys = by or ["team", "user"]
    for key in keys:
        if key not in USAGE_KEYS:
            raise UnknownNameError("sum by", key, USAGE_KEYS)
    with connect(data, server) as client:
        rows = client.usage(keys, since, until)
    shown = [key for key in USAGE_KEYS if key in keys]
    if as_json:
        print_json({"rows": rows})
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow((*shown, *_AMOUNTS))
        for row in rows:
            writer.writerow((*(_key(row, key) for key in shown), *(f"{getattr(row, one):.6f}" for one in _AMOUNTS)))
    else:
        show(usage_table(rows, shown))


def usage_table(rows: list[UsageRow], keys: list[UsageKey]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for key in keys:
        table.add_column(key)
    for title in ("slot-hours", "GPU-hours", "goodput-hours", "cost"):
        table.add_column(title, justify="right")
    for row in rows:
        amounts = (f"{getattr(row, one):,.2f}" for one in _AMOUNTS)
        table.add_row(*(Text(plain(_key(row, key) or "-")) for key in keys), *amounts)
    return table


def _key(row: UsageRow, key: UsageKey) -> str:
    return str(getattr(row, key) or "")
