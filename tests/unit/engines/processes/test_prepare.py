"""A job whose code travels and that runs as another Unix user: root's part sees nothing that the job asked for."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pollux.api.workdir import WorkdirEntry, WorkdirFiles
from pollux.engines.code_store import CodeStore
from pollux.engines.processes.identity import RUN_AS, identity_of
from pollux.engines.processes.leftovers import MARK, REPLICA, kill_leftovers, mark_of
from pollux.engines.processes.starters import ColdStarter, Command, ReplicaProcess
from pollux.engines.processes.workdirs import JobCode, locked, unpack
from tests.intruder import NOBODY, PYTHON, needs_another_user, run_as_nobody

pytestmark = needs_another_user
TIMEOUT_S = 30.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """That another user can pass through."""
    made = Path(tempfile.mkdtemp(prefix="pollux-prepare-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def open_folder(folder: Path) -> Path:
    """That every user can write to, as a folder which a job names may be."""
    made = folder / "open"
    made.mkdir()
    made.chmod(0o777)
    return made


@pytest.fixture
def workdir(folder: Path) -> str:
    store, content = CodeStore(str(folder / "store")), b"made at home\n"
    sha256 = hashlib.sha256(content).hexdigest()
    store.put_file(sha256, io.BytesIO(content))
    entry = WorkdirEntry(path="deep/note", kind="file", sha256=sha256, size_bytes=len(content))
    return store.put_list(WorkdirFiles(files=(entry,)))


def code(folder: Path, **options: object) -> JobCode:
    return JobCode(store=str(folder / "store"), **options)  # type: ignore[arg-type]


def nobody() -> str:
    return pwd.getpwuid(NOBODY).pw_name


def spawn(starter: ColdStarter, folder: Path, needed: JobCode, *argv: str, **env: str) -> ReplicaProcess:
    out = str(folder / "out")
    env = {"PATH": os.environ["PATH"], RUN_AS: nobody(), **needed.to_env(), **env}
    return starter.spawn(Command(argv=argv, env=env, cwd=str(folder / "work"), stdout=out, stderr=out))


def wait(starter: ColdStarter, replica: ReplicaProcess) -> int:
    ends_at = time.monotonic() + TIMEOUT_S
    while replica.exit_code is None:
        assert time.monotonic() < ends_at, "it does not end"
        starter.poll()
        time.sleep(0.02)
    return replica.exit_code


@pytest.mark.skipif(sys.platform != "linux", reason="asks the linker of glibc")
def test_the_linker_obeys_a_job_in_no_process_of_root(folder: Path, open_folder: Path, workdir: str) -> None:
    """LD_DEBUG_OUTPUT stands for LD_PRELOAD: a file belongs to the user that the linker obeyed it as."""
    asked = {"LD_DEBUG": "files", "LD_DEBUG_OUTPUT": str(open_folder / "linked"), "LD_PRELOAD": "/missing/preload.so"}
    with ColdStarter(()) as starter:
        replica = spawn(starter, folder, code(folder, workdir=workdir), "/bin/sh", "-c", "id -u", **asked)
        assert wait(starter, replica) == 0
    owners = {path.stat().st_uid for path in open_folder.glob("linked.*")}
    assert owners == {NOBODY}
    assert str(NOBODY) in (folder / "out").read_text().splitlines()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_of_root_has_nothing_of_the_jobs_environment(folder: Path, workdir: str) -> None:
    with ColdStarter(()) as starter:
        with locked(str(folder / "work.lock"), 1.0):  # it waits for this, as root
            replica = spawn(
                starter, folder, code(folder, workdir=workdir), "/bin/sh", "-c", 'echo "$MARKER" `cat deep/note`',
                MARKER="of the job", HOME="/job/home", PYTHONPATH="/job/python", XDG_CACHE_HOME="/job/cache",
            )  # fmt: skip
            seen = psutil.Process(replica.pid)
            ends_at = time.monotonic() + TIMEOUT_S
            while not any(file.path.endswith("work.lock") for file in seen.open_files()):
                assert time.monotonic() < ends_at, "it does not wait for the lock"
                assert_nothing_of_the_job(seen)
                time.sleep(0.02)
            assert seen.uids().real == 0
            assert_nothing_of_the_job(seen)
        assert wait(starter, replica) == 0
    assert (folder / "out").read_text() == "of the job made at home\n"


def assert_nothing_of_the_job(process: psutil.Process) -> None:
    env = process.environ()
    assert "MARKER" not in env and not [value for value in env.values() if "/job/" in value]
    assert "of the job" not in " ".join(process.cmdline())


def test_packages_are_built_by_the_user_with_the_jobs_environment(folder: Path, open_folder: Path) -> None:
    (folder / "work").mkdir()
    with ColdStarter(()) as starter:
        needed = code(folder, pip=("--no-index", "./missing"))
        replica = spawn(starter, folder, needed, "/bin/true", XDG_CACHE_HOME=str(open_folder))
        assert wait(starter, replica) == 1
    assert "cannot be" in (folder / "out").read_text()  # installed; or begun, where this interpreter is root's alone
    made = open_folder / "pollux" / "environments"
    assert made.stat().st_uid == NOBODY and all(path.stat().st_uid == NOBODY for path in made.iterdir())


def test_root_keeps_what_it_fetched_in_its_own_cache(
    folder: Path, open_folder: Path, workdir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "own"))
    needed = code(folder, workdir=workdir, is_far=True)
    unpack(needed, str(folder / "work"), {"XDG_CACHE_HOME": str(open_folder)}, identity_of({RUN_AS: nobody()}))
    assert not list(open_folder.iterdir())
    assert [path.read_bytes() for path in (folder / "own").rglob("*") if path.is_file()] == [b"made at home\n"]


READ = """
import os, sys
try:
    print(os.listdir(sys.argv[1]), open(sys.argv[1] + "/deep/note").read())
