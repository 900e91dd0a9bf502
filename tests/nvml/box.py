"""A machine whose cards a test changes: what the NVML in this folder tells, here and in processes that are started."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

GIB = 1 << 30
FOLDER = Path(__file__).parent


def card(number: int, name: str = "NVIDIA H200", memory: int = 141 * GIB, **more: Any) -> dict[str, Any]:
    return {"uuid": f"GPU-{number}", "name": name, "memory": memory, "ecc_errors": 0, "remap_failed": 0, **more}


def part(number: int, instance: int, profile: str = "1g.18gb", **more: Any) -> dict[str, Any]:
    """A slice of card ``number``; its memory is that of the profile's name."""
    memory = int(profile.partition(".")[2].removesuffix("gb")) * GIB
    uuid, name = f"MIG-{number}-{instance}", f"NVIDIA H200 MIG {profile}"
    return {"uuid": uuid, "name": name, "memory": memory, "instance": instance, **more}


class Box:
    """``cut(...)`` says which cards there are from now on."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._path = folder / "nvml.json"
        self.cards: list[dict[str, Any]] = []
        monkeypatch.setenv("FAKE_NVML", str(self._path))
        path = os.environ.get("PYTHONPATH", "")
        monkeypatch.setenv("PYTHONPATH", f"{FOLDER}{os.pathsep}{path}" if path else str(FOLDER))
        monkeypatch.syspath_prepend(str(FOLDER))
        monkeypatch.delitem(sys.modules, "pynvml", raising=False)
        monkeypatch.setitem(sys.modules, "pynvml", importlib.import_module("pynvml"))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def cut(self, *cards: dict[str, Any]) -> None:
        self.cards = list(cards)
        beside = self._path.with_suffix(".new")
        beside.write_text(json.dumps({"cards": self.cards}))
        beside.replace(self._path)

    def change(self, number: int, **more: Any) -> None:
        self.cut(*({**one, **more} if index == number else one for index, one in enumerate(self.cards)))


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    return Box(tmp_path, monkeypatch)
