"""Refuses what of Lightning's options cannot be elastic, before the first step. The strategy calls it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pollux.errors import InvalidValueError
from pollux.integrations.one_process import needs

with needs("lightning", "lightning"):
    from lightning.pytorch.callbacks import (
        BatchSizeFinder,
        GradientAccumulationScheduler,
        LearningRateFinder,
        StochasticWeightAveraging,
    )
    from lightning.pytorch.core.optimizer import _MockOptimizer

_CALLBACKS = {
    BatchSizeFinder: "Pollux finds the batch size",
    GradientAccumulationScheduler: "Pollux accumulates by itself",
    LearningRateFinder: "find the rate in a run of its own",
    StochasticWeightAveraging: "it replaces the schedule in the middle of training; use WeightAveraging of your own",
}
Problem = tuple[str, str]  # the option with its value, and what to do instead


def check_trainer(trainer: Any, max_batch_size: int | None) -> None:
    """Check what does not depend on the optimizer.

    Raises:
        InvalidValueError: names the first option that cannot be used, its value, and what to do instead.
    """
    _refuse(_trainer_problems(trainer, max_batch_size))


def check_optimizers(optimizers: list[Any], schedulers: list[Any]) -> None:
    """Check what ``configure_optimizers`` has returned.

    Raises:
        InvalidValueError: there is not one optimizer with at most one scheduler that is stepped every time.
    """
    _refuse(_optimizer_problems(optimizers, schedulers))


def _refuse(problems: Iterator[Problem]) -> None:
    for what, advice in problems:
        raise InvalidValueError(f"{what} cannot be used with PolluxStrategy: {advice}")


def _trainer_problems(trainer: Any, max_batch_size: int | None) -> Iterator[Problem]:
    connector = trainer._accelerator_connector
    devices = connector._devices_flag
    if (isinstance(devices, int) and devices > 1) or (isinstance(devices, list | tuple) and len(devices) > 1):
        yield f"devices={devices!r}", "a replica has one device, and Pollux chooses how many replicas there are"
    if devices == -1:
        yield "devices=-1", "a replica has one device; leave it out"
    if trainer.num_nodes > 1 or connector._num_nodes_flag > 1:
        yield f"num_nodes={connector._num_nodes_flag}", "Pollux chooses the nodes; leave it out"
    if trainer.accumulate_grad_batches != 1:
        yield (
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}",
            "Pollux accumulates by itself: give the loader the whole batch, and the strategy device_batch_size",
        )
    if max_batch_size is not None and trainer.max_steps != -1:
        yield (
            f"max_steps={trainer.max_steps} with max_batch_size={max_batch_size}",
            "a step of a larger batch is worth several: give max_epochs, or no max_batch_size",
        )
    if trainer.max_steps == -1 and trainer.fit_loop.max_epochs in (None, -1):
        yield "max_epochs=-1", "a run must know its end: give max_epochs or max_steps"
    if trainer.limit_train_batches != 1.0 and not trainer.fast_dev_run:
        yield f"limit_train_batches={trainer.limit_train_batches}", "train on a torch.utils.data.Subset"
    if trainer.overfit_batches:
        yield f"overfit_batches={trainer.overfit_batches}", "train on a torch.utils.data.Subset"
    if trainer.reload_dataloaders_every_n_epochs:
        yield "reload_dataloaders_every_n_epochs", "a run trains on one loader"
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        yield "val_check_interval as a time", "replicas have different clocks: give a number"
    if connector._layer_sync is not None:
        yield "sync_batchnorm", "its collectives do not survive a lost replica; leave it out"
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        yield f"precision={trainer.precision!r}", "use 'bf16-mixed', which needs no loss scaling"
    if trainer.ckpt_path is not None:
        yield f"ckpt_path={trainer.ckpt_path!r}", "a run resumes by itself, from POLLUX_CHECKPOINT_DIR"
    if not trainer.lightning_module.automatic_optimization:
        yield "automatic_optimization=False", "let Lightning step the optimizer, or use pollux.train itself"
    for callback in trainer.callbacks:
        for kind, advice in _CALLBACKS.items():
            if isinstance(callback, kind):
                is_default = kind is GradientAccumulationScheduler and set(callback.scheduling.values()) == {1}
                if not is_default:
                    yield kind.__name__, advice


def _optimizer_problems(optimizers: list[Any], schedulers: list[Any]) -> Iterator[Problem]:
    made = [one for one in optimizers if not isinstance(one, _MockOptimizer)]  # Lightning's, where there is none
    if len(made) != 1:
        yield f"configure_optimizers with {len(made)} optimizers", "return one, or use pollux.train itself"
    if len(schedulers) > 1:
        yield (
            f"configure_optimizers with {len(schedulers)} schedulers",
            "chain them by ChainedScheduler or SequentialLR",
        )
    for config in schedulers:
        if config.interval == "step" and config.frequency != 1:
            yield f"a scheduler with frequency={config.frequency} steps", "let the scheduler itself count"
