"""Draws the order in which an epoch's examples are read: by the seed, or by the user's sampler.

:mod:`pollux.train.sources` asks for it once per epoch. Short orders are drawn at once. Those of a sampler with millions
of draws are drawn as they are needed, and forgotten when their examples are consumed.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, cast

import numpy as np
import torch
from torch.utils.data import BatchSampler, SequentialSampler

from pollux.errors import InvalidValueError
from pollux.train.position import EpochOrder
from pollux.types import IntArray

MAX_DRAWN = 4_000_000  # draws of a sampler that are held at once: about 150 MB of Python's numbers
CHUNK = 4096  # of a longer order, drawn at a time; also how much of it is compared with a saved state

Unit = Any  # an example's index or key, or with a batch_sampler a list of them
ShareOrder = Callable[[list[Unit]], list[Unit]]
"""Takes this rank's order and returns rank 0's. Called on every rank, once per epoch, before its first step."""


class OrderState(TypedDict):
    checksum: int | None
    order: list[Unit] | None  # None if it can be drawn again


class _HasGenerator(Protocol):
    generator: torch.Generator | None


class Order(Protocol):
    unit: str  # of one entry: "example" or "batch"

    @property
    def is_reproducible(self) -> bool:
        """Whether the same order can be drawn again from (seed, epoch)."""

    @property
    def length(self) -> int | None:
        """Entries per epoch, if known before drawing."""

    def draw(self, epoch: int, seed: int, num_replicas: int) -> IntArray | list[Unit] | range | LongOrder: ...


class DatasetOrder:
    unit = "example"
    is_reproducible = True

    def __init__(self, length: int, shuffle: bool, seed: int) -> None:
        self.length = length
        self._order = EpochOrder(length, seed=seed, shuffle=shuffle)

    def draw(self, epoch: int, seed: int, num_replicas: int) -> IntArray | range:
        if not self._order.shuffle:
            return range(self.length)
        if seed != self._order.seed:
            self._order = EpochOrder(self.length, seed=seed, shuffle=True)
        return self._order.indices(epoch)


class SamplerOrder:
    def __init__(self, sampler: Iterable[object], unit: str, share: ShareOrder | None) -> None:
        self.unit = unit
        self._sampler, self._share = sampler, share
        self._holder = _generator_holder(sampler)
        self.is_reproducible = self._holder is not None or _is_fixed(sampler)

    @property
    def length(self) -> int | None:
        return length_of(self._sampler)

    def draw(self, epoch: int, seed: int, num_replicas: int) -> list[Unit] | LongOrder:
        set_epoch = getattr(self._sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        length = self.length
        if length is not None and length > MAX_DRAWN and self.is_reproducible:
            return LongOrder(length, lambda: self._units(epoch, seed))
        order = list(itertools.islice(self._units(epoch, seed), MAX_DRAWN + 1))
        if len(order) > MAX_DRAWN:
            raise InvalidValueError(
                f"{type(self._sampler).__name__} gives more than {MAX_DRAWN} draws, and they cannot be drawn again as "
                "they are needed: give it a length (__len__) and a 'generator' attribute, as torch's RandomSampler has"
            )
        if not self.is_reproducible and self._share is not None:
            order = list(self._share(order))
        elif not self.is_reproducible and num_replicas > 1:
            raise InvalidValueError(
                f"{type(self._sampler).__name__} has no generator to seed, so each of the {num_replicas} replicas "
                "would draw another order: give it a 'generator' attribute, or pass share_order"
            )
        if not order:
            raise InvalidValueError(
                f"{type(self._sampler).__name__} gave nothing for epoch {epoch}; at least 1 example is needed"
            )
        return order

    def _units(self, epoch: int, seed: int) -> Iterator[Unit]:
        """The sampler's draws, with its generator seeded while it draws and as it was in between."""
        generator = torch.Generator().manual_seed(torch_seed(seed, epoch))
        with self._seeded(generator):
            draws = iter(self._sampler)
        while True:
            with self._seeded(generator):
                chunk = list(itertools.islice(draws, CHUNK))
            if not chunk:
                return
            if self.unit == "batch":
                chunk = [list(cast(Iterable[object], batch)) for batch in chunk]
                if not all(chunk):
                    raise InvalidValueError(
                        f"{type(self._sampler).__name__} gave an empty batch in epoch {epoch}; it needs an example"
                    )
            yield from chunk

    @contextmanager
    def _seeded(self, generator: torch.Generator) -> Iterator[None]:
        if self._holder is None:
            yield
            return
        before, self._holder.generator = self._holder.generator, generator
        try:
            yield
        finally:
            self._holder.generator = before


