"""What all commands that talk to a server share: where it is, how its names are completed, how answers are printed.

Data goes to stdout, everything else to stderr; errors are left to the main command, which prints them in one line.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, RenderableType

from pollux.api.codec import encode

if TYPE_CHECKING:  # a simulation has these options, too, and mostly no server to ask
    from pollux.client import Client

_SERVER = "Server"
_COMPLETION_TIMEOUT_S = 1.0

DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="Data directory of the server; $POLLUX_DATA or ~/.pollux if left out.",
        rich_help_panel=_SERVER,
    ),
]
ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        help="Where it listens, if not on this machine; the token is in $POLLUX_TOKEN.",
        rich_help_panel=_SERVER,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@contextlib.contextmanager
def connect(data: Path | None, server: str | None, timeout_s: float = 30.0) -> Iterator[Client]:
    """The client of the server that is meant, for a while."""
    from pollux.client import Client

    with Client(url=server, data_directory=data, timeout_s=timeout_s) as client:
        yield client


def show(renderable: RenderableType) -> None:
    """Data to look at. What goes to a file or pipe is not coloured, cut to the width of a terminal, or padded."""
    if sys.stdout.isatty():
        Console(highlight=False).print(renderable)
        return
    console = Console(width=200, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    for line in capture.get().splitlines():
        typer.echo(line.rstrip())


def terminal_width() -> int | None:
    """Of stdout; None: it is no terminal, and nothing needs to be left out."""
    return Console().width if sys.stdout.isatty() else None


def print_json(document: object) -> None:
    typer.echo(json.dumps(encode(document), indent=1, allow_nan=False))


def say(text: str) -> None:
    """To the person at the terminal, not to the next program in the pipe."""
    typer.echo(text, err=True)


def moment(at: float | None) -> str:
    """A time of the server's, as it is here: the clock's alone if it is of today."""
    if at is None:
        return "-"
    local = datetime.fromtimestamp(at).astimezone()
    is_today = local.date() == datetime.now().astimezone().date()
    return local.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S")


# Completion -----------------------------------------------------------------------------------


def _client_of(ctx: typer.Context) -> Client:
    from pollux.client import Client
    from pollux.client.address import find_address

    given = ctx.params
    find_address(given.get("server"), None, given.get("data"))  # fails at once where there is none
    return Client(url=given.get("server"), data_directory=given.get("data"), timeout_s=_COMPLETION_TIMEOUT_S)


def complete_job(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of jobs that begin so, newest first."""
    try:
        with _client_of(ctx) as client:
            names = [job.name for job in client.jobs(limit=100, newest_first=True)]
    except Exception:  # whatever it is, a shell that completes is no place to say it
        return []
    return [name for name in names if name.startswith(incomplete)]


def complete_node(ctx: typer.Context, incomplete: str) -> list[str]:
    try:
        with _client_of(ctx) as client:
            names = [node.name for node in client.nodes()]
    except Exception:  # as above
        return []
    return [name for name in names if name.startswith(incomplete)]


JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Name of the job.", autocompletion=complete_job)]
JobsArgument = Annotated[list[str], typer.Argument(metavar="JOB", help="Their names.", autocompletion=complete_job)]
