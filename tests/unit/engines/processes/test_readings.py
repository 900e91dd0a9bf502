from __future__ import annotations

import time

import psutil

from pollux.api.cluster import SlotReading
from pollux.engines.processes.devices import Device
from pollux.engines.processes.gpus import Gpu
from pollux.engines.processes.layout import detect_nodes
from pollux.engines.processes.readings import HostMeter, Sampler, read_slots
from tests.unit.engines.processes.nvml import FakeNvml, Part

GIB = 1 << 30
CARD = Part("GPU-a", utilisation=87, memory=(10 * GIB, 139 * GIB), power_mw=300_500, temperature_c=61)
OTHER = Part("GPU-b", utilisation=0, memory=(GIB, 139 * GIB), power_mw=70_000, temperature_c=30)


def test_a_gpu_tells_all():
    found = read_slots([Device(node="n", number=0, gpu="GPU-a"), Device(node="n", number=1, gpu="GPU-b")],
                       FakeNvml(CARD, OTHER))  # fmt: skip
    assert found == {
        "n": [
            SlotReading(slot=0, gpu="GPU-a", utilisation=0.87, memory_bytes=10 * GIB, memory_total_bytes=139 * GIB,
                        power_w=300.5, temperature_c=61),
            SlotReading(slot=1, gpu="GPU-b", utilisation=0.0, memory_bytes=GIB, memory_total_bytes=139 * GIB,
                        power_w=70.0, temperature_c=30),
        ]
    }  # fmt: skip


def test_slices_have_memory_of_their_own_and_an_equal_part_of_their_cards_power():
    slices = [Part(f"MIG-{index}", memory=(index * GIB, 35 * GIB), card=CARD) for index in range(3)]
    devices = [Device(node="n", number=100 + index, gpu=f"MIG-{index}") for index in range(3)]
    rows = read_slots(devices, FakeNvml(CARD, *slices))["n"]
    assert [row.memory_bytes for row in rows] == [0, GIB, 2 * GIB]
    assert {row.power_w for row in rows} == {100.2}
    assert {row.temperature_c for row in rows} == {61}
    assert {row.utilisation for row in rows} == {None}, "NVML has none of a slice"


def test_shares_of_a_card_divide_its_power():
    _, devices = detect_nodes(slots_per_gpu=4, gpus=[Gpu(number=0, uuid="GPU-a", name="H200")], env={})
    (rows,) = read_slots(devices, FakeNvml(CARD)).values()
    assert [row.slot for row in rows] == [device.number for device in devices]
    assert {(row.utilisation, row.power_w) for row in rows} == {(0.87, 75.1)}


def test_a_gpu_that_fell_off_the_bus_is_left_out_and_the_others_are_read():
    devices = [Device(node="n", number=0, gpu="GPU-gone"), Device(node="m", number=1, gpu="GPU-b")]
    found = read_slots([*devices, Device(node="cpu", number=2)], FakeNvml(OTHER))
    assert list(found) == ["m"]


def test_what_nvml_does_not_tell_is_null():
    (row,) = read_slots([Device(node="n", number=0, gpu="GPU-x")], FakeNvml(Part("GPU-x")))["n"]
    told = (row.utilisation, row.memory_bytes, row.memory_total_bytes, row.power_w, row.temperature_c)
    assert told == (None,) * 5


def test_the_host_is_read(tmp_path):
    meter = HostMeter(str(tmp_path))
    ends_at = time.monotonic() + 0.3
    while time.monotonic() < ends_at:  # be busy
        pass
    reading = meter.read(at=5.0)
    assert reading.at == 5.0 and 0 < reading.cpu <= 1
    assert 0 < reading.memory_bytes < reading.memory_total_bytes == psutil.virtual_memory().total
    assert 0 < reading.disk_bytes < reading.disk_total_bytes
    assert reading.received_bytes_per_s >= 0 and reading.sent_bytes_per_s >= 0


def test_a_sampler_tells_of_every_node_once_per_reading(tmp_path):
    devices = [Device(node="a", number=0), Device(node="a", number=1), Device(node="b", number=2)]
    sampler = Sampler(str(tmp_path), lambda: devices, period_s=0.05)
    try:
        ends_at = time.monotonic() + 10
        while (found := sampler.take()) is None:
            assert time.monotonic() < ends_at
            time.sleep(0.01)
        assert list(found) == ["a", "b"] and found["a"].slots == ()
    finally:
        sampler.close()
