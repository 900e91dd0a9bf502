"""A head that Pollux started itself dies: it is started again, its nodes rejoin, and training goes on by itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import httpx
import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")
psutil = pytest.importorskip("psutil")

from pollux.engines.ray import head  # noqa: E402
from tests.e2e.cluster import LiveCluster  # noqa: E402
from tests.long import long  # noqa: E402
from tests.ray_cluster import RAY, RayNode  # noqa: E402

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="needs fork and /proc"), long]

SLACK = 2.0  # a machine with other tests on it
AGAIN_S = 240.0  # 9 s on an idle machine. On a busy one Ray gives a first attempt up after 50 s, and a second follows
POLLUX = [sys.executable, "-m", "pollux"]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveCluster]:
    """A server with a head of its own, which has one slot, and a node that joined it."""
    # A folder of its own, with a short path for sockets: neither Ray nor the server finds other clusters here.
    temporary = tempfile.mkdtemp(prefix="pollux-ray-", dir="/tmp")
    monkeypatch.setenv("RAY_TMPDIR", temporary)
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    made = LiveCluster(tmp_path, engine="ray", slots=None, resource="CPU", policy="equal", host="127.0.0.1")
    node: RayNode | None = None
    try:
        made.start()
        address = json.loads((made.data / head.HEAD_FILE).read_text())["address"]
        node = RayNode(
            [f"--address={address}", "--node-name=joined", "--num-cpus=1", "--object-store-memory=80000000"],
            {**os.environ, "RAY_DISABLE_IMPORT_WARNING": "1"},
            tmp_path / "node.log",
        )
        made.until(lambda: "joined" in {one.name for one in made.client.nodes()}, "the node that joined", 60.0)
        yield made
    finally:
        made.stop()
        if node is not None:
            node.kill()
        head.stop_head(made.data)
        shutil.rmtree(temporary, ignore_errors=True)


def kill_head(cluster: LiveCluster) -> list[int]:
    note = json.loads((cluster.data / head.HEAD_FILE).read_text())
    processes = [psutil.Process(note["pid"]), *psutil.Process(note["pid"]).children(recursive=True)]
    for process in processes:
        process.kill()
    psutil.wait_procs(processes, 10.0)
    return [process.pid for process in processes]


class Readiness:
    """Asks a server all the time whether it is ready: it may say 503 for a few seconds only.

    It begins before the head is killed, so that it misses nothing on a busy machine.
    """

    def __init__(self, cluster: LiveCluster) -> None:
        self._url, self._closing = f"{cluster.client.address.url}/readyz", threading.Event()
        self.lost_at: float | None = None  # when it was first seen not to be ready
        self._thread = threading.Thread(target=self._keep_asking, daemon=True)

    def __enter__(self) -> Self:
        assert httpx.get(self._url, timeout=60.0).is_success
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def _keep_asking(self) -> None:
        while self.lost_at is None and not self._closing.wait(0.05):
            if httpx.get(self._url, timeout=60.0).status_code == 503:
                self.lost_at = time.monotonic()


def test_an_own_head_that_dies_is_started_again_and_training_goes_on(own: LiveCluster) -> None:
    assert Path(RAY).exists()
    own.submit_ledger("trains", epochs=200, step_s=0.2, max_replicas=1)
    own.until_replicas("trains", 1)
    job = own.client.job("trains")
    own.until(lambda: job.view().num_steps, "a step")
    before = job.view().num_crashes
    with Readiness(own) as readiness:
        killed_at = time.monotonic()
        kill_head(own)
        own.until(lambda: readiness.lost_at, "the server says that it is not ready", 15.0 * SLACK)
        own.until(lambda: job.view().num_crashes > before and job.view().state == "running", "it runs again", AGAIN_S)
    assert readiness.lost_at is not None
    print(f"not ready after {readiness.lost_at - killed_at:.1f} s")
    since = job.reports()[-1].id
    own.until(lambda: job.reports(since=since), "it trains again", 90.0)
    took_s = time.monotonic() - killed_at
    print(f"training again after {took_s:.1f} s")
    own.until(
        lambda: any(one.name == "joined" and one.health == "ok" for one in own.client.nodes()), "its node again", 90.0
    )
    assert own.client.is_ready()
    job.cancel()
    own.until_over("trains")


def test_down_after_a_lost_head_is_fast_and_leaves_nothing(own: LiveCluster) -> None:
    own.submit_ledger("lost", epochs=200, step_s=0.2, max_replicas=1)
    own.until_replicas("lost", 1)
    with Readiness(own) as readiness:
        kill_head(own)
        own.until(lambda: readiness.lost_at, "the server says that it is not ready", 15.0 * SLACK)
    began = time.monotonic()
    subprocess.run([*POLLUX, "down", "--data", str(own.data)], check=True, timeout=120)
    took_s = time.monotonic() - began
    print(f"down took {took_s:.1f} s")
    assert took_s < 55.0  # 9 s on an idle machine; 61 s there if it waits for the head
    assert not (own.data / head.HEAD_FILE).exists()
