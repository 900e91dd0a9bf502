"""``pollux doctor``: what it finds here, and what it says of machines where something is wrong."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from pollux.cli import doctor
from pollux.cli.app import app
from pollux.engines.processes.gpus import Gpu

CARD = Gpu(number=0, uuid="GPU-12345678-aa", name="NVIDIA H200")


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with room and without GPUs, whatever this one is."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=64e9, free=64e9))
    monkeypatch.setattr(doctor, "find_gpus", list)
    monkeypatch.setattr(doctor, "_has_card", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield


def found(directory: Path) -> dict[str, doctor.Finding]:
    return {one.subject: one for one in doctor.examine(directory)}


def test_says_what_is_there(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--data", str(tmp_path)])
    assert done.exit_code == 0, done.output
    for word in ("Python", "cli", "typer", "slots are CPU cores", "64 GB free", "no server runs"):
        assert word in done.output
    as_json = CliRunner().invoke(app, ["doctor", "--data", str(tmp_path), "--json"])
    findings = json.loads(as_json.output)["findings"]
    assert {one["state"] for one in findings} <= {"fine", "missing"}


def test_an_extra_that_is_not_complete_is_missing_and_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = importlib.metadata.version

    def without_ray(name: str) -> str:
        if name == "ray":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_ray)
    ray = found(tmp_path)["ray"]
    assert (ray.state, ray.found) == ("missing", "not installed: ray")
    assert "pollux-scheduler[ray]" in ray.advice


def test_a_torch_for_cpus_beside_a_gpu_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_gpus", lambda: [CARD])
    monkeypatch.setattr(doctor, "_version", lambda name: "2.13.0+cpu" if name == "torch" else "1")
    findings = found(tmp_path)
    assert (findings["GPUs"].state, findings["torch"].state) == ("fine", "problem")
    assert "H200" in findings["GPUs"].found
    assert CliRunner().invoke(app, ["doctor", "--data", str(tmp_path)]).exit_code == 1


def test_gpus_that_are_hidden_are_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_gpus", lambda: [CARD])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES" in found(tmp_path)["GPUs"].advice


def test_a_card_that_no_driver_answers_for_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_has_card", lambda: True)
    assert "nvidia-smi" in found(tmp_path)["GPUs"].advice


def test_little_room_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=0.1e9, free=0.1e9))
    findings = found(tmp_path)
    assert findings["data"].state == "problem"
    assert "--shm-size" in findings["/dev/shm"].advice


def test_a_server_that_does_not_answer_is_a_problem(tmp_path: Path) -> None:
    told = {"pid": os.getpid(), "url": "http://127.0.0.1:9", "version": "0"}
    (tmp_path / "server.json").write_text(json.dumps(told))
    (tmp_path / "token").write_text("x")
    server = found(tmp_path)["server"]
    assert server.state == "problem"
    assert "server.log" in server.advice
