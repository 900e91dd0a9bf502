"""``pollux decisions``: what was decided and why, in words."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Annotated

import typer

from pollux.api.codec import encode
from pollux.api.round import RoundSummary
from pollux.cli.connect import DataOption, JsonOption, ServerOption, connect, moment, print_json
from pollux.cli.job_table import plain
from pollux.client import Client
from pollux.reports import numbers

NOTHING = ("nothing changed",)


def round_lines(round_: RoundSummary) -> Iterator[str]:
    """``12:00:01  #7 submit, 3 ms  resnet gave ...``, and a line for each sentence after the first."""
    took = numbers.duration(round_.decision_s)
    gap = "" if round_.gap is None else f", gap {numbers.share(round_.gap)}"
    first = f"{moment(round_.at)}  #{round_.id} {plain(round_.trigger)}, {took}{gap}"
    yield first
    for sentence in round_.words:
        yield f"    {plain(sentence)}"


def lines(rounds: Iterable[RoundSummary]) -> Iterator[str]:
    """Rounds that changed nothing are counted, not told."""
    for is_quiet, group in itertools.groupby(rounds, key=lambda round_: round_.words == NOTHING):
        found = list(group)
        if is_quiet:
            yield f"{moment(found[-1].at)}  {numbers.plural(len(found), 'decision')} that changed nothing"
        else:
            yield from itertools.chain.from_iterable(map(round_lines, found))


def _follow(client: Client, last: int, as_json: bool) -> None:
    """Rounds after the one of this id, as they are made."""
    for message in client.events():
        if message.is_full and max((round_.id for round_ in message.rounds), default=0) < last:
            last = 0  # another server, or one that began anew
        for round_ in message.rounds:
            if round_.id <= last:
                continue  # told before, or again after a restart
            last = round_.id
            if as_json:
                typer.echo(json.dumps(encode(round_), allow_nan=False))
            elif round_.words != NOTHING:
                for line in round_lines(round_):
                    typer.echo(line)


def decisions(
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, max=10_000, help="The last so many.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with those to come, until Ctrl-C.")] = False,
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Say what was decided, and why: which job gave slots to which, which started, moved or waits, the gain.

    With --follow and --json each decision is a line.
    """
    with connect(data, server) as client:
        newest = client.rounds(limit=max(limit, 1))
        rounds = newest[len(newest) - limit :] if limit < len(newest) else newest
        if as_json and not follow:
            print_json({"rounds": rounds})
        else:
            told = (json.dumps(encode(round_), allow_nan=False) for round_ in rounds) if as_json else lines(rounds)
            for line in told:
                typer.echo(line)
        if follow:
            _follow(client, newest[-1].id if newest else 0, as_json)
        elif not rounds and not as_json:
            typer.echo("nothing was decided yet", err=True)
