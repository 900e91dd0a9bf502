"""Hugging Face's ``Trainer``, elastic and adaptive. Scripts import ``Trainer`` and ``TrainingArguments`` from here.

The loop is that of :mod:`pollux.train`; losses, evaluation, saving, logging, callbacks and schedules are the trainer's
own. To it every replica is alone: it evaluates all of the data itself, and the replica of rank 0 writes.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import torch

from pollux import train
from pollux.errors import InvalidValueError
from pollux.integrations.huggingface_arguments import (
    ElasticArguments,
    TrainingArguments,
    check_arguments,
    check_optimizer,
    check_trainer,
)
from pollux.integrations.one_process import needs, one_process

with needs("transformers", "hf"):
    import transformers
    from transformers.optimization import GreedyLR
    from transformers.trainer_callback import TrainerControl, TrainerState
    from transformers.trainer_utils import TrainOutput

if TYPE_CHECKING:
    from transformers import Trainer as _Base  # what subclasses mix it into
else:
    _Base = object

__all__ = ["ElasticArguments", "ElasticTrainer", "Seq2SeqTrainer", "Trainer", "TrainingArguments"]

_BY_METRIC = (torch.optim.lr_scheduler.ReduceLROnPlateau, GreedyLR)
_KEPT = ("epoch", "global_step", "log_history", "best_metric", "best_global_step", "best_model_checkpoint")


class _TrainerProgress:
    """What the trainer remembers, in Pollux's checkpoints and for replicas that join."""

    def __init__(self, trainer: ElasticTrainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, str | int]:
        state: TrainerState = self._trainer.state
        kept = {name: getattr(state, name) for name in (*_KEPT, "total_flos", "num_input_tokens_seen")}
        return {"state": json.dumps(kept), "last_logged": self._trainer._globalstep_last_logged}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for name, value in json.loads(saved["state"]).items():
            setattr(self._trainer.state, name, value)
        self._trainer._globalstep_last_logged = saved["last_logged"]


