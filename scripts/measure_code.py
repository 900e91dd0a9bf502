"""Measure the size and shape of ``src``: modules, lines, ``Any``, long functions, repeated names and lines.

    python scripts/measure_code.py                    # of the working tree
    python scripts/measure_code.py --before 0308a93   # a table: that revision, the working tree
    python scripts/measure_code.py --json
    python scripts/measure_code.py --walks            # with the hops of three walks, traced: see walks.py

Lines are those of Python files, blank ones and comments included. A function's length is from ``def`` to its last line.
Repeated lines: lines of code in a run of at least eight (blanks, comments and imports left out) that
occurs twice in the tree. Repeated names: public classes and module-level functions whose name two modules define.
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import json
import statistics
import subprocess
import tarfile
import tempfile
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import walks

ROOT = Path(__file__).resolve().parents[1]
WINDOW = 8  # lines that count as repeated
MAX_FUNCTION, MAX_PARAMETERS = 80, 8


@dataclass(frozen=True, kw_only=True)
class Measures:
    modules: int
    lines: int
    largest_module: int
    any_count: int
    any_per_1000_lines: float
    functions: int
    median_function: float
    percentile_95_function: float
    functions_over_80_lines: int
    functions_over_8_parameters: int
    repeated_lines: int
    repeated_names: int
    names: tuple[str, ...]  # the repeated ones


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def length(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def num_parameters(function: Function) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in named)


def count_any(text: str) -> int:
    """Uses of the name ``Any`` in code; its imports do not count."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.NAME and token.string == "Any" and "import" not in token.line for token in tokens)


def code_lines(text: str) -> list[str]:
    kept = (line.strip() for line in text.splitlines())
    return [line for line in kept if line and not line.startswith(("#", "import ", "from "))]


def repeated_lines(texts: list[str]) -> int:
    places: dict[tuple[str, ...], list[tuple[int, int]]] = collections.defaultdict(list)
    for index, text in enumerate(texts):
        lines = code_lines(text)
        for start in range(len(lines) - WINDOW + 1):
            places[tuple(lines[start : start + WINDOW])].append((index, start))
    repeated = {
        (index, start + offset)
        for found in places.values()
        if len(found) > 1
        for index, start in found
        for offset in range(WINDOW)
    }
    return len(repeated)


def repeated_names(trees: list[ast.Module]) -> tuple[str, ...]:
    counts = collections.Counter(
        node.name
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_")
    )
    return tuple(sorted(name for name, count in counts.items() if count > 1))


def measure(folder: Path) -> Measures:
    """Of the Python files under ``folder``."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))]
    trees = [ast.parse(text) for text in texts]
    found = [function for tree in trees for function in functions(tree)]
    lengths = sorted(map(length, found))
    num_lines = sum(len(text.splitlines()) for text in texts)
    num_any = sum(map(count_any, texts))
    names = repeated_names(trees)
    return Measures(
        modules=len(texts),
        lines=num_lines,
        largest_module=max(len(text.splitlines()) for text in texts),
        any_count=num_any,
        any_per_1000_lines=round(1000 * num_any / num_lines, 1),
        functions=len(found),
        median_function=statistics.median(lengths),
        percentile_95_function=lengths[int(0.95 * len(lengths))],
        functions_over_80_lines=sum(number > MAX_FUNCTION for number in lengths),
        functions_over_8_parameters=sum(num_parameters(function) > MAX_PARAMETERS for function in found),
        repeated_lines=repeated_lines(texts),
        repeated_names=len(names),
        names=names,
    )


@contextmanager
def source_of(revision: str) -> Iterator[Path]:
    """The ``src`` of a git revision, while it is needed."""
    archive = subprocess.run(["git", "archive", revision, "src"], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder) / "src"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", help="a git revision to compare with")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--walks", action="store_true", help="trace a submission, a report and a simulated round")
    options = parser.parse_args()
    columns: dict[str, Measures] = {}
    hops: dict[str, dict[str, dict[str, list[str]]]] = {}  # by column, walk and stage
    with source_of(options.before) if options.before else nullcontext() as before:
        for name, source in ((options.before, before), ("now", ROOT / "src")):
            if source is not None:
                columns[name] = measure(source)
                hops[name] = walks.walks_of(source) if options.walks else {}
    if options.json:
        found = {name: asdict(measures) | {"walks": hops[name]} for name, measures in columns.items()}
        print(json.dumps(found, indent=1))
        return
    print(f"{'':30}" + "".join(f"{name:>12}" for name in columns))
    for field in asdict(columns["now"]):
        if field != "names":
            print(f"{field.replace('_', ' '):30}" + "".join(f"{getattr(one, field):12}" for one in columns.values()))
    for walk in hops["now"]:
        print(f"{'hops of a ' + walk:30}" + "".join(f"{walks.num_hops(found[walk]):12}" for found in hops.values()))
    print("repeated names:", ", ".join(columns["now"].names))


if __name__ == "__main__":
    main()
