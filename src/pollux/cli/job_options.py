"""The options of a job as options of a command: made from :data:`pollux.api.request.OPTIONS`, the one list there is."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from pollux.api.request import OPTIONS, Option

_PANEL = "Job"
_REPEATED = ("list", "lines", "pairs")

CommandArgument = Annotated[
    list[str], typer.Argument(metavar="COMMAND", help="The command to run, with its arguments. No shell reads it.")
]
EnvFile = Annotated[
    str | None,
    typer.Option(
        "--env-file", metavar="FILE", help="Environment variables, a KEY=VALUE on each line.", rich_help_panel=_PANEL
    ),
]


def takes_job_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each of a job's; it gets those that were typed as ``options``, by field."""

    @functools.wraps(command)
    def with_options(**arguments: Any) -> None:
        typed = {option.field: arguments.pop(option.field) for option in OPTIONS}
        typed["env_file"] = arguments.pop("env_file")
        given = {field: value for field, value in typed.items() if value not in (None, [], ())}
        command(options=given, **arguments)

    own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [one for one in own if one.name != "options"] + [_parameter(option) for option in OPTIONS]
    parameters.append(inspect.Parameter("env_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=EnvFile))
    del with_options.__wrapped__  # its signature is the one made here
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {one.name: one.annotation for one in parameters}
    return with_options


def _parameter(option: Option) -> inspect.Parameter:
    """Text as typed: what it means is for :mod:`pollux.api.request` to say, here as in a script's header."""
    kind: Any = bool if option.type == "flag" else list[str] if option.type in _REPEATED else str
    names = f"--{option.name}/--no-{option.name}" if option.type == "flag" else f"--{option.name}"
    shown = typer.Option(
        names,
        metavar=option.metavar or None,
        help=option.help,
        show_default=False,
        rich_help_panel=_PANEL,
    )
    annotation: Any = Annotated[kind | None, shown]
    return inspect.Parameter(option.field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
