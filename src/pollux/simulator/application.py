"""What a simulated job trains: how long its steps take and how it learns.

Two kinds: traces measured by others (:mod:`pollux.simulator.osdi21`) and condensed profiles
(:mod:`pollux.simulator.builtin`). Progress is in scale-invariant iterations: steps at M0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pollux.types import BatchLimits


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one un-accumulated step, and the part of it spent in un-overlapped synchronisation."""

    step_s: float
    sync_s: float

    @property
    def grad_s(self) -> float:
        return self.step_s - self.sync_s

    def iteration_s(self, accum_steps: int) -> float:
        return self.step_s + accum_steps * self.grad_s


@dataclass(frozen=True, slots=True)
class GradientStats:
    """|G|² and the gradient's variance, both for a batch of M0."""

    sqr: float
    var: float

    def gain(self, scale: float) -> float:
        """Progress of one step with a batch ``scale`` times M0."""
        return (self.var + self.sqr) / (self.var / scale + self.sqr)


def dense_placement(num_replicas: int, gpus_per_node: int) -> tuple[int, ...]:
    """Full nodes first, the rest on one more."""
    full, rest = divmod(num_replicas, gpus_per_node)
    return (gpus_per_node,) * full + ((rest,) if rest else ())


class Application(Protocol):
    """The physics of one kind of training job."""

    name: str
    limits: BatchLimits
    max_replicas: int
    num_epochs: int

    def step_time(self, accelerator: str, placement: tuple[int, ...], device_batch: int) -> StepTime:
        """Of one step with ``placement`` replicas per node (in rank order) and ``device_batch`` examples each."""

    def epoch_end(self, epoch: int) -> float:
        """Progress at which epoch ``epoch`` (from 0) ends."""

    def gradient(self, epoch: int, total_batch: int) -> GradientStats:
        """During epoch ``epoch``, training with ``total_batch``."""

    def iterations_between(self, epoch: int, last: int, total_batch: int) -> float:
        """Steps at ``total_batch`` from the end of epoch ``epoch`` to the end of epoch ``last``."""
