"""The one look: complete in itself, light and dark, and every colour that figures name is in the style."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pollux.errors import PolluxError
from pollux.evaluation import replay_page, suite_page
from pollux.reports import figures, look, page, simulation_page


def variables(block: str) -> dict[str, str]:
    return dict(re.findall(r"--([a-z0-9]+): ([^;]+);", block))


def blocks() -> list[dict[str, str]]:
    found = [variables(block) for block in re.findall(r":root[^{]*\{([^}]*)\}", look.style())]
    assert len(found) == 3
    return found


def test_dark_is_dark_whether_the_system_or_the_page_says_so() -> None:
    light, by_system, by_page = blocks()
    assert by_system == by_page
    assert set(light) == set(by_system)
    assert light["bg"] != by_system["bg"]
    assert ':root:not([data-theme="light"])' in look.style() and ':root[data-theme="dark"]' in look.style()


def test_everything_that_is_used_is_there() -> None:
    known = set(blocks()[0])
    used = set(re.findall(r"var\(--([a-z0-9]+)\)", look.style())) | set(
        re.findall(r'css\("--([a-z]+)"\)', look.script())
    )
    pages = (page, figures, simulation_page, replay_page, suite_page)
    sources = [Path(str(module.__file__)).read_text() for module in pages]
    for name in re.findall(r'"@([a-z0-9]+)"', "".join(sources)):
        used.add(f"c{name}" if name.isdecimal() else name)
    assert used <= known


def test_text_can_stand_inside_a_page() -> None:
    assert "</script" not in look.script() and "</style" not in look.style()
    assert "http" not in look.script() + look.style() and "@import" not in look.style()
    assert "window.Look" in look.script()


def test_plotly_comes_from_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("plotly")
    assert "plotly.js v" in look.plotly_js()[:500]
    monkeypatch.setattr(look, "find_spec", lambda name: None)
    with pytest.raises(PolluxError, match="pip install"):
        look.plotly_js()


def test_importing_it_imports_nothing_heavy() -> None:
    code = "import sys, pollux.reports.look; print('plotly' in sys.modules, 'numpy' in sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert printed.split()[0] == "False"
