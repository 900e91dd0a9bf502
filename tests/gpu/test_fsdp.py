"""Sharded models (FSDP2) on GPUs with NCCL: resized in place, killed and compiled, with unsharded training's values.

``benchmarks/fsdp.py`` does it, several replicas side by side where there is one card. The same with gloo is among the
long tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.long import long  # noqa: E402

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fsdp.py"
TOLERANCE = 1e-6  # of single-precision sums in another order, over 12 steps of AdamW
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def run(out: Path, part: str, *options: str, limit_s: int = 90) -> tuple[list[dict[str, Any]], str]:
    """Results and output of one part of the benchmark, which ends within 15 s of its limit."""
    command = [sys.executable, str(SCRIPT), "--parts", part, "--limit-s", str(limit_s), "--out", str(out), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=limit_s + 60, check=False)
    output = ended.stdout + ended.stderr
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert ended.returncode == 0 and not any("error" in one for one in results), output
    return results, output


def check_values(out: Path, *options: str) -> None:
    [result], output = run(out, "values", *options)
    assert result["difference"] < TOLERANCE, output
    assert result["sizes"][:3] == [1, 2, 4] and result["killed"] == 1, output


@needs_gpu
@pytest.mark.parametrize("backend", ["", "aot_eager"])
def test_resizes_and_a_lost_shard_keep_the_values_of_unsharded_training_under_nccl(
    tmp_path: Path, backend: str
) -> None:
    check_values(tmp_path / "out", "--compile", backend)


@needs_gpu
def test_no_replica_holds_the_whole_state_in_a_resize_under_nccl(tmp_path: Path) -> None:
    results, output = run(tmp_path / "out", "resizes", "--state-mb", "500")
    assert [one["sizes"] for one in results] == ["1 -> 2", "2 -> 4", "4 -> 2"], output
    first, *others = results
    # From one replica on two: the one has all of it before, the other gets its half.
    assert first["peak_of_state"][1] < 0.75, output
    assert all(max(one["peak_of_state"]) < 0.95 for one in others), output


@needs_gpu
def test_a_lost_shard_comes_back_under_nccl(tmp_path: Path) -> None:
    results, output = run(tmp_path / "out", "kills")
    assert [(one["replicas"], one["copies"]) for one in results] == [(2, 1), (4, 2)], output
    assert all(one["restarts"] == 0 for one in results), output
    assert results[1]["steps_repeated"] <= 1, output


@long
def test_resizes_and_a_lost_shard_keep_unsharded_values_under_gloo(tmp_path: Path) -> None:
    check_values(tmp_path / "out", "--device", "cpu")


@long
def test_a_lost_shard_comes_back_under_gloo(tmp_path: Path) -> None:
    results, output = run(tmp_path / "out", "kills", "--device", "cpu", "--state-mb", "20")
    assert [one["restarts"] for one in results] == [0, 0], output
    assert results[1]["steps_repeated"] <= 1, output