class LongOrder:
    """A sampler's order, drawn as far as it is read. ``draws`` begins to draw it again."""

    def __init__(self, length: int, draws: Callable[[], Iterator[Unit]]) -> None:
        self._length, self._draws = length, draws
        self._rest = draws()
        self._held: list[Unit] = []
        self._first = 0  # position of the first one held
        self._needed = 0  # none before this position

    def __len__(self) -> int:
        return self._length

    def take(self, positions: range) -> list[Unit]:
        if positions.start < self._first:
            self._rest, self._held, self._first = self._draws(), [], 0
            self._needed = min(self._needed, positions.start)
        while self._first + len(self._held) < positions.stop:
            self._drop()
            chunk = list(itertools.islice(self._rest, CHUNK))
            if not chunk:
                drawn = self._first + len(self._held)
                raise InvalidValueError(f"the sampler gave {drawn} draws, but its length is {self._length}")
            self._held += chunk
        return self._held[positions.start - self._first : positions.stop - self._first : positions.step]

    def forget(self, before: int) -> None:
        """Examples before this position are consumed."""
        self._needed = before

    def _drop(self) -> None:
        count = min(self._needed - self._first, len(self._held))
        if count > 16 * CHUNK or count == len(self._held):
            del self._held[:count]
            self._first += count

    def checksum(self) -> int:
        return zlib.crc32(repr((self._length, list(itertools.islice(self._draws(), CHUNK)))).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The order of one epoch: dataset indices (or keys), or lists of them."""

    epoch: int
    seed: int
    order: IntArray | list[Unit] | range | LongOrder
    is_batched: bool

    def __len__(self) -> int:
        return len(self.order)

    def all(self) -> list[Unit]:
        return self._take(range(len(self)))

    def _take(self, positions: range) -> list[Unit]:
        if isinstance(self.order, LongOrder):
            return self.order.take(positions)
        units = self.order[positions.start : positions.stop : positions.step]
        return units.tolist() if isinstance(units, np.ndarray) else list(units)

    def indices(self, positions: range) -> list[Unit]:
        units = self._take(positions)
        return [index for unit in units for index in unit] if self.is_batched else units

    def num_examples(self, positions: range) -> int:
        return sum(map(len, self._take(positions))) if self.is_batched else len(positions)

    def forget(self, before: int) -> None:
        if isinstance(self.order, LongOrder):
            self.order.forget(before)

    def checksum(self) -> int:
        if isinstance(self.order, LongOrder):
            return self.order.checksum()
        if isinstance(self.order, np.ndarray):
            return zlib.crc32(np.ascontiguousarray(self.order).data)
        return zlib.crc32(repr(self.order).encode())


def length_of(sized: object) -> int | None:
    try:
        return len(sized)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # torch's base classes raise either
        return None


def _generator_holder(sampler: object) -> _HasGenerator | None:
    """The sampler, or the one inside a batch_sampler, that has a ``generator`` to seed; None if there is none."""
    while sampler is not None:
        if isinstance(getattr(sampler, "generator", ()), torch.Generator | None):
            return cast(_HasGenerator, sampler)
        sampler = getattr(sampler, "sampler", None)
    return None


def _is_fixed(sampler: object) -> bool:
    """Whether it gives the same order every time, on every rank."""
    if isinstance(sampler, BatchSampler):
        return _is_fixed(sampler.sampler)
    return isinstance(sampler, list | tuple | range | SequentialSampler)


def torch_seed(*entropy: int) -> int:
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))
