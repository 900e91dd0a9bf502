"""``pollux whoami``: whom the server takes the caller for."""

from __future__ import annotations

import typer

from pollux.cli.connect import DataOption, JsonOption, ServerOption, connect, print_json
from pollux.cli.job_table import plain


def whoami(as_json: JsonOption = False, data: DataOption = None, server: ServerOption = None) -> None:
    """Show who you are to the server: user, team and role."""
    with connect(data, server) as client:
        found = client.me()
    if as_json:
        print_json(found)
    else:
        typer.echo(f"{plain(found.user)}, {found.role}{f' of team {plain(found.team)}' if found.team else ''}")
