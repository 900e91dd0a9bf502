"""The documentation's site: every page has its place, and it builds without a warning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.long import long
from tests.pages import ROOT


def test_every_page_has_a_place_on_the_site() -> None:
    named = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").glob("*.md")}
    pages |= {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs/internals").glob("*.md")}
    assert pages - named == set(), "name them in mkdocs.yml"


@long
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the site needs the extra docs")
    pytest.importorskip("mkdocstrings", reason="the site needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first = (tmp_path / "index.html").read_text()
    assert "slots.svg" in first
    assert "--detach" in (tmp_path / "reference/commands.html").read_text()
    assert "noise_scale" in (tmp_path / "reference/train.html").read_text()
    loaded = re.findall(r"""<(?:script|link|img)[^>]*(?:src|href)=["']?(https?:[^"' >]+)""", first)
    assert loaded == [], "the site loads from other hosts"
