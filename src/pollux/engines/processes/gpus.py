"""The GPUs and MIG slices of this machine, as NVML tells them, and why some of them cannot be used.

``devices`` makes slots of them, ``gpu_health`` looks for errors. NVML is opened for each look, so that cards that went
and came back and slices that were cut meanwhile are seen.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SLICE_NUMBERS = 100  # a card has at most 7 slices, with instance numbers below 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A whole GPU, or a MIG slice of one."""

    number: int  # NVML's, which is the order on the PCI bus; of a slice, SLICE_NUMBERS·(card + 1) + its instance
    uuid: str
    name: str
    card: int | None = None  # NVML's number of the card that a slice is of; None: a whole GPU
    memory_bytes: int | None = None  # None: NVML does not tell
    card_uuid: str = ""  # of the card that a slice is of; a whole GPU is its own

    @property
    def instance(self) -> int | None:
        """Of a slice, the number of its GPU instance."""
        return None if self.card is None else self.number - SLICE_NUMBERS * (self.card + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusableGpu:
    """A GPU or slice that NVML lists and that can be no slot. ``name``: its UUID, where that can be known."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    gpus: tuple[Gpu, ...] = ()
    unusable: tuple[UnusableGpu, ...] = ()


def find_gpus() -> list[Gpu]:
    """Those that can be used; none where there is no driver or no library for it."""
    found = survey()
    for ill in found.unusable:
        logger.warning("%s cannot be used: %s", ill.name, ill.reason)
    return list(found.gpus)


def survey() -> Survey:
    """All GPUs and slices by NVML. Never fails: without a driver there are none."""
    try:
        import pynvml
    except ImportError:
        return Survey()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return Survey()
    try:
        gpus: list[Gpu] = []
        unusable: list[UnusableGpu] = []
        for number in range(pynvml.nvmlDeviceGetCount()):
            found = _look_at(pynvml, number)
            gpus += found.gpus
            unusable += found.unusable
        return Survey(gpus=tuple(gpus), unusable=tuple(unusable))
    except pynvml.NVMLError:
        return Survey()
    finally:
        pynvml.nvmlShutdown()


def open_nvml() -> Any:
    """The module pynvml, initialised for as long as the caller wants; None where there is no GPU or no driver."""
    if not survey().gpus:
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        logger.warning("GPUs cannot be read: %s", error)
        return None
    return pynvml


def _look_at(nvml: Any, number: int) -> Survey:
    """One card: itself, or its slices."""
    name = f"GPU {number}"
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
        name = text_of(nvml.nvmlDeviceGetUUID(handle))
        model = text_of(nvml.nvmlDeviceGetName(handle))
    except nvml.NVMLError as error:  # fallen off the bus: the others are as good as before
        return Survey(unusable=(UnusableGpu(name=name, reason=f"NVML: {error}"),))
    try:
        is_cut = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    except nvml.NVMLError as error:
        if not _is_refused(nvml, error):  # cards and drivers without MIG
            is_cut = False
        else:
            why = f"whether it is cut into MIG slices cannot be read: {error}; give this user the rights to the driver"
            return Survey(unusable=(UnusableGpu(name=name, reason=why),))
    if is_cut:
        return _slices(nvml, handle, number, name)
    memory = _memory(nvml, handle)
    return Survey(gpus=(Gpu(number=number, uuid=name, name=model, memory_bytes=memory, card_uuid=name),))


def _slices(nvml: Any, handle: Any, card: int, card_uuid: str) -> Survey:
    """A card in MIG mode without slices has no slot."""
    slices: list[Gpu] = []
    unusable: list[UnusableGpu] = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            uuid, name = nvml.nvmlDeviceGetUUID(part), nvml.nvmlDeviceGetName(part)
            instance = int(nvml.nvmlDeviceGetGpuInstanceId(part))
        except nvml.NVMLError as error:  # mostly: no slice has this index, or it has just been taken away
            if _is_refused(nvml, error):
                why = f"slice {index} cannot be read: {error}; give this user the rights to /dev/nvidia-caps"
                unusable.append(UnusableGpu(name=f"{card_uuid} slice {index}", reason=why))
            continue
        slices.append(
            Gpu(
                number=SLICE_NUMBERS * (card + 1) + instance,
                uuid=text_of(uuid),
                name=text_of(name),
                card=card,
                memory_bytes=_memory(nvml, part),
                card_uuid=card_uuid,
            )
        )
    if not slices and not unusable:
        why = f"GPU {card} is in MIG mode and has no slices, so it has no slots; make some: nvidia-smi mig -cgi"
        unusable.append(UnusableGpu(name=card_uuid, reason=why))
    return Survey(gpus=tuple(slices), unusable=tuple(unusable))


def _memory(nvml: Any, handle: Any) -> int | None:
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:
        return None


def _is_refused(nvml: Any, error: Exception) -> bool:
    """For want of rights, not because the card cannot do it."""
    return bool(getattr(error, "value", None) == nvml.NVML_ERROR_NO_PERMISSION)


def visible_gpus(gpus: Sequence[Gpu], env: Mapping[str, str], *, skips_missing: bool = False) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves to us, in its order; as CUDA does, up to the first that is not there.

    ``skips_missing``: those after it as well. A card that is lost later must not hide the others.
    """
    if (visible := env.get("CUDA_VISIBLE_DEVICES")) is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for entry in visible.split(","):
        word = entry.strip()
        is_uuid = word[:4] in ("GPU-", "MIG-")
        matching = [
            gpu
            for gpu in gpus
            if (gpu.uuid.startswith(word) if is_uuid else gpu.card is None and word == str(gpu.number))
        ]
        if not matching and skips_missing:
            continue
        if not matching or matching[0] in chosen:
            break
        chosen.append(matching[0])
    return chosen


def text_of(value: str | bytes) -> str:
    """Older NVML bindings answer with bytes."""
    return value.decode() if isinstance(value, bytes) else value
