from __future__ import annotations

import os

import pytest

from pollux.engines.processes.devices import Device, slot_env
from pollux.engines.processes.gpus import Gpu, find_gpus, visible_gpus
from pollux.engines.processes.layout import detect_nodes
from pollux.errors import InvalidValueError
from pollux.types import Node
from tests.nvml.box import card, part

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


@pytest.fixture
def nvml(box):
    """Cards by number: "lost", "old" without MIG, "whole", or the names of its MIG slices by instance."""

    def use(*cards):
        rows = []
        for number, one in enumerate(cards):
            more = {"is_lost": one == "lost", "is_old": one == "old"}
            if isinstance(one, dict):
                more["slices"] = [part(number, instance, profile) for instance, profile in sorted(one.items())]
            rows.append(card(number, name="H200", **more))
        box.cut(*rows)

    return use


def test_one_gpu_that_fell_off_the_bus_does_not_hide_the_others(nvml):
    nvml("whole", "lost", "old")
    assert [(gpu.number, gpu.uuid, gpu.name) for gpu in find_gpus()] == [(0, "GPU-0", "H200"), (2, "GPU-2", "H200")]


def test_mig_slices_are_slots_of_their_own_types_beside_whole_gpus(nvml):
    nvml("whole", {2: "3g.71gb", 7: "1g.18gb", 8: "1g.18gb"})
    nodes, devices = detect_nodes(env={})
    assert [(node.num_slots, node.accelerator) for node in nodes] == [
        (1, "H200"),
        (1, "NVIDIA H200 MIG 3g.71gb"),
        (2, "NVIDIA H200 MIG 1g.18gb"),
    ]
    assert [slot_env(device)["CUDA_VISIBLE_DEVICES"] for device in devices] == [
        "GPU-0",
        "MIG-1-2",
        "MIG-1-7",
        "MIG-1-8",
    ]
    hosts = [slot_env(device).get("NCCL_HOSTID") for device in devices]
    assert hosts[0] is None and len(set(hosts[1:])) == 3  # NCCL refuses two ranks on one card of one host


def test_a_slice_keeps_its_number_when_another_is_taken_away(nvml):
    nvml({2: "3g.71gb", 7: "1g.18gb"})
    before = {device.gpu: device.number for device in detect_nodes(env={})[1]}
    nvml({7: "1g.18gb"})
    (device,) = detect_nodes(env={})[1]
    assert before[device.gpu] == device.number


def test_a_card_in_mig_mode_without_slices_has_no_slot_and_says_so(nvml, caplog):
    nvml({}, "whole")
    assert [gpu.uuid for gpu in find_gpus()] == ["GPU-1"]
    assert "GPU 0 is in MIG mode and has no slices" in caplog.text


def test_visible_slices(nvml):
    nvml("whole", {1: "1g.18gb", 2: "1g.18gb"})
    _, devices = detect_nodes(env={"CUDA_VISIBLE_DEVICES": "MIG-1-2,GPU-0"})
    assert [device.gpu for device in devices] == ["MIG-1-2", "GPU-0"]
    assert detect_nodes(env={"CUDA_VISIBLE_DEVICES": "0"})[1][0].gpu == "GPU-0"


def test_several_slots_on_a_gpu_have_a_part_of_its_memory_and_their_own_numbers():
    nodes, devices = detect_nodes(slots_per_gpu=2, gpus=H200[:2], env={})
    assert [(node.num_slots, node.accelerator) for node in nodes] == [(4, "NVIDIA H200 1/2")]
    assert len({device.number for device in devices}) == 4
    envs = [slot_env(device) for device in devices]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in envs] == ["GPU-0abc", "GPU-0abc", "GPU-1abc", "GPU-1abc"]
    assert {env["POLLUX_DEVICE_SHARES"] for env in envs} == {"2"}
    assert len({env["NCCL_HOSTID"] for env in envs}) == 4


def test_slots_per_gpu_needs_gpus():
    with pytest.raises(InvalidValueError, match="2 slots per GPU, and there is no GPU here"):
        detect_nodes(slots_per_gpu=2, gpus=[], env={})
    with pytest.raises(InvalidValueError, match="slots per GPU = 0; a number from 1 to 16"):
        detect_nodes(slots_per_gpu=0, gpus=H200, env={})
