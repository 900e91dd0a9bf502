"""Batch policies: choose the total batch, the device batch m and the accumulation steps s at a step boundary.

The tuner asks the policy, on rank 0 alone; the session tells the other ranks. Policies:

- ``adaptive``: the batch of highest goodput, by measured step times, the noise scale, and how far the learning rate
  has been raised. It moves by one doubling at a time: up if that gains at least 5 % at the noise scale's lower bound,
  down if it gains as much at its upper bound. While the user's learning rate warms up, a quarter of the lower bound
  counts. A step takes at most a sixteenth of the examples seen so far: early in training the noise scale may fall from
  very high to very low within a few steps.
- ``fixed``: exactly the same total batch for any number of replicas; shares may differ by one example.
- ``linear``: M0 for every replica, the usual way of scaling out by hand.
- ``ramp``: totals by the number of examples seen, as the user gives them.
- ``seesaw``: where the schedule lowers the rate by a factor, the rate falls by its root and the batch grows by the
  factor (Seesaw, arXiv 2510.14717).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np

from pollux.errors import InvalidValueError, UnknownNameError
from pollux.model.efficiency import SAME_RATE, earned_gain
from pollux.model.goodput import corrected_times, fixed_batch
from pollux.model.profile import Timing
from pollux.train.encoding import sendable
from pollux.train.position import StepShape
from pollux.train.progress import gain_of
from pollux.types import BatchConfig, BatchLimits, ThroughputParams

ROUNDING = 1e-6  # of a logarithm: 2.9999999 doublings count as 3
LEAST_RATE_SHARE = 1e-9  # a schedule that ends at rate 0 must not ask for an infinite batch


sendable(BatchConfig)


@sendable
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChoice:
    """m, s, and the total batch M <= K·m·(s+1)."""

    config: BatchConfig
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSituation:
    """What a policy may base its choice on."""

    limits: BatchLimits
    num_nodes: int
    num_replicas: int
    total: int | None = None  # the present batch; None: just started
    params: ThroughputParams | None = None  # None: nothing measured yet
    noise_scale: float | None = None
    noise_low: float | None = None  # bounds of the noise scale; None: use the noise scale itself
    noise_high: float | None = None
    num_examples: float = math.inf  # in all steps so far
    epoch_length: int | None = None  # examples, where that is known
    may_grow: bool = True
    may_shrink: bool = True
    is_rate_rising: bool = False  # the user's schedule still warms up
    rate_share: float = 1.0  # of the schedule's highest rate so far
    earned: float = 1.0  # share of its gain that a larger batch has at the present learning rate
    measured: Mapping[int, Timing] = field(default_factory=dict)  # in this allocation, by device batch


@runtime_checkable
class BatchPolicy(Protocol):
    def choose(self, situation: BatchSituation) -> BatchChoice: ...


@dataclass(frozen=True, slots=True)
class AdaptiveBatch:
    """Highest goodput, one doubling at a time. M0, or the least that the replicas allow, until it is measured."""

    threshold: float = 0.05  # gain of goodput that a change needs; lower values change more often, for less
    trust_while_rising: float = 0.25  # share of φ's lower bound that counts in the user's warm-up: φ may fall fast
    largest_share: float = 1 / 16  # of the examples seen so far that one step may take: see the module docstring
    explores: bool = True  # time larger device batches in the first steps
    is_guarded: bool = True  # undo a growth that hurts

    def choose(self, situation: BatchSituation) -> BatchChoice:
        limits, replicas = situation.limits, situation.num_replicas
        least = max(limits.minimum, limits.device_min * replicas)
        total = min(max(situation.total or least, least), limits.maximum)
        phi = situation.noise_scale
        if situation.params is None or phi is None:
            return spread(total, situation)
        low = phi if situation.noise_low is None else situation.noise_low
        high = phi if situation.noise_high is None else situation.noise_high
        most = min(max(situation.num_examples * self.largest_share, least), limits.maximum)
        if situation.epoch_length:  # a step fits into an epoch
            most = min(most, situation.epoch_length)
        larger, smaller = self._next(total, 2.0, situation), self._next(total, 0.5, situation)
        sure = low * self.trust_while_rising if situation.is_rate_rising else low
        if situation.may_grow and total < larger <= most:
            # Goodput has one maximum. One step time that was measured too long must not hide it: look further too.
            further = self._next(larger, 2.0, situation)
            is_worth_it = self._gain(larger, total, sure, situation) > self.threshold
            if not is_worth_it and larger < further <= most:
                is_worth_it = self._gain(further, total, sure, situation) > (1 + self.threshold) ** 2 - 1
            if is_worth_it:
                return spread(larger, situation)
        # A rate that is still on its way up is no reason to shrink: at least SAME_RATE counts as earned.
        hopeful = replace(situation, earned=max(situation.earned, SAME_RATE))
        if situation.may_shrink and smaller < total and self._gain(smaller, total, high, hopeful) > self.threshold:
            return spread(smaller, situation)
        return spread(total, situation)

    @staticmethod
    def _next(total: int, factor: float, situation: BatchSituation) -> int:
        """The neighbour of ``total`` among M0·2^i, within the limits."""
        limits = situation.limits
        least = max(limits.minimum, limits.device_min * situation.num_replicas)
        place = math.log2(total / limits.initial)
        place = math.floor(place + ROUNDING) + 1 if factor > 1 else math.ceil(place - ROUNDING) - 1
        wanted = round(limits.initial * 2.0**place)
        return min(max(wanted, least), limits.maximum)

    @staticmethod
    def _gain(total: int, present: int, phi: float, situation: BatchSituation) -> float:
        """The relative gain of goodput at ``total`` over ``present``, as a share."""
        rates = throughputs([total, present], situation)
        initial, earned = situation.limits.initial, situation.earned
        taught = [earned_gain(gain_of(phi, initial, batch), earned) / batch for batch in (total, present)]
        return rates[0] * taught[0] / (rates[1] * taught[1]) - 1


def throughputs(totals: Sequence[int], situation: BatchSituation) -> list[float]:
    """Examples per second at each total, from θ and the timings measured in this allocation."""
    assert situation.params is not None
    choices = [spread(total, situation) for total in totals]
    device = np.array([choice.config.device_batch for choice in choices])
    accum = np.array([choice.config.accum_steps for choice in choices])
    nodes, replicas = situation.num_nodes, situation.num_replicas
    pass_s, step_s = corrected_times(situation.params, nodes, replicas, device, situation.measured)
    return [float(rate) for rate in np.array(totals) / (accum * pass_s + step_s)]


@dataclass(frozen=True, slots=True)
class FixedBatch:
    """Always the same total; M0 unless ``total`` is given."""

    total: int | None = None
    uses_measurements: bool = False

    def choose(self, situation: BatchSituation) -> BatchChoice:
        limits = situation.limits
        total = limits.initial if self.total is None else self.total
        if not 1 <= total <= limits.maximum:
            raise InvalidValueError(f"fixed batch size {total}; it must lie in 1..{limits.maximum}, the max batch size")
        return spread(total, situation)


@dataclass(frozen=True, slots=True)
class LinearBatch:
    """M0 per replica."""

    uses_measurements: bool = False

    def choose(self, situation: BatchSituation) -> BatchChoice:
        limits = situation.limits
        return spread(min(limits.initial * situation.num_replicas, limits.maximum), situation)


@dataclass(frozen=True, slots=True)
class RampBatch:
    """Totals by examples seen: ((0, 64), (1_000_000, 128), ...) is 64, and 128 from a million examples on.

    ``examples_per_unit`` converts the first numbers: with 1/1024 they are tokens, in sequences of 1024. Progress counts
    every example in full, as the user has chosen these batches.
    """

    steps: tuple[tuple[float, int], ...]
    examples_per_unit: float = 1.0
    counts_examples: bool = True

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.steps]
        is_rising = all(later > start for start, later in itertools.pairwise(starts))  # False for NaN
        if not starts or starts[0] != 0 or not is_rising or min(total for _, total in self.steps) < 1:
            raise InvalidValueError(
                f"ramp {self.steps}; it needs ((0, batch), (examples, batch), ...) with rising numbers of examples"
            )
        if not 0 < self.examples_per_unit < math.inf:
            raise InvalidValueError(f"examples_per_unit is {self.examples_per_unit}; it must be a positive number")

    def choose(self, situation: BatchSituation) -> BatchChoice:
        largest = max(total for _, total in self.steps)
        if largest > situation.limits.maximum:  # raised before the first step, not when the ramp gets there
            raise InvalidValueError(
                f"the ramp asks for a batch of {largest}; max_batch_size is "
                f"{situation.limits.maximum}: raise it, or lower the ramp"
            )
        seen = situation.num_examples / self.examples_per_unit
        return spread(next(total for start, total in reversed(self.steps) if seen >= start), situation)


@dataclass(frozen=True, slots=True)
class SeesawBatch:
    """M0 up to the peak of the schedule; M0·α where the schedule has lowered the rate by α, in doublings.

    The optimizer's rate is the schedule's times √α, so it falls by √α only.
    """

    counts_examples: bool = True
    scaling: str = "seesaw"  # the learning-rate rule that goes with it, unless the user names another

    def choose(self, situation: BatchSituation) -> BatchChoice:
        limits = situation.limits
        alpha = 1.0 if situation.is_rate_rising else 1.0 / max(situation.rate_share, LEAST_RATE_SHARE)
        wanted = limits.initial * 2.0 ** math.floor(math.log2(alpha) + ROUNDING)
        total = max(min(wanted, limits.maximum), situation.total or limits.initial)
        return spread(round(total), situation)


POLICIES: dict[str, Callable[[], BatchPolicy]] = {
    "adaptive": AdaptiveBatch,
    "fixed": FixedBatch,
    "linear": LinearBatch,
    "seesaw": SeesawBatch,
}


def batch_policy(policy: str | BatchPolicy) -> BatchPolicy:
    """The policy of that name, or the given policy after a check."""
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise UnknownNameError("batch policy", policy, POLICIES)
        return POLICIES[policy]()
    if isinstance(policy, type) or not isinstance(policy, BatchPolicy):
        raise InvalidValueError(
            f"{policy!r} is not a batch policy; pass one of {', '.join(POLICIES)}, or an object with choose(situation)"
        )
    return policy


def make_limits(
    batch_size: int,
    max_batch_size: int | None,
    device_batch_size: int | tuple[int, int] | None,
) -> BatchLimits:
    """The user's limits. Without device bounds a device takes what fits; larger batches are tried one by one.

    Raises:
        InvalidValueError: the bounds contradict each other.
    """
    if isinstance(device_batch_size, int):
        device_batch_size = (1, device_batch_size)
    maximum = batch_size if max_batch_size is None else max_batch_size
    low, high = device_batch_size or (1, max(maximum, batch_size, 1))
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
    if low > batch_size:
        raise InvalidValueError(
            f"device_batch_size of at least {low} exceeds batch_size {batch_size}: one replica could not train with "
            f"batch_size; lower the smallest device batch to {batch_size} at most, or raise batch_size"
        )
    return BatchLimits(initial=batch_size, maximum=maximum, device_min=low, device_max=high)


def spread(total: int, situation: BatchSituation) -> BatchChoice:
    """Divide ``total`` among the replicas, in as few passes as fit; every replica has an example in each pass."""
    limits, replicas = situation.limits, situation.num_replicas
    if total < replicas:
        raise InvalidValueError(
            f"a batch of {total} cannot be divided among {replicas} replicas; ask for at most {total} of them"
        )
    config = fixed_batch(total, replicas, limits)
    passes = config.accum_steps + 1
    share = -(-total // replicas)
    device_batch = -(-share // passes)  # fixed_batch may round down at the maximum; here the total must be met
    return BatchChoice(config=BatchConfig(device_batch, config.accum_steps), total=total)


def shape_of(
    choice: BatchChoice, num_replicas: int, rank: int, epoch_length: int | None = None, split_every: int = 0
) -> StepShape:
    """The shape of steps with this batch. A batch larger than an epoch takes the whole epoch in one step."""
    config = choice.config
    return StepShape(
        num_replicas=num_replicas,
        rank=rank,
        device_batch=config.device_batch,
        accum_steps=config.accum_steps,
        limit=choice.total if epoch_length is None else min(choice.total, epoch_length),
        split_every=split_every,
    )
