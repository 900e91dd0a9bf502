"""What the server takes in of working directories, and what it refuses: paths, sizes, archives, other users' files."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from pollux.api.request import JobRequest
from pollux.api.workdir import WorkdirEntry, WorkdirFiles
from pollux.engines.code_store import CodeStore
from pollux.errors import InvalidValueError
from pollux.server.storage.workdirs import Workdirs

LIMIT = 100_000
TEXT = b"print(1)\n"


def hash_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def listing(**files: bytes) -> WorkdirFiles:
    return WorkdirFiles(
        files=tuple(
            WorkdirEntry(path=name, sha256=hash_of(content), size_bytes=len(content)) for name, content in files.items()
        )
    )


def bundle(*contents: bytes, **changes: object) -> io.BytesIO:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:") as archive:
        for content in contents:
            info = tarfile.TarInfo(hash_of(content))
            info.size = len(content)
            for name, value in changes.items():
                setattr(info, name, value)
            archive.addfile(info, io.BytesIO(content))
    made.seek(0)
    return made


@pytest.fixture
def workdirs(tmp_path: Path) -> Workdirs:
    return Workdirs(str(tmp_path), LIMIT)


def stored(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("sha256", ["../../../../etc/passwd", "", "0" * 63, "0" * 64 + "\n", "G" * 64])
def test_what_is_no_hash_never_becomes_a_path(tmp_path, sha256):
    store = CodeStore(str(tmp_path))
    for ask in (lambda: store.read_bytes(sha256, 9), lambda: store.missing([sha256]), lambda: store.has_list(sha256)):
        with pytest.raises(InvalidValueError, match="64 hexadecimal digits"):
            ask()


def test_a_link_is_not_read_as_a_script(workdirs, tmp_path):
    """Of a list that was kept before links with a hash were refused."""
    (tmp_path / "secret").write_text("from pollux import train; train.init()")
    found = WorkdirFiles(files=(WorkdirEntry(path="a.py", kind="link", target="b", sha256="../../../secret"),))
    with pytest.raises(InvalidValueError, match="only files have them"):
        workdirs.announce(found)
    request = JobRequest(command=("python", "a.py"), workdir=workdirs.store.put_list(found))
    with pytest.raises(InvalidValueError, match="only files have them"):
        workdirs.resolved(request)
