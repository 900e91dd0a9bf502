"""The kind of a job, seen from its script and from the files that this imports."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pollux.api import kind as kinds
from pollux.api.kind import MAX_FILES, detect_kind, module_of
from pollux.api.request import JobRequest


def files(texts: Mapping[str, str]):
    return lambda path: texts.get(path)


@pytest.mark.parametrize(
    ("script", "others", "kind"),
    [
        ("import trainer", {"/w/trainer.py": "import pollux.train"}, "elastic"),
        ("from trainer import main", {"/w/trainer.py": "from pollux import train"}, "elastic"),
        ("from lib import loop", {"/w/lib/loop.py": "import pollux.train"}, "elastic"),
        ("import lib.loop", {"/w/lib/loop.py": "import pollux.train"}, "elastic"),
        ("import lib.loop", {"/w/lib/__init__.py": "import pollux.train", "/w/lib/loop.py": ""}, "elastic"),
        ("import lib", {"/w/lib/__init__.py": "from .a import x", "/w/lib/a.py": "import pollux.train"}, "elastic"),
        ("import lib.a", {"/w/lib/a.py": "from . import b", "/w/lib/b.py": "import pollux.train"}, "elastic"),
        ("import lib.p.a", {"/w/lib/p/a.py": "from .. import b", "/w/lib/b.py": "import pollux.train"}, "elastic"),
        ("import a", {"/w/a.py": "import b", "/w/b.py": "import a, pollux.train"}, "elastic"),
        ("import a", {"/w/a.py": "import b", "/w/b.py": "import a"}, "fixed"),
        ("import a", {"/w/a.py": "not python"}, "fixed"),
        ("from pollux import elastic", {}, "restartable"),
        ("import a", {"/w/a.py": "from pollux.elastic import join"}, "restartable"),
        ("from pollux import elastic\nimport a", {"/w/a.py": "import pollux.train"}, "elastic"),
        ("from pollux.integrations.huggingface import Trainer", {}, "elastic"),
        ("import a", {}, "fixed"),
        ("import a", {"/p/a.py": "import pollux.train"}, "elastic"),
        ("import a", {"/elsewhere/a.py": "import pollux.train"}, "fixed"),
        ("from ...... import a", {"/w/a.py": "import pollux.train"}, "fixed"),
    ],
)
def test_files_that_a_script_imports_are_read(script, others, kind):
    assert detect_kind(script, roots=("/w", "/p"), read=files(others)) == kind


def test_not_more_files_are_read_than_a_bound():
    asked = []

    def endless(path: str) -> str:
        asked.append(path)
        return f"import m{len(asked)}"

    assert detect_kind("import m0", roots=("/w",), read=endless) == "fixed"
    assert len(asked) <= MAX_FILES


@pytest.mark.parametrize(
    ("command", "module"),
    [
        (["python", "-m", "lab.train"], "lab.train"),
        (["python3", "-u", "-m", "train", "--lr", "1"], "train"),
        (["python", "train.py", "-m", "x"], None),
        (["python", "-m", "torch.distributed.run", "train.py"], None),
        (["bash", "train.sh"], None),
        (["tool", "-m", "x"], None),
    ],
)
def test_the_module_that_python_runs(command, module):
    assert module_of(command) == module


def test_a_request_is_resolved_by_the_files_beside_its_script():
    read = files(
        {"/w/sub/trainer.py": "import pollux.train", "/w/lab/train.py": "import lab.loop", "/w/lab/loop.py": ""}
    )
    beside = JobRequest(command=("python", "sub/train.py"), cwd="/w")
    assert beside.resolved("import trainer", read).kind == "elastic"
    moved = JobRequest(command=("python", "-m", "sub.trainer"), cwd="/w")
    assert moved.resolved(None, read).kind == "elastic"
    assert JobRequest(command=("python", "-m", "lab.train"), cwd="/w").resolved(None, read).kind == "fixed"
    by_path = JobRequest(command=("python", "/x/train.py"), cwd="/w", env={"PYTHONPATH": "/nowhere:/w/sub"})
    assert by_path.resolved("import trainer", read).kind == "elastic"


def test_what_is_looked_at_is_bounded(monkeypatch):
    """A server does it for its users: 300 files of 1 MB stopped all its threads for minutes, and names times roots had
    no bound at all.
    """
    parsed: list[int] = []
    parse = kinds.parse_python
    monkeypatch.setattr(kinds, "parse_python", lambda text: (parsed.append(len(text)), parse(text))[1])
    long, script = "#" * (kinds.MAX_LENGTH + 1), "\n".join(f"import m{number}" for number in range(20))
    files = {f"/m{number}.py": "#" * 250_000 for number in range(19)} | {"/m19.py": long}
    assert kinds.detect_kind(script, roots=("/",), read=files.get) == "fixed"
    assert max(parsed) <= kinds.MAX_LENGTH
    assert 2_500_000 < sum(parsed) <= kinds.MAX_LENGTH_OF_ALL
    looks: list[str] = []
    many = f"import {', '.join(f'a{number}' for number in range(500))}"
    assert kinds.detect_kind(many, roots=[f"/r{number}" for number in range(500)], read=looks.append) == "fixed"
    assert len(looks) == kinds.MAX_LOOKS
