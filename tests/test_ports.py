"""The table of ported scripts in docs/porting.md: every script is in it, with the number of its changed lines."""

from __future__ import annotations

import re

import pytest

from pollux.api.kind import detect_kind
from pollux.check import check_script
from tests.ports import BOUNDS, MOST_LINES, MOST_LINES_OTHERS, PORTS, ROOT, changed_lines

NAMES = sorted(path.stem for path in (PORTS / "plain").glob("*.py"))


def test_every_script_has_a_plain_version_a_port_and_bounds():
    assert NAMES == sorted(path.stem for path in PORTS.glob("*.py")) == sorted(BOUNDS)


@pytest.mark.parametrize("name", NAMES)
def test_few_lines_change(name):
    assert 0 < changed_lines(name) <= MOST_LINES.get(name, MOST_LINES_OTHERS)


def test_the_table_tells_the_changed_lines():
    page = (ROOT / "docs" / "porting.md").read_text()
    told = {name: int(count) for name, count in re.findall(r"^\| `(\w+)` \|[^|]+\| (\d+) \|", page, re.MULTILINE)}
    assert told == {name: changed_lines(name) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_port_is_elastic_and_has_no_error(name):
    text = (PORTS / f"{name}.py").read_text()
    assert detect_kind(text) == "elastic"
    findings = [found for found in check_script(text, name) if found.severity != "hint"]
    findings = [found for found in findings if found.severity == "error" or name != "vae"]
    assert findings == []  # vae logs every tenth pass, which is as good as every tenth step; most print and log nothing
