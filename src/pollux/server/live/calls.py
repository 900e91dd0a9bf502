"""What other threads ask of the scheduler's thread: queued by any thread, carried out by that one between two ticks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from pollux.errors import StoreError

_T = TypeVar("_T")


class Calls:
    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._called = threading.Event()

    def put(self, call: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()
        self._calls.append((call, future))
        self._called.set()
        return future

    def wake(self) -> None:
        """End a rest."""
        self._called.set()

    def carry_out(self) -> None:
        """All but those that their callers gave up. Raises StoreError, which also the caller gets."""
        self._called.clear()
        while self._calls:
            call, future = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except StoreError as error:
                future.set_exception(error)
                raise
            except Exception as error:
                future.set_exception(error)

    def rest(self, pause_s: float, is_over: Callable[[], bool]) -> None:
        """Leave the processor to those who answer requests, but for what callers wait for."""
        ends_at = time.monotonic() + pause_s
        while (left_s := ends_at - time.monotonic()) > 0 and not is_over():
            if self._called.wait(left_s):
                self.carry_out()

    def refuse(self) -> None:
        """What is left, at the end."""
        while self._calls:
            future = self._calls.popleft()[1]
            if future.set_running_or_notify_cancel():
                future.set_exception(StoreError("the server is stopping"))
