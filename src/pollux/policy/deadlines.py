"""Minimum satisfactory shares: the fewest replicas with which jobs meet their deadlines, as ElasticFlow (ASPLOS'23).

Jobs are taken in the order of their deadlines. Each reserves the smallest share that, together with what earlier ones
left free over time, finishes its work in time. A job that comes is admitted if it and all that were promised before can
still be met. :mod:`pollux.policy.elasticflow` and the scheduler's layer (:mod:`pollux.scheduler.deadlines`) use it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

_LATENESS = 1e-6  # seconds by which floating-point sums may miss a deadline
_MAX_DOUBLINGS = 40
_MAX_HALVINGS = 12


@dataclass(frozen=True, slots=True)
class DeadlineJob:
    """A job as far as its deadline is concerned. ``finish_s[i]``: to do all that is left on ``counts[i]`` replicas."""

    name: str
    deadline_at: float
    counts: tuple[int, ...]  # rising
    finish_s: tuple[float, ...]

    @classmethod
    def of(
        cls, name: str, deadline_at: float, bounds: tuple[int, int], finish_s: Callable[[int], float]
    ) -> DeadlineJob:
        """With the counts that are worth looking at: the least, powers of two up to the most, and the most."""
        least, most = bounds
        powers = [1 << exponent for exponent in range(least.bit_length(), most.bit_length())]
        counts = sorted({least, *(count for count in powers if least <= count <= most), most})
        times = [finish_s(count) for count in counts]
        # More replicas that are not faster are of no use.
        useful = [i for i, time in enumerate(times) if time < min(times[:i], default=math.inf)]
        return cls(name, deadline_at, tuple(counts[i] for i in useful), tuple(times[i] for i in useful))

    @property
    def is_known(self) -> bool:
        return bool(self.counts)


class Timeline:
    """Free slots from now on, as a step function of time."""

    def __init__(self, now: float, num_slots: int) -> None:
        self.times, self.free = [now], [num_slots]

    def take(self, pieces: Iterable[tuple[float, float, int]]) -> None:
        """``pieces``: (from, to, slots)."""
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

    def fill(self, job: DeadlineJob, most: int) -> tuple[list[tuple[float, float, int]], float]:
        """What a job takes with at most ``most`` replicas at any time, and when it is through; inf: never."""
        pieces = []
        left = 1.0  # share of its work
        for place, begin in enumerate(self.times):
            end = self.times[place + 1] if place + 1 < len(self.times) else math.inf
            index = bisect_right(job.counts, min(most, self.free[place])) - 1
            if index < 0:
                continue
            through_at = begin + left * job.finish_s[index]
            pieces.append((begin, min(through_at, end), job.counts[index]))
            if through_at <= end:
                return pieces, through_at
            left -= (end - begin) / job.finish_s[index]
        return pieces, math.inf


@dataclass(frozen=True, slots=True)
class Shares:
    """The reservation: replicas that each job needs now, when it ends with them, and which jobs cannot be met."""

    now: dict[str, int] = field(default_factory=dict)
    ends_at: dict[str, float] = field(default_factory=dict)
    missed: dict[str, float] = field(default_factory=dict)


def minimum_shares(now: float, num_slots: int, jobs: Sequence[DeadlineJob]) -> Shares:
    """Reserve for all jobs, earliest deadline first; those that cannot be met come after the others."""
    line, shares = Timeline(now, num_slots), Shares()
    late = []
    for job in sorted(jobs, key=lambda job: job.deadline_at):
        for most in job.counts:
            pieces, end = line.fill(job, most)
            if end <= job.deadline_at + _LATENESS:
                _reserve(line, shares, job, pieces, end)
                break
        else:
            late.append(job)
    for job in late:
        pieces, end = line.fill(job, job.counts[-1]) if job.is_known else ([], math.inf)
        shares.missed[job.name] = end
        _reserve(line, shares, job, pieces, end)
    return shares


def _reserve(
    line: Timeline, shares: Shares, job: DeadlineJob, pieces: list[tuple[float, float, int]], end: float
) -> None:
    shares.now[job.name] = pieces[0][2] if pieces and pieces[0][0] == line.times[0] else 0
    shares.ends_at[job.name] = end
    line.take(piece for piece in pieces if math.isfinite(piece[1]))


def can_admit(now: float, num_slots: int, promised: Sequence[DeadlineJob], job: DeadlineJob) -> bool:
    """Whether it and all that can be met without it can be met together."""
    before = minimum_shares(now, num_slots, promised).missed.keys()
    return minimum_shares(now, num_slots, [*promised, job]).missed.keys() <= before


def earliest_deadline(now: float, num_slots: int, promised: Sequence[DeadlineJob], job: DeadlineJob) -> float:
    """The earliest deadline that could be promised to it, within a few percent; inf: none."""
    if not job.is_known:
        return math.inf

    def is_possible(deadline_at: float) -> bool:
        moved = DeadlineJob(job.name, deadline_at, job.counts, job.finish_s)
        return can_admit(now, num_slots, promised, moved)

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
    """Which jobs were promised their deadline. State of a policy or a scheduler, from round to round."""

    def __init__(self) -> None:
        self._promised: set[str] = set()

    def clear(self) -> None:
        self._promised.clear()

    def shares(self, now: float, num_slots: int, jobs: Sequence[DeadlineJob]) -> Shares:
        """Reserve for those promised; the others are admitted if they fit, in the order given."""
        self._promised &= {job.name for job in jobs}
        held = [job for job in jobs if job.name in self._promised]
        for job in jobs:
            if job.name not in self._promised and job.is_known and can_admit(now, num_slots, held, job):
                held.append(job)
                self._promised.add(job.name)
        return minimum_shares(now, num_slots, held)

    def has(self, job: str) -> bool:
        return job in self._promised
