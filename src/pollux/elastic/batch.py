"""Which batch a job trains with, by its noise scale and the speed model that the server has fitted. Job calls it.

The model is that of :mod:`pollux.model.throughput`, written without numpy. Letters as in the paper: K replicas,
m examples in one pass of a device, M the total batch, M0 the one that the user tuned, φ the noise scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pollux.errors import InvalidValueError

MAX_NOISE_SCALE = 1e15
_MAX_PASSES = 16  # of one step
_NUM_SIZES = 24  # device batches that are compared


@dataclass(frozen=True, slots=True)
class Batch:
    """Examples of one step: ``total`` of all replicas, in ``num_passes`` passes of ``device`` examples on each."""

    total: int
    device: int
    num_passes: int = 1

    @property
    def share(self) -> int:
        """Examples of one replica."""
        return self.device * self.num_passes


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchBounds:
    """``initial`` is M0, ``maximum`` bounds M, the others bound m."""

    initial: int
    maximum: int
    device_min: int
    device_max: int

    @classmethod
    def of(cls, batch_size: int, max_batch_size: int | None, device: int | tuple[int, int] | None) -> BatchBounds:
        maximum = batch_size if max_batch_size is None else max_batch_size
        low, high = (1, maximum) if device is None else (device, device) if isinstance(device, int) else device
        for what, value in (("batch_size", batch_size), ("device_batch_size", low)):
            if value < 1:
                raise InvalidValueError(f"{what} is {value}; at least 1 is needed")
        if maximum < batch_size:
            raise InvalidValueError(f"max_batch_size is {maximum}, below batch_size = {batch_size}; leave it out")
        if not low <= high or low > maximum:
            raise InvalidValueError(f"device_batch_size is {low} to {high}; it must rise, and begin below {maximum}")
        return cls(initial=batch_size, maximum=maximum, device_min=low, device_max=high)


def gain_of(noise_scale: float | None, initial: int, total: int) -> float:
    """AdaScale's r: how many steps at M0 one step at M is worth. At least 1; 1 while φ is not known."""
    if noise_scale is None or total <= initial:
        return 1.0
    phi = min(max(noise_scale, 0.0), MAX_NOISE_SCALE)
    return total / initial * (phi + initial) / (phi + total)


def step_s(theta: Sequence[float], num_nodes: int, num_replicas: int, batch: Batch) -> float:
    """Seconds of one step by the model θ, in the order of :class:`pollux.types.ThroughputParams`."""
    alpha_g, beta_g, alpha_n, beta_n, alpha_r, beta_r, gamma, delta, ring = theta
    grad_s, sync_s = alpha_g + beta_g * batch.device**delta, 0.0
    if num_replicas > 1:
        alpha, beta = (alpha_n, beta_n) if num_nodes > 1 else (alpha_r, beta_r)
        sync_s = alpha + beta * (num_replicas - 2) / (num_replicas if ring > 0 else 1)
    longer, shorter = max(grad_s, sync_s), min(grad_s, sync_s)
    together_s = longer * (1 + (shorter / longer) ** gamma) ** (1 / gamma) if longer > 0 else 0.0
    return float((batch.num_passes - 1) * grad_s + together_s)


def choose_batch(
    bounds: BatchBounds,
    num_replicas: int,
    num_nodes: int = 1,
    theta: Sequence[float] | None = None,
    noise_scale: float | None = None,
) -> Batch:
    """The batch with the highest goodput; the one nearest to M0 while θ or φ is not known, or M may not grow."""
    nearest = _nearest(bounds, num_replicas)
    if theta is None or noise_scale is None or bounds.maximum == bounds.initial:
        return nearest

    def goodput(batch: Batch) -> float:
        useful = gain_of(noise_scale, bounds.initial, batch.total) * bounds.initial
        return useful / max(step_s(theta, num_nodes, num_replicas, batch), 1e-9)

    return max([nearest, *_candidates(bounds, num_replicas)], key=goodput)


def _nearest(bounds: BatchBounds, num_replicas: int) -> Batch:
    """M0, rounded up to a multiple of the replicas."""
    share = max(-(-bounds.initial // num_replicas), bounds.device_min)
    num_passes = -(-share // bounds.device_max)
    device = -(-share // num_passes)
    return Batch(num_replicas * device * num_passes, device, num_passes)


def _candidates(bounds: BatchBounds, num_replicas: int) -> Iterator[Batch]:
    ratio = (bounds.device_max / bounds.device_min) ** (1 / _NUM_SIZES)
    sizes = {round(bounds.device_min * ratio**power) for power in range(_NUM_SIZES + 1)}
    sizes |= {bounds.maximum // (num_replicas * count) for count in range(1, _MAX_PASSES + 1)}
    for device in sorted(sizes):
        for num_passes in range(1, _MAX_PASSES + 1):
            total = num_replicas * device * num_passes
            fits = bounds.device_min <= device <= bounds.device_max
            if fits and bounds.initial <= total <= bounds.maximum:
                yield Batch(total, device, num_passes)
