"""The walks that docs/internals tells of are those that a trace shows."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests.long import long

ROOT = Path(__file__).resolve().parents[1]


@long
def test_the_chains_of_the_page_are_those_of_a_trace() -> None:
    for package in ("torch", "fastapi", "typer"):
        pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location("walks", ROOT / "scripts" / "walks.py")
    assert spec is not None and spec.loader is not None
    walks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(walks)
    page = (ROOT / "docs" / "internals" / "walks.md").read_text(encoding="utf-8")
    told = [block.split() for block in re.findall(r"```text\n(.*?)\n```", page, re.DOTALL) if " > " not in block]
    traced = walks.walks_of(ROOT / "src")
    assert told == [calls for stages in traced.values() for calls in stages.values()], sys.version
