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

# One of each kind: prose, console blocks, pictures, tables, what is made from code.
SITE_PAGES = (
    "index",
    "getting-started",
    "concepts",
    "dashboard",
    "simulation",
    "reference/commands",
    "reference/train",
)


def test_every_page_has_a_place_on_the_site() -> None:
    named = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").glob("*.md")}
    for folder in ("internals", "tutorials"):
        pages |= {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs" / folder).glob("*.md")}
    assert pages - named == set(), "name them in mkdocs.yml"


def test_pictures_are_those_that_their_script_draws(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/concept_pictures.py"), "--output", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    drawn = sorted(tmp_path.glob("*.svg"))
    assert len(drawn) == 5
    for picture in drawn:
        told = (ROOT / "docs/images" / picture.name).read_text()
        assert picture.read_text() == told, f"{picture.name}: python scripts/concept_pictures.py"


def test_screenshots_are_small_and_of_every_page() -> None:
    places = re.findall(r"\((images/pages/[\w-]+\.webp)\)", (ROOT / "docs/dashboard.md").read_text())
    kept = {str(one.relative_to(ROOT / "docs")) for one in (ROOT / "docs/images/pages").iterdir()}
    assert set(places) == kept and len(kept) >= 26
    assert max((ROOT / "docs" / one).stat().st_size for one in kept) < 150_000


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="the site needs the extra docs")
    pytest.importorskip("mkdocstrings", reason="the site needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@long
def test_the_site_builds_without_a_warning(site: Path) -> None:
    first = (site / "index.html").read_text()
    assert "slots.svg" in first
    assert "--detach" in (site / "reference/commands.html").read_text()
    assert "noise_scale" in (site / "reference/train.html").read_text()
    loaded = re.findall(r"""<(?:script|link|img)[^>]*(?:src|href)=["']?(https?:[^"' >]+)""", first)
    assert loaded == [], "the site loads from other hosts"


@long
@pytest.mark.parametrize("mode", ["light", "dark"])
def test_axe_finds_no_barrier_on_the_site(site: Path, mode: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core comes with the extra dev")
    from tests.browser.browsing import PATIENCE_MS, browser  # it needs the extra server

    found = []
    with browser() as chrome:
        page = chrome.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(PATIENCE_MS)
        page.emulate_media(color_scheme=mode)
        for name in SITE_PAGES:
            page.goto((site / f"{name}.html").as_uri())
            page.wait_for_function("() => !document.querySelector('nav.md-code__nav:not([aria-label])')")
            told = axe.Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
            found += [f"{name}: {one['id']}: {one['nodes'][0]['html'][:120]}" for one in told]
    assert found == []
