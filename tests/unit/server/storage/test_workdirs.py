"""What the server takes in of working directories, and what it refuses: paths, sizes, archives, other users' files."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import stat
import tarfile
import time
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
    for ask in (lambda: store.read_bytes(sha256, 9), lambda: store.sizes([sha256]), lambda: store.has_list(sha256)):
        with pytest.raises(InvalidValueError, match="64 hexadecimal digits"):
            ask()


def test_a_link_is_not_read_as_a_script(workdirs, tmp_path):
    """Of a list that was kept before links with a hash were refused."""
    (tmp_path / "secret").write_text("from pollux import train; train.init()")
    found = WorkdirFiles(files=(WorkdirEntry(path="a.py", kind="link", target="b", sha256="../../../secret"),))
    with pytest.raises(InvalidValueError, match="only files have them"):
        workdirs.announce(found, None)
    request = JobRequest(command=("python", "a.py"), workdir=workdirs.store.put_list(found))
    with pytest.raises(InvalidValueError, match="only files have them"):
        workdirs.resolved(request)


# Sizes ----------------------------------------------------------------------------------------


def gnu_sparse(size: int) -> io.BytesIO:
    """GNU's old format: one header that says how long the hole is."""
    info = tarfile.TarInfo(hash_of(bytes(size)))
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[156:157] = tarfile.GNUTYPE_SPARSE
    header[386:398], header[398:410] = b"%011o\0" % size, b"%011o\0" % 0
    header[483:495] = b"%011o\0" % size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return io.BytesIO(bytes(header) + bytes(1024))


def pax_sparse(size: int) -> io.BytesIO:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo(hash_of(bytes(size)))
        info.pax_headers = {"GNU.sparse.size": str(size), "GNU.sparse.map": f"{size},0"}
        archive.addfile(info)
    made.seek(0)
    return made


