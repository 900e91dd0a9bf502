"""A Ray cluster that asks for a token: a wrong one is told at once, and no job sees the right one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from tests.e2e.cluster import LiveCluster
from tests.long import long
from tests.ray_cluster import RayCluster

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="needs fork and /proc"), long]

CONNECT = """
import sys, time
import ray
from pollux.engines.ray.connection import Refused, connect
began = time.monotonic()
try:
    connect(sys.argv[1])
except Refused as error:
    print(f"{time.monotonic() - began:.2f} {error}")
"""


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with RayCluster(tmp_path_factory.mktemp("ray"), head_cpus=1) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("token", "said"),
    [
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64}, "asks for another token than this one"),
        ({"HOME": "/nowhere"}, "asks for a token, and there is none here"),
        ({"RAY_AUTH_TOKEN": "f" * 64}, "RAY_AUTH_MODE is not 'token' here"),
    ],
    ids=["wrong", "missing", "mode"],
)
def test_a_wrong_or_missing_token_is_told_within_seconds(head: RayCluster, token: dict[str, str], said: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", CONNECT, head.address],
        env={**env, **token},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    took_s, _, message = done.stdout.partition(" ")
    assert said in message and "set RAY_AUTH_MODE=token" in message, done.stdout + done.stderr
    assert float(took_s) < 5.0


def test_no_job_sees_the_token_and_nodes_are_checked(head: RayCluster, tmp_path: Path) -> None:
    cluster = LiveCluster(tmp_path, engine="ray", address=head.address, slots=None, name="x", resource="CPU").start()
    try:
        for command in (["sh", "-c", "env"], ["python", "-c", "import os; print(dict(os.environ))"]):
            job = cluster.client.submit(command, name=command[0], kind="fixed", cwd=str(tmp_path))
            job.result(timeout_s=120)
            cluster.until(lambda job=job: "POLLUX_JOB_ID" in "\n".join(job.logs()), "its output")
            text = "\n".join(job.logs())
            assert head.token["RAY_AUTH_TOKEN"] not in text
            assert "RAY_AUTH" not in text
        (node,) = cluster.client.check_nodes(script=str(tmp_path / "none.py"), packages=["numpy", "no-such-package"])
        found = {one.subject: one for one in node.findings}
        wrong = {subject for subject, one in found.items() if one.state == "problem"}
        assert wrong == {"script", "package no-such-package"}, node
        assert {"clock", "disk", "server", "storage", "GPUs", "package numpy"} <= found.keys()
    finally:
        cluster.stop()
