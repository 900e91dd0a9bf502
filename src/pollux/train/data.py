"""A data loader whose replicas, device batch and accumulation may change at any step boundary.

``run.dataloader(...)`` makes one; users may use it alone. :mod:`pollux.train.position` decides which positions of an
epoch a rank reads next; torch's own DataLoader reads them:

    loader = ElasticLoader(dataset, StepShape(device_batch=32), shuffle=True, num_workers=2)
    for x, y in loader:                     # one pass; a step is loader.step.num_passes of them
        (loss_fn(model(x), y) * loader.current.weight).backward()
        if loader.current.is_last:
            optimizer.step()
            loader.commit()                 # only now are these examples consumed
            loader.configure(StepShape(device_batch=64))   # from the next step on

Rules:

- Examples are consumed by :meth:`ElasticLoader.commit` only. After a failed step (out of memory, a lost peer),
  :meth:`ElasticLoader.retry` or a new iteration serves the same examples again.
- Worker processes live as long as the loader. They read at most ``prefetch_factor`` passes per worker ahead. On a
  change of shape, batches read ahead are discarded, and reading starts again at the committed position. Skipping is by
  index, so only discarded batches are read twice.
- A pass in which this rank has no example (only in the last step of an epoch) still yields a batch, of one example
  of the step, with ``weight`` 0: forward and backward must run, or the other ranks would wait in their collectives.
  With ``StepShape(least=2)``, for batch normalisation, examples are divided into pairs, and a batch of one example
  holds it twice.
- A ``sampler`` gives the order and length of an epoch. Every rank draws it once per epoch, with its ``generator``
  seeded from (seed, epoch). For a sampler without a generator, ``share_order`` fetches the order of rank 0, and that
  order is saved in the state, as it cannot be drawn again.
- With a ``batch_sampler`` the user's batch is the unit: one per rank and pass, never split or joined. Position and
  ``Step.count`` then count batches, ``device_batch`` is ignored, and weights still count examples.
- Every worker reads an IterableDataset *in full*: worker w of rank r keeps every (K·W)-th example. The dataset
  must give every worker the same stream: no sharding of its own, no unseeded shuffling; ``set_epoch`` is called
  if there is one. Batches are collated in the training process, so that m may change without loss. To start in the
  middle (a restore, or a change of replicas), the loader reads and drops the examples before, unless the dataset's
  ``__iter__`` takes ``start``, the number of examples to skip. Its ``state_dict`` is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from typing import Any, cast

import torch
from torch.utils.data import Dataset, IterableDataset, default_collate
from torch.utils.data.distributed import DistributedSampler

from pollux.errors import InvalidValueError, PolluxError
from pollux.train.order import DatasetOrder, Order, SamplerOrder, ShareOrder, length_of, torch_seed
from pollux.train.position import Position, Step, StepShape, check_seed, count_passes
from pollux.train.sources import LoaderOptions, LoaderState, MapSource, OwnBatches, StreamSource

STATE_VERSION = 1  # of ``state_dict``; others are refused
DEFAULT_PREFETCH_FACTOR = 2  # passes per worker, as in torch's DataLoader


@dataclass(slots=True)
class Pass:
    """The pass whose batch was yielded last. Not changed once it is made, as :class:`Step`."""

    step: Step
    index: int
    num_examples: int  # own, in this pass
    step_examples: int  # of all ranks and passes of the step
    is_last: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_last = self.index == self.step.num_passes - 1

    @property
    def is_filler(self) -> bool:
        """This rank had no example left: the batch is only there for the collectives, with weight 0."""
        return self.num_examples == 0

    @property
    def weight(self) -> float:
        """The factor for a mean loss: see :meth:`Step.weight`."""
        return self.num_examples * self.step.shape.num_replicas / self.step_examples


class ElasticLoader:
    """Yields this rank's batches, pass by pass, to the end of the epoch. See the module's rules.

    Iterating goes on at the committed position. After the end of an epoch, the next ``iter`` starts the next epoch.
    With ``auto_commit``, asking for the next step commits this one.
    Raises InvalidValueError for options that contradict each other.
    """

    def __init__(
        self,
        dataset: Dataset[object] | None,
        shape: StepShape,
        *,
        shuffle: bool = False,
        seed: int = 0,
        sampler: Iterable[object] | None = None,
        batch_sampler: Iterable[Sequence[object]] | None = None,
        collate_fn: Callable[[list[Any]], object] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        drop_last: bool = False,
        timeout_s: float = 0.0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        share_order: ShareOrder | None = None,
        auto_commit: bool = False,
    ) -> None:
        check_seed(seed)
        _check_options(dataset, shuffle, sampler, batch_sampler, drop_last, num_workers, prefetch_factor)
        self._shape, self._seed, self._drop_last, self._auto_commit = shape, seed, drop_last, auto_commit
        self._shuffle, self._length = shuffle, None if dataset is None else length_of(dataset)
        # The workers' seeds come from a generator of our own, so that a resize does not change the global random state.
        self._generator = torch.Generator().manual_seed(torch_seed(seed, shape.rank))
        workers: LoaderOptions = {
            "num_workers": num_workers,
            "persistent_workers": num_workers > 0,
            "timeout": timeout_s,
            "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context,
            "generator": self._generator,
        }
        prefetch = (prefetch_factor or DEFAULT_PREFETCH_FACTOR) if num_workers else None
        pins = pin_memory and torch.cuda.is_available()  # torch warns about pinning without a GPU
        self._source: MapSource | StreamSource | OwnBatches
        if dataset is None:
            self._source = OwnBatches()
        elif isinstance(dataset, IterableDataset):
            if prefetch:  # counts single examples for a stream, passes otherwise
                workers["prefetch_factor"] = prefetch * shape.device_batch
            self._source = StreamSource(dataset, collate_fn or default_collate, pins, drop_last, workers)
        else:
            order = _order_of(dataset, self._length, shuffle, seed, sampler, batch_sampler, share_order)
            workers |= {"prefetch_factor": prefetch, "collate_fn": collate_fn, "pin_memory": pins}
            self._source = MapSource(dataset, order, drop_last, workers)
        self._position = Position()
        self._open: Step | None = None  # begun, neither committed nor retried
        self._current: Pass | None = None
        self._is_exhausted = False
        self._turn = 0
        self._check_fit(shape)

    @property
    def epoch(self) -> int:
        return self._position.epoch

    @property
    def position(self) -> int:
        """Global examples (batches, with a batch_sampler) of this epoch that are consumed."""
        return self._position.consumed

    @property
    def shape(self) -> StepShape:
        """The shape of the next step to begin."""
        return self._shape

    @property
    def current(self) -> Pass:
        if self._current is None:
            raise PolluxError("no pass is under way: take a batch from the loader first")
        return self._current

    @property
    def step(self) -> Step:
        return self.current.step

    @property
    def identity(self) -> tuple[str | int | None, ...]:
        """Equal on replicas that read the same data in the same order."""
        return (self._source.unit, self._shuffle, self._length, self._source.epoch_length, self._drop_last)

    @property
    def epoch_length(self) -> int | None:
        """Examples per epoch; None if unknown in advance, or if batches are the unit."""
        return self._source.epoch_length if self._source.unit == "example" else None

    @property
    def unit(self) -> str:
        """The unit of positions: an "example", the user's "batch", an example of a "stream", or of the loop's "own"."""
        return self._source.unit

    def configure(self, shape: StepShape) -> None:
        """Set the shape of the next steps. A step under way keeps its shape, unless it is retried."""
        self._check_fit(shape)
        if shape.rank != self._shape.rank:  # for workers that are still to start
            self._generator.manual_seed(torch_seed(self._seed, shape.rank))
        self._shape = shape

    def commit(self) -> None:
        """Consume the examples of the step under way. Call it when the step is done on all ranks."""
        if self._open is None:
            raise PolluxError("no step to commit: it was committed or retried already, or none was begun")
        if not self.current.is_last:
            raise PolluxError(
                f"commit after pass {self.current.index + 1} of {self._open.num_passes}: a step is committed after its "
                "last pass (current.is_last)"
            )
        self._position.commit(self._open.count)
        self._open = None

    def retry(self) -> None:
        """Give up the step under way: the next batch begins a new attempt at the same examples."""
        self._open = None

    @property
    def is_over(self) -> bool:
        """Whether no step of this epoch is left."""
        return self._is_exhausted or self._source.is_over(self._position, self._shape)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of another epoch. The current epoch keeps its position."""
        if epoch != self.epoch:
            self._position.set_epoch(epoch)
            self._open, self._is_exhausted = None, False

    def __len__(self) -> int:
        """Passes per epoch with the present shape. TypeError if the length is unknown."""
        length = self._source.epoch_length
        if length is None:
            raise TypeError("the number of examples is not known in advance")
        shape = self._source.units_shape(self._shape)
        return count_passes(length, shape, drop_last=self._drop_last, epoch=self.epoch)

    def __iter__(self) -> Iterator[Any]:
        if self._is_exhausted:
            self.set_epoch(self.epoch + 1)
        self._turn += 1
        self._open = None
        return self._passes(self._turn)

    def _passes(self, turn: int) -> Iterator[object]:
        source = self._source
        while True:
            try:
                step = source.begin(self._position, self._seed, self._shape)
            except BaseException:  # the DataLoader may have lost a worker, and a reset would wait for it forever
                self.close()
                raise
            if step is None:
                break
            self._open = step
            for index in range(step.num_passes):
                try:
                    batch = source.fetch(step, index)
                    own, whole = source.num_examples(step.passes[index]), step.count
                    if source.unit == "batch":
                        whole = source.num_examples(range(step.start, step.start + step.count))
                    self._current = Pass(step, index, own, whole)
                except BaseException:
                    self.close()
                    raise
                yield batch
                if turn != self._turn:
                    raise PolluxError("this loader is being iterated elsewhere: use one iteration at a time")
                if self._open is not step:  # committed, or retried
                    break
            else:
                if not self._auto_commit:
                    raise PolluxError(
                        "the loop asks for the next step, but this one was neither committed nor retried: "
                        "call commit() or retry(), or use auto_commit=True"
                    )
                self.commit()
        self._current, self._is_exhausted = None, True

    def state_dict(self) -> LoaderState:
        """The position after the committed steps. It holds nothing about ranks: any number of them can go on."""
        return {
            "version": STATE_VERSION,
            "unit": self._source.unit,
            "epoch": self.epoch,
            "position": self.position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "length": self._length,
            **self._source.order_state(self.epoch, self._seed),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from a saved position, with the present shape and rank. A step under way is given up.

        Raises InvalidValueError, with nothing changed, for the state of another dataset, order or version.
        """
        saved = _checked_state(state)
        expected = {"unit": self._source.unit, "shuffle": self._shuffle, "length": self._length}
        for key, own in expected.items():
            if state[key] != own:
                raise InvalidValueError(
                    f"this data state was saved with {key} = {state[key]!r}, but the loader has {own!r}: "
                    "it belongs to another dataset or loader"
                )
        self._source.adopt(saved)
        self._position = Position(epoch=saved["epoch"], consumed=saved["position"])
        self._seed = saved["seed"]
        self._open, self._is_exhausted = None, False

    def close(self) -> None:
        """End the worker processes. Iterating again starts new ones, also after a worker was killed."""
        self._open = None
        self._source.close()

    def __enter__(self) -> ElasticLoader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_fit(self, shape: StepShape) -> None:
        length = self._source.epoch_length
        total = self._source.units_shape(shape).total
        if self._drop_last and length is not None and total > length:
            raise InvalidValueError(
                f"a step of {total} examples never fits into an epoch of {length} with drop_last: "
                "use a smaller batch or drop_last=False"
            )


# --- checks, and the order of a sampler --------------------------------------------------------------------------


def _check_options(
    dataset: Dataset[object] | None,
    shuffle: bool,
    sampler: Iterable[object] | None,
    batch_sampler: Iterable[object] | None,
    drop_last: bool,
    num_workers: int,
    prefetch_factor: int | None,
) -> None:
    if num_workers < 0:
        raise InvalidValueError(f"{num_workers} workers; 0 (read in the training process) or more are needed")
    if prefetch_factor is not None and (prefetch_factor < 1 or num_workers == 0):
        raise InvalidValueError(
            f"prefetch_factor {prefetch_factor} with {num_workers} workers; it must be at least 1 and needs workers"
        )
    given = [name for name, one in (("sampler", sampler), ("batch_sampler", batch_sampler)) if one is not None]
    if len(given) == 2:
        raise InvalidValueError("both sampler and batch_sampler were given; pass one of them")
    if given and shuffle:
        raise InvalidValueError(f"shuffle=True with a {given[0]}, which already gives the order: leave shuffle out")
    if batch_sampler is not None and drop_last:
        raise InvalidValueError("drop_last with a batch_sampler: let the batch_sampler drop its last batch")
    if isinstance(dataset, IterableDataset) and (given or shuffle):
        raise InvalidValueError(
            f"{given[0] if given else 'shuffle=True'} with an IterableDataset, which gives its own order; "
            "shuffle inside the dataset (seeded by set_epoch)"
        )
    for one in (sampler, batch_sampler):
        if isinstance(one, DistributedSampler) or isinstance(getattr(one, "sampler", None), DistributedSampler):
            raise InvalidValueError(
                "a DistributedSampler gives one rank's share, but Pollux divides the data among ranks: use "
                "shuffle=True or a sampler over the whole dataset"
            )
        if isinstance(one, Iterator):
            raise InvalidValueError(
                f"{type(one).__name__} can be iterated only once; a sampler is iterated every epoch: pass an iterable"
            )


def _order_of(
    dataset: Dataset[object],
    length: int | None,
    shuffle: bool,
    seed: int,
    sampler: Iterable[object] | None,
    batch_sampler: Iterable[object] | None,
    share: ShareOrder | None,
) -> Order:
    if length == 0:
        raise InvalidValueError(f"{type(dataset).__name__} has 0 examples; at least 1 is needed")
    order: Order
    if batch_sampler is not None:
        order = SamplerOrder(batch_sampler, "batch", share)
    elif sampler is not None:
        order = SamplerOrder(sampler, "example", share)
    elif length is None:
        raise InvalidValueError(
            f"{type(dataset).__name__} has no length: add __len__, pass a sampler that names what to read, or make it "
            "an IterableDataset"
        )
    else:
        return DatasetOrder(length, shuffle, seed)
    if order.length == 0:
        raise InvalidValueError(
            f"{type(batch_sampler if sampler is None else sampler).__name__} has length 0; at least 1 is needed"
        )
    return order


def _checked_state(state: Mapping[str, object]) -> LoaderState:
    missing = {"version", "unit", "epoch", "position", "seed", "shuffle", "length", "checksum", "order"} - set(state)
    if missing:
        raise InvalidValueError(
            f"not a data state: {', '.join(sorted(missing))} missing; pass what state_dict() returned"
        )
    if state["version"] != STATE_VERSION:
        raise InvalidValueError(
            f"data state of version {state['version']!r}; this Pollux reads version {STATE_VERSION}"
        )
    for key in ("epoch", "position", "seed"):
        value = state[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InvalidValueError(f"data state with {key} = {value!r}; a whole number, 0 or more, is needed")
    return cast(LoaderState, state)
