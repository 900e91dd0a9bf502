"""Replicas that are killed and frozen at random moments: no hang, no lost job, every example once.

``benchmarks/gpu_faults.py`` does it, with NCCL where there is a GPU. A short run with gloo is among the long tests.
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

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_faults.py"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def run(out: Path, limit_s: int, *options: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, results and output of the benchmark, which ends within 15 s of its limit."""
    command = [sys.executable, str(SCRIPT), "--limit-s", str(limit_s), "--out", str(out), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=limit_s + 60, check=False)
    return ended.returncode, json.loads(out.read_text()), ended.stdout + ended.stderr


def check_faults(out: Path, limit_s: int, *options: str) -> None:
    code, result, output = run(out, limit_s, *options)
    [piece] = result["pieces"]
    assert piece["faults"], output
    assert not [fault for fault in piece["faults"] if fault["is_hang"]], output
    assert not piece["wrong"] and not piece["is_lost"] and code == 0, output


@needs_gpu
@pytest.mark.parametrize("seed", [0, 1])
def test_lost_replicas_end_no_job_under_nccl(tmp_path: Path, seed: int) -> None:
    check_faults(tmp_path / "faults.json", 120, "--faults", "20", "--seed", str(seed), "--replicas", "2", "4")


@long
def test_lost_replicas_end_no_job_under_gloo(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--faults", "8", "--replicas", "2", "3")
    check_faults(tmp_path / "faults.json", 120, *options)


@needs_gpu
def test_a_resize_in_place_stalls_less_than_a_restart(tmp_path: Path) -> None:
    _, result, output = run(tmp_path / "resizes.json", 150, "--resizes", "--state-mb", "63", "--sizes", "1", "2", "1")
    stalls: dict[tuple[bool, str], float] = {}
    for row in result["resizes"]:
        stalls[row["how"].startswith("in place"), row["sizes"]] = row["stall_s"]
    sizes = {size for _, size in stalls}
    assert sizes, output
    assert all(stalls[True, size] < stalls[False, size] for size in sizes), output
