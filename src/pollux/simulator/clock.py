"""Virtual time: instead of waiting, the clock lets the simulated engine advance. The scheduler's loop reads it."""

from __future__ import annotations

from collections.abc import Callable


class VirtualClock:
    """Implements :class:`~pollux.scheduler.ports.Clock`. ``advance(deadline)`` returns the time it stopped at."""

    def __init__(self, advance: Callable[[float], float]) -> None:
        self._now = 0.0
        self._advance = advance

    def now(self) -> float:
        return self._now

    def wait_until(self, deadline: float) -> None:
        self._now = self._advance(deadline)
