"""``pollux prune``: remove jobs that ended long ago."""

from __future__ import annotations

from typing import Annotated

import typer

from pollux.api.request import parse_duration
from pollux.cli.connect import DataOption, JsonOption, ServerOption, connect, print_json, say
from pollux.reports import numbers

PRUNE_TIMEOUT_S = 600.0  # thousands of folders take a while


def prune(
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="TIME", help="Since their end, as in 30d; there is no default.")
    ],
    is_dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
    is_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Remove jobs that ended long ago: rows, logs, checkpoints. Accounts of what they used stay. Print their names."""
    older_than_s = parse_duration(older_than)
    with connect(data, server, PRUNE_TIMEOUT_S) as client:
        done = client.prune(older_than_s, is_dry_run=is_dry_run)
    if is_json:
        print_json(done)
        return
    for name in done.names:
        typer.echo(name)
    would = "would be removed" if is_dry_run else "removed"
    say(
        f"{numbers.plural(len(done.names), 'job')} {would}: {numbers.plural(done.num_rows, 'row')}, "
        f"{numbers.size(done.log_bytes)} of logs, {numbers.size(done.checkpoint_bytes)} of checkpoints"
    )
    if done.num_kept:
        say(f"{numbers.plural(done.num_kept, 'job')} kept: others wait for them")
    if done.leaves_remote_checkpoints:
        say("checkpoints behind a URL (--storage) are left: remove them there")
