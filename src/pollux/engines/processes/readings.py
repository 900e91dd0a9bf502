"""Reads what GPUs and their machine do: NVML and psutil, every few seconds, on a thread of its own.

The supervisor of one machine and the node agents of Ray each have a :class:`Sampler`. NVML tells of a MIG slice only
its memory; power and temperature are the card's. Power of a card is divided equally among its slots.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import psutil

from pollux.api.cluster import NodeReading, SlotReading
from pollux.engines.processes.devices import Device
from pollux.engines.processes.gpus import open_nvml

PERIOD_S = 5.0
_MIB = 1 << 20  # readings are rounded, so that what rests is told once

logger = logging.getLogger(__name__)


class HostMeter:
    """CPU, memory, disk and network of this machine; rates are over the time since the last reading."""

    def __init__(self, folder: str) -> None:
        """``folder``: on the disk that is told of."""
        self._folder = folder
        psutil.cpu_percent()  # the first answer means nothing
        self._network, self._at = psutil.net_io_counters(), time.monotonic()

    def read(self, at: float) -> NodeReading:
        memory, disk, network = psutil.virtual_memory(), psutil.disk_usage(self._folder), psutil.net_io_counters()
        now = time.monotonic()
        passed_s = max(now - self._at, 1e-3)
        received, sent = 0.0, 0.0
        if network is not None and self._network is not None:  # None: a machine without a network
            received = max(network.bytes_recv - self._network.bytes_recv, 0) / passed_s
            sent = max(network.bytes_sent - self._network.bytes_sent, 0) / passed_s
        self._network, self._at = network, now
        return NodeReading(
            at=at,
            cpu=round(psutil.cpu_percent() / 100, 2),
            memory_bytes=_rounded(memory.total - memory.available),
            memory_total_bytes=memory.total,
            disk_bytes=_rounded(disk.used),
            disk_total_bytes=disk.total,
            received_bytes_per_s=float(f"{received:.2g}"),
            sent_bytes_per_s=float(f"{sent:.2g}"),
        )


def read_slots(devices: Sequence[Device], nvml: Any) -> dict[str, list[SlotReading]]:
    """By node; devices that are no GPUs, and GPUs that do not answer, are left out. ``nvml`` is the module pynvml."""
    found: dict[str, list[SlotReading]] = {}
    cards: dict[str, str] = {}  # of the card that a device is on, by the device's UUID
    for device in devices:
        if device.gpu is not None and device.gpu not in cards:
            try:
                cards[device.gpu] = _uuid(nvml, _card(nvml, nvml.nvmlDeviceGetHandleByUUID(device.gpu)))
            except nvml.NVMLError as error:
                logger.debug("%s cannot be read: %s", device.gpu, error)
    num_slots = Counter(cards[device.gpu] for device in devices if device.gpu in cards)
    for device in devices:
        if device.gpu in cards:
            row = _read_slot(nvml, device, num_slots[cards[device.gpu]])
            found.setdefault(device.node, []).append(row)
    return found


def _read_slot(nvml: Any, device: Device, num_sharing: int) -> SlotReading:
    assert device.gpu is not None

    def ask(read: Callable[[], float]) -> float | None:
        try:
            return read()
        except nvml.NVMLError:  # not supported, mostly: slices have no utilisation, some cards no power
            return None

    handle = nvml.nvmlDeviceGetHandleByUUID(device.gpu)
    card = _card(nvml, handle)
    busy = ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
    used = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used)
    total = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total)
    power_w = ask(lambda: nvml.nvmlDeviceGetPowerUsage(card) / 1e3)
    temperature = ask(lambda: nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU))
    return SlotReading(
        slot=device.number,
        gpu=device.gpu,
        utilisation=busy,
        memory_bytes=None if used is None else _rounded(used),
        memory_total_bytes=None if total is None else int(total),
        power_w=None if power_w is None else round(power_w / num_sharing, 1),
        temperature_c=temperature,
    )


def _card(nvml: Any, handle: Any) -> Any:
    """The card that a slice is of; a whole GPU is its own."""
    try:
        return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    except nvml.NVMLError:
        return handle


def _uuid(nvml: Any, handle: Any) -> str:
    uuid = nvml.nvmlDeviceGetUUID(handle)
    return uuid.decode() if isinstance(uuid, bytes) else str(uuid)


def _rounded(num_bytes: float) -> int:
    return int(num_bytes) // _MIB * _MIB


class Sampler:
    """Reads every few seconds, until it is closed. The thread ends with the process, too."""

    def __init__(self, folder: str, devices: Callable[[], Sequence[Device]], period_s: float = PERIOD_S) -> None:
        """``devices``: the slots there are, asked at every reading, from another thread."""
        self._devices, self._period_s = devices, period_s
        self._host = HostMeter(folder)
        self._nvml = open_nvml()
        self._turn = threading.Lock()
        self._readings: dict[str, NodeReading] | None = None  # that were not taken
        self._is_closed = threading.Event()
        threading.Thread(target=self._run, name="pollux-readings", daemon=True).start()

    def take(self) -> dict[str, NodeReading] | None:
        """The newest readings by node; None: no new ones."""
        with self._turn:
            readings, self._readings = self._readings, None
        return readings

    def close(self) -> None:
        self._is_closed.set()

    def _run(self) -> None:
        while not self._is_closed.wait(self._period_s):
            try:
                readings = self._read()
            except Exception:  # no reading is worth a job
                logger.exception("the machine cannot be read")
                continue
            with self._turn:
                self._readings = readings

    def _read(self) -> dict[str, NodeReading]:
        devices = list(self._devices())
        slots = {} if self._nvml is None else read_slots(devices, self._nvml)
        host = self._host.read(time.time())
        return {
            node: replace(host, slots=tuple(slots.get(node, ())))
            for node in dict.fromkeys(device.node for device in devices)
        }
