"""The position in an epoch, counted in global examples, and the division of the next step among ranks.

The elastic loader's sources call it. No torch, no I/O, no communication. An epoch is a fixed order of its examples. Its
position is the number of examples consumed *in committed steps*, over all replicas. The next step takes the next
K·m·(s+1) of them. Ranks, device batch and accumulation are arguments of a query, never stored, so a resize only changes
the next query.

Division: example i of a step goes to rank i mod K. Every rank has the same numbers, so all agree without communication.

    order     7 2 9 4 0 5 1 8 3 6          K = 2, m = 2, s = 1: a step is 8 examples
    rank 0    7 . 9 . 0 . 1 .              passes (7, 9), (0, 1)
    rank 1    . 2 . 4 . 5 . 8              passes (2, 4), (5, 8)
    last                      3 6          one pass each: (3) and (6)

The last step of an epoch may be short. It uses as few passes as the device batch allows, the same number on every
rank, because every pass may hold a collective. Shares differ by at most one example, and may be empty. A mean over
unequal shares needs weights: see :meth:`Step.weight`.

BatchNorm cannot take a single example. With ``least=2``, a step that would leave one example to a pass is divided into
pairs instead, and some ranks have none: 5 examples among 4 ranks become 3, 2, 0, 0.

One replica with one pass has a single gradient per step, but the noise scale needs two. With ``split_every``, every
n-th step has two passes of half the examples each. Position and epoch alone decide which steps these are, so that
workers can read ahead; the epoch is included because an epoch may have fewer than n steps, and the next one must then
be split at another place.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field, replace

import numpy as np

from pollux.errors import InvalidValueError
from pollux.types import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The shape of steps: K replicas of which this is ``rank``, at most m examples a pass, s + 1 passes.

    ``limit`` bounds a step's examples where the batch does not divide evenly: shares then differ by at most one.
    ``split_every``: with one replica and one pass, every n-th step has two passes; 0 for none. ``least``: 2 if no pass
    should have a single example.
    """

    num_replicas: int = 1
    rank: int = 0
    device_batch: int = 1
    accum_steps: int = 0
    limit: int | None = None
    split_every: int = 0
    least: int = 1
    total: int = field(init=False)  # M = K·m·(s+1), or the limit where that is less
    is_single: bool = field(init=False)  # one gradient per step: one replica, one pass

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise InvalidValueError(f"{self.num_replicas} replicas; at least 1 is needed")
        if not 0 <= self.rank < self.num_replicas:
            raise InvalidValueError(f"rank {self.rank} of {self.num_replicas} replicas; 0 <= rank < replicas is needed")
        if self.device_batch < 1:
            raise InvalidValueError(f"device batch size {self.device_batch}; it must be at least 1")
        if self.accum_steps < 0:
            raise InvalidValueError(f"{self.accum_steps} accumulation steps; 0 (none) or more are needed")
        if self.limit is not None and self.limit < 1:
            raise InvalidValueError(f"at most {self.limit} examples in a step; at least 1 is needed")
        if self.least not in (1, 2):
            raise InvalidValueError(f"at least {self.least} examples in a pass; 1 or 2 can be asked for")
        if self.split_every < 0:
            raise InvalidValueError(f"split every {self.split_every} steps; 0 (none) or more are needed")
        most = self.num_replicas * self.device_batch * self.num_passes
        object.__setattr__(self, "total", most if self.limit is None else min(most, self.limit))
        object.__setattr__(self, "is_single", self.num_replicas == 1 and self.accum_steps == 0)

    def splits_at(self, position: int, epoch: int = 0) -> bool:
        """Whether the step that starts at ``position`` has two passes."""
        if not self.is_single or self.split_every == 0:
            return False
        return (position // self.total + epoch * _epoch_stride(self.split_every)) % self.split_every == 0

    @property
    def num_passes(self) -> int:
        return self.accum_steps + 1


@dataclass(slots=True)
class Step:
    """One rank's part in one step over the positions ``start`` to ``start + count``. Not changed once it is made.

    ``count`` is global (the same on every rank), ``passes`` are this rank's own positions, pass by pass. Their number
    is the same on every rank; a short step may have fewer than s + 1. (Not frozen, which would make every step of
    training slower: a frozen object takes three times as long to make.)
    """

    shape: StepShape
    start: int
    count: int
    passes: tuple[range, ...]
    num_passes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_passes = len(self.passes)

    @property
    def sizes(self) -> list[int]:
        """How many positions each pass of every rank has, empty ones left out."""
        if _needs_pairs(self.count, self.shape, self.num_passes):
            return [len(cell) for cell in _pairs(self.count, self.shape.device_batch)]
        sizes = []
        for rank in range(self.shape.num_replicas):
            base, extra = divmod(len(range(rank, self.count, self.shape.num_replicas)), self.num_passes)
            sizes += [base + 1] * extra + ([base] * (self.num_passes - extra) if base else [])
        return sizes

    @property
    def own_count(self) -> int:
        return sum(map(len, self.passes))

    @property
    def is_short(self) -> bool:
        """Whether this is an epoch's smaller last step. Its micro-batches are unequal, so its noise is not measured."""
        return self.count < self.shape.total

    @property
    def is_split(self) -> bool:
        """Whether it has more passes than its shape, so that its noise can be measured."""
        return self.num_passes > self.shape.num_passes

    def weight(self, index: int) -> float:
        """The factor for the loss of pass ``index`` (a mean over its examples) before ``backward``.

        With gradients summed over passes and averaged over ranks (DDP), the result is then the mean gradient over
        all ``count`` examples. The factor is 1/(s+1) in a full step, and 0 for an empty share.
        """
        return len(self.passes[index]) * self.shape.num_replicas / self.count


def divide(position: int, length: int, shape: StepShape, *, drop_last: bool = False, epoch: int = 0) -> Step | None:
    """The step that starts at ``position`` of an epoch of ``length``; None when the epoch is over.

    With ``drop_last`` an epoch is over as soon as a full step of this shape does not fit.
    """
    total = shape.total
    count = total if position + total <= length else length - position
    if count <= 0 or (drop_last and count < total):
        return None
    if shape.is_single and count == total and not shape.splits_at(position, epoch):  # most steps of one replica
        return Step(shape, position, count, (range(position, position + count),))
    num_passes = _ceil_div(_ceil_div(count, shape.num_replicas), shape.device_batch)  # from the largest share
    if num_passes == 1 and count == shape.total >= 2 * shape.least and shape.splits_at(position, epoch):
        num_passes = 2
    if _needs_pairs(count, shape, num_passes):
        cells = _pairs(count, shape.device_batch)[shape.rank :: shape.num_replicas]
        moved = [range(position + cell.start, position + cell.stop) for cell in cells]
        empty = [range(position, position)] * (num_passes - len(moved))
        return Step(shape, position, count, (*moved, *empty))
    own = range(position + shape.rank, position + count, shape.num_replicas)
    if num_passes == 1:
        return Step(shape, position, count, (own,))
    base, extra = divmod(len(own), num_passes)
    bounds = [index * base + min(index, extra) for index in range(num_passes + 1)]
    passes = tuple(own[low:high] for low, high in itertools.pairwise(bounds))
    return Step(shape, position, count, passes)


def _needs_pairs(count: int, shape: StepShape, num_passes: int) -> bool:
    """Whether the usual division would leave a single example to a pass, and pairs would not."""
    if shape.least == 1 or count < 2 or shape.device_batch < 2:
        return False
    return count // shape.num_replicas // num_passes < 2


def _pairs(count: int, device_batch: int) -> list[range]:
    """Offsets of a step's examples two by two. An odd one joins the first pair if a pass may have three."""
    if count % 2 == 0 or device_batch < 3:
        return [range(low, min(low + 2, count)) for low in range(0, count, 2)]
    return [range(3), *(range(low, low + 2) for low in range(3, count, 2))]


def count_passes(length: int, shape: StepShape, *, drop_last: bool = False, epoch: int = 0) -> int:
    """Passes of a whole epoch of ``length`` when the shape never changes."""
    full, rest = divmod(length, shape.total)
    last = divide(0, rest, replace(shape, split_every=0), drop_last=drop_last)
    splits = 0
    if shape.is_single and shape.split_every and shape.total >= 2 * shape.least:
        # Multiples of n from first to first + full - 1.
        first = epoch * _epoch_stride(shape.split_every)
        splits = (first + full - 1) // shape.split_every - (first - 1) // shape.split_every
    return full * shape.num_passes + splits + (last.num_passes if last else 0)


@functools.cache
def _epoch_stride(split_every: int) -> int:
    """How far counting to the next split step moves on with each epoch.

    Coprime with ``split_every``, so that in that many epochs each offset comes once. Near the golden section, so that
    a few epochs in a row have offsets far apart: with a stride of 1, epochs of 50 steps would be split every 128 steps
    on average, but not for 78 epochs at first.
    """
    near = round(split_every * (math.sqrt(5) - 1) / 2)
    candidates = sorted(range(1, split_every + 1), key=lambda stride: abs(stride - near))
    return next(stride for stride in candidates if math.gcd(stride, split_every) == 1)


class EpochOrder:
    """The order of a dataset of ``length`` examples in each epoch: the same on all ranks, by the seed.

    It keeps one permutation (8 bytes per example), that of the last epoch asked for: about 0.1 s and 80 MB for ten
    million examples. From about a billion examples on, shuffle shards instead (with an IterableDataset or a sampler).
    """

    def __init__(self, length: int, *, seed: int = 0, shuffle: bool = True) -> None:
        if length < 1:
            raise InvalidValueError(f"the dataset has {length} examples; at least 1 is needed")
        check_seed(seed)
        self.length, self.seed, self.shuffle = length, seed, shuffle
        self._drawn: tuple[int, IntArray] | None = None

    def indices(self, epoch: int) -> IntArray:  # (length,) dataset indices in the order of consumption
        if self._drawn is None or self._drawn[0] != epoch:
            if self.shuffle:
                # RandomState and not default_rng: numpy promises never to change its stream (NEP 19), so a checkpoint
                # means the same examples after an upgrade.
                bits = np.random.MT19937(np.random.SeedSequence([self.seed, epoch]))
                order = np.random.RandomState(bits).permutation(self.length).astype(np.int64, copy=False)
            else:
                order = np.arange(self.length, dtype=np.int64)
            self._drawn = epoch, order
        return self._drawn[1]


class Position:
    """An epoch and how many global examples of it are consumed. Only :meth:`commit` moves it."""

    def __init__(self, *, epoch: int = 0, consumed: int = 0) -> None:
        if epoch < 0 or consumed < 0:
            raise InvalidValueError(f"position {consumed} of epoch {epoch}; both must be 0 or more")
        self.epoch, self.consumed = epoch, consumed

    def take(self, length: int, shape: StepShape, *, drop_last: bool = False) -> Step | None:
        """The next step of ``shape.rank``; None when the epoch is over. Changes nothing."""
        if self.consumed > length:
            raise InvalidValueError(
                f"position {self.consumed} lies beyond the {length} examples of epoch {self.epoch}: "
                "this position belongs to another dataset or sampler"
            )
        return divide(self.consumed, length, shape, drop_last=drop_last, epoch=self.epoch)

    def commit(self, count: int) -> None:
        """Consume ``count`` examples, over all ranks. Call it when all ranks have finished the step."""
        if count < 1:
            raise InvalidValueError(f"{count} examples committed; a step has at least 1")
        self.consumed += count

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of another epoch. The current epoch keeps its position."""
        if epoch < 0:
            raise InvalidValueError(f"epoch {epoch}; it must be 0 or more")
        if epoch != self.epoch:
            self.epoch, self.consumed = epoch, 0


def check_seed(seed: int) -> None:
    if seed < 0:
        raise InvalidValueError(f"seed {seed}; it must be 0 or more")


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
