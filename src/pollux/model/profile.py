"""Measured step times of a job by configuration and accelerator type. Jobs and scheduler fit θ to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np

from pollux.errors import ProfileError
from pollux.types import FloatArray

WINDOW_STEPS = 100
"""Steps that a profile remembers a configuration by. Ten reports of a live job, which average the noise of one to a
third; a clock that throttles or a neighbour that comes is seen within the first of the next ten."""
DRIFT = 0.08  # relative; a larger change is not noise: medians of ten steps spread by 1 to 5 % on a quiet GPU
LEAST_S, MOST_S = 1e-9, 1e9  # that a step can take: ratios of times stay finite, whatever a job tells
MOST_STEPS = 1 << 50  # that a configuration counts: JSON keeps no larger numbers exactly
_NUM_RECENT = 3  # measurements, the fewest whose median ignores a single outlier


class Configuration(NamedTuple):
    """What a step time depends on, besides the job and the accelerator."""

    num_nodes: int
    num_replicas: int
    device_batch: int


class Timing(NamedTuple):
    """Mean seconds of one pass (T_grad) and of one un-accumulated step (T_step), over ``num_steps`` steps."""

    grad_s: float
    step_s: float
    num_steps: int = 1


@dataclass(frozen=True, slots=True)
class Observations:
    """A profile of one accelerator type as columns, ready for fitting."""

    num_nodes: FloatArray  # (num_configurations,), as all the others
    num_replicas: FloatArray
    device_batch: FloatArray
    grad_s: FloatArray
    step_s: FloatArray


class Profile:
    """Step times by accelerator type and configuration. Adding to a configuration averages over its last steps.

    ``window_steps``: over so many; None: over all of them, as of a run that is over. At most ``max_configurations`` are
    kept per type, the oldest leaving first, so that a job that re-batches for weeks stays small.
    """

    def __init__(self, max_configurations: int = 256, window_steps: int | None = WINDOW_STEPS) -> None:
        self._timings: dict[str, dict[Configuration, Timing]] = {}
        self._recent: dict[tuple[str, Configuration], _Recent] = {}
        self._max_configurations, self._window_steps = max_configurations, window_steps
        self.max_replicas = 0  # the largest number that was ever measured, on any type

    def add(self, accelerator: str, configuration: Configuration, timing: Timing) -> bool:
        """Take in a measurement; true if a model that was fitted before should be fitted again.

        That is if the configuration is new, or has become faster or slower by more than :data:`DRIFT` since this was
        true for it last. Where its last measurements agree on that, they replace what was known of it.
        """
        check_measurement(configuration, timing)
        self.max_replicas = max(self.max_replicas, configuration.num_replicas)
        timings = self._timings.setdefault(accelerator, {})
        known = timings.get(configuration)
        if known is None:
            if len(timings) >= self._max_configurations:
                oldest = next(iter(timings))
                del timings[oldest], self._recent[accelerator, oldest]
            timings[configuration] = timing
            self._recent[accelerator, configuration] = _Recent(told=timing)
            return True
        average = timings[configuration] = _averaged(known, timing, self._window_steps)
        if self._window_steps is None:
            return False
        recent = self._recent[accelerator, configuration]
        recent.timings.append(timing)
        if len(recent.timings) < _NUM_RECENT or not _has_drifted(recent.told, average):
            return False
        lately = Timing(
            median(entry.grad_s for entry in recent.timings),
            median(entry.step_s for entry in recent.timings),
            average.num_steps,
        )
        if not _has_drifted(recent.told, lately):  # an outlier has moved the average
            return False
        if not any(_has_drifted(lately, entry) for entry in recent.timings):
            average = timings[configuration] = lately
        recent.told = average
        return True

    def forget(self, accelerator: str, num_nodes: int, num_replicas: int) -> None:
        """What was measured in this allocation is stale."""
        timings = self._timings.get(accelerator, {})
        for configuration in [c for c in timings if c[:2] == (num_nodes, num_replicas)]:
            del timings[configuration], self._recent[accelerator, configuration]

    @property
    def accelerators(self) -> tuple[str, ...]:
        return tuple(self._timings)

    def timings(self, accelerator: str) -> Mapping[Configuration, Timing]:
        return self._timings.get(accelerator, {})

    def observations(self, accelerator: str) -> Observations:
        timings = self.timings(accelerator)
        if not timings:
            raise ProfileError(f"nothing was measured on accelerator {accelerator!r} yet")
        rows = np.array([(*c, t.grad_s, t.step_s) for c, t in timings.items()], dtype=float)
        return Observations(*rows.T.copy())

    def __iter__(self) -> Iterator[tuple[str, Configuration, Timing]]:
        for accelerator, timings in self._timings.items():
            for configuration, timing in timings.items():
                yield accelerator, configuration, timing

    def __len__(self) -> int:
        return sum(len(timings) for timings in self._timings.values())


@dataclass(slots=True)
class _Recent:
    """The last measurements of a configuration, and its times when :meth:`Profile.add` was last true for it."""

    told: Timing
    timings: deque[Timing] = field(default_factory=lambda: deque(maxlen=_NUM_RECENT))


def _averaged(known: Timing, timing: Timing, window_steps: int | None) -> Timing:
    num_steps = known.num_steps + timing.num_steps
    if window_steps is None:
        share = timing.num_steps / num_steps
    else:
        weight = min(timing.num_steps, window_steps)  # no report counts more than all that were before
        share = weight / (min(known.num_steps, window_steps) + weight)
    return Timing(
        known.grad_s + (timing.grad_s - known.grad_s) * share,
        known.step_s + (timing.step_s - known.step_s) * share,
        min(num_steps, MOST_STEPS),
    )


def _has_drifted(before: Timing, now: Timing) -> bool:
    return any(abs(new / old - 1) > DRIFT for old, new in zip(before[:2], now[:2], strict=True))


def check_measurement(configuration: Configuration, timing: Timing) -> None:
    """Refuse what cannot have been measured.

    Raises:
        ProfileError: says which value and why.
    """
    nodes, replicas, batch = configuration
    if not (1 <= nodes <= replicas and batch >= 1):
        raise ProfileError(
            f"cannot profile {replicas} replicas on {nodes} nodes with device batch {batch}: "
            "1 <= nodes <= replicas and batch >= 1 are needed"
        )
    for name, value in (("grad_s", timing.grad_s), ("step_s", timing.step_s)):
        if not LEAST_S <= value <= MOST_S:
            raise ProfileError(
                f"{name} = {value} at {configuration}: a measured time is a positive number, from {LEAST_S:g} to "
                f"{MOST_S:g} s"
            )
    if timing.num_steps < 1:
        raise ProfileError(f"num_steps = {timing.num_steps} at {configuration}: at least one step must be measured")
