"""A Ray cluster whose processes talk by TLS: nodes join, jobs run, and no job sees the key."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from pollux.engines.ray.head import own_address
from tests.certificates import make_certificate
from tests.e2e.cluster import LiveCluster
from tests.e2e.test_ray_token import CONNECT
from tests.long import long
from tests.ray_cluster import RayCluster

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="needs fork and /proc"), long]


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    # Ray calls a machine by its address in the network, also where it was told the loopback.
    names = dict.fromkeys(("127.0.0.1", own_address("192.0.2.1:9")))
    made = make_certificate(tmp_path / "tls", ",".join(f"IP:{name}" for name in names))
    tls = {"RAY_USE_TLS": "1", "RAY_TLS_CA_CERT": str(made.cert)}
    tls |= {"RAY_TLS_SERVER_CERT": str(made.cert), "RAY_TLS_SERVER_KEY": str(made.key)}
    for name, value in tls.items():  # for the server, which this process starts
        monkeypatch.setenv(name, value)
    with RayCluster(tmp_path, head_cpus=0, env=tls) as cluster:
        cluster.add("a", 1)
        yield cluster


def test_jobs_run_on_nodes_that_talk_by_tls_and_do_not_see_the_key(nodes: RayCluster, tmp_path: Path) -> None:
    cluster = LiveCluster(tmp_path, engine="ray", address=nodes.address, slots=None, name="x", resource="CPU").start()
    try:
        job = cluster.client.submit(["sh", "-c", "env"], name="env", kind="fixed", cwd=str(tmp_path))
        job.result(timeout_s=120)
        cluster.until(lambda: "POLLUX_JOB_ID" in "\n".join(job.logs()), "its output")
        assert not re.search("RAY_(TLS|USE_TLS|AUTH)", "\n".join(job.logs()))
        cluster.submit_ledger("trains", epochs=2, step_s=0.0)
        assert cluster.until_over("trains") == "succeeded"
        without = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        done = subprocess.run(
            [sys.executable, "-c", CONNECT, nodes.address],
            env={**without, **nodes.token},
            capture_output=True,
            text=True,
            timeout=120,
        )
        took_s, _, message = done.stdout.partition(" ")
        assert "speaks TLS: set RAY_USE_TLS=1" in message, done.stdout + done.stderr
        assert float(took_s) < 5.0
    finally:
        cluster.stop()
