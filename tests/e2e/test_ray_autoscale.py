"""Auto-scaling for real: Ray's own auto-scaler starts and ends nodes on this machine, as Pollux asks it to.

Its fake provider starts each node as processes beside the head. The head has no slots, as is usual where nodes come
and go: Ray never ends it, so a slot there could not be given back. The size is that of what has slots.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")
pytest.importorskip("psutil")

import psutil

from pollux.api.job import StateChange
from pollux.engines.ray.engine import RayEngine, RaySettings
from pollux.types import Node
from tests.e2e.cluster import LiveCluster
from tests.long import long
from tests.ray_cluster import RayCluster

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork and /proc")

SLOTS, MIN_NODES, MAX_NODES = 2, 1, 3
IDLE_S = 5.0  # after which Ray ends a node
# A ledger's steps take as long however many replicas share them, so a job is worth one slot to the scheduler once it
# has been measured. Three jobs are worth three nodes of two slots in this band, and one is worth one.
AUTOSCALE = {"min_nodes": MIN_NODES, "max_nodes": MAX_NODES, "low": 0.3, "high": 0.6, "settle_s": 2.0}
PRICE = 3.6
UNBROKEN = {"running", "resizing", "succeeded"}  # not stopped, to be started again elsewhere
HEAD_ID = f"{'f' * 51}00000"  # the fake provider's
EPOCHS, STEP_S = 30, 0.3  # of 20 steps: three minutes, unless a job is told to hurry


class ScaledRay(RayCluster):
    """A head alone, with Ray's auto-scaler."""

    def __init__(self, folder: Path, *, is_v2: bool) -> None:
        env = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        if is_v2:
            env |= {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": HEAD_ID}
            env |= {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID}
        super().__init__(folder, env=env)
        # Named by its class: for the name "fake_multinode" Ray reads a file that its wheel does not have.
        provider = {
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "gcs_address": self.address,
            "head_node_id": HEAD_ID,
            "launch_multiple": True,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
        }
        resources = {"CPU": SLOTS, "object_store_memory": 80_000_000}
        commands = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
        config = {
            "cluster_name": "fake",
            "provider": provider,
            "max_workers": 2 * MAX_NODES,  # the bound is to be ours
            "upscaling_speed": 100.0,
            "idle_timeout_minutes": IDLE_S / 60.0,
            "head_node_type": "ray.head.default",
            "available_node_types": {
                "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
                "worker": {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": 2 * MAX_NODES},
            },
            **{name: {} for name in ("auth", "docker", "file_mounts")},
            **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
            **{f"{name}_commands": [] for name in commands},
            "file_mounts_sync_continuously": False,
        }
        self._config = folder / "autoscaler.json"
        self._config.write_text(json.dumps(config))

    def start_head(self, *options: str) -> Any:
        return super().start_head(f"--autoscaling-config={self._config}", *options)

    def num_workers(self) -> int:
        """Nodes besides the head, by their processes."""
        return sum(name == "raylet" for name in self.processes().values()) - 1

    def processes(self) -> dict[psutil.Process, str]:
        """With their names; known by the folder, which no other cluster has."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(self.temporary) in " ".join(process.cmdline()):
                    found[process] = process.name()
        return found

    def close(self) -> None:
        left = list(self.processes())  # what Ray's auto-scaler started does not always end with it
        super().close()
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, 10.0)
        assert not self.processes()


@pytest.fixture(params=["v2", "v1"])
def scaled(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ScaledRay]:
    """Ray has two auto-scalers: KubeRay and ``ray up`` take the second today, all else the first."""
    with ScaledRay(tmp_path, is_v2=request.param == "v2") as cluster:
        yield cluster


@long
def test_the_cluster_grows_with_its_jobs_and_shrinks_when_they_end(scaled: ScaledRay, tmp_path: Path) -> None:
    sizing = {"autoscale": AUTOSCALE, "node_slots": SLOTS, "node_price": PRICE}
    live = LiveCluster(
        tmp_path, engine="ray", address=scaled.address, slots=None, name="x", policy="equal", resource="CPU", **sizing
    )
    try:
        live.start()

        def nodes() -> set[str]:
            return {node.name for node in live.client.nodes() if node.health == "ok"}

        def nodes_of(name: str) -> set[str]:
            replicas = live.client.job(name).describe().replicas
            return {replica.node for replica in replicas if replica.state == "member"}

        def transitions(name: str) -> list[StateChange]:
            return list(live.client.job(name).describe().transitions)

        live.until(lambda: len(nodes()) == MIN_NODES, "the fewest nodes, which nobody needs yet")
        names = ("a", "b", "c")
        for name in names:
            most = MAX_NODES * SLOTS if name == "a" else SLOTS
            live.submit_ledger(name, epochs=EPOCHS, step_s=STEP_S, max_replicas=most)
        live.until(lambda: len(nodes()) == MAX_NODES, "as many nodes as are allowed")
        live.until(lambda: scaled.num_workers() == MAX_NODES, "no more")  # the first auto-scaler may start too many
        live.until(
            lambda: (
                set().union(*map(nodes_of, names)) == nodes() and all(len(live.pids(name)) == SLOTS for name in names)
            ),
            "jobs on all nodes",
        )

        for name in ("b", "c"):
            live.hurry(name)
        for name in ("b", "c"):
            assert live.until_over(name) == "succeeded", live.story(name)
        alone_at = max(transitions(name)[-1].at for name in ("b", "c"))
        live.until(lambda: len(nodes()) == MIN_NODES and nodes_of("a") == nodes(), "the fewest nodes")
        live.until(lambda: scaled.num_workers() == MIN_NODES, "nodes ended by Ray")

        live.hurry("a")
        assert live.until_over("a") == "succeeded", live.story("a")
        for name in names:
            live.check_ledger(name, epochs=EPOCHS)
            assert live.client.job(name).view().num_crashes == 0, live.story(name)
        assert any("resizing" in {row.target for row in transitions(name)} for name in names), live.log()
        shrinking = [row for row in transitions("a") if row.at > alone_at]
        assert {row.target for row in shrinking} <= UNBROKEN, live.story("a")
        assert any(len(set(generations)) > 1 for generations in generations_of(tmp_path / "a-trace"))
        # Without its pauses a job's steps may look like some that more replicas would shorten: the cluster may grow for
        # its last seconds.
        live.until(lambda: live.client.status().sizing.num_wanted == MIN_NODES, "as few nodes wanted as before")
        live.until(lambda: scaled.num_workers() == MIN_NODES, "nodes for its last steps ended")
        quiet_until = time.monotonic() + 1.5 * IDLE_S
        while time.monotonic() < quiet_until:  # nobody is on it, but our agent, and that is enough
            assert scaled.num_workers() == MIN_NODES
            time.sleep(0.5)

        size = live.client.status().sizing
        assert size is not None
        assert (size.min_nodes, size.max_nodes, size.num_wanted) == (MIN_NODES, MAX_NODES, MIN_NODES)
        assert size.cost == pytest.approx(PRICE * sum(size.node_hours.values()))
        assert size.cost > 0
    finally:
        live.stop()
    live.until(lambda: scaled.num_workers() == 0, "nothing that is held any more")


@long
def test_a_cluster_goes_to_zero_and_comes_back_for_the_next_job(tmp_path: Path) -> None:
    sizing = {"autoscale": {**AUTOSCALE, "min_nodes": 0}, "node_slots": SLOTS}
    with ScaledRay(tmp_path, is_v2=True) as scaled:
        live = LiveCluster(
            tmp_path, engine="ray", address=scaled.address, slots=None, name="x", resource="CPU", **sizing
        )
        try:
            live.start()
            assert scaled.num_workers() == 0
            for name in ("first", "second"):
                job = live.client.submit(["echo", "hello"], name=name, cwd=str(tmp_path))
                job.result(timeout_s=120)
                live.until(lambda: scaled.num_workers() == 0, "no node that costs anything")
            words = [sentence for round_ in live.client.rounds(limit=1000) for sentence in round_.words]
            assert words.count("the cluster is to change: 0 -> 1 nodes: jobs wait, and there is no node") == 2, words
            assert any("1 -> 0 nodes" in sentence for sentence in words), words
        finally:
            live.stop()


@long
def test_a_node_that_is_wanted_again_before_it_is_gone_is_taken_back(tmp_path: Path) -> None:
    """By the engine alone, and where no auto-scaler runs: the nodes stay, and their agents come and go."""
    with RayCluster(tmp_path) as cluster:
        for name in ("a", "b"):
            cluster.add(name, SLOTS)
        settings = RaySettings(address=cluster.address, name="x", owner="me", resource="CPU", is_scaled=True)
        engine = RayEngine(tmp_path / "data", settings, launch_of=nothing_runs, template=TEMPLATE)
        try:
            until(lambda: names_of(engine) == ["a", "b"])
            scale(engine, ["a"], 0, to=["a"])
            scale(engine, ["a"], 1, to=["a", "b"])  # one more, whichever
            scale(engine, ["b"], 0, to=["b"])
            engine.close(stops_jobs=False)
            settings = dataclasses.replace(settings, is_scaled=False)  # all there is, from now on
            engine = RayEngine(tmp_path / "data", settings, launch_of=nothing_runs)
            until(lambda: names_of(engine) == ["a", "b"])
        finally:
            engine.close(stops_jobs=True, grace_s=5.0)


TEMPLATE = Node(name="new", num_slots=SLOTS, accelerator="cpu")


def nothing_runs(job: str) -> Any:
    raise AssertionError(job)


def generations_of(traces: Path) -> list[list[str]]:
    """Those in which each process trained: who stays in a resize has seen several."""
    return [[line.split()[2] for line in path.read_text().splitlines()] for path in traces.iterdir()]


def scale(engine: RayEngine, keeping: list[str], num_more: int, *, to: list[str]) -> None:
    """As a scheduler does, which asks in every round."""

    def ask() -> bool:
        engine.scale_to(keeping, num_more)
        return names_of(engine) == to

    until(ask)


def names_of(engine: RayEngine) -> list[str]:
    return sorted(node.name for node in engine.nodes())


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
