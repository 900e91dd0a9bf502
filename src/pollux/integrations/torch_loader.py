"""Makes a run's training loader from a torch ``DataLoader``, which is what people give to a framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from pollux.errors import InvalidValueError
from pollux.train.loader import AdaptiveLoader
from pollux.train.run import Run


class BatchOptions(TypedDict):
    """See ``run.dataloader``."""

    max_batch_size: int | None
    device_batch_size: int | tuple[int, int] | None


def elastic_loader(
    run: Run,
    loader: DataLoader[Any],
    batch: BatchOptions,
    *,
    seed: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> AdaptiveLoader:
    """The same data and options; the loader's batch size is M0. ``collate_fn`` takes the place of the loader's.

    Raises:
        InvalidValueError: the loader has a batch sampler of its own, or drops the tail of an adaptive batch.
    """
    is_plain = loader.batch_size is not None and type(loader.batch_sampler) in (BatchSampler, type(None))
    if not is_plain:
        raise InvalidValueError("the training loader has a batch_sampler of its own; give it batch_size instead")
    if loader.drop_last and batch["max_batch_size"] is not None:
        raise InvalidValueError(
            "drop_last with max_batch_size: how much is dropped would depend on the batch; leave one of them out"
        )
    is_random = isinstance(loader.sampler, RandomSampler)
    is_known = is_random or isinstance(loader.sampler, SequentialSampler)
    is_stream = isinstance(loader.dataset, IterableDataset)
    return run.dataloader(
        loader.dataset,
        loader.batch_size or 1,
        **batch,
        shuffle=is_random and not is_stream,
        seed=seed,
        sampler=None if is_known or is_stream else loader.sampler,
        collate_fn=collate_fn or loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout_s=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
    )
