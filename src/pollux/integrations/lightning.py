"""Lightning's ``Trainer``, elastic and adaptive: ``Trainer(strategy=PolluxStrategy())``. Needs lightning.

The loop is Lightning's, over the epochs and the loader of a run. To Lightning every replica is alone: it validates all
of the data itself, and the replica of rank 0 writes.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from pollux import train
from pollux.errors import InvalidValueError
from pollux.integrations.lightning_loops import ElasticFitLoop
from pollux.integrations.lightning_options import check_optimizers, check_trainer
from pollux.integrations.lightning_state import TrainerProgress, continue_csv
from pollux.integrations.one_process import needs
from pollux.integrations.torch_loader import BatchOptions, elastic_loader
from pollux.train.live import Rank
from pollux.train.loader import AdaptiveLoader
from pollux.train.run import Run
from pollux.train.scaling import ScalingRule

with needs("lightning", "lightning"):
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies.strategy import Strategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

__all__ = ["PolluxCallback", "PolluxStrategy"]


class PolluxCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Reports Lightning's metrics to the cluster, and Pollux's values to Lightning's loggers.

    The strategy adds one if there is none.
    """

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        run = trainer.strategy.run
        if not run.is_last_pass or not trainer.loggers or (run.num_steps + 1) % max(trainer.log_every_n_steps, 1):
            return
        values = {"pollux/replicas": float(run.world_size), "pollux/noise_scale": run.noise_scale}
        if run.batch is not None:
            values["pollux/batch"] = float(run.batch.total)
        known = {name: value for name, value in values.items() if value == value}  # NaN is not known yet
        for logger in trainer.loggers:
            logger.log_metrics(known, step=run.num_steps)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._report(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._report(trainer)

    def _report(self, trainer: Any) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        if metrics:
            trainer.strategy.run.log(**metrics)


class PolluxStrategy(Strategy):  # type: ignore[misc, unused-ignore]
    """One replica of a job that is resized while it trains.

    The batch size of the training loader is M0, the total batch for which the learning rate was tuned.
    ``max_batch_size`` and ``device_batch_size`` are those of ``run.dataloader``; ``scaling`` and ``ddp_options`` those
    of ``run.prepare``. ``run`` is there from the beginning of ``trainer.fit``.
    """

    strategy_name = "pollux"

    def __init__(
        self,
        *,
        max_batch_size: int | None = None,
        device_batch_size: int | tuple[int, int] | None = None,
        scaling: str | ScalingRule = "auto",
        checkpoint_dir: str | Path | None = None,
        **ddp_options: Any,
    ) -> None:
        super().__init__()
        self._batch: BatchOptions = {"max_batch_size": max_batch_size, "device_batch_size": device_batch_size}
        self._scaling, self._checkpoint_dir, self._ddp_options = scaling, checkpoint_dir, ddp_options
        self._run: Run | None = None
        self._loader: AdaptiveLoader | None = None
        self._has_joined = self._was_main = False
        self._on_sigterm: Any = None
        self._trainer: Any = None
        self.is_in_pass = False  # a batch of training is under way

    @property
    def run(self) -> Run:
        if self._run is None:
            raise InvalidValueError("PolluxStrategy has no run yet: it begins with trainer.fit(...)")
        return self._run

    @property
    def loader(self) -> AdaptiveLoader:
        assert self._loader is not None
        return self._loader

    # --- setting up -----------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        if self._run is None:
            device = "cpu" if isinstance(self.accelerator, CPUAccelerator) else None
            self._run = train.init(checkpoint_dir=self._checkpoint_dir, device=device)
        # Before this replica has joined, it does not know whether it is the one that logs.
        rank_zero_only.rank = Rank(lambda: 0 if self._has_joined and self.run.is_main else 1)
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Raises InvalidValueError for what cannot be elastic, on every replica, before it joins the others."""
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        if self._loader is not None:
            raise InvalidValueError("trainer.fit was called twice: a PolluxStrategy trains once")
        check_trainer(trainer, self._batch["max_batch_size"])
        self._trainer = trainer
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        trainer.fit_loop = ElasticFitLoop(trainer, self)
        if not any(isinstance(callback, PolluxCallback) for callback in trainer.callbacks):
            trainer.callbacks.insert(0, PolluxCallback())
        super().setup(trainer)
        check_optimizers(self.optimizers, self.lr_scheduler_configs)
        trainer.fit_loop.setup_data()
        seed = int(os.environ.get("PL_GLOBAL_SEED") or 0)
        self._loader = elastic_loader(self.run, trainer.train_dataloader, self._batch, seed=seed)
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        self.model, _ = self.run.prepare(
            self.lightning_module,
            self.optimizers[0],
            schedulers[0] if schedulers else None,
            scaling=self._scaling,
            **self._ddp_options,
        )
        self.optimizers[0].register_step_post_hook(self._on_step)
        self.run.track("lightning", TrainerProgress(trainer))

    def _on_step(self, *_: Any) -> None:
        self._trainer.fit_loop.epoch_loop.has_stepped = True

    def join(self) -> None:
        """The run has the state: this replica knows which one it is, and Lightning's handler of SIGTERM goes."""
        self._has_joined = True
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._follow_rank()

    def begin_pass(self) -> None:
        """A batch is there: the replicas may have changed."""
        self.is_in_pass = True
        self._follow_rank()

    def _follow_rank(self) -> None:
        """The replica that becomes rank 0 goes on with the files of the one before."""
        is_main = bool(self.run.is_main)
        if is_main and not self._was_main:
            for logger in self._trainer.loggers:
                continue_csv(logger)
                logger.log_hyperparams(self._trainer.lightning_module.hparams_initial)
        self._was_main = is_main

    def on_exception(self, exception: BaseException) -> None:
        """A replica that leaves writes nothing more, unless it was the one that writes."""
        self._has_joined = self._was_main

    # --- one replica ----------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        return self.run.device

    def model_to_device(self) -> None:
        self.lightning_module.to(self.root_device)

    @property
    def is_global_zero(self) -> bool:
        return int(os.environ.get("RANK") or 0) == 0 if self._run is None else bool(self._run.is_main)

    @property
    def global_rank(self) -> int:
        return int(os.environ.get("RANK") or 0) if self._run is None else int(self._run.rank)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Over all replicas, of what is logged in a training step; elsewhere every replica has seen all."""
        if not self.is_in_pass or self._trainer is None or not self._trainer.training:
            return tensor
        value = torch.as_tensor(tensor)
        is_sum = str(reduce_op).lower().endswith("sum")
        total = self.run.sum(value) if is_sum else self.run.mean(value)
        return torch.full_like(value.detach(), total, dtype=torch.get_default_dtype())

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """What all replicas do, at a point of the loop that all of them come to."""
        if not self._has_joined:
            return decision
        num_yes, num_replicas = self.run.sum(float(decision), 1.0)
        return bool(num_yes == num_replicas if all else num_yes > 0)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Decisions of rank 0. Other values are the same on all replicas, or come with the run's state."""
        if not isinstance(obj, bool) or not self._has_joined:
            return obj
        return bool(self.run.sum(float(obj) if self.run.is_main else 0.0))

    def barrier(self, name: str | None = None) -> None:
        """None is needed: replicas wait for each other in their steps."""

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        return tensor

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self.lightning_module.validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self.lightning_module.test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self.lightning_module.predict_step(*args, **kwargs)
