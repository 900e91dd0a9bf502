"""The table of commands: what it says of each is what the command says of itself, and little is loaded for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from pollux.cli.app import PANELS, USUAL_COMMANDS, app, load_command

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


def test_names_of_other_tools_lead_to_ours() -> None:
    killed = CliRunner().invoke(app, ["kill", "gpt"])
    assert killed.exit_code == 2 and "Did you mean 'cancel'?" in killed.stderr
    meant = {name for names in USUAL_COMMANDS.values() for name in names}
    assert meant <= set(LISTED) and not set(USUAL_COMMANDS) & set(LISTED)
    gpus = CliRunner().invoke(app, ["submit", "--gpus", "2", "--", "true"])
    assert gpus.exit_code == 2 and "--max-replicas, --replicas" in gpus.stderr


def test_what_asks_a_server_loads_no_more_than_that() -> None:
    code = (
        "import sys; from pollux.cli.app import load_command\n"
        f"for name in {LIGHT}: load_command(name)\n"
        f"import pollux.client; print(*(name for name in {HEAVY} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def test_an_interrupt_while_a_module_is_imported_ends_with_130(tmp_path: Path) -> None:
    # dataclasses are made by exec: Python notes a KeyboardInterrupt there, and ends by the signal in spite of our code
    interrupt = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    lines = [
        "import pollux.cli.app",
        f"pollux.cli.app.app = lambda prog_name: exec({interrupt!r})",
        "pollux.cli.main()",
    ]
    (tmp_path / "interrupted.py").write_text("\n".join(lines))
    command = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 130, done.stderr
    assert done.stderr == ""
