"""A lock for which those who wait are served in order.

With a plain lock, a thread that takes it again and again (the scheduler's, writing many rows) is nearly always first,
and a request that wants to write one row waits for all of them.
"""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._is_taken = False

    def __enter__(self) -> None:
        with self._mutex:
            if not self._is_taken:
                self._is_taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        mine.acquire()  # until it is handed over

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False