except OSError as error:
    print(type(error).__name__)
"""


def test_a_copy_of_roots_jobs_is_closed_to_other_users(folder: Path, workdir: str) -> None:
    unpack(code(folder, workdir=workdir), str(folder / "work"), {})
    assert (folder / "work" / "deep" / "note").read_text() == "made at home\n"
    assert run_as_nobody(READ, str(folder / "work")).strip() == "PermissionError"


def test_a_copy_is_its_users_alone_and_given_away_last(
    folder: Path, workdir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, chown = [], os.chown

    def noted(path: Path, *arguments: int, **options: bool) -> None:
        given.append(path.name)
        chown(path, *arguments, **options)

    monkeypatch.setattr(os, "chown", noted)
    unpack(code(folder, workdir=workdir), str(folder / "work"), {}, identity_of({RUN_AS: nobody()}))
    assert stat.S_IMODE((folder / "work").stat().st_mode) == 0o700
    assert sorted(given[:-1]) == ["deep", "note"] and given[-1].startswith("work-")
    assert "made at home" in run_as_nobody(READ, str(folder / "work"))


OWNER = """
import json, sys, time
from pollux.engines.processes.leftovers import MARK, REPLICA, kill_leftovers, mark_of
from pollux.engines.processes.starters import ColdStarter, Command
replica = ColdStarter(()).spawn(Command(**json.loads(sys.argv[1])))
print(replica.pid, flush=True)
time.sleep(60)
"""


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(is_so: Callable[[], bool], what: str) -> None:
    ends_at = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < ends_at, what
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the parent has to end it")
def test_a_prepared_replica_of_another_user_dies_with_its_supervisor(folder: Path, workdir: str) -> None:
    out = str(folder / "out")
    env = {"PATH": os.environ["PATH"], RUN_AS: nobody(), **code(folder, workdir=workdir).to_env()}
    argv = ["/bin/sh", "-c", "echo begun; exec sleep 50"]
    command = {"argv": argv, "env": env, "cwd": str(folder / "work"), "stdout": out, "stderr": out}
    with subprocess.Popen([sys.executable, "-c", OWNER, json.dumps(command)], stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        replica = psutil.Process(int(one.stdout.readline()))
        until(lambda: "begun" in (folder / "out").read_text(), "it does not begin")
        assert replica.uids().real == NOBODY
        one.kill()
    try:
        until(lambda: has_ended(replica), "it outlives its supervisor")
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            replica.kill()


def test_root_finds_what_replicas_of_its_unix_users_left_behind(folder: Path) -> None:
    mark = mark_of(folder)
    options = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/"}
    left, other = (
        subprocess.Popen(["/bin/sleep", "50"], env=env, **options)  # type: ignore[call-overload]
        for env in ({MARK: mark, REPLICA: "r1"}, {MARK: f"{mark}-other", REPLICA: "r1"})
    )
    try:
        assert kill_leftovers(mark, ["r2"]) == []
        assert kill_leftovers(mark, ["r1"]) == [left.pid]
        assert left.wait(timeout=TIMEOUT_S) == -9 and other.poll() is None
    finally:
        for process in (left, other):
            process.kill()
            process.wait()


@pytest.mark.parametrize("is_sent", [False, True], ids=["as it is", "prepared"])
def test_a_job_gets_into_no_folder_that_is_closed_to_its_user(
    folder: Path, is_sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in it may be open: only the folder above keeps others out."""
    if not is_sent:
        monkeypatch.setattr(sys, "executable", PYTHON)  # ours may be closed to others
    (folder / "closed").mkdir(mode=0o700)
    work = folder / "closed" / "work"
    work.mkdir(mode=0o755)
    (work / "note").write_text("of another user\n")
    out, env = folder / "out", {"PATH": os.environ["PATH"], RUN_AS: nobody()}
    env |= code(folder, conda="/missing").to_env() if is_sent else {}
    with ColdStarter(()) as starter:
        command = Command(argv=("cat", "note"), env=env, cwd=str(work), stdout=str(out), stderr=str(out))
        assert wait(starter, starter.spawn(command)) != 0
    assert "of another user" not in out.read_text() and "Permission denied" in out.read_text()
