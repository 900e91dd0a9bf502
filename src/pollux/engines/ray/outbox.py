"""Messages that are numbered and kept until they have been heard.

Ray does not say whether a call that failed was carried out, so the same question may come twice. The Ray supervisor and
the node agents each have one; their callers ask for what came after the last number that they have seen.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from pollux.engines.transport import Message

MAX_UNHEARD = 100_000  # without a listener for so long, the state that it asks for at first says more

Numbered = tuple[int, Message]


class Outbox:
    def __init__(self, changed: threading.Condition) -> None:
        """``changed`` guards it, and is notified of every message."""
        self._changed = changed
        self._unheard: deque[Numbered] = deque()
        self._num_told = 0

    def put(self, message: Message) -> None:
        with self._changed:
            self._num_told += 1
            self._unheard.append((self._num_told, message))
            while len(self._unheard) > MAX_UNHEARD:
                self._unheard.popleft()
            self._changed.notify_all()

    def clear(self) -> None:
        with self._changed:
            self._unheard.clear()

    def after(self, number: int, wait_s: float, is_over: Callable[[], bool] = lambda: False) -> list[Numbered]:
        """Messages after that number, as soon as there are any or ``is_over``; those before are forgotten."""
        with self._changed:
            while self._unheard and self._unheard[0][0] <= number:
                self._unheard.popleft()
            self._changed.wait_for(lambda: bool(self._unheard) or is_over(), wait_s)
            return list(self._unheard)
