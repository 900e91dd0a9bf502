"""Which batch to train with: a policy is asked at step boundaries and answers with (m, s) and the total.

Stands in ``train``, above :mod:`pollux.model`. Only rank 0 asks; the others are told. Policies:

- ``adaptive``: the batch of highest goodput by the fitted throughput model and the noise scale, kept unless another is
  5 % better, and never more than a sixteenth of what has been seen: a model that has seen little may change in a
  few steps from all noise to none, and a rate scaled for the noise that was there would throw it out of its course.
- ``fixed``: the same total batch whatever the replicas, exactly: shares may differ by one example.
- ``linear``: M0 for every replica, the usual way of scaling out by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from pollux.errors import InvalidValueError, UnknownNameError
from pollux.model.goodput import best_batch, fixed_batch
from pollux.model.profile import Timing
from pollux.train.position import StepShape
from pollux.types import BatchConfig, BatchLimits, ThroughputParams


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChoice:
    """m, s, and the total batch M <= K·m·(s+1)."""

    config: BatchConfig
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSituation:
    """What a policy may know."""

    limits: BatchLimits
    num_nodes: int
    num_replicas: int
    current: BatchConfig | None = None  # None: just started, or resized
    params: ThroughputParams | None = None  # None: nothing measured yet
    noise_scale: float | None = None
    num_examples: float = math.inf  # in all steps so far
    measured: Mapping[int, Timing] = field(default_factory=dict)  # in this allocation, by device batch


@runtime_checkable
class BatchPolicy(Protocol):
    def choose(self, situation: BatchSituation) -> BatchChoice: ...


@dataclass(frozen=True, slots=True)
class AdaptiveBatch:
    """Highest goodput; M0 (or the least that the replicas allow) until something is known."""

    threshold: float = 0.05
    largest_share: float = 1 / 16  # of the examples seen, in one step: a batch doubles in some ten steps at most

    def choose(self, situation: BatchSituation) -> BatchChoice:
        limits, replicas = situation.limits, situation.num_replicas
        least = max(limits.minimum, limits.device_min * replicas)
        if situation.params is None or situation.noise_scale is None:
            return _spread(least, situation)
        most = max(situation.num_examples * self.largest_share, least)
        config, _ = best_batch(
            situation.params,
            situation.noise_scale,
            limits if most >= limits.maximum else replace(limits, maximum=int(most)),
            situation.num_nodes,
            replicas,
            current=situation.current,
            threshold=self.threshold,
            measured=situation.measured,
        )
        return BatchChoice(config=config, total=config.total(replicas))


@dataclass(frozen=True, slots=True)
class FixedBatch:
    """The same total always; M0 unless another is named."""

    total: int | None = None

    def choose(self, situation: BatchSituation) -> BatchChoice:
        limits = situation.limits
        total = limits.initial if self.total is None else self.total
        if not 1 <= total <= limits.maximum:
            raise InvalidValueError(f"fixed batch size {total}; it must lie in 1..{limits.maximum}, the max batch size")
        return _spread(total, situation)


@dataclass(frozen=True, slots=True)
class LinearBatch:
    """M0 per replica."""

    def choose(self, situation: BatchSituation) -> BatchChoice:
        limits = situation.limits
        return _spread(min(limits.initial * situation.num_replicas, limits.maximum), situation)


POLICIES: dict[str, Callable[[], BatchPolicy]] = {
    "adaptive": AdaptiveBatch,
    "fixed": FixedBatch,
    "linear": LinearBatch,
}


def batch_policy(policy: str | BatchPolicy) -> BatchPolicy:
    """A policy by name, or the given one."""
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise UnknownNameError("batch policy", policy, POLICIES)
        return POLICIES[policy]()
    if isinstance(policy, type) or not isinstance(policy, BatchPolicy):
        raise InvalidValueError(
            f"{policy!r} is no batch policy; pass one of {', '.join(POLICIES)}, or an object with choose(situation)"
        )
    return policy


def make_limits(
    batch_size: int,
    max_batch_size: int | None,
    device_batch_size: int | tuple[int, int] | None,
) -> BatchLimits:
    """The limits a user asked for. Without device bounds a device takes M0 at most: so much is known to fit.

    Raises:
        InvalidValueError: bounds that contradict each other.
    """
    if isinstance(device_batch_size, int):
        device_batch_size = (1, device_batch_size)
    low, high = device_batch_size or (1, batch_size)
    maximum = batch_size if max_batch_size is None else max_batch_size
    if batch_size < 1:
        raise InvalidValueError(f"batch_size {batch_size}; it must be at least 1")
    if maximum < batch_size:
        raise InvalidValueError(f"max_batch_size {maximum} is below batch_size {batch_size}; it must be at least that")
    if not 1 <= low <= high:
        raise InvalidValueError(f"device_batch_size ({low}, {high}); it needs 1 <= smallest <= largest")
    if low > maximum:
        raise InvalidValueError(
            f"device_batch_size of at least {low} exceeds max_batch_size {maximum}: not even one replica could train"
        )
    return BatchLimits(initial=batch_size, maximum=maximum, device_min=low, device_max=high)


def _spread(total: int, situation: BatchSituation) -> BatchChoice:
    """``total`` over the replicas in as few passes as fit, every replica having an example in each."""
    limits, replicas = situation.limits, situation.num_replicas
    if total < replicas:
        raise InvalidValueError(
            f"a batch of {total} cannot be divided among {replicas} replicas; ask for at most {total} of them"
        )
    config = fixed_batch(total, replicas, limits)
    passes = config.accum_steps + 1
    share = -(-total // replicas)
    device_batch = -(-share // passes)  # fixed_batch may round down at the maximum; the total is what counts here
    return BatchChoice(config=BatchConfig(device_batch, config.accum_steps), total=total)


def shape_of(choice: BatchChoice, num_replicas: int, rank: int, epoch_length: int | None = None) -> StepShape:
    """A step is never larger than an epoch: a batch that is takes the whole of it."""
    config = choice.config
    return StepShape(
        num_replicas=num_replicas,
        rank=rank,
        device_batch=config.device_batch,
        accum_steps=config.accum_steps,
        limit=choice.total if epoch_length is None else min(choice.total, epoch_length),
    )
