from __future__ import annotations

import os
import sys
import types

import pytest

from pollux.engines.processes.devices import Device, Gpu, detect_nodes, find_gpus, slot_env, visible_gpus
from pollux.errors import InvalidValueError
from pollux.types import Node

H200 = [Gpu(number=number, uuid=f"GPU-{number}abc", name="NVIDIA H200") for number in range(4)]


def test_cpu_slots_where_there_are_no_gpus():
    nodes, devices = detect_nodes(gpus=[], env={})
    (node,) = nodes
    assert (node.num_slots, node.accelerator) == (len(os.sched_getaffinity(0)), "cpu")
    assert [device.number for device in devices] == list(range(node.num_slots))
    assert slot_env(devices[0]) == {"CUDA_VISIBLE_DEVICES": ""}


def test_slots_asks_for_cpu_slots_even_where_there_are_gpus():
    nodes, devices = detect_nodes(slots=3, gpus=H200, env={})
    assert [(node.num_slots, node.accelerator) for node in nodes] == [(3, "cpu")]
    assert all(device.gpu is None for device in devices)


def test_a_slot_per_gpu_by_its_uuid():
    nodes, devices = detect_nodes(gpus=H200, env={})
    assert [(node.num_slots, node.accelerator) for node in nodes] == [(4, "NVIDIA H200")]
    assert [slot_env(device)["CUDA_VISIBLE_DEVICES"] for device in devices] == [gpu.uuid for gpu in H200]


def test_gpus_of_different_kinds_are_different_nodes():
    mixed = [*H200[:2], Gpu(number=2, uuid="GPU-x", name="Tesla T4")]
    nodes, devices = detect_nodes(gpus=mixed, env={})
    assert [(node.num_slots, node.accelerator) for node in nodes] == [(2, "NVIDIA H200"), (1, "Tesla T4")]
    assert nodes[1].name.endswith("-Tesla-T4")
    assert {device.node for device in devices} == {node.name for node in nodes}
    with pytest.raises(InvalidValueError, match="node-0 would have NVIDIA H200 and Tesla T4"):
        detect_nodes(nodes="1x3", gpus=mixed, env={})


def test_virtual_nodes():
    nodes, devices = detect_nodes(nodes="2x2", gpus=[], env={})
    assert nodes == [Node(name=f"node-{index}", num_slots=2, accelerator="cpu") for index in range(2)]
    assert [(device.node, device.number) for device in devices] == [
        ("node-0", 0),
        ("node-0", 1),
        ("node-1", 2),
        ("node-1", 3),
    ]
    nodes, devices = detect_nodes(nodes="2x1", gpus=H200, env={})
    assert [node.accelerator for node in nodes] == ["NVIDIA H200"] * 2
    assert devices[1] == Device(node="node-1", number=1, gpu="GPU-1abc")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"nodes": "2by2"}, r"nodes = '2by2'; nodes x slots of each is needed, as in 2x4"),
        ({"nodes": "0x2"}, "with 1 to 4096 slots"),
        ({"nodes": "999x999"}, "with 1 to 4096 slots"),
        ({"nodes": ""}, "as in 2x4"),
        ({"slots": 0}, "slots = 0; a number from 1 to 4096"),
        ({"slots": 3, "nodes": "2x2"}, "3 slots cannot be 2x2"),
        ({"nodes": "2x3"}, r"6 slots, and there are 4 GPUs; ask for fewer, or for CPU slots with --slots 6"),
    ],
)
def test_what_cannot_be_is_refused(options, problem):
    with pytest.raises(InvalidValueError, match=problem):
        detect_nodes(gpus=H200, env={}, **options)


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [(None, [0, 1, 2, 3]), ("2,0", [2, 0]), ("", []), ("-1", []), ("1,9,2", [1]), ("GPU-3", [3]), ("1,1", [1])],
)
def test_gpus_that_we_may_not_use_are_left_alone(visible, numbers):
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [gpu.number for gpu in visible_gpus(H200, env)] == numbers


def test_looking_for_gpus_never_fails():
    assert all(gpu.uuid and gpu.name for gpu in find_gpus())


def test_one_gpu_that_fell_off_the_bus_does_not_hide_the_others(monkeypatch):
    class NVMLError(Exception):
        pass

    def handle_of(number: int) -> int:
        if number == 1:
            raise NVMLError("GPU is lost")
        return number

    fake = types.ModuleType("pynvml")
    vars(fake).update(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=handle_of,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetName=lambda handle: b"H200",
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert [(gpu.number, gpu.uuid, gpu.name) for gpu in find_gpus()] == [(0, "GPU-0", "H200"), (2, "GPU-2", "H200")]
