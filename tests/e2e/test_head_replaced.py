"""A Ray cluster is gone for good, and another one takes its place at another address: jobs go on from checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")

from tests.e2e.cluster import LiveCluster
from tests.long import long
from tests.ray_cluster import RayCluster

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="needs fork and /proc"), long]

EPOCHS = 8


def test_jobs_go_on_with_a_head_at_another_address(tmp_path: Path) -> None:
    options: dict[str, Any] = {"engine": "ray", "slots": None, "name": "x", "policy": "equal", "resource": "CPU"}
    (tmp_path / "before").mkdir()
    (tmp_path / "after").mkdir()
    with RayCluster(tmp_path / "before", head_cpus=1) as nodes:
        first = LiveCluster(tmp_path, address=nodes.address, **options).start()
        first.submit_ledger("goes-on", epochs=EPOCHS, step_s=0.3, max_replicas=1)
        first.until(lambda: list(first.data.glob("jobs/goes-on/checkpoints/step-*")), "a checkpoint")
        for node in nodes.nodes.values():
            node.kill()
        first.kill_server()
        first.stop()  # nothing of it is left
    with RayCluster(tmp_path / "after", head_cpus=1) as nodes:
        second = LiveCluster(tmp_path, address=nodes.address, **options).start()
        try:
            second.hurry("goes-on")
            assert second.until_over("goes-on", 120.0) == "succeeded"
            second.check_ledger("goes-on", EPOCHS)
        finally:
            second.stop()
