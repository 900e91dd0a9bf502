"""The loader that ``run.dataloader`` returns: an elastic loader that tells the session where the user's loop is.

The user's loop iterates it. Asking for the next batch is the step boundary: the body of the loop is then over. To other
code it looks like a torch DataLoader with batch size M0.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from torch.utils.data import Dataset, IterableDataset, RandomSampler, Sampler, SequentialSampler, default_collate

from pollux.train.data import DEFAULT_PREFETCH_FACTOR, ElasticLoader, Pass
from pollux.train.order import length_of
from pollux.train.team import BrokenGroup


class Loop(Protocol):
    """The calls that a loader makes to the session."""

    @property
    def epoch(self) -> int: ...

    def start(self) -> None: ...
    def begin_loop(self) -> None: ...
    def begin_pass(self, current: Pass) -> None: ...
    def end_pass(self) -> None: ...
    def leave_loop(self) -> None: ...
    def end_loop(self) -> bool: ...
    def recover(self, error: BrokenGroup) -> None: ...


class AdaptiveLoader:
    """Made by ``run.dataloader``. Yields one batch per pass; a step may have several passes.

    ``len(loader)`` is the number of steps per epoch at M0, as of a DataLoader with this ``batch_size``: what a schedule
    over ``len(loader) * epochs`` steps needs. It does not change with replicas or the batch.
    """

    def __init__(
        self,
        elastic: ElasticLoader,
        session: Loop,
        complete: Callable[[], object],
        dataset: Dataset[object] | None,
        batch_size: int,
        options: Mapping[str, Any],
    ) -> None:
        self.elastic = elastic
        self._session, self._complete = session, complete
        self.dataset, self.batch_size = dataset, batch_size
        self.batch_sampler: Iterable[object] | None = options.get("batch_sampler")
        self.collate_fn: Callable[[list[Any]], object] = options.get("collate_fn") or default_collate
        self.num_workers: int = options.get("num_workers", 0)
        self.pin_memory: bool = options.get("pin_memory", False)
        self.drop_last: bool = options.get("drop_last", False)
        self.timeout: float = options.get("timeout_s", 0.0)
        self.worker_init_fn = options.get("worker_init_fn")
        self.multiprocessing_context = options.get("multiprocessing_context")
        self.prefetch_factor = options.get("prefetch_factor") or (DEFAULT_PREFETCH_FACTOR if self.num_workers else None)
        self.persistent_workers = self.num_workers > 0
        self.generator = None
        self._sampler: Iterable[object] | None = options.get("sampler")
        self._shuffle: bool = options.get("shuffle", False)

    @property
    def sampler(self) -> Iterable[object] | None:
        """The sampler that was given, or the kind that a DataLoader would have. Pollux draws the order itself."""
        if self._sampler is not None or self.dataset is None or isinstance(self.dataset, IterableDataset):
            return self._sampler
        kind: type[Sampler[int]] = RandomSampler if self._shuffle else SequentialSampler
        return kind(self.dataset)  # type: ignore[call-arg]

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: each epoch has an order of its own. For loops that call it on any loader or sampler."""

    def __len__(self) -> int:
        if self.batch_sampler is not None:
            return len(self.batch_sampler)  # type: ignore[arg-type]
        length = (
            None if self.dataset is None else length_of(self._sampler if self._sampler is not None else self.dataset)
        )
        if length is None:
            raise TypeError("the number of examples is not known in advance")
        return length // self.batch_size if self.drop_last else -(-length // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        session, elastic = self._session, self.elastic
        self._complete()
        session.start()
        session.end_pass()  # of a loop that was left by ``break``
        session.begin_loop()
        batches = iter(elastic)
        epoch = session.epoch
        while session.epoch == epoch:  # taking over the state of others may move this replica to the next epoch
            try:
                batch = next(batches)
            except StopIteration:
                if not session.end_loop():
                    return
                batches = iter(elastic)
                continue
            except BrokenGroup as error:
                session.recover(error)
                batches = iter(elastic)
                continue
            session.begin_pass(elastic.current)
            try:
                yield batch
            except GeneratorExit:  # ``break``, or the iterator was deleted: no collectives here
                session.leave_loop()
                raise
            session.end_pass()


def check_options(options: Mapping[str, object], dataloader: Callable[..., object]) -> None:
    """Raises TypeError, as Python does, for what ``run.dataloader`` does not take."""
    own = set(inspect.signature(dataloader).parameters) - {"self", "options"}
    allowed = own | set(inspect.signature(ElasticLoader).parameters) - {"shape", "share_order"}
    for name in options:
        if name not in allowed:
            close = difflib.get_close_matches(name, allowed, 1, cutoff=0.68)
            advice = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(sorted(allowed))}"
            raise TypeError(f"run.dataloader takes no {name!r}: {advice}")
