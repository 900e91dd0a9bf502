"""The ``pollux`` command line: its sub-commands, and how they fail.

Errors raised on purpose become one line on stderr and exit code 2, as bad usage does; Ctrl-C is 130. Anything else is
a bug and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pollux.cli.api import api
from pollux.cli.compare import compare
from pollux.cli.dashboard import dashboard
from pollux.cli.decisions import decisions
from pollux.cli.demo import demo
from pollux.cli.describe import describe
from pollux.cli.export import export
from pollux.cli.job_options import CONTEXT
from pollux.cli.jobs import cancel, logs, wait
from pollux.cli.listing import drain, ls, nodes, status
from pollux.cli.replay import replay
from pollux.cli.run import run
from pollux.cli.simulate import simulate
from pollux.cli.submit import submit
from pollux.cli.top import top
from pollux.cli.up import down, up
from pollux.cli.workload import app as workload_app
from pollux.errors import PolluxError
from pollux.version import __version__

EXIT_BAD_USAGE = 2
EXIT_INTERRUPTED = 130


class OneLineErrors(TyperGroup):
    """Turns our own exceptions into one line and an exit code, for every command below it."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PolluxError as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(EXIT_BAD_USAGE) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None


app = typer.Typer(
    cls=OneLineErrors,
    help="A co-adaptive scheduler for deep-learning clusters.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pollux {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """A co-adaptive scheduler for deep-learning clusters."""


_PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Server": (up, down, status, dashboard, decisions, api),
    "Jobs": (submit, run, ls, describe, logs, cancel, wait, top, export),
    "Nodes": (nodes, drain),
    "Simulation": (simulate, compare, replay, demo),
}
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        _settings = CONTEXT if _command in (submit, run) else None
        app.command(rich_help_panel=_panel, context_settings=_settings)(_command)
app.add_typer(workload_app, name="workload", rich_help_panel="Simulation")
