"""Checkpoints behind URLs: in memory, in a store that is moody, away or hangs, and over S3's interface with moto."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")

import fsspec  # noqa: E402
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402

from pollux import train  # noqa: E402
from pollux.errors import CheckpointError, FencedError, InvalidValueError  # noqa: E402
from pollux.train import checkpoint_remote  # noqa: E402
from pollux.train.checkpoint import AsyncSaver, CheckpointDirectory  # noqa: E402
from pollux.train.checkpoint_files import FileRecord, Manifest  # noqa: E402
from pollux.train.checkpoint_remote import RemoteStorage, is_url, without_secrets  # noqa: E402
from pollux.train.leaving import Leave  # noqa: E402
from tests.unit.train.checkpoints import assert_same, info, save, state, step_of  # noqa: E402
from tests.unit.train.processes import Rows, flat, small_model  # noqa: E402


@pytest.fixture(autouse=True)
def drafts(tmp_path, monkeypatch):
    """Where drafts and downloads go; nothing of them is left behind."""
    folder = tmp_path / "drafts"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.glob(".temporary*")) == []


class MoodyFileSystem(MemoryFileSystem):
    """Fails as a test tells it to: ``fails(method, path)`` raises, or waits."""

    protocol = "moody"
    store: ClassVar[dict[str, object]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    cachable = False

    @staticmethod
    def fails(method, path):
        pass

    def put_file(self, source, target, **options):
        self.fails("put", target)
        super().put_file(source, target, **options)

    def get_file(self, source, target, **options):
        self.fails("get", source)
        super().get_file(source, target, **options)

    def ls(self, path, **options):
        self.fails("ls", path)
        return super().ls(path, **options)

    def rm_file(self, path):
        self.fails("rm", path)
        super().rm_file(path)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).replace("moody://", "memory://"))


fsspec.register_implementation("moody", MoodyFileSystem, clobber=True)


@pytest.fixture
def moody(monkeypatch):
    monkeypatch.setattr(MoodyFileSystem, "store", {})
    monkeypatch.setattr(MoodyFileSystem, "pseudo_dirs", [""])
    monkeypatch.setattr(checkpoint_remote, "FIRST_PAUSE_S", 0.001)

    def tell(fails):
        monkeypatch.setattr(MoodyFileSystem, "fails", staticmethod(fails))

    return tell


@pytest.fixture(params=["memory", "moody"])
def url(request, moody):
    return f"{request.param}://{secrets.token_hex(8)}/some/where"


def stored(url):
    """What lies there: paths below the root."""
    fs, path = fsspec.core.url_to_fs(url)
    return sorted(name.removeprefix(path).lstrip("/") for name in fs.find(path))


# What goes in comes out


def test_checkpoints_come_back_and_the_newest_are_kept(url):
    directory = CheckpointDirectory(url)
    assert directory.load("ours") is None
    for step in (1, 2, 3):
        save(directory, step, generation=4)
        assert step_of(directory.load("ours")) == step
    assert [entry.step for entry in directory.list_all()] == [3, 2]
    assert stored(url) == sorted(
        f"step-00000000000{step}-0-4/{name}" for step in (2, 3) for name in ("tensors.safetensors", "manifest.json")
    )


def test_the_same_step_again_replaces_it_and_a_half_upload_keeps_its_name(url):
    directory = CheckpointDirectory(url)
    save(directory, 5)
    save(directory, 5)
    assert {name.split("/")[0] for name in stored(url)} == {"step-000000000005.1"}
    fs, path = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{path}/step-000000000006/tensors.safetensors", b"half of another writer's")
    save(directory, 6)
    assert "step-000000000006.1/manifest.json" in stored(url)
    assert directory.load("ours").info.step == 6


def test_a_damaged_download_leads_to_the_previous_one(url, caplog):
    directory = CheckpointDirectory(url)
    save(directory, 1)
    save(directory, 2)
    fs, path = fsspec.core.url_to_fs(url)
    name = f"{path}/step-000000000002/tensors.safetensors"
    content = bytearray(fs.cat_file(name))
    content[len(content) // 2] ^= 1
    fs.pipe_file(name, bytes(content))
    assert step_of(directory.load("ours")) == 1
    assert "content of its file tensors.safetensors has changed" in caplog.text


def test_a_manifest_cannot_name_files_elsewhere(url):
    directory = CheckpointDirectory(url)
    save(directory, 1)
    forged = Manifest(info={}, algorithm="sha256", records={"../../x": FileRecord(size_bytes=1, digest="")})
    with (
        pytest.raises(CheckpointError, match="not a plain file name"),
        directory._storage.fetch("step-000000000001", forged),
    ):
        pass


def test_in_the_background(url):
    directory = CheckpointDirectory(url)
    saver = AsyncSaver(directory)
    assert saver.begin(state(3), b"blob 3", info(3))
    saver.close(60)
    assert step_of(directory.load("ours")) == 3


# The order of things


def test_the_manifest_comes_last_and_goes_first(moody):
    seen = []
    moody(lambda method, path: seen.append((method, path.rpartition("/")[2])))
    directory = CheckpointDirectory("moody://order/here", keep=1)
    save(directory, 1)
    assert [name for method, name in seen if method == "put"] == ["tensors.safetensors", "manifest.json"]
    seen.clear()
    save(directory, 2)
    removed = [name for method, name in seen if method == "rm"]
    assert removed[0] == "manifest.json" and len(removed) == 2


@pytest.mark.parametrize("number", range(1, 13))
def test_a_writer_that_ends_after_any_operation_leaves_a_good_checkpoint(moody, number):
    """The writer dies at its n-th word to the store; nothing is said any more after that."""
    directory = CheckpointDirectory("moody://dies/here", keep=1)
    save(directory, 1)
    num_left = [number]

    class Died(BaseException):
        pass

    def die(method, path):
        if method in ("put", "rm", "ls"):
            num_left[0] -= 1
            if num_left[0] < 0:
                raise Died

    moody(die)
    with suppress(Died):
        save(directory, 2)
    moody(lambda method, path: None)
    assert step_of(directory.load("ours")) in (1, 2)
    save(directory, 3)
    assert step_of(directory.load("ours")) == 3


def test_halves_of_dead_writers_go_by_age(moody, monkeypatch):
    directory = CheckpointDirectory("moody://halves/here")
    fs, path = fsspec.core.url_to_fs("moody://halves/here")
    fs.pipe_file(f"{path}/step-000000000001/tensors.safetensors", b"half")
    fs.pipe_file(f"{path}/notes/tensors.safetensors", b"not ours")
    save(directory, 2)
    assert "step-000000000001/tensors.safetensors" in stored("moody://halves/here")  # its writer may be at it
    assert directory.load("ours").info.step == 2  # and it is no checkpoint
    monkeypatch.setattr(checkpoint_remote, "STALE_S", -1.0)
    save(directory, 3)
    there = {name.split("/")[0] for name in stored("moody://halves/here")}
    assert there == {"notes", "step-000000000002", "step-000000000003"}


# A store that is moody, away, or hangs


def test_passing_troubles_are_tried_again(moody, caplog):
    caplog.set_level(logging.INFO)
    counts: dict[tuple[str, str], int] = {}

    def fail_twice(method, path):
        key = (method, path)
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= 2:
            raise ConnectionResetError(errno.ECONNRESET, "reset by peer") if counts[key] == 1 else RuntimeError("503")

    moody(fail_twice)
    directory = CheckpointDirectory("moody://troubles/here")
    save(directory, 1)
    assert step_of(directory.load("ours")) == 1
    assert "retrying" in caplog.text
    assert max(counts.values()) < 20


def test_a_store_that_is_away_is_told_and_leaves_the_previous_ones(moody):
    directory = CheckpointDirectory("moody://away/here")
    save(directory, 1)
    before = stored("moody://away/here")

    def away(method, path):
        if method == "put":
            raise OSError("no route to host")

    moody(away)
    with pytest.raises(CheckpointError, match=r"step 2 could not be written.*in 5 attempts: no route to host"):
        save(directory, 2)
    saver = AsyncSaver(directory)
    saver.begin(state(2), b"", info(2))
    with pytest.raises(CheckpointError, match="no route to host"):
        saver.wait(60)
    moody(lambda method, path: None)
    assert stored("moody://away/here") == before
    save(directory, 2)
    assert step_of(directory.load("ours")) == 2

    def gone(method, path):
        raise OSError("no route to host")

    moody(gone)
    with pytest.raises(CheckpointError, match="cannot look for checkpoints"):
        directory.load("ours")  # never: begin from the beginning


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "denied"), OSError(errno.ENOSPC, "no space left")])
def test_a_no_is_not_asked_again(moody, error):
    asked = []

    def refuse(method, path):
        if method == "put":
            asked.append(path)
            raise error

    moody(refuse)
    with pytest.raises(CheckpointError, match=error.strerror):
        save(CheckpointDirectory("moody://no/here"), 1)
    assert len(asked) == 1


@pytest.mark.parametrize("method", ["put", "ls", "rm", "get"])
def test_a_store_that_hangs_is_given_up(moody, monkeypatch, method, caplog):
    directory = CheckpointDirectory("moody://hangs/here", keep=1)
    save(directory, 1)
    monkeypatch.setattr(checkpoint_remote, "OPERATION_S", 0.2)
    release = threading.Event()

    def hang(called, path):
        if called == method:
            release.wait(30)
            raise OSError("the connection was closed")

    moody(hang)
    begun = time.monotonic()
    try:
        if method == "rm":  # it is saved, and the old one stays
            save(directory, 2)
            assert "Remove it by hand" in caplog.text
        else:
            with pytest.raises(CheckpointError, match="no response within 0 s"):
                directory.load("ours") if method == "get" else save(directory, 2)
        assert time.monotonic() - begun < 10
    finally:
        release.set()


# What cannot be


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(
        checkpoint_remote.known_implementations,
        "nowhere",
        {"class": "nowherefs.NowhereFileSystem", "err": "Install nowherefs to go nowhere"},
    )
    with pytest.raises(CheckpointError, match=r"nowhere://bucket/a: .*pip install nowherefs"):
        CheckpointDirectory("nowhere://key:secret@bucket/a")
    with pytest.raises(CheckpointError, match=r"Protocol not known.*such as s3://bucket/path"):
        train.init(checkpoint_dir="nobody-knows://bucket")


@pytest.mark.parametrize(
    ("path", "is_one"),
    [("s3://b/k", True), ("file:///x", True), ("filecache::s3://b/k", True), ("/x/y", False), ("a::b", False),
     ("checkpoints", False), ("./s3:/b", False), (Path("checkpoints"), False)],
)  # fmt: skip
def test_what_is_a_url(path, is_one):
    assert is_url(path) == is_one


def test_a_url_in_a_path_is_a_mistake():
    with pytest.raises(InvalidValueError, match="pass the URL as str"):
        CheckpointDirectory(Path("s3://bucket/key"))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/key", "s3://bucket/key"),
        ("https://me:hunter22@host:1/x?token=abcdef12&a=b", "https://host:1/x"),
        ("simplecache::sftp://me:hunter22@host/x", "simplecache::sftp://host/x"),
        ("s3://key:se/cret@bucket/a", "s3://bucket/a"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("sftp://me@host/a", "sftp://host/a"),
    ],
)
def test_secrets_are_not_shown(url, shown):
    assert without_secrets(url) == shown


def test_secrets_are_cut_out_of_errors(moody, monkeypatch, caplog):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    url = "moody://me:hunter22@host/here?sig=abcdef12"

    def refuse(method, path):
        if method == "put":
            raise RuntimeError(f"cannot PUT {url} with wJalrXUtnFEMI")

    moody(refuse)
    with pytest.raises(CheckpointError) as raised:
        save(CheckpointDirectory(url), 1)
    story, error = caplog.text, raised.value
    while error is not None:
        story += repr(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    assert "cannot PUT" in story and "***" in story
    for secret in ("hunter22", "wJalrXUtnFEMI", "abcdef12"):
        assert secret not in story


def test_nobody_else_may_read_a_draft(drafts, url):
    storage = RemoteStorage(url)
    draft = storage.make_draft()
    assert draft.parent == drafts and draft.stat().st_mode & 0o077 == 0
    storage.discard(draft, None)


# Fencing


@pytest.fixture(params=["folder", "file", "memory"])
def place(request, tmp_path):
    folder = tmp_path / "store"
    return {"folder": folder, "file": f"file://{folder}", "memory": f"memory://{secrets.token_hex(8)}/x"}[request.param]


def test_who_may_not_publish_leaves_nothing(place):
    answers = [True, False]
    directory = CheckpointDirectory(place, may_publish=lambda: answers.pop(0))
    save(directory, 1)
    with pytest.raises(FencedError, match="step 2 is not published"):
        save(directory, 2)
    assert [entry.step for entry in directory.list_all()] == [1]
    if not str(place).startswith("memory"):
        assert [path.name for path in Path(str(place).removeprefix("file://")).iterdir()] == ["step-000000000001"]
    else:
        assert {name.split("/")[0] for name in stored(place)} == {"step-000000000001"}


def test_a_late_checkpoint_of_a_fenced_writer_never_wins(place):
    """The old writer is frozen between the question and its last step; its successor saves fewer steps meanwhile."""
    asked, release = threading.Event(), threading.Event()

    def freeze():
        asked.set()
        return release.wait(60)

    old, new = CheckpointDirectory(place, may_publish=freeze), CheckpointDirectory(place)
    save(new, 10, lineage=7, generation=3)
    saver = AsyncSaver(old)
    saver.begin(state(50), b"blob 50", info(50, lineage=7, generation=3))
    assert asked.wait(60)
    save(new, 20, lineage=7, generation=4)
    release.set()
    saver.close(60)
    assert [entry.step for entry in new.list_all()][:2] == [20, 50]
    assert step_of(new.load("ours")) == 20
    save(new, 30, lineage=7, generation=4)
    assert [entry.step for entry in new.list_all()] == [30, 20]  # and it goes like any old one


def test_a_late_checkpoint_counts_where_nothing_newer_is(place):
    directory = CheckpointDirectory(place)
    save(directory, 10, lineage=7, generation=3)
    save(directory, 50, lineage=7, generation=3)
    assert step_of(directory.load("ours")) == 50


def test_lineages_grow_even_where_clocks_do_not(place, monkeypatch):
    directory = CheckpointDirectory(place)
    now = time.time()
    first = directory.next_lineage()
    assert first >= int(now)
    save(directory, 90, lineage=first + 1000, generation=9)  # written by somebody whose clock is ahead
    assert directory.next_lineage() == first + 1001
    save(directory, 5, lineage=first + 1001, generation=1)
    assert step_of(directory.load("ours")) == 5


# A run


def train_for(url, num_steps, epochs=2):
    """Trains on; leaves after so many steps, with a checkpoint, or comes to the end."""
    model = small_model()
    with train.init(checkpoint_dir=url, device="cpu") as run:
        loader = run.dataloader(Rows(32), batch_size=4, shuffle=True)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        first = None
        for _ in run.epochs(epochs):
            for _, inputs, targets in loader:
                first = run.num_steps if first is None else first
                (model(inputs) - targets).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if run.num_steps == num_steps:
                    run._signals.received = "SIGTERM"
        return first, flat(model)


def test_a_run_resumes_from_a_url():
    url = f"memory://{secrets.token_hex(8)}/run"
    with pytest.raises(Leave):
        train_for(url, 5)
    first, resumed = train_for(url, -1)
    assert first >= 6
    _, whole = train_for(f"memory://{secrets.token_hex(8)}/other", -1)
    assert torch.equal(resumed, whole)
    lineages = [entry.lineage for entry in CheckpointDirectory(url).list_all()]
    assert len(set(lineages)) == 2 and lineages == sorted(lineages, reverse=True)


# S3's own interface. moto and s3fs bring hundreds of megabytes, so they are no part of the dev extra.


@pytest.fixture
def s3(monkeypatch, tmp_path):
    pytest.importorskip("s3fs", reason="needs s3fs")
    pytest.importorskip("moto", reason="needs moto[server]")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing-secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
        fs = fsspec.filesystem("s3", skip_instance_cache=True)
        fs.mkdir("bucket")
        yield fs
    finally:
        server.kill()
        server.wait(10)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_on_s3(s3):
    directory = CheckpointDirectory("s3://bucket/jobs/a")
    assert directory.load("ours") is None
    for step in (1, 2, 3):
        save(directory, step, lineage=5, generation=1)
        assert step_of(directory.load("ours")) == step
    save(directory, 3, lineage=5, generation=1)
    assert [entry.step for entry in directory.list_all()] == [3, 2]
    s3.invalidate_cache()
    assert sorted({name.split("/")[3] for name in s3.find("bucket/jobs/a")}) == [
        "step-000000000002-5-1",
        "step-000000000003-5-1.1",
    ]
    big = {"a": torch.arange(3_000_000)}  # more than one part
    directory.save(big, b"", info(4, lineage=5))
    save(directory, 9, signature="theirs", lineage=9)
    s3.rm_file("bucket/jobs/a/step-000000000009-9-0/manifest.json")
    save(directory, 5, lineage=6)
    assert step_of(directory.load("ours")) == 5
    directory.save(big, b"", info(6, lineage=6))
    assert_same(directory.load("ours").tensors, big)
    with pytest.raises(CheckpointError, match=r"s3://nobucket/x: .*could not be written"):
        save(CheckpointDirectory("s3://nobucket/x"), 1)
    assert [name.rstrip("/") for name in s3.ls("", detail=False, refresh=True)] == ["bucket"]