@pytest.mark.parametrize("made", [gnu_sparse, pax_sparse])
@pytest.mark.parametrize("size", [LIMIT // 2, 1 << 28])
def test_a_sparse_archive_fills_no_disk(workdirs, tmp_path, made, size):
    with tarfile.open(fileobj=made(size), mode="r:") as archive:
        assert [one.size for one in archive] == [size]  # it is what it is meant to be
    with pytest.raises(InvalidValueError, match=r"plain files|at most"):
        workdirs.take(made(size), None)
    assert stored(tmp_path) == []


def test_a_bundle_holds_no_more_than_a_directory_may(workdirs, tmp_path):
    parts = [bytes([number]) * (LIMIT // 3) for number in range(4)]
    with pytest.raises(InvalidValueError, match="at most"):
        workdirs.take(bundle(*parts), None)
    assert sum(path.stat().st_size for path in stored(tmp_path)) <= LIMIT


def test_a_bundle_of_plain_files_is_taken(workdirs):
    found = listing(a=TEXT, b=b"", c=TEXT)
    assert set(workdirs.announce(found, None).missing) == {hash_of(TEXT), hash_of(b"")}
    assert workdirs.take(bundle(TEXT, b""), None) == 2
    assert workdirs.announce(found, None).missing == ()


def test_a_file_that_is_longer_than_allowed_is_not_kept(tmp_path):
    with pytest.raises(InvalidValueError, match="more bytes"):
        CodeStore(str(tmp_path)).put_file(hash_of(TEXT), io.BytesIO(TEXT), len(TEXT) - 1)
    assert stored(tmp_path) == []


def test_a_size_that_is_only_claimed_is_refused(workdirs):
    workdirs.take(bundle(TEXT), None)
    files = tuple(WorkdirEntry(path=str(number), sha256=hash_of(TEXT), size_bytes=0) for number in range(20_000))
    with pytest.raises(InvalidValueError, match="said to have 0 bytes; it has 9"):
        workdirs.announce(WorkdirFiles(files=files), None)


def test_a_copy_stops_beyond_the_size_of_its_list(workdirs, tmp_path):
    workdirs.take(bundle(TEXT), None)
    workdirs.store.copy_to(hash_of(TEXT), tmp_path / "whole", len(TEXT))
    assert (tmp_path / "whole").read_bytes() == TEXT
    with pytest.raises(OSError, match="more than the 8 bytes"):
        workdirs.store.copy_to(hash_of(TEXT), tmp_path / "copy", len(TEXT) - 1)
    assert (tmp_path / "copy").stat().st_size == 0


# Other users ----------------------------------------------------------------------------------


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_and_folders_are_the_servers_alone(workdirs, tmp_path):
    before = os.umask(0)
    try:
        workdirs.take(bundle(TEXT), None)
        workdirs.announce(listing(a=TEXT), None)
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "workdirs") == 0o700
    assert len(stored(tmp_path)) == 2 and {mode_of(path) for path in stored(tmp_path)} == {0o600}


def test_a_folder_of_before_is_closed_at_the_start(tmp_path, caplog):
    (tmp_path / "workdirs").mkdir()
    (tmp_path / "workdirs").chmod(0o755)
    with caplog.at_level(logging.WARNING):
        Workdirs(str(tmp_path))
    assert mode_of(tmp_path / "workdirs") == 0o700 and "755" in caplog.text


def test_what_was_used_longest_ago_goes_and_what_jobs_need_stays(tmp_path: Path) -> None:
    in_use: set[str] = set()
    workdirs = Workdirs(str(tmp_path), LIMIT, lambda: in_use, max_kept_bytes=2500)

    def send(number: int, age_s: float) -> str:
        shared, own = b"s" * 500, bytes([number]) * 1000
        workdirs.take(bundle(shared, own), "ann")
        id_ = workdirs.announce(listing(shared=shared, own=own), "ann").id
        for path in stored(tmp_path):
            if "senders" not in path.parts and path.stat().st_mtime > time.time() - 60:
                os.utime(path, (time.time() - age_s,) * 2)
        return id_

    oldest, old = send(1, 9000.0), send(2, 8000.0)
    in_use.add(oldest)
    third = send(3, 7000.0)  # 3,500 bytes now: one has to go, and it is not the one that a job needs
    assert [workdirs.store.has_list(id_) for id_ in (oldest, old, third)] == [True, False, True]
    assert workdirs.store.sizes([hash_of(bytes([2]) * 1000), hash_of(b"s" * 500)]) == {hash_of(b"s" * 500): 500}
    with pytest.raises(InvalidValueError, match="send it first"):
        workdirs.check_sender(old, "ann")
    assert workdirs.announce(listing(shared=b"s" * 500, own=bytes([2]) * 1000), "ann").missing  # it is sent again
    fresh = [send(number, 0.0) for number in (4, 5)]  # none of these may go yet, whatever the bound
    assert all(workdirs.store.has_list(id_) for id_ in (oldest, *fresh)) and not workdirs.store.has_list(third)
    with pytest.raises(InvalidValueError, match="may be kept"):
        send(6, 0.0)


def test_files_that_are_never_announced_fill_no_disk(tmp_path: Path) -> None:
    in_use: set[str] = set()
    workdirs = Workdirs(str(tmp_path), LIMIT, lambda: in_use, max_kept_bytes=4000)
    needed = b"n" * 1000
    workdirs.take(bundle(needed), "ann")
    in_use.add(workdirs.announce(listing(needed=needed), "ann").id)
    with pytest.raises(InvalidValueError, match=r"may be kept: what no job needs goes an hour after it was sent"):
        for number in range(20):
            workdirs.take(bundle(bytes([number]) * 1000), "bob")
    files = [path for path in stored(tmp_path) if "files" in path.parts and "senders" not in path.parts]
    assert sum(path.stat().st_size for path in files) == 5000  # with what a job needs
    workdirs.take(bundle(bytes(1000)), "ann")  # is here, so it takes no more room
    workdirs.announce(listing(needed=needed), "ann")
    for path in files:
        os.utime(path, (time.time() - 9000.0,) * 2)
    workdirs.take(bundle(b"a" * 1000), "ann")  # what was not announced has gone
    assert workdirs.store.sizes([hash_of(needed), hash_of(bytes(1000))]) == {hash_of(needed): 1000}


def test_a_file_that_does_not_arrive_takes_no_room(tmp_path: Path) -> None:
    workdirs = Workdirs(str(tmp_path), LIMIT, max_kept_bytes=2500)
    for _ in range(5):
        with pytest.raises(InvalidValueError, match="hash"):
            workdirs.take(bundle(b"x" * 1000, name="0" * 64), "bob")
    assert workdirs.take(bundle(b"a" * 1000, b"b" * 1000), "ann") == 2
