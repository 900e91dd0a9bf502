"""Jobs and the memory of devices: what they ask for, where they ran out, and slots that are gone."""

from __future__ import annotations

import pytest

from pollux.api.request import JobRequest, parse_headers
from pollux.errors import InvalidValueError
from pollux.scheduler.device_memory import memory_by_type, misfits, ran_out
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.ports import JobEnded, NodesChanged, ResizeFailed
from pollux.server.present.views import Capacity, waiting_reason
from pollux.server.storage.records import decode_record, encode_record
from pollux.types import Allocation, JobSpec, Node
from tests.unit.scheduler.world import World

GIB = 1 << 30
SMALL = Node(name="small", num_slots=4, accelerator="1g.18gb", device_memory_bytes=18 * GIB)
LARGE = Node(name="large", num_slots=2, accelerator="3g.71gb", device_memory_bytes=71 * GIB)
OUT = "job: rank 0 exited with 1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\nTraceback"


def world_of(*nodes: Node, policy: str = "pollux") -> World:
    world = World(policy)
    world.engine.node_list = list(nodes)
    return world


def holds(world: World, job: str) -> dict[str, int]:
    return world.store.jobs[job].allocation.as_mapping()


def fail(world: World, job: str, reason: str) -> None:
    end = JobEnded(job=job, state=JobState.FAILED, at=world.clock.time, reason=reason, exit_code=1)
    world.engine.held.pop(job, None)
    world.engine.events.append(end)


@pytest.mark.parametrize("policy", ["pollux", "fifo", "sia", "equal"])
def test_a_job_gets_the_memory_that_it_asks_for(policy: str) -> None:
    world = world_of(SMALL, LARGE, policy=policy)
    world.submit("needy", device_memory_bytes=20 * GIB, requested_replicas=1, max_replicas=2)
    world.submit("greedy", device_memory_bytes=100 * GIB, requested_replicas=1)
    world.round()
    assert set(holds(world, "needy")) == {"large"}
    record = world.store.jobs["greedy"]
    assert record.state is JobState.PENDING
    why = waiting_reason(record, Capacity.of([SMALL, LARGE]))
    assert why == (
        "no slot has enough memory: 1g.18gb has 18 GiB of device memory, 100 GiB are needed; "
        "3g.71gb has 71 GiB of device memory, 100 GiB are needed"
    )


def test_a_job_that_ran_out_of_memory_goes_to_another_type_and_not_back() -> None:
    world = world_of(SMALL)
    world.submit("job", max_replicas=2, requested_replicas=1)
    world.round()
    assert set(holds(world, "job")) == {"small"}
    world.engine.node_list = [SMALL, LARGE]
    fail(world, "job", OUT)
    for _ in range(3):
        world.round()
        assert set(holds(world, "job")) == {"large"}
    record = world.store.jobs["job"]
    assert any("it starts on another type" in change.reason for change in record.history)
    assert set(decode_record(encode_record(record)).unfit_types) == {"1g.18gb"}  # known to the next server
    fail(world, "job", OUT)  # there, too: no type is left
    world.round()
    assert world.store.jobs["job"].state is JobState.FAILED


def test_without_another_type_it_has_failed_and_other_failures_are_not_about_memory() -> None:
    world = world_of(SMALL)
    world.submit("job", requested_replicas=1)
    world.round()
    fail(world, "job", OUT)
    world.round()
    assert world.store.jobs["job"].state is JobState.FAILED
    assert ran_out("x: out of memory with 4 examples on the device, and device_batch_size allows no fewer than 4")
    assert not ran_out("x: ValueError: shapes\nout of memory") and not ran_out("OSError: Cannot allocate memory")


@pytest.mark.parametrize(("node", "unfit"), [("small", {"1g.18gb"}), ("large", set())])
def test_new_replicas_that_run_out_of_memory_keep_the_job_off_another_type(node: str, unfit: set[str]) -> None:
    world = world_of(LARGE)
    world.submit("job", max_replicas=2)
    world.round()
    world.engine.node_list = [LARGE, SMALL]
    record = world.store.jobs["job"]
    reason, held = "torch.OutOfMemoryError: CUDA out of memory", record.allocation
    failed = ResizeFailed(job="job", generation=record.generation, allocation=held, node=node, reason=reason)
    world.engine.events.append(failed)
    world.scheduler.tick()
    assert set(world.store.jobs["job"].unfit_types) == unfit  # on the type that it trains on, it fits


def test_a_job_whose_slots_are_gone_goes_on_with_the_rest_and_blames_no_node() -> None:
    world = world_of(SMALL)
    world.submit("job", min_replicas=2, requested_replicas=4)
    world.round()
    record = world.store.jobs["job"]
    held = record.allocation.num_replicas
    assert held >= 3
    gone = {"job": "job", "node": "", "reason": "slot 107 of small (MIG-0-7) cannot be used: XID 95"}
    world.engine.node_list = [Node(name="small", num_slots=held - 1, accelerator="1g.18gb")]
    left = Allocation.of(("small", held - 1))
    world.engine.held["job"] = [left]
    world.engine.events += [ResizeFailed(generation=record.generation, allocation=left, **gone), NodesChanged()]
    world.round()
    assert world.replicas() == {"job": held - 1}
    assert not world.scheduler.health.excluded("job", world.clock.time)
    world.engine.node_list = [Node(name="small", num_slots=1, accelerator="1g.18gb")]
    one = Allocation.of(("small", 1))
    world.engine.held["job"] = [one]
    record = world.store.jobs["job"]
    world.engine.events += [ResizeFailed(generation=record.generation, allocation=one, **gone), NodesChanged()]
    world.round()  # less than its minimum: it stops in order and waits
    record = world.store.jobs["job"]
    assert record.state is JobState.PENDING
    assert any("what is left is not enough to go on with" in change.reason for change in record.history)
    assert waiting_reason(record, Capacity.of(world.engine.nodes())).startswith("needs 4 slots at once")


def test_memory_of_a_type_is_that_of_its_smallest_node() -> None:
    other = Node(name="b", num_slots=1, accelerator="1g.18gb", device_memory_bytes=16 * GIB)
    assert memory_by_type([SMALL, other, LARGE]) == {"1g.18gb": 16 * GIB, "3g.71gb": 71 * GIB}
    cpu = {"cpu": None}
    spec = JobSpec(name="j", device_memory_bytes=1)
    assert misfits(spec, {}, cpu) == {"cpu": "its device memory is not known"}


def test_the_option() -> None:
    request = JobRequest(command=("x",), kind="fixed", gpu_memory_bytes=20 * GIB)
    assert request.to_spec("x", 0.0).device_memory_bytes == 20 * GIB
    assert parse_headers("#POLLUX --gpu-memory 20G\n") == {"gpu_memory_bytes": 20 * GIB}
    with pytest.raises(InvalidValueError, match="GPU memory"):
        JobRequest(command=("x",), gpu_memory_bytes=0)
