"""Watches whether the head of a Ray cluster answers, and tells of it within seconds. The proxy runs one.

Ray itself waits a minute and more for a head that is gone, and a question to it may block all that time. So one thread
asks, and another one looks how long ago the last answer came.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

PERIOD_S = 1.0
LATE_S = 3.0  # without an answer

logger = logging.getLogger(__name__)


class HeadWatch:
    def __init__(
        self,
        ask: Callable[[], object],
        tell: Callable[[str], object],
        *,
        period_s: float = PERIOD_S,
        late_s: float = LATE_S,
    ) -> None:
        """``ask`` returns when the head has answered; it may raise or block. ``tell`` gets the problem, then ""."""
        self._ask, self._tell, self._period_s, self._late_s = ask, tell, period_s, late_s
        self._answered_at = time.monotonic()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"pollux-head-{name}", daemon=True)
            for target, name in ((self._keep_asking, "ask"), (self._keep_looking, "look"))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closing.set()

    def _keep_asking(self) -> None:
        while not self._closing.is_set():
            try:
                self._ask()
                self._answered_at = time.monotonic()
            except Exception as error:  # Ray has many
                logger.warning(
                    "the head does not answer: %s", str(error).splitlines()[0] if str(error) else repr(error)
                )
            self._closing.wait(self._period_s)

    def _keep_looking(self) -> None:
        is_late = False
        while not self._closing.wait(self._period_s / 4):
            was_late, is_late = is_late, time.monotonic() - self._answered_at > self._late_s
            if is_late and not was_late:
                self._tell(
                    f"the head of the Ray cluster has not answered for {self._late_s:g} s: no job can be started"
                )
            elif was_late and not is_late:
                self._tell("")
