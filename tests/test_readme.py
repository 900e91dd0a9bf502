"""The README's blocks are run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_console_block_runs_in_order(tmp_path):
    commands = [line[2:] for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]
    assert commands
    for command in commands:
        words = command.split()
        assert words[0] == "pollux"
        program = [sys.executable, "-c", "from pollux.cli import main; main()", *words[1:]]
        done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
    assert (tmp_path / "report.html").stat().st_size > 100_000
    assert (tmp_path / "mine.csv").read_text().count("\n") == 41


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
