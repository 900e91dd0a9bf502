"""Reads an elastic loader's batches: by index, from a stream, or none at all where the loop brings its own.

:mod:`pollux.train.data` uses it; its docstring has the rules. :mod:`pollux.train.order` draws the order of an epoch.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory as pin_batch  # the only pinning that knows nested batches

from pollux.errors import InvalidValueError
from pollux.train.order import Drawn, Order, OrderState, Unit
from pollux.train.position import Position, Step, StepShape, divide

logger = logging.getLogger(__name__)

LoaderOptions = dict[str, Any]  # of torch's DataLoader


class LoaderState(OrderState):
    """See :meth:`pollux.train.data.ElasticLoader.state_dict`."""

    version: int
    unit: str
    epoch: int
    position: int
    seed: int
    shuffle: bool
    length: int | None


# --- the loop's own batches --------------------------------------------------------------------------------------


class OwnBatches:
    """No data: the loop brings its own. Steps are counted and divided as for a dataset that never ends."""

    unit = "own"
    epoch_length = None

    def units_shape(self, shape: StepShape) -> StepShape:
        return shape

    def begin(self, position: Position, seed: int, shape: StepShape) -> Step | None:
        return position.take(sys.maxsize, shape)

    def is_over(self, position: Position, shape: StepShape) -> bool:
        return False

    def fetch(self, step: Step, index: int) -> object:
        return None

    def num_examples(self, positions: range) -> int:
        return len(positions)

    def order_state(self, epoch: int, seed: int) -> OrderState:
        return {"checksum": None, "order": None}

    def adopt(self, state: LoaderState) -> None:
        """A position is all there is."""

    def close(self) -> None:
        """Nothing is open."""


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
        self._drawn: Drawn | None = None
        self._checksum: tuple[Drawn, int] | None = None
        self._next: tuple[Drawn, int, StepShape] | None = None  # of the batches being read ahead

    @property
    def unit(self) -> str:
        return self._order.unit

    @property
    def epoch_length(self) -> int | None:
        return self._order.length

    def units_shape(self, shape: StepShape) -> StepShape:
        return replace(shape, device_batch=1, least=1) if self.unit == "batch" else shape

    def begin(self, position: Position, seed: int, shape: StepShape) -> Step | None:
        drawn = self._draw(position.epoch, seed, shape.num_replicas)
        drawn.forget(position.consumed)
        shape = self.units_shape(shape)
        step = position.take(len(drawn), shape, drop_last=self._drop_last)
        if step is None:
            self._next = None
            return None
        if self._next is None or self._next[0] is not drawn or self._next[1:] != (step.start, shape):
            self._restart(drawn, step.start, shape)
        self._next = None  # until the last pass is read: a step left half-way must be read again
        return step

    def is_over(self, position: Position, shape: StepShape) -> bool:
        drawn = self._drawn
        if drawn is None or drawn.epoch != position.epoch or not position.consumed:
            return False
        return position.take(len(drawn), self.units_shape(shape), drop_last=self._drop_last) is None

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
        return {"checksum": self._checksum[1], "order": None if self._order.is_reproducible else drawn.all()}

    def adopt(self, state: LoaderState) -> None:
        epoch, seed, saved = state["epoch"], state["seed"], state["order"]
        if saved is None and (state["checksum"] is None or not self._order.is_reproducible):
            if state["position"]:
                raise InvalidValueError(f"this data state is in the middle of epoch {epoch}, but its order is missing")
            self._drawn = None
            return
        order = self._order.draw(epoch, seed, 1) if saved is None else list(saved)
        drawn = Drawn(epoch=epoch, seed=seed, order=order, is_batched=self.unit == "batch")
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

    def _draw(self, epoch: int, seed: int, num_replicas: int) -> Drawn:
        if self._drawn is None or (self._drawn.epoch, self._drawn.seed) != (epoch, seed):
            order = self._order.draw(epoch, seed, num_replicas)
            self._drawn = Drawn(epoch=epoch, seed=seed, order=order, is_batched=self.unit == "batch")
        return self._drawn

    def _restart(self, drawn: Drawn, position: int, shape: StepShape) -> None:
        self._stream.plan = _plan(drawn, position, shape, self._drop_last)
        if self._loader is None:
            self._loader = DataLoader(self._dataset, batch_sampler=self._stream, **self._options)
        # With persistent workers this keeps the processes, drops what they had read ahead and asks for the new plan.
        self._batches = iter(self._loader)


def _plan(drawn: Drawn, position: int, shape: StepShape, drop_last: bool) -> Iterator[list[Unit]]:
    """Index lists from ``position`` to the end of the epoch, for the workers to read ahead.

    A function and not a method: the workers' iterator holds it, and a reference cycle would keep the workers alive
    until a garbage collection.
    """
    while (step := divide(position, len(drawn), shape, drop_last=drop_last, epoch=drawn.epoch)) is not None:
        for positions in step.passes:
            indices = drawn.indices(positions or range(step.start, step.start + 1))
            # BatchNorm needs two examples; the mean over the same one twice is that of one.
            yield indices * shape.least if len(indices) < shape.least else indices
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
        first = start + (rank - start) % num_replicas
        return self._read(start, first + num_replicas * worker, num_replicas * num_workers)

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
    """Reads in order: position i of the stream belongs to rank i mod K, whatever the size of steps.

    Holds this rank's examples of the step under way: a new m or s, or a retry, reads nothing again. It reads one
    example beyond the step. If this rank has one beyond the step's M, the step is full; if not, the worker that should
    have had it knows the length of the stream. So all ranks agree on its end without communication.
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
        self._least = 1

    def units_shape(self, shape: StepShape) -> StepShape:
        return replace(shape, least=1) if shape.least > 1 else shape  # a rank has its own examples only

    def begin(self, position: Position, seed: int, shape: StepShape) -> Step | None:
        self._least, shape = shape.least, self.units_shape(shape)
        if self._begun is not None and position.consumed == self._start + self._begun.count:  # it was committed
            del self._buffer[: self._begun.own_count]
            self._start = position.consumed
        key = position.epoch, shape.num_replicas, shape.rank
        if self._key != key or self._start != position.consumed:
            self._restart(key, position.consumed)
        # A step's first example goes to the rank that has it, which is rank 0 only if all steps are multiples of K.
        shape = replace(shape, rank=(shape.rank - position.consumed) % shape.num_replicas)
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

    def is_over(self, position: Position, shape: StepShape) -> bool:
        return self._end is not None and self._key is not None and position.consumed >= self._end.total > 0

    def fetch(self, step: Step, index: int) -> object:
        low = sum(map(len, step.passes[:index]))
        examples = self._buffer[low : low + len(step.passes[index])]
        if not examples and self._end is not None:
            examples = [self._end.last]
        if len(examples) < self._least:
            examples = examples * self._least  # BatchNorm needs two; the mean over both is that of one
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
