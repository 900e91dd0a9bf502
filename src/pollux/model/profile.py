"""What was measured of a job: step times per configuration, kept apart by accelerator type."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pollux.errors import ProfileError
from pollux.types import FloatArray


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
    """Step times by accelerator type and configuration. Adding to a configuration averages.

    At most ``max_configurations`` are kept per type, the oldest leaving first, so that a job that
    re-batches for weeks stays small.
    """

    def __init__(self, max_configurations: int = 256) -> None:
        self._timings: dict[str, dict[Configuration, Timing]] = {}
        self._max_configurations = max_configurations
        self.max_replicas = 0  # the largest number that was ever measured, on any type

    def add(self, accelerator: str, configuration: Configuration, timing: Timing) -> bool:
        """Take in a measurement; true if this configuration had not been seen before."""
        check_measurement(configuration, timing)
        self.max_replicas = max(self.max_replicas, configuration.num_replicas)
        timings = self._timings.setdefault(accelerator, {})
        known = timings.get(configuration)
        if known is None:
            if len(timings) >= self._max_configurations:
                del timings[next(iter(timings))]
            timings[configuration] = timing
            return True
        num_steps = known.num_steps + timing.num_steps
        share = timing.num_steps / num_steps
        timings[configuration] = Timing(
            known.grad_s + (timing.grad_s - known.grad_s) * share,
            known.step_s + (timing.step_s - known.step_s) * share,
            num_steps,
        )
        return False

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
        if not (math.isfinite(value) and value > 0):
            raise ProfileError(f"{name} = {value} at {configuration}: a measured time is a positive number")
    if timing.num_steps < 1:
        raise ProfileError(f"num_steps = {timing.num_steps} at {configuration}: at least one step must be measured")
