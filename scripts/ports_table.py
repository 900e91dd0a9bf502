"""Writes the table of ported scripts in docs/porting.md from a run of their tests.

    pytest tests/e2e/test_ports.py -o junit_family=xunit1 --junitxml=out/ports.xml
    python scripts/ports_table.py out/ports.xml

The tests record what each script printed at its end. A test that failed, or did not run, leaves "no" in its columns.
The names of the public scripts are those of the table that is there.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.ports import BOUNDS, changed_lines  # noqa: E402

PAGE = ROOT / "docs" / "porting.md"
COLUMNS = ("plain", "alone", "cluster", "killed")
HEAD = (
    "| script | in the shape of | lines | alone | cluster | resize, SIGKILL | result: plain | alone | in a cluster "
    "| killed | may be |\n|---|---|---|---|---|---|---|---|---|---|---|\n"
)


def results_of(report: Path) -> dict[str, dict[str, float]]:
    """By script and column, of the tests that passed."""
    found: dict[str, dict[str, float]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = re.search(r"\[(\w+)\]$", case.get("name", ""))
        if name is not None and not any(part.tag in ("failure", "error", "skipped") for part in case):
            for told in case.iter("property"):
                found.setdefault(name[1], {})[str(told.get("name"))] = float(str(told.get("value")))
    return found


def row(name: str, shape: str, results: dict[str, float]) -> str:
    def cell(column: str) -> str:
        value = results.get(column)
        return "-" if value is None else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"

    ran = ["yes" if column in results else "no" for column in COLUMNS[1:]]
    lowest, highest = BOUNDS[name]
    cells = [f"`{name}`", shape, str(changed_lines(name)), *ran, *map(cell, COLUMNS), f"{lowest} to {highest}"]
    return f"| {' | '.join(cells)} |\n"


def main() -> int:
    results = results_of(Path(sys.argv[1]))
    page = PAGE.read_text()
    old = re.search(r"^\| script \|.*?\n(?=\n)", page, re.MULTILINE | re.DOTALL)
    assert old is not None, "docs/porting.md has no table of scripts"
    shapes = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", old[0], re.MULTILINE))
    rows = (row(name, shapes.get(name, "?"), results.get(name, {})) for name in sorted(BOUNDS))
    PAGE.write_text(page.replace(old[0], HEAD + "".join(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
