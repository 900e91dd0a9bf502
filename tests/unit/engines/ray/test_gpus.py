"""The GPUs and slices of a Ray node, with the NVML of tests/nvml: which ones Ray may hand out, what NCCL is told."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")

from pollux.engines.processes.gpus import survey
from pollux.engines.ray.node_agent import gpus_for_ray, slice_host
from tests.nvml.box import Box, card, part


def test_slices_of_one_type_are_a_node_and_those_of_several_say_how_to_start_ray(box: Box) -> None:
    box.cut(card(0, slices=[part(0, 7), part(0, 8)]))
    gpus, problem = gpus_for_ray(survey(), {})
    assert [gpu.uuid for gpu in gpus] == ["MIG-0-7", "MIG-0-8"] and not problem
    box.cut(card(0, slices=[part(0, 7), part(0, 1, "3g.71gb")]), card(1))
    _, problem = gpus_for_ray(survey(), {})
    assert "devices of several types" in problem and "UUIDs in CUDA_VISIBLE_DEVICES" in problem
    gpus, problem = gpus_for_ray(survey(), {"CUDA_VISIBLE_DEVICES": "MIG-0-1"})
    assert [gpu.uuid for gpu in gpus] == ["MIG-0-1"] and not problem


def test_a_slice_without_rights_gives_the_node_no_work_unless_ray_has_others(box: Box) -> None:
    box.cut(card(0, slices=[part(0, 7), part(0, 8, has_no_rights=True)]))
    _, problem = gpus_for_ray(survey(), {})
    assert "cannot be used" in problem and "/dev/nvidia-caps" in problem
    assert gpus_for_ray(survey(), {"CUDA_VISIBLE_DEVICES": "MIG-0-7"})[1] == ""


def test_each_slice_is_a_host_of_its_own_to_nccl_and_a_whole_gpu_is_not() -> None:
    hosts = [slice_host("a", devices).get("NCCL_HOSTID") for devices in ("MIG-0-7", "MIG-0-8", "GPU-1", "0", "")]
    assert hosts == ["a-MIG-0-7", "a-MIG-0-8", None, None, None]
