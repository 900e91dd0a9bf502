"""What a simulated job trains: how long its steps take and how it learns. The engine runs jobs by it.

There are two kinds: traces measured by others (:mod:`pollux.simulator.traces`) and condensed profiles
(:mod:`pollux.simulator.builtin`). Progress is in scale-invariant iterations: steps at M0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from pollux.model.efficiency import earned_gain
from pollux.types import BatchLimits, JobSpec


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
    earned: float = 1.0  # the share of a larger batch's gain that counts

    def gain(self, scale: float) -> float:
        """Progress of one step with a batch ``scale`` times M0."""
        full = (self.var + self.sqr) / (self.var / scale + self.sqr)
        return full if self.earned == 1 else earned_gain(full, self.earned)


def dense_placement(num_replicas: int, gpus_per_node: int) -> tuple[int, ...]:
    """Full nodes first, the rest on one more."""
    full, rest = divmod(num_replicas, gpus_per_node)
    return (gpus_per_node,) * full + ((rest,) if rest else ())


def spread_placements(num_replicas: int, slots_per_node: int, num_nodes: int) -> Iterator[tuple[int, ...]]:
    """One placement on every number of nodes that can hold the replicas, as even as possible."""
    for nodes in range(-(-num_replicas // slots_per_node), min(num_replicas, num_nodes) + 1):
        least, rest = divmod(num_replicas, nodes)
        yield (least,) * (nodes - rest) + (least + 1,) * rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How a job that was recorded on a live cluster starts, resizes and re-batches. None: as the simulation says.

    ``lone_noise_scales`` is what it measures in each epoch on one replica without accumulation. Recordings of earlier
    versions have a biased estimate there, from one gradient a step, and it decided whether the batch grew.
    """

    start_s: float | None = None  # it holds slots but does not train: before its first step and after its last
    resize_s: float | None = None  # it holds slots but does not train: when it is resized
    join_s: float = 0.0  # until new replicas train when it grows; the old ones train on meanwhile
    batch_threshold: float | None = None  # gain below which it does not change its batch
    rounds_epochs: bool = True  # an epoch's last stretch takes whole seconds, as in the artifact
    lone_noise_scales: tuple[float, ...] = ()
    # By epoch, the largest batch that it had dared by then, and the largest of one replica: batches grow with evidence
    # and with replicas. Empty: any.
    largest_batches: tuple[tuple[int, int], ...] = ()
    earned: float = 1.0  # the share of a larger batch's gain that it counts: its learning rate may not have followed


NO_HABITS = Habits()


class Application(Protocol):
    """The physics of one kind of training job."""

    name: str
    limits: BatchLimits
    min_replicas: int
    max_replicas: int
    num_epochs: int
    habits: Habits
    losses: tuple[float, ...]
    """(num_epochs + 1,) shares of the first loss before training and after each epoch; empty: not measured."""

    @property
    def accelerators(self) -> tuple[str, ...]:
        """The types it can run on; empty: any."""

    def device_max(self, accelerator: str, placement: tuple[int, ...]) -> int:
        """The largest device batch in this placement."""

    def step_time(self, accelerator: str, placement: tuple[int, ...], device_batch: int) -> StepTime:
        """Of one step with ``placement`` replicas per node (in rank order) and ``device_batch`` examples each."""

    def placements(
        self, accelerator: str, num_replicas: int, slots_per_node: int, num_nodes: int
    ) -> Iterator[tuple[int, ...]]:
        """Enough placements that every other one on such nodes has the step times of one of them."""

    def epoch_end(self, epoch: int) -> float:
        """Progress at which epoch ``epoch`` (from 0) ends."""

    def gradient(self, epoch: int, total_batch: int) -> GradientStats:
        """During epoch ``epoch``, training with ``total_batch``."""

    def iterations_between(self, epoch: int, last: int, total_batch: int) -> float:
        """Steps at ``total_batch`` from the end of epoch ``epoch`` to the end of epoch ``last``."""


def limits_in(
    application: Application, accelerator: str, placement: tuple[int, ...], own: BatchLimits | None = None
) -> BatchLimits:
    """The batch sizes of a job in a placement: those it asked for (``own``), bounded by its devices' memory."""
    limits = (own or application.limits).on(accelerator)
    most = max(application.device_max(accelerator, placement), limits.device_min)
    return limits if most >= limits.device_max else dataclasses.replace(limits, device_max=most)


def application_key(applications: Mapping[str, Application], job: JobSpec) -> str:
    """The key of a job's application: ``application/job`` where the job has its own, else the application's name.

    Recorded jobs have their own: each has its own work and noise scale.
    """
    own = f"{job.application}/{job.name}"
    return own if own in applications else job.application
