"""How many of a study's slots each trial should have, and how many new trials should begin. Pure.

The driver of a study calls it. A slot goes where it buys the most chance to find the best trial, per unit of training:
a trial that has passed a rung offers its chance to end as the best, over the part of its work that is left; a new trial
offers the chance of one more draw, 1/(n + 1) after n trials, over what a trial costs on average. Slots are given one by
one, each to the largest offer divided by the slots that it would then have (D'Hondt), because speed grows less than
slots do; where a further slot is known to add even less, as to replicas that share a GPU, that counts. At first new
trials offer most; then the best trials grow; a trial that offers less than a new one has no slot: it waits, and goes on
when slots are free.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

LEAST_LEFT = 0.05  # of a trial's work, that its chance is divided by
LEAST_GAIN = 0.05  # of one slot's goodput, below which a further slot is not worth a resize
NEW = 0.3  # what a new trial's chance counts: a good value soon is worth more than the best one at the end
STAYS = 1.5  # a trial that has slots keeps the last one unless others offer so many times more


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A live trial. ``chance``: to end as the best; ``is_proven``: it has passed a rung; ``speedups``: its goodput with
    1, 2, ... slots over that with one, as far as it is known; ``most``: slots that the scheduler gives it."""

    number: int
    chance: float
    progress: float
    is_proven: bool
    has_slots: bool
    speedups: tuple[float, ...] = ()
    most: float = math.inf

    def gain(self, slots: int) -> float:
        """What the last of so many slots adds to the goodput that one has, 1/slots at most."""
        known = self.speedups[slots - 1] - self.speedups[slots - 2] if 1 < slots <= len(self.speedups) else 1.0
        return min(max(known, 0.0), 1 / slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """What a new trial is worth: ``num_left`` may begin, ``num_seen`` have shown a value, one costs ``cost`` of a full
    training on average."""

    num_left: int
    num_seen: int
    cost: float

    @property
    def offer(self) -> float:
        return NEW / (self.num_seen + 1) / max(self.cost, LEAST_LEFT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Apportionment:
    slots: dict[int, int]  # by trial; 0: it waits
    num_new: int


Rule = Callable[[Sequence[Candidate], Prospect, int, int], Apportionment]


def apportion(
    candidates: Sequence[Candidate], prospect: Prospect, num_slots: int, most_per_trial: int
) -> Apportionment:
    """Share out ``num_slots``. A trial that has passed no rung yet keeps one, as long as there are enough."""
    slots = {one.number: 0 for one in candidates}
    trying = sorted(one.number for one in candidates if not one.is_proven)[:num_slots]
    for number in trying:
        slots[number] = 1
    heap: list[tuple[float, int, int]] = []  # the largest offer first; of equal ones a live trial, then a new one
    offers = {one.number: (one, _offer(one, prospect)) for one in candidates}
    for one, offer in offers.values():
        if slots[one.number] < min(most_per_trial, one.most) and (one.is_proven or slots[one.number]):
            first = STAYS if one.has_slots and slots[one.number] == 0 else one.gain(slots[one.number] + 1)
            heapq.heappush(heap, (-offer * first, 0, one.number))
    for index in range(prospect.num_left):
        heapq.heappush(heap, (-prospect.offer, 1, index))
    num_new = 0
    for number, is_new in _given(heap, offers, slots, num_slots - len(trying), most_per_trial):
        if is_new:
            num_new += 1
        else:
            slots[number] += 1
    return Apportionment(slots=slots, num_new=num_new)


def _offer(one: Candidate, prospect: Prospect) -> float:
    if not one.is_proven:
        return prospect.offer
    return one.chance * (1 - 1 / (prospect.num_seen + 1)) / max(1 - one.progress, LEAST_LEFT)


def _given(
    heap: list[tuple[float, int, int]],
    offers: dict[int, tuple[Candidate, float]],
    slots: dict[int, int],
    num_slots: int,
    most: int,
) -> Iterator[tuple[int, bool]]:
    """Who gets each slot. A new trial takes one."""
    while num_slots > 0 and heap:
        _, is_new, number = heapq.heappop(heap)
        yield number, bool(is_new)
        num_slots -= 1
        if is_new:
            continue
        one, offer = offers[number]
        gain = one.gain(slots[number] + 1)
        if slots[number] < min(most, one.most) and gain >= LEAST_GAIN:
            heapq.heappush(heap, (-offer * gain, 0, number))
