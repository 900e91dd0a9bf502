"""An NVML without a driver: cards and MIG slices that say what a test gives them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace


class NVMLError(Exception):
    pass


@dataclass(eq=False)
class Part:
    """A card, or a slice of one (``card``). None: NVML does not tell."""

    uuid: str
    utilisation: int | None = None  # per cent
    memory: tuple[int, int] | None = None  # used, in all
    power_mw: int | None = None
    temperature_c: int | None = None
    card: Part | None = None


class FakeNvml:
    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *parts: Part) -> None:
        self.parts = {part.uuid: part for part in parts}

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Part:
        return _told(self.parts.get(uuid))

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, part: Part) -> Part:
        return _told(part.card)

    def nvmlDeviceGetUUID(self, part: Part) -> str:
        return part.uuid

    def nvmlDeviceGetUtilizationRates(self, part: Part) -> SimpleNamespace:
        return SimpleNamespace(gpu=_told(part.utilisation))

    def nvmlDeviceGetMemoryInfo(self, part: Part) -> SimpleNamespace:
        used, total = _told(part.memory)
        return SimpleNamespace(used=used, total=total)

    def nvmlDeviceGetPowerUsage(self, part: Part) -> int:
        return _told(part.power_mw)

    def nvmlDeviceGetTemperature(self, part: Part, kind: int) -> int:
        assert kind == self.NVML_TEMPERATURE_GPU
        return _told(part.temperature_c)


def _told(value):
    if value is None:
        raise NVMLError("Not Supported")
    return value
