"""Trainers of other libraries, resized in place, killed and resumed: they end as an uninterrupted run does."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import SCRIPTS, Bench, pump_until, resize_waiting
from tests.long import long


def needs(*packages: str) -> None:
    for name in packages:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")


def alone(script: str, folder: Path, *args: object) -> dict[str, Any]:
    """What an uninterrupted run by itself tells."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("POLLUX_", "TORCH"))}
    out = folder / "alone"
    command = [sys.executable, str(SCRIPTS / script), "--out", str(out), *map(str, args)]
    subprocess.run(command, env={**env, "OMP_NUM_THREADS": "1"}, check=True, timeout=200, capture_output=True)
    told: dict[str, Any] = json.loads(out.read_text())
    return told


def step_of(bench: Bench) -> int:
    path = bench.out.with_name(f"{bench.out.name}-step")
    return int(path.read_text() or 0) if path.exists() else 0


def resized_and_killed(bench: Bench, script: str, *args: object) -> dict[str, Any]:
    """What a run tells that had 1, 2, 4, 1 and 2 replicas and lost the one of rank 0."""
    job = bench.start(1, script, args=[*args, "--step-s", 0.3])
    for size in (2, 4, 1, 2):
        reached = step_of(bench) + 3
        pump_until(bench, job, lambda reached=reached: step_of(bench) >= reached, 120)
        resize_waiting(bench, job, size)
    reached = step_of(bench) + 2
    pump_until(bench, job, lambda: step_of(bench) >= reached, 60)
    pid = job.replicas[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    pump_until(bench, job, lambda: job.crashes, 60)
    bench.finish(job, 180)
    told: dict[str, Any] = json.loads(bench.out.read_text())
    return told


@long
def test_hugging_faces_trainer_ends_as_if_alone(bench: Bench, tmp_path: Path) -> None:
    needs("transformers", "accelerate")
    expected = alone("hf_trainer.py", tmp_path, "--epochs", 5)
    told = resized_and_killed(bench, "hf_trainer.py", "--epochs", 5)
    assert told["steps"] == expected["steps"] == 80
    assert told["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-3)
    assert told["rate"] == pytest.approx(expected["rate"], abs=1e-12)
    for name in ("loss", "eval_loss"):  # logged and evaluated at the same steps
        steps = [[row["step"] for row in one["history"] if name in row] for one in (told, expected)]
        assert steps[0] == steps[1]
    losses = [{row["step"]: row["loss"] for row in one["history"] if "loss" in row} for one in (told, expected)]
    assert losses[0][80] == pytest.approx(losses[1][80], rel=0.02)
    assert [path.name for path in Path(f"{bench.out}-hf").iterdir()] == ["checkpoint-80"]


@long
def test_an_accelerate_loop_ends_as_if_alone(bench: Bench, tmp_path: Path) -> None:
    needs("accelerate")
    expected = alone("accelerate_loop.py", tmp_path, "--epochs", 5)
    told = resized_and_killed(bench, "accelerate_loop.py", "--epochs", 5)
    assert told["steps"] == expected["steps"] == 100
    assert told["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert told["rate"] == pytest.approx(expected["rate"])


@long
def test_lightnings_trainer_ends_as_if_alone(bench: Bench, tmp_path: Path) -> None:
    needs("lightning")
    expected = alone("lightning_loop.py", tmp_path, "--epochs", 5)
    told = resized_and_killed(bench, "lightning_loop.py", "--epochs", 5)
    assert told["steps"] == expected["steps"] == 100
    assert told["epochs"] == expected["epochs"] == 5
    assert told["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert told["rate"] == pytest.approx(expected["rate"], abs=1e-12)
    places = [[[epoch, step] for epoch, step, _ in one["history"]] for one in (told, expected)]
    assert places[0] == places[1] == [[epoch, 20 * (epoch + 1)] for epoch in range(5)]  # validated once an epoch
    losses = [[loss for _, _, loss in one["history"]] for one in (told, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    logs = Path(f"{bench.out}-logs") / "run"
    assert [path.name for path in logs.iterdir()] == ["version_0"]
    assert Path(told["best"]).name == Path(expected["best"]).name
    assert [path.name for path in (logs / "version_0" / "checkpoints").iterdir()] == [Path(told["best"]).name]
    with (logs / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["val_loss"]][:5] == [19, 39, 59, 79, 99]


@long
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_trls_trainers_end_as_if_alone(bench: Bench, tmp_path: Path, kind: str) -> None:
    needs("trl", "datasets", "transformers", "accelerate")
    expected = alone("trl_trainer.py", tmp_path, "--kind", kind)
    told = resized_and_killed(bench, "trl_trainer.py", "--kind", kind)
    assert told["steps"] == expected["steps"] == 80
    assert told["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-3)
    steps = [[row["step"] for row in one["history"] if "eval_loss" in row] for one in (told, expected)]
    assert steps[0] == steps[1]
