"""Keeps the pages for people who change the code right: names, links, words, line lengths, plain English."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "pollux"
INTERNALS = sorted((ROOT / "docs" / "internals").glob("*.md"))
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "examples/README.md")]
PAGES = [*TOP, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / ".github").rglob("*.md"))]
WIDTH = 120
MAX_WORDS = 44  # three of them of studies
VAGUE = re.compile(r"\b(nobody|somebody|whoever|everybody|anybody)\b", re.IGNORECASE)

_NAME = re.compile(r"`((?:[a-z_]+/)*[a-z_]+\.py):([A-Za-z_][\w.]*)`")
_FILE = re.compile(r"`((?:src|tests|docs|scripts|benchmarks|examples|deploy)/[\w./-]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Lines outside tables, code blocks and headings, with their numbers."""
    is_code = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith(("|", "    ", "#")):
            yield number, line


def defined(path: Path) -> set[str]:
    """Classes and functions of a module, and methods as ``Class.method``."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            functions = (inner for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef))
            found.update(f"{node.name}.{inner.name}" for inner in functions)
    return found


@pytest.mark.parametrize("page", [*INTERNALS, *DECISIONS, *TOP], ids=relative)
def test_every_function_that_is_named_exists(page: Path) -> None:
    missing = [
        f"{file}:{name}"
        for file, name in _NAME.findall(page.read_text(encoding="utf-8"))
        if not (SOURCE / file).is_file() or name not in defined(SOURCE / file)
    ]
    assert not missing


def test_journeys_name_functions() -> None:
    """The test above would pass on pages that name none."""
    for name in ("journey-of-a-job", "journey-of-a-report", "threads-and-state", "failures"):
        page = ROOT / "docs" / "internals" / f"{name}.md"
        assert len(_NAME.findall(page.read_text(encoding="utf-8"))) >= 15, name


@pytest.mark.parametrize("page", [*INTERNALS, *DECISIONS, *TOP], ids=relative)
def test_every_file_that_is_named_exists(page: Path) -> None:
    shown = _FILE.findall(page.read_text(encoding="utf-8"))
    assert not [name for name in shown if "NAME" not in name and not (ROOT / name).exists()]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in link or link.startswith("mailto:"):
            continue
        target, _, anchor = link.partition("#")
        file = page.parent / target if target else page
        assert file.exists(), link
        assert not anchor or anchor in anchors(file), link


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_lines_of_prose_are_short(page: Path) -> None:
    long = [
        f"line {number}: {len(line)}" for number, line in prose(page) if len(line) > WIDTH and not _LINK.search(line)
    ]
    assert not long


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_pages_say_who_is_meant(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not [match[0] for match in VAGUE.finditer(text)]


def test_module_docstrings_say_who_is_meant() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        assert not VAGUE.search(docstring), path


# The glossary ---------------------------------------------------------------------------------


def glossary() -> list[str]:
    text = (ROOT / "docs" / "internals" / "glossary.md").read_text(encoding="utf-8")
    return [word for word in re.findall(r"^\| ([^|]+?) \|", text, re.MULTILINE) if word != "word"]


def test_the_glossary_is_short() -> None:
    words = glossary()
    assert 20 <= len(words) <= MAX_WORDS
    assert len(set(words)) == len(words)


def test_every_word_of_the_glossary_is_used() -> None:
    """In the code and in the pages, as a word or as a part of a name."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py")))
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES if page.name != "glossary.md")
    for word in glossary():
        pattern = re.compile(word.replace(" ", "[ _-]?"), re.IGNORECASE)
        assert pattern.search(code) and pattern.search(pages), word
