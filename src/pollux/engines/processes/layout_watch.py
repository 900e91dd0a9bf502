"""Looks every few seconds which GPUs and slices there are and which are well. The supervisor of one machine has one.

A thread of its own asks NVML, which may take long for a card in trouble. The supervisor takes the newest layout and
never waits, except for the first one after a server's hello.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from pollux.engines.processes.gpu_health import GpuHealth
from pollux.engines.processes.gpus import open_nvml, survey
from pollux.engines.processes.layout import LayoutRequest, SlotBook, SlotLayout

PERIOD_S = 2.0

logger = logging.getLogger(__name__)


class LayoutWatch:
    def __init__(self, directory: Path, period_s: float = PERIOD_S) -> None:
        self._book, self._period_s = SlotBook(directory), period_s
        self._turn = threading.Lock()  # guards all below
        self._request: LayoutRequest | None = None
        self._health: GpuHealth | None = None
        self._layout: SlotLayout | None = None  # that was not taken
        self._is_closed = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def lay_out(self, request: LayoutRequest | None) -> SlotLayout | None:
        """Look now, and from now on by this request. None: there is nothing to watch."""
        with self._turn:
            self._request, self._layout = request, None
            if request is None:
                return None
            layout = self._look(request)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pollux-layout", daemon=True)
            self._thread.start()
        return layout

    def take(self) -> SlotLayout | None:
        """The newest layout; None: there was no look since this was asked last."""
        if not self._turn.acquire(blocking=False):  # it is looking just now
            return None
        try:
            layout, self._layout = self._layout, None
            return layout
        finally:
            self._turn.release()

    def look_soon(self) -> None:
        """Something may have happened to a device."""
        self._wake.set()

    def close(self) -> None:
        self._is_closed = True
        self._wake.set()

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.wait(self._period_s)
            self._wake.clear()
            with self._turn:
                if self._request is None or self._is_closed:
                    continue
                try:
                    self._layout = self._look(self._request)
                except Exception:  # what was known stays
                    logger.exception("the GPUs cannot be looked at")

    def _look(self, request: LayoutRequest) -> SlotLayout:
        found = survey()
        if self._health is None and (nvml := open_nvml()) is not None:
            self._health = GpuHealth(nvml)
        faults = {} if self._health is None else self._health.look(found.gpus, time.monotonic())
        return self._book.lay_out(request, found, faults)
