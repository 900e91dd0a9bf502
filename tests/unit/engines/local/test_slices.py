"""GPUs and slices that come, go and fail while real processes run in their slots. NVML is ours (:mod:`tests.nvml`)."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")

from pollux.engines.live import ReplicaInfo
from pollux.engines.processes.layout import LayoutRequest
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.ports import JobHurt, JobLost, ResizeFailed
from tests.leftovers import processes_in
from tests.nvml.box import Box, card, part
from tests.unit.engines.bench import LEDGER, Bench, is_alive, until


@pytest.fixture
def gpu_bench(tmp_path: Path, box: Box, monkeypatch: pytest.MonkeyPatch):
    """Four slices on one card, and a supervisor of its own that watches them."""
    monkeypatch.setattr("socket.gethostname", lambda: "lab")
    box.cut(card(0, slices=[part(0, instance) for instance in (7, 8, 9, 10)]))
    bench = Bench(tmp_path, tmp_path, layout=LayoutRequest())
    yield bench
    bench.close()
    assert processes_in(tmp_path) == []


def node_of(bench: Bench) -> str:
    (node,) = bench.engine.nodes()
    return node.name


def run(bench: Bench, job: str, *shares: tuple[str, int], generation: int = 1) -> list[ReplicaInfo]:
    """A ledger whose replicas tell what their slots gave them: a fork's environment is not in /proc."""
    told = str(bench.folder)
    code = f"""
import json, os, runpy, sys
with open(os.path.join({told!r}, os.environ["POLLUX_REPLICA_ID"] + ".env"), "w") as file:
    json.dump(dict(os.environ), file)
sys.argv = [{str(LEDGER)!r}, "--out", {told + "/" + job!r}, "--epochs", "100000", "--save-s", "0.2"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    bench.prepare(job, bench.script(code))
    return bench.run(job, *shares, generation=generation)


def environment(bench: Bench, replica: ReplicaInfo) -> dict[str, str]:
    return json.loads((bench.folder / f"{replica.replica_id}.env").read_text())


def test_a_slice_that_vanishes_takes_one_replica_and_no_job(gpu_bench: Bench, box: Box) -> None:
    bench, node = gpu_bench, node_of(gpu_bench)
    assert [(one.num_slots, one.accelerator) for one in bench.engine.nodes()] == [(4, "NVIDIA H200 MIG 1g.18gb")]
    elastic = run(bench, "elastic", (node, 3))
    bench.prepare("fixed", ("sleep", "1000"), kind="fixed")
    (fixed,) = bench.run("fixed", (node, 1))
    uuids = {one.slot: environment(bench, one)["CUDA_VISIBLE_DEVICES"] for one in elastic}
    uuids[fixed.slot] = psutil.Process(fixed.pid).environ()["CUDA_VISIBLE_DEVICES"]
    assert sorted(uuids.values()) == ["MIG-0-10", "MIG-0-7", "MIG-0-8", "MIG-0-9"]
    assert len({environment(bench, one)["NCCL_HOSTID"] for one in elastic}) == 3
    gone = [uuids[elastic[1].slot], uuids[fixed.slot]]
    box.cut(card(0, slices=[one for one in box.cards[0]["slices"] if one["uuid"] not in gone]))
    smaller = bench.wait_of(ResizeFailed, "elastic")
    assert (smaller.node, smaller.allocation.counts) == ("", (2,))
    assert uuids[elastic[1].slot] in smaller.reason
    lost = bench.wait_of(JobLost, "fixed")  # it cannot go on: it waits for other slots
    assert f"({uuids[fixed.slot]}) cannot be used: NVML does not list it any more" in lost.reason
    bench.resize("elastic", (node, 2), generation=2)
    bench.wait_runs("elastic", 2)
    assert {one.pid for one in bench.members("elastic")} == {elastic[0].pid, elastic[2].pid}  # trained on
    until(lambda: not is_alive(elastic[1].pid) and not is_alive(fixed.pid), "replicas live on slices that are gone")
    assert [one.num_slots for one in bench.engine.nodes()] == [2]
    assert not any(isinstance(event, JobHurt) for event in bench.seen)


@pytest.mark.long
def test_a_card_is_cut_anew_while_the_server_runs(gpu_bench: Bench, box: Box) -> None:
    bench, node = gpu_bench, node_of(gpu_bench)
    bench.run("job", (node, 4))
    box.cut(card(0, slices=[part(0, 1, "3g.71gb"), part(0, 2, "2g.35gb")]))
    assert "NVML does not list it any more" in bench.wait_of(JobLost, "job").reason
    until(lambda: len(bench.engine.nodes()) == 2, "the new slices are not there")
    large, small = bench.engine.nodes()
    assert (large.accelerator, small.accelerator) == ("NVIDIA H200 MIG 3g.71gb", "NVIDIA H200 MIG 2g.35gb")
    (replica,) = run(bench, "job", (large.name, 1), generation=2)
    assert environment(bench, replica)["CUDA_VISIBLE_DEVICES"] == "MIG-0-1"


@pytest.mark.long
def test_an_xid_empties_its_slot_and_tells_why(gpu_bench: Bench, box: Box) -> None:
    bench, node = gpu_bench, node_of(gpu_bench)
    replicas = bench.run("job", (node, 2))
    box.change(0, xids=[(95, 7)])
    bench.wait_of(ResizeFailed, "job")
    until(lambda: bench.engine.unusable, "no reason was told")
    (ill,) = bench.engine.unusable
    assert ill.name == "MIG-0-7" and ill.reason.startswith("XID 95 (uncontained ECC error)")
    until(lambda: not is_alive(replicas[0].pid), "its replica lives")
    assert is_alive(replicas[1].pid)
    assert [one.num_slots for one in bench.engine.nodes()] == [3]


@pytest.mark.long
def test_slots_are_known_by_uuid_to_the_next_server(gpu_bench: Bench, box: Box) -> None:
    bench, node = gpu_bench, node_of(gpu_bench)
    (replica,) = bench.run("job", (node, 1))
    bench.engine.close(stops_jobs=False)
    # Meanwhile the card is another number to NVML: its slices would have had other numbers.
    box.cut(card(5), box.cards[0])
    bench.engine = bench.open()
    assert {one.accelerator: one.num_slots for one in bench.engine.nodes()} == {
        "NVIDIA H200": 1,
        "NVIDIA H200 MIG 1g.18gb": 4,
    }
    bench.engine.adopt([bench.record("job", JobState.RUNNING, 1, (node, 1))])
    bench.wait_runs("job", 1)
    (same,) = bench.members("job")
    assert (same.pid, same.slot) == (replica.pid, replica.slot)
    bench.prepare("other")
    others = bench.run("other", (node, 3))
    assert replica.slot not in {one.slot for one in others}
