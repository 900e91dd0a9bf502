"""Which cluster is meant; and a real head of our own, started and stopped."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

psutil = pytest.importorskip("psutil")

from pollux.engines.ray import head  # noqa: E402
from pollux.engines.ray.network import can_connect  # noqa: E402
from pollux.errors import EngineError  # noqa: E402
from tests.intruder import NOBODY, PYTHON, needs_another_user  # noqa: E402
from tests.long import long  # noqa: E402


@pytest.fixture
def last_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "ray_current_cluster"
    monkeypatch.setattr(head, "_LAST_CLUSTER", path)
    return path


def note_head(directory: Path, address: str, **changes: object) -> None:
    me = psutil.Process()
    note = {"pid": me.pid, "created": me.create_time(), "address": address, **changes}
    (directory / head.HEAD_FILE).write_text(json.dumps(note))


def test_the_named_cluster_then_the_environment_then_our_own_then_the_last(tmp_path, last_cluster):
    environment = {"RAY_ADDRESS": "env:1"}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        last = f"127.0.0.1:{listener.getsockname()[1]}"
        last_cluster.write_text(f"{last}\n")
        note_head(tmp_path, "own:1")
        assert head.find_address("named:1", tmp_path, environment) == "named:1"
        assert head.find_address("auto", tmp_path, environment) == "env:1"
        assert head.find_address(None, tmp_path, environment) == "env:1"
        assert head.find_address(None, tmp_path, {}) == "own:1"
        (tmp_path / head.HEAD_FILE).unlink()
        assert head.find_address(None, tmp_path, {}) == head.find_address("auto", tmp_path, {}) == last
    assert head.find_address(None, tmp_path, {}) is None  # nobody answers there any more
    with pytest.raises(EngineError, match=r"no Ray runs on this machine: start one \(`ray start --head`\)"):
        head.find_address("auto", tmp_path, {})


# Listens at a port of its own choice, under the name of a Ray head's process, and says so.
IMPOSTOR = """
import ctypes, socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))
ctypes.CDLL(None).prctl(15, b"gcs_server", 0, 0, 0)
print(listener.getsockname()[1], flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def impostor(user: int, *words: str) -> Iterator[int]:
    """The port where a program of this user listens."""
    assert PYTHON is not None
    command = [PYTHON, "-I", "-c", IMPOSTOR, *words]
    with subprocess.Popen(
        command, user=user, group=user, extra_groups=[], cwd="/", stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


@needs_another_user
def test_a_cluster_that_another_user_has_noted_is_not_joined(tmp_path, last_cluster, caplog):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        last_cluster.write_text(f"127.0.0.1:{listener.getsockname()[1]}")
        assert head.find_address(None, tmp_path, {}) is not None
        os.chown(last_cluster, NOBODY, NOBODY)
        assert head.find_address(None, tmp_path, {}) is None
        assert f"is not joined: the file is user {NOBODY}'s" in caplog.text
        os.chown(last_cluster, 0, 0)
        os.chown(last_cluster.parent, NOBODY, NOBODY)
        with pytest.raises(EngineError, match="no Ray runs on this machine"):
            head.find_address("auto", tmp_path, {})
        assert f"is not joined: the folder is user {NOBODY}'s" in caplog.text
        os.chown(last_cluster.parent, 0, 0)
        last_cluster.rename(last_cluster.with_name("elsewhere"))
        last_cluster.symlink_to("elsewhere")
        assert head.find_address(None, tmp_path, {}) is None
        last_cluster.unlink()
        os.mkfifo(last_cluster)  # does not answer
        assert head.find_address(None, tmp_path, {}) is None


@needs_another_user
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not tell who listens")
def test_a_program_of_another_user_at_the_port_of_a_head_that_has_ended_is_not_joined(tmp_path, last_cluster, caplog):
    with impostor(NOBODY) as port:
        address = f"127.0.0.1:{port}"
        last_cluster.write_text(address)
        assert head.find_address(None, tmp_path, {}) is None
        assert f"is not joined: another user's program listens at {address}" in caplog.text
        note_head(tmp_path, address, pid=2**22 + 1)
        assert head.is_dead(tmp_path) and head.own_head(tmp_path) is None


@needs_another_user
def test_only_processes_of_this_user_or_root_tell_how_a_head_is_known():
    """All users can see what processes there are, and start others with the same words."""
    for user, told, expected in (
        (NOBODY, "203.0.113.66", "127.0.0.1:2"),
        (0, "203.0.113.66", "203.0.113.66:2"),
        (0, "fe80::1%\x1b[2Kowned", "127.0.0.1:2"),
        (0, "owned", "127.0.0.1:2"),
    ):
        with impostor(user, "--gcs_server_port=2", f"--node-ip-address={told}"):
            assert head.as_others_know_it("127.0.0.1:2") == expected


@pytest.mark.parametrize("damage", [{"created": 1.0}, {"pid": 2**22 + 1}, {"pid": "x"}])
def test_another_process_with_the_number_of_our_head_is_not_it(tmp_path, damage):
    note_head(tmp_path, "own:1", **damage)
    assert head.own_head(tmp_path) is None
    head.stop_head(tmp_path)
    assert psutil.pid_exists(os.getpid())


def test_a_damaged_note_is_none(tmp_path):
    (tmp_path / head.HEAD_FILE).write_text("{ damaged")
    assert head.own_head(tmp_path) is None


def test_our_own_address_towards_a_cluster():
    for near in (None, "localhost:6379", "127.0.0.1:6379", "[::1]:6379"):
        assert head.own_address(near) == "127.0.0.1"
    with pytest.raises(EngineError, match=r"the host of nowhere\.invalid:6379 cannot be found"):
        head.own_address("nowhere.invalid:6379")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@long
def test_a_head_is_started_found_and_stopped(tmp_path, last_cluster):
    pytest.importorskip("ray")
    address = head.start_head(tmp_path, "127.0.0.1")
    try:
        pid = json.loads((tmp_path / head.HEAD_FILE).read_text())["pid"]
        everybody = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        assert len(everybody) > 2
        host, port = address.split(":")
        assert can_connect(host, int(port), 2.0) == ""
        assert head.own_head(tmp_path) == head.find_address(None, tmp_path, {}) == address
        folder = Path(json.loads((tmp_path / head.HEAD_FILE).read_text())["folder"])
        assert (folder / "ray" / "ray_current_cluster").read_text().endswith(address[-5:])
    finally:
        head.stop_head(tmp_path)
    assert not folder.exists()
    assert psutil.wait_procs(everybody, 5.0)[1] == []
    assert head.own_head(tmp_path) is None and not (tmp_path / head.HEAD_FILE).exists()
    assert can_connect(host, int(port), 2.0) != ""
    head.stop_head(tmp_path)  # again: there is nothing to stop


def test_what_a_head_keeps_is_closed_to_others_before_it_starts(tmp_path, monkeypatch):
    seen: list[Path] = []

    def spawn(_: str, __: list[str], env: dict[str, str], **___: object) -> int:
        seen.append(Path(env["RAY_TMPDIR"]))
        for folder in (tmp_path / head.HEAD_BOOKS, seen[-1]):
            assert folder.stat().st_mode & 0o777 == 0o700
        raise OSError("not in this test")

    monkeypatch.setattr(os, "posix_spawn", spawn)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    for folder in (None, "again", "/"):  # "/" is not closed to others, so another one is made
        if folder is not None:
            note_head(tmp_path, "127.0.0.1:1", created=0.0, folder=str(seen[0]) if folder == "again" else folder)
        with pytest.raises(OSError, match="not in this test"):
            head.start_head(tmp_path, "127.0.0.1")
    assert seen[0] == seen[1] != seen[2]
    for made in set(seen):
        made.rmdir()


def test_a_head_is_where_the_user_wants_its_files(tmp_path, monkeypatch):
    seen: list[str] = []

    def spawn(_: str, __: list[str], env: dict[str, str], **___: object) -> int:
        seen.append(env["RAY_TMPDIR"])
        raise OSError("not in this test")

    monkeypatch.setattr(os, "posix_spawn", spawn)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(OSError, match="not in this test"):
        head.start_head(tmp_path, "127.0.0.1")
    assert seen == [str(tmp_path)]


def test_a_head_that_does_not_start_says_why(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_gcs_storage", "rocksdb")
    with pytest.raises(EngineError, match=r"a Ray head could not be started; .*ray-head\.log ends with: ") as error:
        head.start_head(tmp_path, "127.0.0.1")
    assert "requires RAY_gcs_storage_path" in str(error.value)
    assert head.own_head(tmp_path) is None
