"""How long a pass and a step take, without ever waiting for the device.

Called by the session at each pass. Marks are put where passes begin and where a pass's own gradient is complete: clock
readings on a CPU, events in the device's stream on a GPU, which are looked at when the device has long passed them.
The loop is measured from one batch to the next, so that data loading, the optimizer and everything users do in between
count: this is the time that a goodput model has to predict.

- T_step, an un-accumulated step: a step's last pass, up to the next pass's beginning.
- T_grad, a pass without synchronisation: an accumulating pass, up to the next one's beginning; where steps have one
  pass only, from its beginning to its gradient.

Left out are steps that did more than a step (``disturb``: a resize, a checkpoint, the pause between epochs), those that
were split to measure the noise scale (timed apart, as ``split_s``), the first ones of every configuration (allocators,
autotuners and caches warm up), and, by taking medians, what the machine did on the side.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from statistics import median

import torch

from pollux.model.profile import Configuration, Timing

FIRST_WARM_UP_STEPS = 5  # of a process: libraries load, kernels are chosen, memory is allocated
WARM_UP_STEPS = 1  # of a configuration
FIRST_WINDOW, WINDOW = 3, 10  # steps per value; the first one of a configuration comes early
MAX_UNREAD = 64  # passes whose events have not been reached yet
TIMED_EVERY = 4  # steps, once a configuration is known: marks cost host time, which is what small steps are short of


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
    """``begin`` at each batch, ``ready`` when its gradient is there; ``take`` what has become known since."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._unused: list[torch.cuda.Event] = []
        self._current: _Pass | None = None
        self._unread: deque[_Pass] = deque()
        self._windows: dict[Configuration, _Window] = {}
        self._warm_up, self._has_begun = FIRST_WARM_UP_STEPS, False
        self._configuration: Configuration | None = None
        self.step_s: float | None = None  # of late, whatever the configuration
        self.split_s: float | None = None  # of late, a step that is split to be measured
        self._first_half_s = 0.0
        self._num_untimed = 0
        self._spare: float | torch.cuda.Event | None = None  # the last end that begins nothing

    def begin(self, configuration: Configuration, *, is_only: bool, is_last: bool, is_split: bool = False) -> None:
        """A pass begins, and so the one before has ended."""
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
        """Every step while there is news to be had, and every step of several passes; some of the others."""
        window = self._windows.get(configuration)
        if not is_single or self._warm_up or window is None or not window.has_reported:
            return True
        self._num_untimed = (self._num_untimed + 1) % TIMED_EVERY
        return self._num_untimed == 0

    def ready(self) -> None:
        """The pass's own gradient is complete; replicas may still have to exchange theirs."""
        if self._current is not None and self._current.is_only and self._current.ready is None:
            self._current.ready = self._mark()

    def end(self) -> None:
        """The pass under way is over, and no other follows at once: an epoch's last."""
        if self._current is not None:
            self._current.end = self._mark()
            self._unread.append(self._current)
        self._current = None

    def disturb(self) -> None:
        """What happens now is no part of a step: the pass under way does not count."""
        if self._current is not None:
            self._recycle(self._current.ready)  # its start is the end of the pass before, and may be unread
        self._current = None

    def reset(self) -> None:
        """Another group, another device load: warm up again."""
        self.disturb()
        self._configuration = None

    def forget(self) -> None:
        """What was measured is stale: every configuration is new again."""
        self._windows.clear()

    def take(self) -> list[tuple[Configuration, Timing]]:
        """Medians over the windows that are full; they start anew."""
        timings = []
        for configuration, window in self._windows.items():
            if window.is_full:
                # Of few steps the fastest is the one that nothing disturbed; of more, the one in the middle.
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
    """A running mean that follows within some ten steps; a pause (an evaluation, a page fault) hardly moves it."""
    return value if mean is None else 0.9 * mean + 0.1 * min(value, 3 * mean)


def _between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return float(start.elapsed_time(end)) / 1000.0
    assert isinstance(end, float)
    return end - start
