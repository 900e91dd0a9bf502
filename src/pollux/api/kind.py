"""Which kind of job a script is, seen from its imports and from those of the files that it imports.

:meth:`pollux.api.request.JobRequest.resolved` calls it. Pure: files are read by the caller's function. Files in the
folder of the script and on PYTHONPATH are followed; installed packages are not.
"""

from __future__ import annotations

import ast
import posixpath
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

ReadFile = Callable[[str], str | None]
"""The text of a file by its path; None: there is none, or it cannot be read."""

FoundKind = Literal["elastic", "restartable", "fixed"]
MAX_FILES = 300  # that are read
MAX_LOOKS = 20_000  # for files, found or not
# No other thread of the server runs while a text is parsed, at about a megabyte a second.
MAX_LENGTH, MAX_LENGTH_OF_ALL = 300_000, 3_000_000
_KINDS: Mapping[str, FoundKind] = {
    "pollux.train": "elastic",
    "pollux.integrations": "elastic",
    "pollux.elastic": "restartable",
}
_PYTHON = re.compile(r"python[0-9.]*")


def no_files(path: str) -> str | None:
    """Reads nothing."""
    return None


def parse_python(text: str) -> ast.Module | None:
    """None: it is not Python."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of the user's code ("\\d" in a string), not for us to show
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def module_of(command: Sequence[str]) -> str | None:
    """The module of ``python -m module``; None: the command runs none, or a launcher of torch."""
    for index, word in enumerate(command[1:], start=1):
        if word == "-m" and index + 1 < len(command):
            module = command[index + 1]
            is_python = _PYTHON.fullmatch(posixpath.basename(command[0])) is not None
            return module if is_python and not module.startswith("torch.distributed") else None
        if not word.startswith("-"):
            return None
    return None


def import_roots(script: str | None, cwd: str, python_path: str) -> tuple[str, ...]:
    """Where the imports of a script are looked for: its folder (with ``-m`` the current one), then PYTHONPATH."""
    first = cwd if script is None else posixpath.dirname(posixpath.join(cwd, script))
    others = [posixpath.join(cwd, entry) for entry in python_path.split(":") if entry]
    return tuple(dict.fromkeys([first, *others]))


def detect_kind(
    text: str | None, module: str | None = None, *, roots: Sequence[str] = (), read: ReadFile = no_files
) -> FoundKind:
    """``elastic`` if the script, or a file that it imports, imports ``pollux.train``, anywhere.

    Else ``restartable`` if one imports ``pollux.elastic``, else ``fixed``.
    ``text`` is that of the script. Without one ``module`` is looked for. What is not Python is ``fixed``.
    Texts of more than 300,000 characters are left out, and so is what comes after 3,000,000 in all.
    """
    reader = _Reader(roots, read)
    waiting = [("", text)] if text is not None else list(reader.files_of(module or ""))
    found: set[FoundKind] = set()
    left = MAX_LENGTH_OF_ALL
    while waiting and "elastic" not in found:
        package, code = waiting.pop()
        if len(code) > min(MAX_LENGTH, left):
            continue
        left -= len(code)
        for name in imports_of(code, package):
            found.update(kind for known, kind in _KINDS.items() if f"{name}.".startswith(f"{known}."))
            waiting.extend(reader.files_of(name))
    return next((kind for kind in ("elastic", "restartable") if kind in found), "fixed")


def imports_of(text: str, package: str = "") -> list[str]:
    """Full names of all that a text imports, in any place. ``from a import b`` names a and a.b: b may be a module."""
    names: list[str] = []
    tree = parse_python(text)
    for node in () if tree is None else ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (base := _base(node, package)):
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return names


def _base(node: ast.ImportFrom, package: str) -> str:
    """The full name of what ``from`` names; empty where a relative import leads outside."""
    if node.level == 0:
        return node.module or ""
    parts = package.split(".") if package else []
    if node.level > len(parts):
        return ""
    return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])


class _Reader:
    """Finds the files of modules: each once, and not more than a bound."""

    def __init__(self, roots: Sequence[str], read: ReadFile) -> None:
        self._roots, self._read = roots, read
        self._seen: set[str] = set()
        self._num_files = self._num_looks = 0

    def files_of(self, module: str) -> Iterator[tuple[str, str]]:
        """(package, text) of the module and of the packages that it is in."""
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if not all(parts) or parts[0] == "pollux" or name in self._seen:
                continue
            self._seen.add(name)
            if self._num_files < MAX_FILES and (found := self._find(name)) is not None:
                self._num_files += 1
                yield found

    def _find(self, module: str) -> tuple[str, str] | None:
        path = module.replace(".", "/")
        forms = ((f"{path}/__init__.py", module), (f"{path}.py", module.rpartition(".")[0]))
        for root in self._roots:
            for file, package in forms:
                self._num_looks += 1
                if self._num_looks > MAX_LOOKS:
                    return None
                text = self._read(posixpath.join(root, file))
                if text is not None:
                    return package, text
        return None
