"""Pages of the documentation, run as they stand: their blocks in order, in a folder and a home of their own.

``console`` blocks hold what is typed (``$ ...``, continued by ``> ...``) and what is answered. What is answered with
numbers changes from run to run; a line without any must come as it is shown. A ``python`` block that begins with a
comment of a file's name alone (``# train.py``) is that file; the others are run.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCK_TIMEOUT_S = 120.0
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w-]+\.(?:py|sh))\n")
_EMPTY = re.compile(r"[\s.…]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name of the file that it is, if it is one."""
        match = _FILE.match(self.text)
        return match[1] if match else None

    @property
    def commands(self) -> list[str]:
        """What is typed, each with the lines that continue it."""
        found: list[str] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append(line[2:])
            elif line.startswith("> "):
                found[-1] += f"\n{line[2:]}"
        return found

    @property
    def constant_lines(self) -> list[str]:
        """Answers that are the same every time."""
        lines = (line for line in self.text.splitlines() if not line.startswith(("$ ", "> ")))
        return [_squeezed(line) for line in lines if not re.search(r"\d", line) and not _EMPTY.fullmatch(line)]


def read_blocks(page: Path, *languages: str) -> list[Block]:
    found = (Block(language=language, text=text) for language, text in _BLOCK.findall(page.read_text()))
    return [block for block in found if block.language in languages]


def require_extras(blocks: Sequence[Block]) -> None:
    """Skip a test of blocks that need a package that is not installed."""
    if any("pollux tune" in block.text or "pollux.tune" in block.text for block in blocks):
        pytest.importorskip("optuna", reason="studies need the extra tune")


def _squeezed(text: str) -> str:
    """Columns are as wide as what stands in them."""
    return " ".join(text.split())


class Session:
    """A user in a new home, beside the examples. ``folder`` is known to every process, as its home."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("POLLUX_")}
        path = os.pathsep.join((os.path.dirname(sys.executable), inherited.get("PATH", os.defpath)))
        own = {"HOME": str(folder), "POLLUX_DATA": str(folder / ".pollux"), "PATH": path, "OMP_NUM_THREADS": "1"}
        # A Ray that is started is nobody else's; paths of its sockets must be short.
        self.temporary = Path(tempfile.mkdtemp(prefix="pollux-ray-", dir="/tmp"))
        self._env = inherited | own | {"RAY_TMPDIR": str(self.temporary)}
        (folder / "examples").symlink_to(ROOT / "examples")

    def run(self, block: Block) -> str:
        """What it prints, if all of it succeeds."""
        if block.file is not None:
            (self.folder / block.file).write_text(block.text)
            return ""
        if block.language == "python":
            return self._run([sys.executable, "-c", block.text], block.text)
        printed = self._run(["bash", "-c", "\n".join(("set -euo pipefail", *block.commands))], block.text)
        lines = {_squeezed(line) for line in printed.splitlines()}
        for line in block.constant_lines:
            assert line in lines, f"{line!r} is shown, but not printed by\n{block.text}\nwhich printed\n{printed}"
        return printed

    def _run(self, words: list[str], shown: str) -> str:
        with subprocess.Popen(
            words,
            cwd=self.folder,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                printed, _ = process.communicate(timeout=BLOCK_TIMEOUT_S)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        assert process.returncode == 0, f"exit code {process.returncode} of\n{shown}\nwhich printed\n{printed}"
        return printed

    def processes(self) -> list[int]:
        """Whoever has this home: all that was started here, and what that has started."""
        mark, found = f"HOME={self.folder}".encode(), []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found


@contextlib.contextmanager
def session(folder: Path) -> Iterator[Session]:
    """At its end nothing runs any more: that is checked if all went well, and seen to if not."""
    made = Session(folder)
    try:
        yield made
        ends_at = time.monotonic() + 20.0
        while made.processes() and time.monotonic() < ends_at:
            time.sleep(0.05)
        assert made.processes() == [], "the page leaves processes behind"
    finally:
        while left := made.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        shutil.rmtree(made.temporary, ignore_errors=True)
