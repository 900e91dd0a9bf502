"""What GPUs do: kept, shown, counted as a job's energy, and told where a job holds one that does nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pollux.api.cluster import NodeReading, SlotReading
from pollux.engines.live import ReplicaInfo
from pollux.server.live import cluster as cluster_module
from pollux.server.live import device_watch
from pollux.server.live.device_watch import DeviceWatch
from pollux.server.storage.readings import ReadingStore
from tests.unit.server.live.world import World, report

SLOT = SlotReading(
    slot=0, gpu="GPU-a", utilisation=0.9, memory_bytes=5, memory_total_bytes=9, power_w=200.0, temperature_c=50.0
)
NODE = NodeReading(
    at=1.0, cpu=0.5, memory_bytes=1, memory_total_bytes=2, disk_bytes=3, disk_total_bytes=4,
    received_bytes_per_s=5.0, sent_bytes_per_s=6.0, slots=(SLOT,),
)  # fmt: skip
NAME = "a"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    for name in ("WATCH_EVERY_S", "SAMPLE_EVERY_S", "TIDY_EVERY_S"):
        monkeypatch.setattr(cluster_module, name, 0.05)
    made = World(tmp_path)
    made.engine.replicas = lambda job: [
        ReplicaInfo(replica_id=f"{job}-0", rank=0, node=node_of(made), slot=0, pid=1, state="member")
    ]
    made.cluster.start()
    yield made
    made.cluster.stop(keeps_jobs=True)
    made.store.close()


def node_of(world: World) -> str:
    return world.engine.nodes()[0].name


def held(world: World, **changes: object) -> None:
    """From now on, this is what the one GPU says."""
    world.engine.readings = {node_of(world): replace(NODE, slots=(replace(SLOT, **changes),))}


def test_nodes_show_what_they_do_and_it_is_kept(world: World) -> None:
    held(world)
    world.until(lambda: world.cluster.queries.nodes()[0].reading is not None, "a reading")
    world.until(lambda: world.cluster.queries.readings(node_of(world), 0.0, 2.0, 10), "it is kept")
    assert world.cluster.queries.readings(node_of(world), 0.0, 2.0, 10)[0].slots == (SLOT,)
    assert world.cluster.queries.readings("another", 0.0, 2.0, 10) == []
    world.engine.readings = {}
    assert world.cluster.queries.nodes()[0].reading is None


def test_a_jobs_energy_is_counted_kept_and_divided_by_its_progress(world: World) -> None:
    held(world)
    name = world.submit(kind="elastic")
    world.until_state(name, "running")
    world.cluster.report(report(name, progress=0.5))
    world.until(lambda: (world.cluster.queries.job(name).energy_j or 0.0) > 20.0, "200 W for a tenth of a second")
    world.engine.end(name)
    world.until_state(name, "succeeded")
    told = world.cluster.queries.job(name)
    assert told.energy_j is not None and told.energy_per_percent_j == pytest.approx(told.energy_j / 50)
    assert world.cluster.measured().energy_j == pytest.approx(told.energy_j)


def test_energy_is_unknown_where_nvml_tells_nothing(world: World) -> None:
    held(world, power_w=None)
    name = world.submit(kind="elastic")
    world.until_state(name, "running")
    world.until(lambda: world.cluster.queries.readings(node_of(world), 0.0, 2.0, 10), "some looks")
    assert world.cluster.queries.job(name).energy_j is None


def test_an_idle_gpu_is_told_once_and_no_more_when_it_works(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_watch, "IDLE_S", 0.3)
    held(world, utilisation=0.0)
    name = world.submit(kind="elastic")
    world.until_state(name, "running")
    world.until(lambda: world.cluster.queries.job(name).idle, "it is shown")
    told = world.cluster.queries.job(name)
    assert told.idle.startswith(f"GPU 0 of {node_of(world)} has done nothing for ")
    held(world)
    world.until(lambda: not world.cluster.queries.job(name).idle, "it is over")
    (note,) = [note.text for note in world.cluster.queries.job(name).training_notes]
    assert note.startswith(f"idle: GPU 0 of {node_of(world)}")


def test_a_gpu_without_utilisation_is_not_called_idle(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A MIG slice."""
    monkeypatch.setattr(device_watch, "IDLE_S", 0.05)
    held(world, utilisation=None)
    name = world.submit(kind="elastic")
    world.until_state(name, "running")
    world.until(lambda: (world.cluster.queries.job(name).energy_j or 0.0) > 40.0, "some looks")
    assert world.cluster.queries.job(name).idle == ""


def test_energy_that_could_not_be_saved_is_counted_later(world: World) -> None:
    watch = DeviceWatch(world.cluster.queries._jobs, world.engine)
    watch.put_back({NAME: 2.0})
    watch.put_back({NAME: 3.0})
    assert watch.take_energy() == {NAME: 5.0} and watch.take_energy() == {}


def test_the_oldest_readings_are_forgotten_and_the_rest_thinned(world: World) -> None:
    world.cluster.stop(keeps_jobs=True)
    store = ReadingStore(world.store)
    for second in range(10):
        store.add({"n": replace(NODE, at=float(second))}, keep=6)
    assert [one.at for one in store.of_node("n", 0.0, 100.0, 100)] == [4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    assert [one.at for one in store.of_node("n", 5.0, 8.0, 2)] == [5.0, 8.0]
