"""Measures how long a pass and a step take, without waiting for the device. The session calls it at each pass.

It marks where passes begin and where a pass's own gradient is complete: clock readings on a CPU, events in the device's
stream on a GPU, which are read when the device has passed them. The loop is timed from one batch to the next,
so data loading, the optimizer and the user's own code are included: the goodput model has to predict this time.

- T_step, a step without accumulation: from the beginning of a step's last pass to the next pass.
- T_grad, a pass without synchronisation: from the beginning of an accumulating pass to the next pass; if steps have
  only one pass, from its beginning to its gradient.

Some steps are left out: those with other work in them (``disturb``: a resize, a checkpoint, the pause between epochs),
those split to measure the noise scale (timed apart, as ``split_s``), and the first ones of every configuration, while
allocators, autotuners and caches warm up. Medians remove other disturbances.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from statistics import median

import torch

from pollux.model.profile import Configuration, Timing

# More warm-up steps or larger windows give steadier times, later.
FIRST_WARM_UP_STEPS = 5  # of a process: libraries load, kernels are chosen, memory is allocated
WARM_UP_STEPS = 1  # of a configuration
FIRST_WINDOW, WINDOW = 3, 10  # steps per value: the first value of a configuration comes early
MAX_UNREAD = 64  # passes whose events the device has not reached; older ones are dropped
TIMED_EVERY = 4  # steps, once a configuration is known: marks cost host time, which limits small steps
AVERAGING = 0.1  # share of a new value in the running mean, which so follows within about ten steps
OUTLIER = 3.0  # a value counts as at most this many times the mean, so that a pause hardly moves it


@dataclass(slots=True)
class _Pass:
    configuration: Configuration
    is_only: bool
    is_last: bool
    counts: bool
    is_split: bool
    start: float | torch.cuda.Event
    ready: float | torch.cuda.Event | None = None
    end: float | torch.cuda.Event | None = None


@dataclass(slots=True)
class _Window:
    grad_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    has_reported: bool = False

    @property
    def is_full(self) -> bool:
        return len(self.step_s) >= (WINDOW if self.has_reported else FIRST_WINDOW) and bool(self.grad_s)


class StepTimer:
    """``begin`` at each batch, ``ready`` when its gradient is complete; ``take`` the new timings."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._unused: list[torch.cuda.Event] = []
        self._current: _Pass | None = None
        self._unread: deque[_Pass] = deque()
        self._windows: dict[Configuration, _Window] = {}
        self._warm_up, self._has_begun = FIRST_WARM_UP_STEPS, False
        self._configuration: Configuration | None = None
        self.step_s: float | None = None  # running mean over all configurations
        self.split_s: float | None = None  # running mean of steps that are split to be measured
        self._first_half_s = 0.0
        self._num_untimed = 0
        self._spare: float | torch.cuda.Event | None = None  # the last end mark that is not also a beginning

    def begin(self, configuration: Configuration, *, is_only: bool, is_last: bool, is_split: bool = False) -> None:
        """A pass begins; this ends the one before."""
        if configuration != self._configuration:
            self._configuration, self._warm_up = configuration, self._warm_up if not self._has_begun else WARM_UP_STEPS
            self._has_begun = True
        is_timed = self._is_timed(configuration, is_only and not is_split)
        mark = self._mark() if is_timed or self._current is not None else 0.0
        if self._current is not None:
            self._current.end = mark
            self._unread.append(self._current)
            if not is_timed:
                self._spare = mark
        if not is_timed:
            self._current = None
            self._read()
            return
        self._current = _Pass(configuration, is_only, is_last, self._warm_up == 0, is_split, mark)
        if is_last and self._warm_up:
            self._warm_up -= 1
        self._read()

    def _is_timed(self, configuration: Configuration, is_single: bool) -> bool:
        """Every step of a new configuration, every step of several passes; of the others, one in TIMED_EVERY."""
        window = self._windows.get(configuration)
        if not is_single or self._warm_up or window is None or not window.has_reported:
            return True
        self._num_untimed = (self._num_untimed + 1) % TIMED_EVERY
        return self._num_untimed == 0

    def ready(self) -> None:
        """The pass's own gradient is complete, before the sum over replicas."""
        if self._current is not None and self._current.is_only and self._current.ready is None:
            self._current.ready = self._mark()

    def end(self) -> None:
        """End the last pass of an epoch, which no other follows at once."""
        if self._current is not None:
            self._current.end = self._mark()
            self._unread.append(self._current)
        self._current = None

    def disturb(self) -> None:
        """Leave out the pass under way: something else happens in it."""
        if self._current is not None:
            self._recycle(self._current.ready)  # not its start, which is the end of the pass before and may be unread
        self._current = None

    def reset(self) -> None:
        """Warm up again, for another group."""
        self.disturb()
        self._configuration = None

    def forget(self) -> None:
        """Forget all timings: every configuration is new again."""
        self._windows.clear()

    def take(self) -> list[tuple[Configuration, Timing]]:
        """Medians of the full windows, which are then emptied."""
        timings = []
        for configuration, window in self._windows.items():
            if window.is_full:
                # Of few steps take the fastest, the least disturbed; of more, the median.
                typical = median if window.has_reported else min
                grad_s, step_s = typical(window.grad_s), typical(window.step_s)
                timings.append((configuration, Timing(min(grad_s, step_s), step_s, len(window.step_s))))
                window.grad_s.clear()
                window.step_s.clear()
                window.has_reported = True
        return timings

    def _read(self) -> None:
        while self._unread:
            entry = self._unread[0]
            if isinstance(entry.end, torch.cuda.Event) and not entry.end.query():  # type: ignore[no-untyped-call]
                if len(self._unread) > MAX_UNREAD:
                    self._recycle(entry.start, entry.ready)
                    self._unread.popleft()
                    continue
                return
            self._unread.popleft()
            if entry.counts:
                self._count(entry)
            self._recycle(entry.start, entry.ready)
            if entry.end is self._spare:
                self._recycle(self._spare)
                self._spare = None

    def _count(self, entry: _Pass) -> None:
        window = self._windows.setdefault(entry.configuration, _Window())
        assert entry.end is not None
        duration = _between(entry.start, entry.end)
        if duration <= 0:
            return
        if entry.is_split:
            self._first_half_s = self._first_half_s + duration if entry.is_last else duration
            if entry.is_last:
                self.split_s = _followed(self.split_s, self._first_half_s)
            return
        if entry.is_last:
            window.step_s.append(duration)
            self.step_s = _followed(self.step_s, duration)
            if entry.is_only and entry.ready is not None:
                window.grad_s.append(max(_between(entry.start, entry.ready), 1e-9))
        else:
            window.grad_s.append(duration)

    def _mark(self) -> float | torch.cuda.Event:
        if not self._is_cuda:
            return time.perf_counter()
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _recycle(self, *marks: float | torch.cuda.Event | None) -> None:
        self._unused += [mark for mark in marks if isinstance(mark, torch.cuda.Event)]


def _followed(mean: float | None, value: float) -> float:
    """A running mean that a pause (an evaluation, a page fault) hardly moves."""
    return value if mean is None else (1 - AVERAGING) * mean + AVERAGING * min(value, OUTLIER * mean)


def _between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return float(start.elapsed_time(end)) / 1000.0
    assert isinstance(end, float)
    return end - start
