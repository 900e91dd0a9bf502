"""Fork servers and Unix users: a job cannot find in its memory what another user's job was started with."""

from __future__ import annotations

import hashlib
import os
import pwd
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from pollux.engines.processes.identity import RUN_AS
from pollux.engines.processes.job_factory import LocalJobFactory
from pollux.engines.processes.starters import Command, Starter
from tests.intruder import needs_another_user
from tests.long import long

# Reads all of its own memory that it can, the interpreter's heap and the stack among it.
# It knows the secret by its beginning and its hash alone, so that it does not find itself.
SCAN = """
import ctypes, hashlib, re, sys
begin, length, digest = sys.argv[1].encode(), int(sys.argv[2]), sys.argv[3]
def is_secret(memory):
    return any(hashlib.sha256(memory[at.start():][:length]).hexdigest() == digest for at in re.finditer(begin, memory))
places = []
for line in open("/proc/self/maps"):
    words = line.split()
    name = words[5] if len(words) > 5 else ""
    if words[1].startswith("rw") and name in ("", "[heap]", "[stack]"):
        first, last = (int(one, 16) for one in words[0].split("-"))
        if last - first < 1 << 28:
            places.append((first, last - first))
print("FOUND" if any(is_secret(ctypes.string_at(*place)) for place in places) else "nothing")
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """That another user can read."""
    made = Path(tempfile.mkdtemp(prefix="pollux-factory-"))
    made.chmod(0o755)
    (made / "scan.py").write_text(SCAN)
    (made / "pass.py").write_text("pass")
    yield made
    shutil.rmtree(made)


@pytest.fixture
def factory() -> Iterator[LocalJobFactory]:
    made = LocalJobFactory()
    yield made
    made.close()


def run(starter: Starter, folder: Path, user: str, *argv: str, **env: str) -> str:
    out = folder / f"{time.monotonic_ns()}.out"
    identity = {RUN_AS: user} if user else {}
    command = Command(
        argv=[str(folder / argv[0]), *argv[1:]],
        env={"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1", **identity, **env},
        cwd="/",
        stdout=str(out),
        stderr=str(out),
    )
    starter.wait_ready(60)
    replica = starter.spawn(command)
    ends_at = time.monotonic() + 60
    while replica.exit_code is None:
        starter.poll()
        assert time.monotonic() < ends_at
        time.sleep(0.02)
    return out.read_text()


def scan(starter: Starter, folder: Path, user: str, secret: str) -> str:
    digest = hashlib.sha256(secret.encode()).hexdigest()
    return run(starter, folder, user, "scan.py", secret[:6], str(len(secret)), digest).strip()


def others() -> tuple[str, str]:
    names = [entry.pw_name for entry in pwd.getpwall() if entry.pw_uid not in (0,)]
    return names[0], names[1]


@long
@needs_another_user
def test_a_job_does_not_find_what_another_users_job_was_started_with(factory: LocalJobFactory, folder: Path) -> None:
    ada, bob = others()
    secret = "quite-of-adas-job"
    first = factory.forking_starter(ada)
    assert run(first, folder, ada, "pass.py", SECRET=secret) == ""
    # The scan does find it where it is: in the memory of forks of the same server.
    assert scan(first, folder, ada, secret) == "FOUND"
    assert scan(factory.forking_starter(bob), folder, bob, secret) == "nothing"


@needs_another_user
@long
def test_a_job_of_a_unix_user_does_not_find_the_servers_environment(
    factory: LocalJobFactory, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "really-of-root"
    monkeypatch.setenv("CLOUD_SECRET", secret)
    ada, _ = others()
    assert scan(factory.forking_starter(""), folder, ada, secret) == "FOUND"  # what all jobs had before
    assert scan(factory.forking_starter(ada), folder, ada, secret) == "nothing"
