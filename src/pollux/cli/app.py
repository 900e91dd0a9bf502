"""The ``pollux`` command line: its sub-commands, and how they fail.

A command's module is loaded when the command is used: most need little, some the whole simulator. Its text for
``pollux --help`` is therefore here, too.

Errors raised on purpose become one line on stderr and exit code 2, as bad usage does; Ctrl-C is 130. Anything else is
a bug and keeps its traceback.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from pollux.cli.terminal import visible
from pollux.errors import PolluxError
from pollux.tls import CA_VARIABLE, PLAIN_VARIABLE
from pollux.version import __version__

EXIT_BAD_USAGE = 2
EXIT_INTERRUPTED = 130


class Listed(NamedTuple):
    """A command that need not be loaded yet."""

    module: str  # in pollux.cli; has a function of the command's name, or ``app`` if there are commands below it
    help: str  # the first paragraph of its own


PANELS: dict[str, dict[str, Listed]] = {
    "Server": {
        "up": Listed(
            "up",
            "Start the server, here or in the background. Ctrl-C: its jobs checkpoint, leave, and go on at the next "
            "start.",
        ),
        "down": Listed("down", "End the server. Its jobs checkpoint, leave, and go on at the next start."),
        "status": Listed("listing", "Show the server's state: its slots, jobs and decisions."),
        "backup": Listed(
            "backup",
            "Back up the server's data to one file: jobs, users, usage, studies, tokens. The server may run.",
        ),
        "restore": Listed(
            "backup",
            "Put a backup in the place of the server's data. No server may run. What was there before is kept beside "
            "it.",
        ),
        "prune": Listed(
            "prune",
            "Remove jobs that ended long ago: rows, logs, checkpoints. Accounts of what they used stay. Print their "
            "names.",
        ),
        "doctor": Listed(
            "doctor",
            "Say what is installed and found here, what is missing, and what to do. Ends with 1 if something is wrong.",
        ),
        "dashboard": Listed(
            "dashboard",
            "Print the dashboard's address, and open it. Anyone who has this address may do what you may.",
        ),
        "decisions": Listed(
            "decisions",
            "Say what was decided, and why: which job gave slots to which, which started, moved or waits, the gain.",
        ),
        "api": Listed(
            "api",
            "Print what the HTTP interface answers: JSON, or text as it comes. pollux api openapi.json tells what "
            "there is.",
        ),
    },
    "Jobs": {
        "submit": Listed("submit", "Submit a job; print its name (of an array: one per line)."),
        "run": Listed(
            "run", "Run a job here and now: a cluster of its own, its logs as they come, and its exit code at the end."
        ),
        "check": Listed(
            "check",
            "Read training scripts and say what will go wrong when they are resized, with line numbers and what to do.",
        ),
        "ls": Listed("listing", "List jobs: those that have not ended, and those that ended within the last hour."),
        "history": Listed(
            "history",
            "List jobs that are over, the last one first: when they began and ended, how, with which exit code.",
        ),
        "describe": Listed(
            "describe",
            "Explain why a job has what it has: its state, model, decisions, resizes, and its failure if it failed.",
        ),
        "logs": Listed("jobs", "Print what a job has written, all replicas, from its first start on."),
        "hold": Listed(
            "operations", "Hold jobs: they get no slots until release. Those that run checkpoint and leave."
        ),
        "release": Listed("operations", "Release jobs that are held."),
        "update": Listed(
            "operations",
            "Change jobs that are not over, from the next round on: weight, priority, bounds, limits, deadline, "
            "budget.",
        ),
        "shell": Listed(
            "shell", "Open a shell beside a replica, on its machine: in its folder, with its GPU, as its Unix user."
        ),
        "requeue": Listed(
            "operations",
            "Let a running job checkpoint and wait again; submit one that is over again. Print its name.",
        ),
        "cancel": Listed(
            "operations", "Cancel jobs: they receive SIGTERM, checkpoint and leave, and are killed if they do not."
        ),
        "wait": Listed(
            "jobs",
            "Wait until jobs have ended. Ends with 0 if all succeeded, 1 if one did not, 124 when the time is up.",
        ),
        "top": Listed(
            "top", "Show the cluster, its jobs, its queue and its decisions, live. Press ? for the keys, q to leave."
        ),
        "tune": Listed(
            "tune",
            "Search for the best parameters of a script. pollux tune SCRIPT begins a study; its trials are jobs.",
        ),
        "export": Listed(
            "export",
            "Export a job's curves and decisions. May be repeated while it trains: the same file is written anew.",
        ),
    },
    "Users": {
        "user": Listed("user", "Users, their roles and their tokens."),
        "team": Listed("team", "Teams and what each is entitled to."),
        "usage": Listed("usage", "Show usage: slot-hours, GPU-hours, goodput-hours and cost."),
        "whoami": Listed("whoami", "Show who you are to the server: user, team and role."),
    },
    "Nodes": {
        "nodes": Listed("listing", "List nodes, their slots and the jobs on them."),
        "drain": Listed("listing", "Take the jobs off a node and give it none, until --undo."),
    },
    "Simulation": {
        "simulate": Listed("simulate", "Run a workload under a policy, in virtual time, and print how its jobs fared."),
        "compare": Listed("compare", "Run every policy on every workload and print them side by side."),
        "policies": Listed(
            "policies",
            "List the policies, ours and installed ones: what each does, and whether it runs on a live cluster.",
        ),
        "replay": Listed(
            "replay", "Simulate the jobs that a server recorded, as it decided and as other policies would have."
        ),
        "demo": Listed(
            "demo", "Train six jobs on a cluster made for them here, and watch them share it; takes two minutes."
        ),
        "workload": Listed(
            "workload", "Generate workloads for the simulator, import production traces, or describe one."
        ),
    },
}
# What other tools call it, for those who know them.
USUAL_COMMANDS = {
    "delete": ("cancel",),
    "jobs": ("ls",),
    "kill": ("cancel",),
    "list": ("ls",),
    "ps": ("ls",),
    "queue": ("ls",),
    "rm": ("cancel",),
    "show": ("describe",),
    "start": ("up",),
    "stop": ("cancel", "down"),
}
USUAL_OPTIONS = {"--gpu": ("--replicas", "--max-replicas"), "--gpus": ("--replicas", "--max-replicas")}
# Options behind the command that a job runs are that command's own.
_SETTINGS = {name: {"allow_interspersed_args": False} for name in ("submit", "run")}


def load_command(name: str) -> Any:
    """The command itself, with its options."""
    listed = next(panel[name] for panel in PANELS.values() if name in panel)
    module = importlib.import_module(f"pollux.cli.{listed.module}")
    below = getattr(module, "app", None)
    if below is None:
        below = typer.Typer(add_completion=False)
        below.command(name, context_settings=_SETTINGS.get(name))(getattr(module, name))
    return typer.main.get_command(below)


class LoadedWhenAsked(TyperGroup):
    """Knows its commands by name and help alone, until one of them is called or completed.

    Turns our own exceptions into one line and an exit code, for every command below it.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in USUAL_COMMANDS and not ctx.resilient_parsing:
            meant = " or ".join(f"'{name}'" for name in USUAL_COMMANDS[args[0]])
            ctx.fail(f"No such command {args[0]!r}. Did you mean {meant}?")
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load_command(name), rest  # None: what is being completed is no name

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PolluxError as error:
            typer.echo(f"error: {visible(' '.join(str(error).split()))}", err=True)
            raise typer.Exit(EXIT_BAD_USAGE) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except Exception as error:
            # click's NoSuchOption, which typer has a copy of: it offers what is spelled alike.
            if meant := USUAL_OPTIONS.get(getattr(error, "option_name", "")):
                error.possibilities = list(meant)  # type: ignore[attr-defined]
            raise


app = typer.Typer(
    cls=LoadedWhenAsked,
    help="Share GPUs between training jobs. Jobs grow, shrink and change their batch size while they train.\n\n"
    "First steps: pollux up --detach, then pollux submit -- python train.py, then pollux top.",
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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    ca: Annotated[
        Path | None,
        typer.Option(
            "--ca", metavar="FILE", help="Certificates to trust, in PEM, if the server's is not known to this system."
        ),
    ] = None,
    allows_plain: Annotated[
        bool, typer.Option("--plain-http", help="Send the token to another machine without encryption.")
    ] = False,
) -> None:
    """Options of all commands. The text of ``pollux --help`` is above."""
    # Every command that asks a server reads the environment for these, as for its address and token.
    if ca is not None:
        os.environ[CA_VARIABLE] = str(ca)
    if allows_plain:
        os.environ[PLAIN_VARIABLE] = "1"


def _stand_in() -> None:
    """Never called: :meth:`LoadedWhenAsked.resolve_command` puts the command in its place."""


for _panel, _commands in PANELS.items():
    for _name, _listed in _commands.items():
        app.command(_name, help=_listed.help, rich_help_panel=_panel)(_stand_in)
