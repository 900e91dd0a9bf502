"""The README's blocks are run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.long import long
from tests.pages import ROOT, Block, read_blocks, require_extras, session

README = ROOT / "README.md"
CONSOLE = read_blocks(README, "console")
PYTHON = read_blocks(README, "python")


EVERY_TIME = ("pollux submit", "pollux run")  # studies and simulations are tried in many other tests


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(
            block, id=block.commands[0][:30], marks=() if any(verb in block.text for verb in EVERY_TIME) else long
        )
        for block in CONSOLE
    ],
)
def test_console_blocks_run(block: Block, tmp_path: Path) -> None:
    require_extras([block])
    with session(tmp_path) as user:
        user.run(block)
    for name in re.findall(r"--(?:html|output) (\S+)", block.text):
        assert (tmp_path / name).stat().st_size > 500


def test_the_console_blocks_say_what_the_quick_start_promises() -> None:
    commands = " ".join(command for block in CONSOLE for command in block.commands)
    for verb in (
        "up --detach",
        "submit",
        "ls",
        "describe",
        "logs",
        "top --once",
        "down",
        "run",
        "tune",
        "simulate",
        "compare",
    ):
        assert f"pollux {verb} " in f"{commands} ", verb


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.text.split("\n", 1)[0])
def test_python_blocks_run(block: Block, tmp_path: Path) -> None:
    with session(tmp_path) as user:
        assert user.run(block)


def test_the_two_commands_are_targets() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shown = re.findall(r"^ +make (\w+)", README.read_text(), re.MULTILINE)
    assert {"demo", "test"} <= set(shown) <= set(targets)


@pytest.mark.parametrize("page", [README, *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target
