from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pollux.engines.processes.commands import StartPlan, plan_start

HOME = str(Path(sys.executable).parent)
ENV = {"PATH": f"{HOME}{os.pathsep}{os.defpath}"}


def plan(*command: str, cwd: str = "/", **env: str) -> StartPlan:
    return plan_start(command, {**ENV, **env}, cwd, parent_env=ENV)


def test_scripts_and_modules_of_our_interpreter_are_forked():
    assert plan("python", "train.py", "-u") == StartPlan(argv=("train.py", "-u"), is_forked=True)
    assert plan(sys.executable, "-m", "package.train", "--lr", "1").argv == ("-m", "package.train", "--lr", "1")
    assert plan("python3", "-u", "train.py") == StartPlan(
        argv=("train.py",), is_forked=True, env={"PYTHONUNBUFFERED": "1"}
    )
    assert plan(f"./{Path(HOME).name}/python", "train.py", cwd=str(Path(HOME).parent)).is_forked
    assert plan("python", "train.py", PYTHONPATH="/lib", PYTHONUNBUFFERED="1", OMP_NUM_THREADS="4").is_forked


@pytest.mark.parametrize(
    "command",
    [
        ("python",),
        ("python", "-"),
        ("python", "-c", "pass"),
        ("python", "-m"),
        ("python", "-O", "train.py"),
        ("python", "-X", "dev", "train.py"),
        ("torchrun", "train.py"),
        ("bash", "train.sh"),
        ("no-such-program", "train.py"),
        ("./train.py",),
    ],
)
def test_all_else_is_started_as_it_stands(command):
    assert plan(*command) == StartPlan(argv=command, is_forked=False)


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "PYTHONOPTIMIZE", "LD_LIBRARY_PATH", "LD_PRELOAD"])
def test_what_is_read_at_the_start_only_needs_a_start(name):
    assert not plan("python", "train.py", **{name: "1"}).is_forked


def test_another_virtual_environment_is_another_interpreter(tmp_path):
    """Its interpreter is often a link to the same file."""
    (tmp_path / "python").symlink_to(os.path.realpath(sys.executable))
    assert not plan("python", "train.py", PATH=str(tmp_path)).is_forked
    assert not plan(str(tmp_path / "python"), "train.py").is_forked
