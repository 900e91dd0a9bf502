"""The table of commands: what it says of each is what the command says of itself, and little is loaded for it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from pollux.cli.app import PANELS, app, load_command

LISTED = {name: listed for panel in PANELS.values() for name, listed in panel.items()}
LIGHT = ("status", "ls", "nodes", "submit", "wait", "logs", "cancel", "describe", "top", "down")
HEAVY = ("numpy", "scipy", "torch", "psutil", "plotly", "fastapi", "pollux.simulator", "pollux.engines")


@pytest.mark.parametrize("name", LISTED)
def test_help_is_the_first_paragraph_of_the_commands_own(name: str) -> None:
    own = load_command(name).help
    assert LISTED[name].help == " ".join(own.split("\n\n")[0].split())


def test_a_command_is_loaded_to_be_called_and_completed() -> None:
    group: Any = typer.main.get_command(app)
    context = typer.Context(group)
    assert group.list_commands(context) == list(LISTED)
    name, command, rest = group.resolve_command(context, ["logs", "a-job", "--tail", "3"])
    assert (name, rest) == ("logs", ["a-job", "--tail", "3"])
    assert {"name", "tail"} <= {parameter.name for parameter in command.params}
    _, workload, _ = group.resolve_command(context, ["workload", "generate"])
    assert set(workload.commands) == {"generate", "import", "describe"}


def test_options_of_a_jobs_command_are_its_own() -> None:
    for name in ("submit", "run"):
        command = load_command(name)
        context = command.make_context(name, ["--name", "a", "python", "train.py", "--name", "b"])
        assert (context.params["command"], context.params["name"]) == (["python", "train.py", "--name", "b"], "a")


def test_a_name_that_is_none() -> None:
    result = CliRunner().invoke(app, ["sumbit", "--", "true"])
    assert result.exit_code == 2
    assert "Did you mean 'submit'?" in result.stderr


def test_what_asks_a_server_loads_no_more_than_that() -> None:
    code = (
        "import sys; from pollux.cli.app import load_command\n"
        f"for name in {LIGHT}: load_command(name)\n"
        f"import pollux.client; print(*(name for name in {HEAVY} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []
