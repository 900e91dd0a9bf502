"""Which GPUs and slices have had errors, as far as NVML tells: XID events, uncorrected ECC errors, failed remapping.

The supervisor's layout watch asks it at every look. An error of the script (an illegal address, say) has an XID as
well; those are left to the job. After an error of the hardware a slot gets no work for a while, and is tried again: a
reset may have mended it, and NVML does not tell.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pollux.engines.processes.gpus import Gpu, text_of

# XIDs that a script causes (illegal instruction or address, its own end), by NVIDIA's list of XID errors.
OF_SCRIPTS = frozenset({13, 31, 43, 45, 68, 109})
XID_MEANINGS = {
    48: "double-bit ECC error",
    62: "the internal micro-controller stopped",
    63: "rows of memory are to be remapped",
    64: "rows of memory could not be remapped",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "its system processor (GSP) does not answer",
    120: "its system processor (GSP) failed",
}
PAUSE_S = 600.0  # without work after an error; doubles with each, as a node's quarantine does
LONGEST_PAUSE_S = 3600.0
_NO_INSTANCE = 0xFFFFFFFF  # of an event that concerns the whole card

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _GpuFault:
    reason: str
    until: float
    num_times: int = 1


class GpuHealth:
    """Not thread-safe: one caller."""

    def __init__(self, nvml: Any) -> None:
        """``nvml`` is the module pynvml, initialised; it stays the caller's."""
        self._nvml = nvml
        self._cards: frozenset[str] = frozenset()  # whose events are heard
        self._events: Any = None
        self._num_errors: dict[str, int] = {}  # uncorrected, by card, as first seen
        self._faults: dict[str, _GpuFault] = {}  # by UUID of a slot's device

    def look(self, gpus: Sequence[Gpu], now: float) -> dict[str, str]:
        """Why GPUs and slices are not to be used now, by UUID. ``now``: monotonic seconds."""
        cards = frozenset(gpu.card_uuid for gpu in gpus)
        if cards != self._cards:
            self._listen(cards)
        for card, instance, xid in self._new_xids():
            concerned = [gpu for gpu in gpus if gpu.card_uuid == card and instance in (None, gpu.instance)]
            if xid not in OF_SCRIPTS:
                self._mark(concerned, f"XID {xid} ({XID_MEANINGS.get(xid, 'see the list of XID errors')})", now)
        for card in cards:
            on_card = [gpu for gpu in gpus if gpu.card_uuid == card]
            num_errors = self._uncorrected(card)
            if num_errors > self._num_errors.setdefault(card, num_errors):
                self._mark(on_card, f"{num_errors - self._num_errors[card]} new uncorrected ECC errors", now)
                self._num_errors[card] = num_errors
            if self._has_failed_rows(card):
                self._mark(on_card, "rows of its memory could not be remapped: the card is to be replaced", now)
        return {uuid: fault.reason for uuid, fault in self._faults.items() if now < fault.until}

    def close(self) -> None:
        if self._events is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(self._events)
            self._events = None

    def _mark(self, gpus: Iterable[Gpu], reason: str, now: float) -> None:
        for gpu in gpus:
            before = self._faults.get(gpu.uuid)
            if before is not None and now < before.until:
                continue
            num_times = 1 if before is None else before.num_times + 1
            pause_s = min(PAUSE_S * 2 ** min(num_times - 1, 8), LONGEST_PAUSE_S)
            why = f"{reason}; it is tried again after {pause_s / 60:.0f} minutes"
            logger.error("%s (%s) gets no work: %s", gpu.uuid, gpu.name, why)
            self._faults[gpu.uuid] = _GpuFault(reason=why, until=now + pause_s, num_times=num_times)

    # --- what NVML tells -------------------------------------------------------------------------------------------

    def _listen(self, cards: frozenset[str]) -> None:
        """To the events of these cards. Slots without events (old cards, no rights) are used as they are."""
        nvml = self._nvml
        self.close()
        self._cards = cards
        try:
            self._events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError as error:
            logger.info("XID errors cannot be seen: %s", error)
            return
        for card in cards:
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(card)
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
            except nvml.NVMLError as error:
                logger.info("XID errors of %s cannot be seen: %s", card, error)

    def _new_xids(self) -> list[tuple[str, int | None, int]]:
        """(card, GPU instance, XID) since the last look."""
        nvml, found = self._nvml, []
        while self._events is not None:
            try:
                data = nvml.nvmlEventSetWait_v2(self._events, 0)
                instance = None if data.gpuInstanceId == _NO_INSTANCE else int(data.gpuInstanceId)
                found.append((text_of(nvml.nvmlDeviceGetUUID(data.device)), instance, int(data.eventData)))
            except nvml.NVMLError as error:
                if getattr(error, "value", None) != nvml.NVML_ERROR_TIMEOUT:
                    logger.debug("events cannot be read: %s", error)
                break
        return found

    def _uncorrected(self, card: str) -> int:
        """Uncorrected ECC errors since the driver was loaded; 0 where it does not tell."""
        nvml = self._nvml
        kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return self._ask(card, lambda handle: int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since)))

    def _has_failed_rows(self, card: str) -> bool:
        return bool(self._ask(card, lambda handle: int(self._nvml.nvmlDeviceGetRemappedRows(handle)[3])))

    def _ask(self, card: str, read: Callable[[Any], int]) -> int:
        try:
            return read(self._nvml.nvmlDeviceGetHandleByUUID(card))
        except self._nvml.NVMLError:  # not supported, mostly
            return 0
