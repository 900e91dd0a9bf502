"""``pollux team``: teams and what each is entitled to. For admins; every user may list them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from pollux.api.access import TeamChange, TeamSummary, format_slots
from pollux.cli.connect import DataOption, JsonOption, ServerOption, connect, print_json, say, show
from pollux.cli.job_table import plain
from pollux.cli.user import GuaranteeOption, LimitOption, WeightOption, slots_of

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Teams and what each is entitled to.")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the team.")]


@app.command("add")
def add(
    name: NameArgument,
    weight: WeightOption = None,
    guarantee: GuaranteeOption = None,
    limit: LimitOption = None,
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Add a team."""
    change = TeamChange(weight=weight, guarantee=slots_of(guarantee), limit=slots_of(limit))
    with connect(data, server) as client:
        _print(client.add_team(name, change), as_json)


@app.command("set")
def set_(
    name: NameArgument,
    weight: WeightOption = None,
    guarantee: GuaranteeOption = None,
    limit: LimitOption = None,
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Change a team's weight, guarantee or limit. What is not named stays; jobs follow with the next decision."""
    change = TeamChange(weight=weight, guarantee=slots_of(guarantee), limit=slots_of(limit))
    with connect(data, server) as client:
        _print(client.change_team(name, change), as_json)


@app.command("ls")
def ls(as_json: JsonOption = False, data: DataOption = None, server: ServerOption = None) -> None:
    """List teams and what each is entitled to."""
    with connect(data, server) as client:
        found = client.teams()
        warnings = [] if as_json else client.status().warnings
    if as_json:
        print_json({"teams": found})
    elif found:
        show(team_table(found))
        for words in warnings:
            say(f"warning: {plain(words)}")
    else:
        say("no teams; add one: pollux team add NAME")


@app.command("rm")
def rm(
    name: NameArgument,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Remove a team that has no users."""
    with connect(data, server) as client:
        client.remove_team(name)
    say(f"team {plain(name)} is removed")


def team_table(teams: Iterable[TeamSummary]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("team", "weight", "guarantee", "limit", "held", "wanted", "lent", "users"):
        table.add_column(title)
    for team in teams:
        table.add_row(
            Text(plain(team.name)),
            f"{team.weight:g}",
            Text(plain(format_slots(team.guarantee))),
            Text(plain(format_slots(team.limit))),
            str(team.num_held),
            str(team.num_wanted),
            Text(plain(", ".join(f"{count} to {other}" for other, count in team.lent_to.items()) or "-")),
            Text(plain(", ".join(team.users) or "-")),
        )
    return table


def _print(team: TeamSummary, as_json: bool) -> None:
    if as_json:
        print_json(team)
    else:
        show(team_table([team]))
