"""The README's blocks are run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.long import long
from tests.pages import ROOT, Block, read_blocks, require_extras, session

README = ROOT / "README.md"
CONSOLE = read_blocks(README, "console")
GETTING_STARTED = ROOT / "docs/getting-started.md"


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


def test_the_first_pages_show_the_commands_that_a_newcomer_needs() -> None:
    pages = (README, GETTING_STARTED)
    commands = " ".join(
        command for page in pages for block in read_blocks(page, "console") for command in block.commands
    )
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


def test_the_readme_is_read_in_a_minute() -> None:
    assert len(README.read_text().splitlines()) <= 100


def test_the_two_commands_are_targets() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shown = re.findall(r"^ +make (\w+)", README.read_text(), re.MULTILINE)
    assert {"demo", "test"} <= set(shown) <= set(targets)


@pytest.mark.parametrize(
    "page",
    [README, *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/tutorials").glob("*.md"))],
    ids=lambda page: page.name,
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target
