"""``pollux cancel``, ``hold``, ``release``, ``update`` and ``requeue``: operations on jobs, many at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from pollux.api.job import JobAction, JobUpdate
from pollux.api.request import parse_duration
from pollux.cli.connect import DataOption, JobArgument, JsonOption, ServerOption, complete_job, connect, print_json, say
from pollux.cli.job_table import plain
from pollux.errors import InvalidValueError
from pollux.reports import numbers

_NUM_NAMED = 10

PatternsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="JOB", help="Names, patterns ('sweep-*'), an array's name.", autocompletion=complete_job),
]
AllOption = Annotated[bool, typer.Option("--all", help="All jobs that are not over; of a member, the own ones.")]


def cancel(
    names: PatternsArgument = None,
    is_all: AllOption = False,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Shown with the job.")] = "",
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Cancel jobs: they receive SIGTERM, checkpoint and leave, and are killed if they do not."""
    _act("cancel", names, is_all, reason, as_json, data, server)


def hold(
    names: PatternsArgument = None,
    is_all: AllOption = False,
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Hold jobs: they get no slots until release. Those that run checkpoint and leave."""
    _act("hold", names, is_all, "", as_json, data, server)


def release(
    names: PatternsArgument = None,
    is_all: AllOption = False,
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Release jobs that are held."""
    _act("release", names, is_all, "", as_json, data, server)


_DONE: dict[str, tuple[str, str]] = {
    "cancel": ("is being cancelled", "are being cancelled"),
    "hold": ("is held", "are held"),
    "release": ("is released", "are released"),
    "update": ("is changed", "are changed"),
}


def _act(
    action: JobAction,
    names: list[str] | None,
    is_all: bool,
    reason: str,
    as_json: bool,
    data: Path | None,
    server: str | None,
) -> None:
    chosen = _chosen(action, names, is_all)
    with connect(data, server, timeout_s=60.0) as client:
        done = client.act(action, chosen, is_all=is_all, reason=reason)
        over = _over(client, chosen, done)
    if as_json:
        print_json({"names": done})
    else:
        _say_done(action, done, over)


def _chosen(action: str, names: list[str] | None, is_all: bool) -> list[str]:
    if bool(names) == is_all:
        raise InvalidValueError(f"{action}: name jobs or patterns, or say --all; one of the two")
    return names or []


def _over(client: object, chosen: Sequence[str], done: Sequence[str]) -> list[str]:
    return [line for name in chosen if name not in done for line in _ended(client, name)]


def _say_done(action: str, done: Sequence[str], over: Sequence[str]) -> None:
    for line in over:
        say(line)
    if len(done) > _NUM_NAMED:
        say(f"{numbers.plural(len(done), 'job')} {_DONE[action][1]}")
    for name in done if len(done) <= _NUM_NAMED else ():
        say(f"{plain(name)} {_DONE[action][0]}")


def _ended(client: object, name: str) -> list[str]:
    """What to say of a job that was over already; nothing of a pattern."""
    from pollux.client import Client
    from pollux.errors import PolluxError

    assert isinstance(client, Client)
    try:
        view = client.job(name).last_seen
    except PolluxError:
        return []
    return [] if view is None or not view.is_over else [f"{plain(name)} had {view.state} already"]


def update(
    names: PatternsArgument = None,
    is_all: AllOption = False,
    weight: Annotated[float | None, typer.Option("--weight", metavar="W", help="Its weight.")] = None,
    priority: Annotated[int | None, typer.Option("--priority", metavar="N", help="Its priority.")] = None,
    min_replicas: Annotated[int | None, typer.Option("--min-replicas", metavar="N", help="Never fewer.")] = None,
    max_replicas: Annotated[int | None, typer.Option("--max-replicas", metavar="N", help="Never more.")] = None,
    time_limit: Annotated[str | None, typer.Option("--time-limit", metavar="TIME", help="In all: 2h30m.")] = None,
    max_restarts: Annotated[int | None, typer.Option("--max-restarts", metavar="N", help="After crashes.")] = None,
    deadline: Annotated[
        str | None, typer.Option("--deadline", metavar="TIME", help="After its submission: 6h, 1d.")
    ] = None,
    budget: Annotated[float | None, typer.Option("--budget", metavar="HOURS", help="Slot-hours in all.")] = None,
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Change jobs that are not over, from the next round on: weight, priority, bounds, limits, deadline, budget."""
    chosen = _chosen("update", names, is_all)
    change = JobUpdate(
        weight=weight,
        priority=priority,
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        time_limit_s=None if time_limit is None else parse_duration(time_limit),
        max_restarts=max_restarts,
        deadline_s=None if deadline is None else parse_duration(deadline),
        budget_hours=budget,
    )
    with connect(data, server, timeout_s=60.0) as client:
        done = client.update_all(chosen, change, is_all=is_all)
        over = _over(client, chosen, done)
        if not done:
            raise InvalidValueError(f"nothing was changed: {'; '.join(over) or 'no job is there that is not over'}")
        if as_json:
            print_json(client.job(chosen[0]).view() if done == chosen[:1] else {"names": done})
    if not as_json:
        _say_done("update", done, over)


def requeue(
    name: JobArgument, as_json: JsonOption = False, data: DataOption = None, server: ServerOption = None
) -> None:
    """Let a running job checkpoint and wait again; submit one that is over again. Print its name."""
    with connect(data, server) as client:
        view = client.requeue(name)
    if as_json:
        print_json(view)
    else:
        typer.echo(view.name)
