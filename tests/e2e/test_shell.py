"""``pollux shell``: who may enter, where one is then, and what is told of it. As another Unix user, too."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("psutil")

from pollux.api.access import TeamChange, UserChange
from pollux.api.codec import encode
from pollux.api.job import Replica, ShellPlace
from pollux.client import Client
from pollux.engines.processes.identity import boot_id
from pollux.errors import PolluxError
from tests.e2e.cluster import LiveCluster

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LiveCluster]:
    cluster = LiveCluster(tmp_path, slots=2).start()
    yield cluster
    cluster.stop()


@pytest.fixture
def exits() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def shell(cluster: LiveCluster, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pollux", "shell", "--data", str(cluster.data), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/", **options)  # type: ignore[call-overload, no-any-return]


def test_the_owner_enters_and_others_do_not(cluster: LiveCluster, exits: contextlib.ExitStack) -> None:
    operator = cluster.client
    operator.add_team("vision", TeamChange())
    clients = {}
    for name in ("ada", "bob"):
        operator.add_user(name, UserChange(team="vision"))
        clients[name] = exits.enter_context(Client(operator.address.url, token=operator.make_token(name).token))
    job = clients["ada"].submit(["sleep", "1000"], cwd=str(cluster.folder), name="nap", env={"SECRET": "hunter2"})
    cluster.until_replicas("nap", 1)
    with pytest.raises(PolluxError, match="is ada's, and 'bob' is no admin"):
        clients["bob"].shell("nap")
    place = clients["ada"].shell("nap")
    assert (place.replica.rank, place.gpu, place.unix_user) == (0, "", "")
    assert "hunter2" not in str(place)
    done = shell(cluster, "nap", "--", "sh", "-c", "pwd; echo $POLLUX_JOB_ID $SECRET; exit 3")
    assert (done.returncode, done.stdout) == (3, f"{cluster.folder}\nnap\n"), done.stderr
    notes = [note.text for note in operator.job("nap").describe().training_notes]
    assert notes == ["ada asked for a shell beside rank 0", "operator asked for a shell beside rank 0"]
    assert "bob" not in str(notes) and job is not None
    refused = shell(cluster, "nap", "--rank", "5")
    assert refused.returncode != 0 and "rank 5 of job 'nap' does not run; those that do: 0" in refused.stderr
    operator.act("cancel", ["nap"])


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_root_leaves_its_environment_behind(tmp_path: Path) -> None:
    """The job's user can read the environment of every process of theirs."""
    other = pwd.getpwnam("nobody")
    with subprocess.Popen(["sleep", "100"], user=other.pw_uid, group=other.pw_gid, cwd="/") as sleeper:
        replica = Replica(replica_id="nap-0", rank=0, node="here", slot=0, pid=sleeper.pid, state="member")
        place = ShellPlace(replica=replica, boot_id=boot_id(), gpu="", unix_user="nobody", checkpoint_dir="")
        code = (
            "import json, os, sys; from pollux.cli.shell import enter; from pollux.api.codec import decode; "
            "from pollux.api.job import ShellPlace; place = decode(ShellPlace, json.loads(sys.argv[1]), 'place'); "
            "os.setuid(int(sys.argv[2])); env = enter('nap', place); print(os.getuid(), os.getgroups(), sorted(env))"
        )
        env = {**os.environ, "PGPASSWORD": "hunter2", "POLLUX_TOKEN": "t"}

        def attempt(place: ShellPlace, uid: int = 0) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-c", code, json.dumps(encode(place)), str(uid)]
            return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)

        done, elsewhere = attempt(place), attempt(dataclasses.replace(place, boot_id="another"))
        of_root = dataclasses.replace(place, replica=dataclasses.replace(replica, pid=os.getpid()))
        stolen = attempt(of_root, other.pw_uid)  # a member who forges the answer
        sleeper.kill()
    assert done.stdout.startswith(f"{other.pw_uid} "), done.stderr
    assert "PGPASSWORD" not in done.stdout and "POLLUX_TOKEN" not in done.stdout and "'HOME'" in done.stdout
    assert "which is not this machine" in elsewhere.stderr
    assert "are of user id 0: run pollux shell as that user" in stolen.stderr and not stolen.stdout