class ElasticTrainer(_Base):
    """A mix-in for ``transformers.Trainer`` and its subclasses (TRL's, too), to be named before them."""

    control: TrainerControl
    optimizer: torch.optim.Optimizer

    def __init__(self, *given: Any, **options: Any) -> None:
        """One of them is ``args``: of this module's :class:`TrainingArguments`, or with :class:`ElasticArguments`.

        Its place differs between trainers: DPO's has the reference model before it.
        """
        named: Any = options.get("args", given[1] if len(given) > 1 else None)
        args: Any = next((one for one in given if isinstance(one, ElasticArguments)), named)
        check_arguments(args)
        check_trainer(type(self), ElasticTrainer)
        self.run = train.init()
        args.follow(lambda: int(self.run.rank))
        with one_process():
            super().__init__(*given, **options)
        self._loss_sum, self._num_losses, self._num_tokens = 0.0, 0, 0
        self._is_new_step = True

    # --- data, model, optimizer ---------------------------------------------------------------------------------

    def get_train_dataloader(self) -> train.AdaptiveLoader:
        args, dataset = self.args, self.train_dataset
        if dataset is None:
            raise InvalidValueError("Trainer was given no train_dataset; training needs one")
        if hasattr(dataset, "column_names") and hasattr(dataset, "remove_columns"):
            dataset, collate = self._remove_unused_columns(dataset, "training"), self.data_collator
        else:
            collate = self._get_collator_with_removed_columns(self.data_collator, "training")
        return self.run.dataloader(
            dataset,
            batch_size=args.per_device_train_batch_size,
            max_batch_size=args.max_batch_size,
            device_batch_size=None if args.device_batch_size is None else (1, args.device_batch_size),
            shuffle=not (
                isinstance(dataset, torch.utils.data.IterableDataset) or args.train_sampling_strategy == "sequential"
            ),
            seed=args.seed if args.data_seed is None else args.data_seed,
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and self.run.device.type == "cuda",
            drop_last=args.dataloader_drop_last,
        )

    def _prepare(self, max_steps: int, loader: train.AdaptiveLoader) -> torch.nn.Module:
        self.create_optimizer()
        check_optimizer(self.optimizer)
        self.create_scheduler(num_training_steps=max_steps)
        if self.args.torch_compile:
            self.model.compile(backend=self.args.torch_compile_backend, mode=self.args.torch_compile_mode)
        unused = self.args.ddp_find_unused_parameters
        model: torch.nn.Module
        model, self.optimizer = self.run.prepare(
            self.model,
            self.optimizer,
            self.lr_scheduler,
            scaling=self.args.scaling,
            **({} if unused is None else {"find_unused_parameters": unused}),
        )
        self.model_wrapped = model
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = loader
        return model

    # --- the loop -----------------------------------------------------------------------------------------------

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: object = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        if resume_from_checkpoint is not None or trial is not None:
            what = "a trial" if trial is not None else f"resume_from_checkpoint={resume_from_checkpoint!r}"
            raise InvalidValueError(
                f"{what} cannot be used with an elastic trainer: it resumes by itself, from POLLUX_CHECKPOINT_DIR"
            )
        run, loader = self.run, self.get_train_dataloader()
        num_epochs = int(-(-args.num_train_epochs // 1))
        max_steps = args.max_steps if args.max_steps > 0 else int(len(loader) * args.num_train_epochs)
        num_epochs = max(num_epochs, -(-max_steps // len(loader)))
        self._init_training_state(max_steps, len(loader), num_epochs, None, None)
        model = self._prepare(max_steps, loader)
        self._tr_loss = torch.tensor(0.0, device=args.device)
        self._total_loss_scalar, self._globalstep_last_logged = 0.0, 0
        self._initial_global_step = self._initial_num_input_tokens_seen = 0
        self.current_gradient_accumulation_steps = 1
        run.track("trainer", _TrainerProgress(self))
        began_at, has_begun = time.time(), False
        for epoch in run.epochs(num_epochs):
            if not has_begun:  # the state of an interrupted run is there now
                has_begun, self._initial_global_step = True, self.state.global_step
                self._follow_rank()
                self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
                if args.eval_on_start:
                    self._evaluate(None, ignore_keys_for_eval, skip_scheduler=True)
            self.control = self.callback_handler.on_epoch_begin(args, self.state, self.control)
            for inputs in loader:
                with run.attempt():
                    self._train_pass(model, inputs, epoch, ignore_keys_for_eval, began_at)
                if self.control.should_epoch_stop or self.control.should_training_stop:
                    break
            self.control = self.callback_handler.on_epoch_end(args, self.state, self.control)
            self._look_after(model, None, epoch, ignore_keys_for_eval, began_at)
            if self.control.should_training_stop and epoch + 1 < num_epochs:
                break
        self._gather_loss()
        output: TrainOutput = self._finalize_training(None, len(self.train_dataset) * num_epochs, began_at)
        return output

    def _train_pass(
        self, model: torch.nn.Module, inputs: Any, epoch: int, ignore: list[str] | None, began_at: float
    ) -> None:
        run = self.run
        args, state = self.args, self.state
        is_last = run.is_last_pass
        if self._is_new_step:
            self.control = self.callback_handler.on_step_begin(args, state, self.control)
        self._is_new_step = is_last
        with self.accelerator.autocast():
            loss = self.training_step(model, inputs)
        self._loss_sum, self._num_losses = self._loss_sum + float(loss), self._num_losses + 1
        self.current_flos += float(self.floating_point_ops(inputs))
        self._count_tokens(inputs)
        norm = self._clip_grad_norm(model) if is_last and args.max_grad_norm > 0 else None
        if is_last:
            self.control = self.callback_handler.on_pre_optimizer_step(args, state, self.control)
        self.optimizer.step()
        if is_last:
            self.control = self.callback_handler.on_optimizer_step(args, state, self.control)
        rate = self._get_learning_rate()
        if not isinstance(self.lr_scheduler, _BY_METRIC):  # these step when there is an evaluation
            self.lr_scheduler.step()
        self.optimizer.zero_grad()
        if not is_last:
            self.control = self.callback_handler.on_substep_end(args, state, self.control)
            return
        self._follow_rank()
        state.global_step = run.num_steps + 1
        state.epoch = min(max((run.progress.step_number + 1) / run.steps_per_epoch, epoch), epoch + 1.0)
        self.control = self.callback_handler.on_step_end(args, state, self.control)
        if args.max_batch_size is not None and run.progress.step_number + 1 >= state.max_steps:
            self.control.should_training_stop = True
        self._look_after(model, norm, epoch, ignore, began_at, rate)

    def _look_after(
        self,
        model: torch.nn.Module,
        norm: torch.Tensor | float | None,
        epoch: int,
        ignore: list[str] | None,
        began_at: float,
        rate: float | None = None,
    ) -> None:
        """Log, evaluate and save where it is due, as the trainer does; the loss is that of all replicas."""
        if self.control.should_log:
            self._gather_loss()
        self._maybe_log_save_evaluate(self._tr_loss, norm, model, None, epoch, ignore, began_at, learning_rate=rate)

    def _gather_loss(self) -> None:
        """Give the trainer the mean loss of all replicas since it logged last, as its sum over steps."""
        num_steps = self.state.global_step - self._globalstep_last_logged
        if num_steps > 0:
            total, count, tokens = self.run.sum(self._loss_sum, self._num_losses, self._num_tokens)
            self._loss_sum, self._num_losses, self._num_tokens = 0.0, 0, 0
            self.state.num_input_tokens_seen += int(tokens)
            self._tr_loss.fill_(total / max(count, 1.0) * num_steps)

    def _count_tokens(self, inputs: Any) -> None:
        """This replica's, until they are added up with the loss."""
        before = self.state.num_input_tokens_seen
        self._track_num_input_tokens(inputs)
        self._num_tokens += self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before

    def _save_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
        """By one replica; the others wait, as they may load it at the end."""
        if self.run.is_main:
            super()._save_checkpoint(model, trial)
        self.run.sum(0.0)
        if self.state.best_global_step:
            best = os.path.join(self.args.output_dir, f"checkpoint-{self.state.best_global_step}")
            self.state.best_model_checkpoint = best if os.path.exists(best) else None

    def log(self, logs: dict[str, float], *more: Any, **options: Any) -> None:
        super().log(logs, *more, **options)
        self.run.log(**{name: value for name, value in logs.items() if isinstance(value, int | float)})

    # --- who this replica is ------------------------------------------------------------------------------------

    def _follow_rank(self) -> None:
        state: TrainerState = self.state
        state.is_world_process_zero = state.is_local_process_zero = bool(self.run.is_main)

    def is_world_process_zero(self) -> bool:
        return bool(self.run.is_main)

    def is_local_process_zero(self) -> bool:
        return bool(self.run.is_main)


class Trainer(ElasticTrainer, transformers.Trainer):
    """``transformers.Trainer`` that is resized, killed and resumed while it trains."""


class Seq2SeqTrainer(ElasticTrainer, transformers.Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer``, likewise."""
