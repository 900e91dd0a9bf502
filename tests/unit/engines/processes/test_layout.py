"""Slots by UUID: which names and numbers they keep while cards, slices and errors come and go."""

from __future__ import annotations

import json

import pytest

from pollux.engines.processes.devices import slot_env
from pollux.engines.processes.gpu_health import LONGEST_PAUSE_S, PAUSE_S, GpuHealth
from pollux.engines.processes.gpus import Survey, survey
from pollux.engines.processes.layout import SLOTS_FILE, LayoutRequest, SlotBook
from tests.nvml.box import GIB, card, part

ASKED = LayoutRequest()


def nodes_of(layout):
    return [(node.name, node.num_slots, node.accelerator) for node in layout.nodes]


def numbers_of(layout):
    return {device.gpu: device.number for device in layout.devices}


@pytest.fixture(autouse=True)
def host(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "lab")


def test_a_recut_renames_no_node_and_no_slot_that_stays(box, tmp_path):
    box.cut(card(0), card(1))
    book = SlotBook(tmp_path)
    before = book.lay_out(ASKED, survey())
    assert nodes_of(before) == [("lab", 2, "NVIDIA H200")]
    box.cut(card(0), card(1, slices=[part(1, 2, "3g.71gb"), part(1, 7), part(1, 8)]))
    after = book.lay_out(ASKED, survey())
    assert nodes_of(after) == [
        ("lab", 1, "NVIDIA H200"),  # what jobs hold there is still theirs
        ("lab-NVIDIA-H200-MIG-3g-71gb", 1, "NVIDIA H200 MIG 3g.71gb"),
        ("lab-NVIDIA-H200-MIG-1g-18gb", 2, "NVIDIA H200 MIG 1g.18gb"),
    ]
    assert [node.device_memory_bytes for node in after.nodes] == [141 * GIB, 71 * GIB, 18 * GIB]
    assert numbers_of(after)["GPU-0"] == numbers_of(before)["GPU-0"]
    envs = {device.gpu: slot_env(device) for device in after.devices}
    assert all(env["CUDA_VISIBLE_DEVICES"] == uuid for uuid, env in envs.items())
    assert len({env["NCCL_HOSTID"] for uuid, env in envs.items() if uuid != "GPU-0"}) == 3
    assert "NCCL_HOSTID" not in envs["GPU-0"]
    again = SlotBook(tmp_path).lay_out(ASKED, survey())  # as after a restart
    assert (nodes_of(again), numbers_of(again)) == (nodes_of(after), numbers_of(after))


def test_a_card_keeps_its_number_when_nvml_counts_anew(box, tmp_path):
    box.cut(card(0), card(1), card(2))
    before = numbers_of(SlotBook(tmp_path).lay_out(ASKED, survey()))
    box.cut(card(1), card(2), card(9))  # after a reboot without card 0, and with another: all have other indices
    after = numbers_of(SlotBook(tmp_path).lay_out(ASKED, survey()))
    assert {uuid: after[uuid] for uuid in ("GPU-1", "GPU-2")} == {uuid: before[uuid] for uuid in ("GPU-1", "GPU-2")}
    assert after["GPU-9"] not in before.values()  # a replica may still be on the old card


def test_virtual_nodes_keep_their_slots_and_shrink(box):
    box.cut(*(card(number) for number in range(4)))
    book, asked = SlotBook(), LayoutRequest(nodes="2x2")
    book.lay_out(asked, survey())
    box.change(0, is_lost=True)
    layout = book.lay_out(asked, survey())
    assert nodes_of(layout) == [("node-0", 1, "NVIDIA H200"), ("node-1", 2, "NVIDIA H200")]
    assert {device.gpu: device.node for device in layout.devices}["GPU-1"] == "node-0"
    assert [(ill.name, ill.reason) for ill in layout.unusable] == [("GPU 0", "NVML: GPU is lost")]


