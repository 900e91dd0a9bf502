"""Reads an elastic loader's batches: draws the order of an epoch, and reads by index or from a stream.

:mod:`pollux.train.data` uses it; its docstring has the rules.
"""

from __future__ import annotations

import inspect
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypedDict, cast

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory as pin_batch  # the only pinning that knows nested batches

from pollux.errors import InvalidValueError
from pollux.train.position import EpochOrder, Position, Step, StepShape, divide
from pollux.types import IntArray

logger = logging.getLogger(__name__)

Unit = Any  # an example's index or key, or with a batch_sampler a list of them
LoaderOptions = dict[str, Any]  # of torch's DataLoader


class OrderState(TypedDict):
    checksum: int | None
    order: list[Unit] | None  # None if it can be drawn again


class LoaderState(OrderState):
    """See :meth:`pollux.train.data.ElasticLoader.state_dict`."""

    version: int
    unit: str
    epoch: int
    position: int
    seed: int
    shuffle: bool
    length: int | None


class _HasGenerator(Protocol):
    generator: torch.Generator | None


ShareOrder = Callable[[list[Unit]], list[Unit]]
"""Takes this rank's order and returns rank 0's. Called on every rank, once per epoch, before its first step."""


# --- the order of an epoch ---------------------------------------------------------------------------------------


class Order(Protocol):
    unit: str  # of one entry: "example" or "batch"

    @property
    def is_reproducible(self) -> bool:
        """Whether the same order can be drawn again from (seed, epoch)."""

    @property
    def length(self) -> int | None:
        """Entries per epoch, if known before drawing."""

    def draw(self, epoch: int, seed: int, num_replicas: int) -> IntArray | list[Unit]: ...


