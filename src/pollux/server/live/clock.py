"""The live clock: seconds since the epoch that never step back, whatever happens to the machine's clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class LiveClock:
    """Runs with the monotonic clock from where the wall clock was at the start, or ``not_before`` if that is later.

    Times are kept in the database, so a server that starts after the machine's clock was set back goes on from the
    latest time that was kept: ages and durations stay what they are.
    """

    def __init__(
        self,
        not_before: float = 0.0,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic = monotonic
        self._offset = max(wall(), not_before) - monotonic()
        self._changed = threading.Event()

    def now(self) -> float:
        return self._offset + self._monotonic()

    def wait_until(self, deadline: float) -> None:
        """Until then, or until :meth:`wake` is called."""
        self._changed.wait(max(deadline - self.now(), 0.0))
        self._changed.clear()

    def wake(self) -> None:
        self._changed.set()