def test_models_of_one_name_and_another_memory_are_types_of_their_own(box):
    box.cut(card(0, "RTX 3080", 10 * GIB), card(1, "RTX 3080", 12 * GIB))
    layout = SlotBook().lay_out(ASKED, survey())
    assert [node.accelerator for node in layout.nodes] == ["RTX 3080", "RTX 3080 12GB"]


def test_a_lost_card_does_not_hide_those_named_after_it(box):
    box.cut(card(0, is_lost=True), card(1))
    asked = LayoutRequest(visible="GPU-0,GPU-1")
    assert numbers_of(SlotBook().lay_out(asked, survey())).keys() == {"GPU-1"}


def test_without_rights_to_mig_a_card_is_no_slot_and_says_why(box):
    box.cut(card(0, has_no_rights=True), card(1, slices=[part(1, 7, has_no_rights=True), part(1, 8)]))
    found = survey()
    assert [gpu.uuid for gpu in found.gpus] == ["MIG-1-8"]
    assert [ill.name for ill in found.unusable] == ["GPU-0", "GPU-1 slice 0"]
    assert all("Insufficient Permissions; give this user the rights" in ill.reason for ill in found.unusable)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"host": "lab", "numbers": {"a": "b"}}'])
def test_a_file_that_cannot_be_read_counts_as_missing(box, tmp_path, content):
    (tmp_path / SLOTS_FILE).write_text(content)
    box.cut(card(0))
    assert nodes_of(SlotBook(tmp_path).lay_out(ASKED, survey())) == [("lab", 1, "NVIDIA H200")]
    assert json.loads((tmp_path / SLOTS_FILE).read_text())["numbers"] == {"GPU-0": 0}


def health():
    import pynvml

    return GpuHealth(pynvml)


def test_an_xid_of_one_slice_leaves_its_neighbours_and_one_of_the_card_none(box):
    box.cut(card(0, slices=[part(0, 7), part(0, 8)]), card(1))
    watch, gpus = health(), survey().gpus
    assert watch.look(gpus, 0.0) == {}
    box.change(0, xids=[(94, 7), (31, 8)])  # 31 is a script's own fault
    assert watch.look(gpus, 1.0) == {
        "MIG-0-7": "XID 94 (contained ECC error); it is tried again after 10 minutes",
    }
    box.change(0, xids=[(94, 7), (31, 8), (79, None)])
    assert watch.look(gpus, 2.0).keys() == {"MIG-0-7", "MIG-0-8"}
    assert watch.look(gpus, 3.0 + PAUSE_S) == {}  # tried again
    box.change(0, xids=[(94, 7), (31, 8), (79, None), (79, None)])
    assert "after 20 minutes" in watch.look(gpus, 4.0 + PAUSE_S)["MIG-0-7"]


def test_ecc_errors_from_before_are_no_reason_and_new_ones_are(box):
    box.cut(card(0, ecc_errors=3), card(1, ecc_errors=None, remap_failed=None))
    watch, gpus = health(), survey().gpus
    assert watch.look(gpus, 0.0) == {}
    box.change(0, ecc_errors=5)
    assert watch.look(gpus, 1.0).keys() == {"GPU-0"}
    assert "2 new uncorrected ECC errors" in watch.look(gpus, 2.0)["GPU-0"]
    box.change(0, remap_failed=1)
    assert "could not be remapped" in watch.look(gpus, 3.0 + LONGEST_PAUSE_S)["GPU-0"]


def test_what_has_an_error_is_no_slot(box):
    box.cut(card(0), card(1))
    layout = SlotBook().lay_out(ASKED, survey(), {"GPU-1": "XID 48"})
    assert [device.gpu for device in layout.devices] == ["GPU-0"]
    assert [(ill.name, ill.reason) for ill in layout.unusable] == [("GPU-1", "XID 48")]
    assert SlotBook().lay_out(ASKED, Survey()).nodes == ()