class DatasetOrder:
    unit = "example"
    is_reproducible = True

    def __init__(self, length: int, shuffle: bool, seed: int) -> None:
        self.length = length
        self._order = EpochOrder(length, seed=seed, shuffle=shuffle)

    def draw(self, epoch: int, seed: int, num_replicas: int) -> IntArray:
        if seed != self._order.seed:
            self._order = EpochOrder(self.length, seed=seed, shuffle=self._order.shuffle)
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

    def draw(self, epoch: int, seed: int, num_replicas: int) -> list[Unit]:
        order: list[Unit]
        set_epoch = getattr(self._sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        if self._holder is not None:
            before = self._holder.generator
            self._holder.generator = torch.Generator().manual_seed(torch_seed(seed, epoch))
            try:
                order = list(self._sampler)
            finally:
                self._holder.generator = before
        else:
            order = list(self._sampler)
            if not self.is_reproducible and self._share is not None:
                order = list(self._share(order))
            elif not self.is_reproducible and num_replicas > 1:
                raise InvalidValueError(
                    f"{type(self._sampler).__name__} has no generator to seed, so each of the {num_replicas} replicas "
                    "would draw another order: give it a 'generator' attribute, or pass share_order"
                )
        if self.unit == "batch":
            order = [list(batch) for batch in order]
            if not all(order):
                raise InvalidValueError(
                    f"{type(self._sampler).__name__} gave an empty batch in epoch {epoch}; it needs an example"
                )
        if not order:
            raise InvalidValueError(
                f"{type(self._sampler).__name__} gave nothing for epoch {epoch}; at least 1 example is needed"
            )
        return order


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """The order of one epoch: dataset indices (or keys), or lists of them."""

    epoch: int
    seed: int
    order: IntArray | list[Unit]
    is_batched: bool

    def __len__(self) -> int:
        return len(self.order)

    def indices(self, positions: range) -> list[Unit]:
        units = self.order[positions.start : positions.stop : positions.step]
        if self.is_batched:
            return [index for unit in units for index in unit]
        return units if isinstance(units, list) else units.tolist()

    def num_examples(self, positions: range) -> int:
        return sum(len(self.order[position]) for position in positions) if self.is_batched else len(positions)

    def checksum(self) -> int:
        if isinstance(self.order, np.ndarray):
            return zlib.crc32(np.ascontiguousarray(self.order).data)
        return zlib.crc32(repr(self.order).encode())


# --- map-style datasets ------------------------------------------------------------------------------------------


class _IndexStream:
    """The DataLoader's batch_sampler: every ``iter`` starts the plan set last."""

    def __init__(self) -> None:
        self.plan: Iterator[list[Unit]] = iter(())

    def __iter__(self) -> Iterator[list[Unit]]:
        return self.plan


class MapSource:
    """Reads by index. ``begin`` uses the batches that workers have read ahead, if they are for this step."""

    def __init__(self, dataset: Dataset[object], order: Order, drop_last: bool, options: LoaderOptions) -> None:
        self._dataset, self._order, self._drop_last, self._options = dataset, order, drop_last, options
        self._stream = _IndexStream()
        self._loader: DataLoader[object] | None = None
        self._batches: Iterator[object] = iter(())
        self._drawn: _Drawn | None = None
        self._checksum: tuple[_Drawn, int] | None = None
        self._next: tuple[_Drawn, int, StepShape] | None = None  # of the batches being read ahead

    @property
    def unit(self) -> str:
        return self._order.unit

    @property
    def epoch_length(self) -> int | None:
        return self._order.length

    def units_shape(self, shape: StepShape) -> StepShape:
        return replace(shape, device_batch=1) if self.unit == "batch" else shape

    def begin(self, position: Position, seed: int, shape: StepShape) -> Step | None:
        drawn = self._draw(position.epoch, seed, shape.num_replicas)
        shape = self.units_shape(shape)
        step = position.take(len(drawn), shape, drop_last=self._drop_last)
        if step is None:
            self._next = None
            return None
        if self._next is None or self._next[0] is not drawn or self._next[1:] != (step.start, shape):
            self._restart(drawn, step.start, shape)
        self._next = None  # until the last pass is read: a step left half-way must be read again
        return step

    def fetch(self, step: Step, index: int) -> object:
        batch = next(self._batches)
        if index == step.num_passes - 1 and self._drawn is not None:
            self._next = self._drawn, step.start + step.count, step.shape
        return batch

    def num_examples(self, positions: range) -> int:
        assert self._drawn is not None
        return self._drawn.num_examples(positions)

    def order_state(self, epoch: int, seed: int) -> OrderState:
        drawn = self._drawn
        if drawn is None or (drawn.epoch, drawn.seed) != (epoch, seed):
            return {"checksum": None, "order": None}  # no step of this epoch has begun, so its order can still be drawn
        if self._checksum is None or self._checksum[0] is not drawn:
            self._checksum = drawn, drawn.checksum()
        return {"checksum": self._checksum[1], "order": None if self._order.is_reproducible else list(drawn.order)}

    def adopt(self, state: LoaderState) -> None:
        epoch, seed, saved = state["epoch"], state["seed"], state["order"]
        if saved is None and (state["checksum"] is None or not self._order.is_reproducible):
            if state["position"]:
                raise InvalidValueError(f"this data state is in the middle of epoch {epoch}, but its order is missing")
            self._drawn = None
            return
        order = self._order.draw(epoch, seed, 1) if saved is None else list(saved)
        drawn = _Drawn(epoch=epoch, seed=seed, order=order, is_batched=self.unit == "batch")
        if drawn.checksum() != state["checksum"]:
            raise InvalidValueError(
                f"the order of epoch {epoch} differs from the saved one: this data state belongs to another dataset or "
                "sampler"
            )
        if state["position"] > len(drawn):
            raise InvalidValueError(
                f"position {state['position']} lies beyond the {len(drawn)} of epoch {epoch}: another dataset"
            )
        self._drawn = drawn

    def close(self) -> None:
        _end_workers(self._batches)
        self._batches, self._loader, self._next = iter(()), None, None

    def _draw(self, epoch: int, seed: int, num_replicas: int) -> _Drawn:
        if self._drawn is None or (self._drawn.epoch, self._drawn.seed) != (epoch, seed):
            order = self._order.draw(epoch, seed, num_replicas)
            self._drawn = _Drawn(epoch=epoch, seed=seed, order=order, is_batched=self.unit == "batch")
        return self._drawn

    def _restart(self, drawn: _Drawn, position: int, shape: StepShape) -> None:
        self._stream.plan = _plan(drawn, position, shape, self._drop_last)
        if self._loader is None:
            self._loader = DataLoader(self._dataset, batch_sampler=self._stream, **self._options)
        # With persistent workers this keeps the processes, drops what they had read ahead and asks for the new plan.
        self._batches = iter(self._loader)


def _plan(drawn: _Drawn, position: int, shape: StepShape, drop_last: bool) -> Iterator[list[Unit]]:
    """Index lists from ``position`` to the end of the epoch, for the workers to read ahead.

    A function and not a method: the workers' iterator holds it, and a reference cycle would keep the workers alive
    until a garbage collection.
    """
    while (step := divide(position, len(drawn), shape, drop_last=drop_last, epoch=drawn.epoch)) is not None:
        for positions in step.passes:
            yield drawn.indices(positions or range(step.start, step.start + 1))
        position += step.count


# --- iterable datasets -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """Every worker sends this last. Each reads the whole stream, so each knows its length."""

    total: int
    last: object  # the last example: a filler for ranks that have none


class _Shard(IterableDataset[object]):
    """One worker's part of a stream. Where it starts is in shared memory, so workers live on when that changes."""

    def __init__(self, dataset: IterableDataset[object]) -> None:
        self.dataset = dataset
        self.takes_start = "start" in inspect.signature(type(dataset).__iter__).parameters
        self.control = torch.zeros(4, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]  # start, K, rank, epoch

    def __iter__(self) -> Iterator[object]:
        start, num_replicas, rank, epoch = (int(value) for value in self.control.tolist())
        info = get_worker_info()
        num_workers, worker = (info.num_workers, info.id) if info is not None else (1, 0)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        return self._read(start, start + rank + num_replicas * worker, num_replicas * num_workers)

    def _read(self, start: int, first: int, stride: int) -> Iterator[object]:
        position, last = 0, None
        if self.takes_start:
            position, examples = start, type(self.dataset).__iter__(self.dataset, start=start)  # type: ignore[call-arg]
        else:
            examples = iter(self.dataset)
        for last in examples:
            if position >= first and (position - first) % stride == 0:
                yield last
            position += 1
        yield _End(total=position, last=last)


class StreamSource:
    """Reads in order. Holds this rank's examples of the step under way: a new m or s, or a retry, reads nothing again.

    It reads one example beyond the step. If rank r has one at position start + M + r, the step is full; if not, the
    worker that should have had it knows the length of the stream. So all ranks agree on its end without communication.
    """

    unit = "stream"
    epoch_length = None

    def __init__(
        self,
        dataset: IterableDataset[object],
        collate: Callable[[list[object]], object],
        pins: bool,
        drop_last: bool,
        options: LoaderOptions,
    ) -> None:
        self._shard = _Shard(dataset)
        self._collate, self._pins, self._drop_last, self._options = collate, pins, drop_last, options
        self._loader: DataLoader[object] | None = None
        self._examples: Iterator[object] = iter(())
        self._key: tuple[int, int, int] | None = None  # epoch, K, rank that the stream was started for
        self._start = 0  # position where the buffer begins, minus the rank
        self._buffer: list[object] = []
        self._begun: Step | None = None
        self._end: _End | None = None

    def units_shape(self, shape: StepShape) -> StepShape:
        return shape

    def begin(self, position: Position, seed: int, shape: StepShape) -> Step | None:
        if self._begun is not None and position.consumed == self._start + self._begun.count:  # it was committed
            del self._buffer[: self._begun.own_count]
            self._start = position.consumed
        key = position.epoch, shape.num_replicas, shape.rank
        if self._key != key or self._start != position.consumed:
            self._restart(key, position.consumed)
        own = shape.device_batch * shape.num_passes
        while self._end is None and len(self._buffer) <= own:
            example = next(self._examples)
            if isinstance(example, _End):
                self._end = example
            else:
                self._buffer.append(example)
        if self._end is not None and self._end.total == 0:
            raise InvalidValueError(f"the dataset gave no examples in epoch {position.epoch}; at least 1 is needed")
        length = position.consumed + shape.total if self._end is None else self._end.total
        self._begun = position.take(length, shape, drop_last=self._drop_last)
        return self._begun

    def fetch(self, step: Step, index: int) -> object:
        low = sum(map(len, step.passes[:index]))
        examples = self._buffer[low : low + len(step.passes[index])]
        if not examples and self._end is not None:
            examples = [self._end.last]
        batch = self._collate(examples)
        return pin_batch(batch) if self._pins else batch  # type: ignore[no-untyped-call]

    def num_examples(self, positions: range) -> int:
        return len(positions)

    def order_state(self, epoch: int, seed: int) -> OrderState:
        return {"checksum": None, "order": None}

    def adopt(self, state: LoaderState) -> None:
        self._key = None

    def close(self) -> None:
        _end_workers(self._examples)
        self._examples, self._loader, self._key = iter(()), None, None
        self._buffer, self._begun, self._end = [], None, None

    def _restart(self, key: tuple[int, int, int], start: int) -> None:
        epoch, num_replicas, rank = key
        self._shard.control.copy_(torch.tensor([start, num_replicas, rank, epoch]))
        if self._loader is None:
            self._loader = DataLoader(self._shard, batch_size=None, collate_fn=_as_it_is, **self._options)
        self._examples = iter(self._loader)
        self._key, self._start, self._buffer, self._begun, self._end = key, start, [], None, None


def _end_workers(iterator: Iterator[object]) -> None:
    # Deleting the iterator would do it, but after an error a traceback may keep it alive.
    shutdown = getattr(iterator, "_shutdown_workers", None)
    if shutdown is None:
        return
    try:
        shutdown()
    except (RuntimeError, AssertionError, OSError):
        # When a worker was killed, torch's SIGCHLD handler raises at any point, here too. Its shutdown still ends the
        # other workers, so there is nothing more to do.
        logger.debug("an error while ending the data workers", exc_info=True)


def _as_it_is(example: object) -> object:
    return example


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
