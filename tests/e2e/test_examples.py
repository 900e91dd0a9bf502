"""The examples run as their README says, learn what the plain versions learn, and differ in few lines."""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.long import long

for _needed in ("torch", "sklearn"):  # found only: importing them takes seconds, in every process
    if importlib.util.find_spec(_needed) is None:
        pytest.skip(f"needs {_needed}", allow_module_level=True)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(script: str, *args: str, **variables: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("POLLUX_", "TORCHELASTIC_"))}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *args],
        capture_output=True,
        text=True,
        timeout=200,
        env={**env, **variables},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@long
def test_digits_are_read():
    assert float(re.findall(r"test accuracy ([\d.]+)%", run("digits.py"))[-1]) > 97


@long
def test_recommendations_beat_popularity():
    (found, popular) = re.findall(r"recall@20 ([\d.]+)% \(popularity alone: ([\d.]+)%\)", run("recommender.py"))[-1]
    assert float(found) > float(popular) + 12


@long
def test_the_gpt_learns_something_and_writes():
    output = run("char_gpt.py", "--epochs", "1", "--steps-scale", "0.15")
    assert float(re.findall(r"validation loss ([\d.]+)", output)[0]) < 3.6  # 4.6 is a guess


@long
def test_an_emulated_device_is_said_and_counts_as_computing(tmp_path):
    file = tmp_path / "reports"
    output = run("digits.py", "--epochs", "1", "--emulate-device", "2", POLLUX_REPORT_FILE=str(file))
    assert "emulating a device: a training pass takes 20 ms and 2 ms per example more" in output
    reports = [json.loads(line) for line in file.read_text().splitlines()]
    timings = [entry for report in reports for entry in report["timings"]]
    assert timings
    for (_, _, device_batch), (grad_s, step_s, _) in timings:
        emulated_s = 0.02 + 0.002 * device_batch
        assert emulated_s <= grad_s <= step_s
        assert step_s - grad_s < emulated_s  # the wait is in the pass, not in what comes after it


@pytest.mark.parametrize("script", ["digits.py", "char_gpt.py", "recommender.py"])
def test_few_lines_differ_from_the_plain_version(script):
    plain, ours = ((folder / script).read_text().splitlines() for folder in (EXAMPLES / "plain", EXAMPLES))
    changed = [line for line in difflib.unified_diff(plain, ours, n=0, lineterm="") if line[0] in "+-"][2:]
    assert sum(line[0] == "-" for line in changed) <= 6
    assert sum(line[0] == "+" for line in changed) <= 23  # eight of them options and the emulated device
    for shown in re.findall(r"```diff\n(.*?)```", (EXAMPLES.parent / "README.md").read_text(), re.DOTALL):
        if script == "digits.py":
            assert set(shown.splitlines()) <= set(changed)
