"""Limits how often the batch changes, and undoes a growth that hurts. The tuner and the session call it.

No I/O and no clock: step numbers and measurements in, decisions out.

- :class:`ChangeLimiter` sets the least number of steps between two changes, and between a change and its reversal.
- :class:`GrowthGuard` compares measurements before and after a growth: the output error
  (:mod:`pollux.train.output_error`), and the loss where the user logs it. A rise beyond the spread of the samples means
  that the growth hurt. |G|² only has to be finite: early in training it changes tenfold within a few hundred steps.
  It watches as long as the batch is above the smallest one: a rate that is too high may hurt thousands of steps later,
  and after the batch has shrunk by half or replicas have changed.
- :class:`ScheduleWatch` tells whether the user's LR schedule still warms up, and how far it is below its peak.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypedDict

# All chosen by hand. Shorter waits let the batch follow the noise scale sooner, and let noise change it more often.
STEPS_BETWEEN = 10  # between two changes, so that a new batch is timed first. The rate has its own limit (GLIDE)
STEPS_TO_REVERSE = 1000  # between two reversals: without it a batch could alternate
# Between a growth and the shrink that reverses it. Early in training the noise scale may fall tenfold within a hundred
# steps; a batch that had to stay for a thousand cost an LSTM half of its time.
STEPS_TO_DOUBT = 50
SAMPLES = 8  # at least, before and after a growth. More take longer to see harm: a sample comes every 16 steps
RISES = {  # factors by which a mean must rise after a growth to count as harm. Lower ones undo harmless growths
    "output_error": 1.03,
    "loss": 1.02,
}
SIGMAS = 3.0  # standard errors by which it must rise too; this many, as the check is repeated at every step
LATE_RISE, LATE_SIGMAS = 2.0, 4.0  # the same after WATCH_STEPS, for either: training has clearly become worse
MAX_BAD_SAMPLES = 3  # samples in a row that are not finite; a GradScaler lets one or two happen in normal training
WATCH_STEPS = 2000  # after a growth or shrink, in which a small rise counts as caused by it
RISING = 1 + 1e-9  # factor between the ends of a window at which a rate counts as rising: above rounding errors


@dataclass(slots=True)
class ChangeLimiter:
    """When the batch last changed, in which direction, and until which step it may not grow. Saved in checkpoints.

    A growth may be reversed soon, if that is the first reversal for a while. The next one, a growth or a shrink, waits.
    """

    changed_at: int = -STEPS_TO_REVERSE
    reversed_at: int = -STEPS_TO_REVERSE
    direction: int = 0  # +1 grown, -1 shrunk
    hold_until: int = 0
    num_reversals: int = 0
    num_taken_back: int = 0

    def may_grow(self, step: int) -> bool:
        return step >= self.hold_until and self._may_go(step, 1)

    def may_shrink(self, step: int) -> bool:
        return self._may_go(step, -1)

    def note(self, step: int, before: int, after: int) -> None:
        """The total batch was changed."""
        direction = 1 if after > before else -1
        if self.direction == -direction:
            self.num_reversals += 1
            self.reversed_at = step
        self.changed_at, self.direction = step, direction

    def moved(self) -> None:
        """Other replicas have other step times: the next change, in either direction, reverses nothing."""
        self.direction = 0

    def take_back(self, step: int, before: int, after: int) -> None:
        """A growth hurt and was undone. The next growth waits, twice as long each time.

        A growth and its undoing are two reversals at once, so the first wait is twice STEPS_TO_REVERSE.
        """
        self.note(step, before, after)
        self.num_taken_back += 1
        self.hold_until = step + STEPS_TO_REVERSE * 2**self.num_taken_back

    def _may_go(self, step: int, direction: int) -> bool:
        waited = step - self.changed_at
        if self.direction != -direction:
            return waited >= STEPS_BETWEEN
        if direction > 0:
            return waited >= STEPS_TO_REVERSE
        return waited >= STEPS_TO_DOUBT and step - self.reversed_at >= STEPS_TO_REVERSE

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


Samples = dict[str, list[float]]  # by kind, as in RISES


class GuardState(TypedDict):
    recent: Samples
    before: Samples
    after: Samples
    num_bad: int
    until: int
    back_to: int
    rate: float


class GrowthGuard:
    """``add`` measurements, ``begin`` at a growth; ``verdict`` says whether the growth hurt, and why.

    Then training goes back to a batch of ``back_to``, and to the learning-rate factor ``rate``. Rank 0 decides by its
    own guard and tells the others, which have seen the same growths. Saved in checkpoints.
    """

    KEPT = 32  # samples of each kind; more make the comparison surer, and slower to notice harm

    def __init__(self) -> None:
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=self.KEPT) for name in RISES}
        self._before: dict[str, list[float]] = {}
        self._after: dict[str, list[float]] = {}
        self._num_bad = 0  # samples in a row that were not finite
        self._until = -1
        self.back_to, self.rate = 0, 1.0

    def recent(self) -> Samples:
        """The newest samples of each kind. Rank 0 alone has those of the output error."""
        return {name: list(values) for name, values in self._recent.items()}

    def begin(self, step: int, before: int, rate: float, samples: Samples | None = None) -> None:
        """The batch has just grown from a total of ``before``, where the learning rate had the factor ``rate``.

        ``samples``: from before the growth, as rank 0 has them; None: this guard's own.
        """
        self.back_to, self.rate = before, max(rate, 1.0)
        self._before = self.recent() if samples is None else samples
        self._after = {name: [] for name in RISES}
        self._until, self._num_bad = step + WATCH_STEPS, 0

    @property
    def is_undecided(self) -> bool:
        """A growth is being watched, and there are too few samples to judge it."""
        return self._until >= 0 and all(len(values) < SAMPLES for values in self._after.values())

    def extend(self, step: int) -> None:
        """The batch has grown again before the last growth could be judged: judge both together."""
        self._after = {name: [] for name in RISES}
        self._until, self._num_bad = step + WATCH_STEPS, 0

    def follow(self, step: int, total: int, least: int) -> None:
        """The batch has shrunk to ``total``, or replicas have changed. At ``least`` nothing is left to be undone."""
        if self._until < 0:
            return
        if total <= least:
            self.end()
            return
        if self.back_to >= total:
            self.back_to, self.rate = least, 1.0
        self.extend(step)

    def undone(self, step: int, total: int, least: int) -> None:
        """The growth was undone. If training stays worse, the smallest batch is next, at the user's rate."""
        self.back_to, self.rate = least, 1.0
        self.follow(step, total, least)

    def end(self) -> None:
        """Stop watching, and drop the samples: they belong to a batch that is no longer used."""
        self._until = -1
        for values in self._recent.values():
            values.clear()

    def add(self, name: str, value: float) -> None:
        """Add a sample of a kind in RISES, or of a quantity that only has to be finite."""
        if not math.isfinite(value):
            self._num_bad += 1
            return
        self._num_bad = 0
        if name not in RISES:
            return
        self._recent[name].append(value)
        if self._until >= 0:
            self._after[name].append(value)
            del self._after[name][: -self.KEPT]

    def state_dict(self) -> GuardState:
        return {
            "recent": self.recent(),
            "before": self._before,
            "after": self._after,
            "num_bad": self._num_bad,
            "until": self._until,
            "back_to": self.back_to,
            "rate": self.rate,
        }

    def load_state_dict(self, state: GuardState) -> None:
        self._recent = {name: deque(state["recent"].get(name, ()), maxlen=self.KEPT) for name in RISES}
        self._before, self._after = dict(state["before"]), {name: list(of) for name, of in state["after"].items()}
        self._num_bad, self._until = state["num_bad"], state["until"]
        self.back_to, self.rate = state["back_to"], state["rate"]

    def verdict(self, step: int) -> str | None:
        """Why the last growth should be undone; None if there is no reason."""
        if self._until < 0:
            return None
        if self._num_bad >= MAX_BAD_SAMPLES:
            return f"{self._num_bad} measurements in a row were not finite after it grew"
        words = {"output_error": "the output error", "loss": "the loss"}
        for name, rise in RISES.items():
            before, after = self._before[name], self._after[name]
            rise, sigmas = (rise, SIGMAS) if step <= self._until else (LATE_RISE, LATE_SIGMAS)
            if _has_risen(before, after, rise, sigmas):
                return f"{words[name]} rose from {_mean(before):.4g} to {_mean(after):.4g} after it grew"
        return None


