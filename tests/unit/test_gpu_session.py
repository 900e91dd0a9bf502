"""The commands of ``scripts/gpu_session.sh``: minutes on a GPU machine are not for finding out that one has rotted."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_session.sh"


def commands() -> dict[str, list[str]]:
    env = {**os.environ, "GPU_PYTHON": "python"}
    listed = subprocess.run([SCRIPT, "--list"], capture_output=True, text=True, check=True, env=env, timeout=60)
    return {line.split()[0]: line.split()[1:] for line in listed.stdout.splitlines()}


def test_every_part_names_files_and_options_that_exist():
    found = commands()
    assert len(found) == 6
    for part, words in found.items():
        [path] = [word for word in words if word.endswith(".py")]
        text = (ROOT / path).read_text()
        for word in words if path.startswith("benchmarks/") else ():
            if word.startswith("--"):
                assert f'"{word}"' in text, f"{part}: {path} has no option {word}"


def test_every_part_is_bounded_below_ten_minutes():
    assert "timeout --kill-after=10 590 $command" in SCRIPT.read_text()
    for words in commands().values():
        limits = [int(after) for word, after in itertools.pairwise(words) if word == "--limit-s"]
        assert all(limit <= 575 for limit in limits)  # scripts end within 15 s of their limit


def copied(folder: Path, python: str) -> subprocess.CompletedProcess[str]:
    """Run it elsewhere, with a Python that only says what it is asked for."""
    (folder / "scripts").mkdir(exist_ok=True)
    (folder / "scripts" / SCRIPT.name).write_text(SCRIPT.read_text())
    pretended = folder / "python"
    pretended.write_text(f"#!/bin/bash\n{python}\n")
    pretended.chmod(0o755)
    command = ["bash", str(folder / "scripts" / SCRIPT.name)]
    env = {**os.environ, "GPU_PYTHON": str(pretended), "SEED": "5"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=60)


def test_it_goes_on_after_a_part_that_fails_and_runs_only_that_one_again(tmp_path: Path):
    first = copied(tmp_path, 'echo "ran $2"; [[ "$*" != *fsdp* ]]')
    assert first.returncode == 1 and "not completed: fsdp (" in first.stdout
    assert (tmp_path / "out/gpu/overhead-5.done").exists() and "ran" in (tmp_path / "out/gpu/fsdp-5.log").read_text()
    again = copied(tmp_path, 'echo "ran $*"')
    assert again.returncode == 0
    assert len(re.findall("^ran ", again.stdout, re.MULTILINE)) == 1 and "ran benchmarks/fsdp.py" in again.stdout


@pytest.mark.parametrize("part", ["nothing", "--help"])
def test_an_unknown_part_is_refused_with_those_there_are(part: str):
    ended = subprocess.run([SCRIPT, part], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 2 and "there are: tests faults resizes" in ended.stdout
