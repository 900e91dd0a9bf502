"""Leaving a run: by signal, or because the replica is not needed any more.

A signal only sets a flag; the session sees it at the next step boundary, where all ranks agree on it, rank 0 saves a
checkpoint, and every rank raises :class:`Leave`. ``LEAVE_NOW`` raises it at once. That is an exception like
SystemExit: it passes through ``except Exception``, and Python turns it into exit code 143 if it is not caught.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from pollux.membership.leave import LEAVE_NOW

EXIT_CODE = 143  # what a process has that ended by SIGTERM
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)

logger = logging.getLogger(__name__)


class Leave(SystemExit):
    """This replica leaves the run, its work saved or handed over. Ends the process with code 143 unless caught."""

    def __init__(self, reason: str) -> None:
        super().__init__(EXIT_CODE)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class LeaveSignals:
    """Remembers the first signal that asks to leave. A second one of the same kind ends the process as usual."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._raises = False
        self.is_given_back = False  # installed once, and not any more
        self._before: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            logger.warning("not in the main thread: signals will not be turned into a checkpoint")
            return
        for number in (*SIGNALS, LEAVE_NOW):
            self._before[number] = signal.signal(number, self._receive)
        self.is_given_back = False

    def restore(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            self._before.clear()
            self.is_given_back = True

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Within this, a signal does not wait for a step boundary: there may be none. Leave is raised at once."""
        if self.received is not None:
            raise Leave(f"{self.received}: left while waiting for other replicas")
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == LEAVE_NOW:
            raise Leave("not needed any more: leaving without a checkpoint")
        if self.received == name:
            raise Leave(f"{name} twice: leaving without a checkpoint")
        self.received = self.received or name
        if self._raises:
            raise Leave(f"{name}: left while waiting for other replicas")