class ScheduleState(TypedDict):
    recent: list[float]
    peak: float


class ScheduleWatch:
    """The learning rate of the user's schedule over the last steps, and its peak."""

    WINDOW = 20  # steps; a rate is rising if it is higher at the end of them than at the beginning

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=self.WINDOW)
        self._peak = 0.0

    def add(self, rate: float) -> None:
        self._recent.append(rate)
        self._peak = max(self._peak, rate)

    @property
    def is_rising(self) -> bool:
        """The schedule still warms up."""
        return len(self._recent) > 1 and self._recent[-1] > self._recent[0] * RISING

    @property
    def share_of_peak(self) -> float:
        return self._recent[-1] / self._peak if self._recent and self._peak > 0 else 1.0

    def state_dict(self) -> ScheduleState:
        return {"recent": list(self._recent), "peak": self._peak}

    def load_state_dict(self, state: ScheduleState) -> None:
        self._recent = deque(state["recent"], maxlen=self.WINDOW)
        self._peak = state["peak"]


def _has_risen(before: Sequence[float], after: Sequence[float], factor: float, sigmas: float) -> bool:
    """Whether the mean rose by more than ``factor``, and by more than ``sigmas`` standard errors of the difference."""
    if len(before) < SAMPLES or len(after) < SAMPLES:
        return False
    low, high = _mean(before), _mean(after)
    error = math.sqrt(_error_2(before) + _error_2(after))
    return high > factor * max(low, 0.0) and high - low > sigmas * error and high > 0


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def _error_2(values: Sequence[float]) -> float:
    """The squared standard error of the mean."""
    mean = _mean(values)
    return sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1) / len(values)
