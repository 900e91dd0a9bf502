"""Minimum satisfactory shares: the fewest replicas with which jobs meet their deadlines, as ElasticFlow (ASPLOS'23).

Jobs are taken in the order of their deadlines. Each reserves the smallest share that, together with what earlier ones
left free over time, finishes its work in time. A job that comes is admitted if it and all that were promised before can
still be met. :mod:`pollux.policy.elasticflow` and the scheduler's layer (:mod:`pollux.scheduler.deadlines`) use it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

_LATENESS = 1e-6  # seconds by which floating-point sums may miss a deadline
_SPARE_S = 120.0  # a deadline is planned for so much earlier: rounds, starts and resizes take time
# And for this share of the time that is left: replicas do not always sit where they are fastest. Of generated workloads
# as many deadlines are met with 0.01 as with 0.06 (94 and 70 % at two loads), and fewer with 0.1.
_SPARE_SHARE = 0.05
_REFUSED_S = 600.0  # a job that was refused is looked at again after so long, or when slots become free
_MAX_DOUBLINGS = 40
_MAX_HALVINGS = 12


def planned_end(deadline_at: float, now: float) -> float:
    """When a job with this deadline is planned to be through: somewhat earlier, as not all goes as planned."""
    left_s = max(deadline_at - now, 0.0)
    return deadline_at - min(_SPARE_S + _SPARE_SHARE * left_s, left_s / 2)


@dataclass(frozen=True, slots=True)
class DeadlineJob:
    """A job as far as its deadline is concerned. ``finish_s[i]``: to do all that is left on ``counts[i]`` replicas."""

    name: str
    deadline_at: float
    counts: tuple[int, ...]  # rising
    finish_s: tuple[float, ...]
    spare_s: float = 0.0  # the deadline that was asked for is so much later
    resize_s: float = 0.0  # lost with every change of its share

    @classmethod
    def of(
        cls,
        name: str,
        deadline_at: float,
        bounds: tuple[int, int],
        finish_s: Callable[[int], float],
        spare_s: float = 0.0,
        resize_s: float = 0.0,
    ) -> DeadlineJob:
        """With the counts that are worth looking at: the least, powers of two up to the most, and the most."""
        least, most = bounds
        powers = [1 << exponent for exponent in range(least.bit_length(), most.bit_length())]
        counts = sorted({least, *(count for count in powers if least <= count <= most), most})
        times = [finish_s(count) for count in counts]
        # More replicas that are not faster are of no use.
        useful = [i for i, time in enumerate(times) if time < min(times[:i], default=math.inf)]
        return cls(
            name, deadline_at, tuple(counts[i] for i in useful), tuple(times[i] for i in useful), spare_s, resize_s
        )

    @property
    def is_known(self) -> bool:
        return bool(self.counts)

    def is_in_reach(self, now: float) -> bool:
        """Whether it could be through in time if it had all the slots that it can use from now on."""
        return now + min(self.finish_s, default=math.inf) <= self.deadline_at + _LATENESS

    @property
    def without_spare(self) -> DeadlineJob:
        """With the deadline that was asked for."""
        return replace(self, deadline_at=self.deadline_at + self.spare_s, spare_s=0.0)


Pieces = list[tuple[float, float, int]]
"""What is reserved for a job: (from, to, slots), in order of time."""


class Timeline:
    """Free slots from now on, as a step function of time."""

    def __init__(self, now: float, num_slots: int) -> None:
        self.times, self.free = [now], [num_slots]

    def take(self, pieces: Iterable[tuple[float, float, int]]) -> None:
        for begin, end, count in pieces:
            for place in range(self._cut(begin), self._cut(end)):
                self.free[place] -= count

    def _cut(self, at: float) -> int:
        place = bisect_right(self.times, at) - 1
        if self.times[place] != at:
            self.times.insert(place + 1, at)
            self.free.insert(place + 1, self.free[place])
            place += 1
        return place

    def fill(self, job: DeadlineJob, most: int) -> tuple[Pieces, float]:
        """What a job takes with at most ``most`` replicas at any time, and when it is through; inf: never."""
        pieces: Pieces = []
        left = 1.0  # share of its work
        for place, begin in enumerate(self.times):
            end = self.times[place + 1] if place + 1 < len(self.times) else math.inf
            index = bisect_right(job.counts, min(most, self.free[place])) - 1
            if index < 0:
                continue
            count = job.counts[index]
            goes_on = bool(pieces) and pieces[-1][1:] == (begin, count)
            lost_s = 0.0 if goes_on else job.resize_s
            through_at = begin + lost_s + left * job.finish_s[index]
            piece = (pieces.pop()[0] if goes_on else begin, min(through_at, end), count)
            pieces.append(piece)
            if through_at <= end:
                return pieces, through_at
            left -= max(end - begin - lost_s, 0.0) / job.finish_s[index]
        return pieces, math.inf

    def first(self, job: DeadlineJob) -> tuple[Pieces, float] | None:
        """What it takes with the smallest share that is enough for its deadline; None: none is."""
        for most in job.counts:
            pieces, end = self.fill(job, most)
            if end <= job.deadline_at + _LATENESS:
                return pieces, end
        return None


@dataclass(frozen=True, slots=True)
class Shares:
    """The reservation: replicas that each job needs now, when it ends with them, and which jobs cannot be met."""

    now: dict[str, int] = field(default_factory=dict)
    ends_at: dict[str, float] = field(default_factory=dict)
    missed: dict[str, float] = field(default_factory=dict)
    pieces: dict[str, Pieces] = field(default_factory=dict)

    def add(self, job: DeadlineJob, now: float, pieces: Pieces, end: float) -> None:
        self.now[job.name] = pieces[0][2] if pieces and pieces[0][0] <= now else 0
        self.ends_at[job.name], self.pieces[job.name] = end, pieces


def minimum_shares(now: float, num_slots: int, jobs: Sequence[DeadlineJob]) -> Shares:
    """Reserve for all jobs, earliest deadline first. Those that cannot be met get nothing, and say when they end."""
    line, shares = Timeline(now, num_slots), Shares()
    late = []
    for job in sorted(jobs, key=lambda job: job.deadline_at):
        found = line.first(job)
        if found is None:
            late.append(job)
            continue
        shares.add(job, now, *found)
        line.take(found[0])
    for job in late:  # with the most replicas that are left at any time
        shares.missed[job.name] = line.fill(job, job.counts[-1])[1] if job.is_known else math.inf
        shares.now[job.name], shares.ends_at[job.name] = 0, shares.missed[job.name]
    return shares


def can_admit(now: float, num_slots: int, promised: Sequence[DeadlineJob], job: DeadlineJob) -> bool:
    """Whether it and all that can be met without it can be met together."""
    before = minimum_shares(now, num_slots, promised).missed.keys()
    return minimum_shares(now, num_slots, [*promised, job]).missed.keys() <= before


def earliest_deadline(now: float, num_slots: int, promised: Sequence[DeadlineJob], job: DeadlineJob) -> float:
    """The earliest deadline that could be promised to it, within a few percent; inf: none."""
    if not job.is_known:
        return math.inf

    def is_possible(deadline_at: float) -> bool:
        return can_admit(now, num_slots, promised, replace(job, deadline_at=deadline_at))

    low = min(job.finish_s)
    high = low
    for _ in range(_MAX_DOUBLINGS):
        if is_possible(now + high):
            break
        low, high = high, 2 * high
    else:
        return math.inf
    for _ in range(_MAX_HALVINGS if high > low else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if is_possible(now + middle) else (middle, high)
    return now + high


class Promises:
    """Which jobs were promised their deadline, and what is reserved for them. Kept from round to round.

    A reservation stays as it was made, so that shares do not change from round to round. All are made anew when a job
    has fallen behind its own, or slots are gone, or a newcomer does not fit beside them.
    """

    def __init__(self) -> None:
        self._promised: set[str] = set()
        self._pieces: dict[str, Pieces] = {}  # by job, of those whose deadline can be met
        self._num_slots = 0
        self._refused: dict[str, float] = {}  # jobs that did not fit, and when that was found

    def clear(self) -> None:
        self._promised.clear()
        self._pieces.clear()
        self._refused.clear()

    def has(self, job: str) -> bool:
        return job in self._promised

    def shares(self, now: float, num_slots: int, jobs: Sequence[DeadlineJob]) -> Shares:
        """Reserve for those promised; the others are admitted if they fit, in the order given.

        A promised job that has fallen behind may use up the time that was spared for that. If its deadline cannot be
        met even so, it takes nothing from the others any more: nothing is reserved for it.
        """
        by_name = {job.name: job for job in jobs}
        if self._promised - by_name.keys() or num_slots > self._num_slots:
            self._refused.clear()  # slots became free
        self._promised &= by_name.keys()
        promised = [job for job in jobs if job.name in self._promised]
        shares = self._kept(now, num_slots, promised)
        if shares is None:
            shares = self._made_anew(now, num_slots, promised)
        for job in jobs:
            if job.name in self._promised or not job.is_in_reach(now):
                continue
            if now - self._refused.get(job.name, -math.inf) < _REFUSED_S:
                continue
            shares = self._admitted(now, num_slots, [by_name[name] for name in shares.pieces], job, shares)
        self._pieces, self._num_slots = shares.pieces, num_slots
        return shares

    def _kept(self, now: float, num_slots: int, promised: Sequence[DeadlineJob]) -> Shares | None:
        """The reservations as they are; None if a job is behind its own, or slots are gone."""
        if num_slots < self._num_slots:
            return None
        shares = Shares()
        for job in promised:
            rest = [(max(begin, now), end, count) for begin, end, count in self._pieces.get(job.name, ()) if end > now]
            cut = _cut_short(job, rest)
            if cut is None:
                if job.name in self._pieces:
                    return None
                shares.missed[job.name] = math.inf  # it was given up
                continue
            shares.add(job, now, *cut)
        return shares

    def _made_anew(self, now: float, num_slots: int, promised: Sequence[DeadlineJob]) -> Shares:
        shares = minimum_shares(now, num_slots, promised)
        kept = [job for job in promised if job.name not in shares.missed]
        for job in promised:
            if job.name in shares.missed and job.without_spare.is_in_reach(now):
                together = minimum_shares(now, num_slots, [*kept, job.without_spare])
                if not together.missed:
                    kept.append(job.without_spare)
        if not shares.missed:
            return shares
        found, names = minimum_shares(now, num_slots, kept), {job.name for job in kept}
        late = {name: end for name, end in shares.missed.items() if name not in names}
        return Shares(found.now, found.ends_at, late, found.pieces)

    def _admitted(
        self, now: float, num_slots: int, held: Sequence[DeadlineJob], job: DeadlineJob, shares: Shares
    ) -> Shares:
        """With one more job, if it fits: beside what is reserved, or else if all is reserved anew."""
        line = Timeline(now, num_slots)
        for pieces in shares.pieces.values():
            line.take(pieces)
        found = line.first(job)
        if found is not None:
            shares.add(job, now, *found)
        else:
            together = minimum_shares(now, num_slots, [*held, job])
            if together.missed:
                self._refused[job.name] = now
                return shares
            shares = Shares(together.now, together.ends_at, shares.missed, together.pieces)
        self._promised.add(job.name)
        return shares


def _cut_short(job: DeadlineJob, pieces: Pieces) -> tuple[Pieces, float] | None:
    """As much of a reservation as the job still needs, and its end; None: it is too little."""
    left, kept = 1.0, []
    for begin, end, count in pieces:
        index = bisect_right(job.counts, count) - 1
        if index < 0:
            continue
        through_at = begin + left * job.finish_s[index]
        kept.append((begin, min(end, through_at), count))
        if through_at <= end:
            return kept, through_at
        left -= (end - begin) / job.finish_s[index]
    if not kept:
        return None
    # What is missing can be done after the last piece, in the time that was spared for such things.
    begin, end, count = kept[-1]
    through_at = end + left * job.finish_s[bisect_right(job.counts, count) - 1]
    if through_at > job.deadline_at + job.spare_s / 2:
        return None
    kept[-1] = (begin, through_at, count)
    return kept, through_at
