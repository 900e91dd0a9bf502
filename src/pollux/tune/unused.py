"""Notices slots that the study offers a trial and the scheduler does not give it. Pure; the driver of a study calls it.

The scheduler may find that a trial is not faster with more slots, or too near its end for a resize to pay. Slots that
are kept free for it would train nothing, so they are offered to others: to new trials, and to those that wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

UNUSED_S = 2.0  # that slots are free for a trial before others get them; a decision takes less than a second
OFFERED_AGAIN_S = 20.0  # a trial's speed changes with its batch, so that it may want them later


class UnusedSlots:
    def __init__(self) -> None:
        self._since: dict[int, float] = {}  # by trial that has fewer slots than it was offered
        self._capped: dict[int, tuple[int, float]] = {}  # by trial: its most slots, and until when

    def most(self, trial: int) -> float:
        """Slots that are worth offering."""
        return self._capped[trial][0] if trial in self._capped else math.inf

    def look(self, now: float, num_slots: int, offered: Mapping[int, int], held: Mapping[int, int]) -> None:
        """``num_slots`` of the study; by live trial, slots that it was offered, and slots that it holds."""
        self._capped = {
            trial: (most, until)
            for trial, (most, until) in self._capped.items()
            if held.get(trial) == most and now < until
        }
        starting = sum(1 for trial, slots in offered.items() if slots and not held.get(trial))
        has_free = num_slots - sum(held.values()) - starting > 0
        short = {trial for trial, slots in offered.items() if has_free and 0 < held.get(trial, 0) < slots}
        self._since = {trial: self._since.get(trial, now) for trial in short}
        for trial, since in list(self._since.items()):
            if now - since >= UNUSED_S:
                self._capped[trial] = held[trial], now + OFFERED_AGAIN_S
                del self._since[trial]
