"""One of the user's models with its optimizer and LR scheduler, and the hooks that the run attaches to them.

``run.prepare`` makes one for each model; :mod:`pollux.train.trainees` uses it. Users keep their own objects. A
communication hook, step hooks and gates are attached to them, and :meth:`Trainee.detach` removes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import OneCycleLR

from pollux.errors import InvalidValueError
from pollux.train.alignment import Alignment
from pollux.train.elastic_model import DDPOptions, ElasticModel, KeptBuffers, broadcast_buffers, set_buffers
from pollux.train.gates import Gate, gate_optimizer, gate_scheduler
from pollux.train.gradients import GradientHook
from pollux.train.norm_layers import NormLayers
from pollux.train.scaling import AUTO, RateState, ScaledRate, ScalingRule, StepContext, rule_for
from pollux.train.sharded_gradients import ShardedGradients
from pollux.train.sharded_model import ModelShards, ShardedModel, SmallState, check_shardable
from pollux.train.sharded_module import WAY, ShardFunction
from pollux.train.state import Stateful, load_optimizer, signature_of
from pollux.train.team import Team


class Steps(Protocol):
    """The session's methods that the hooks on the user's objects call."""

    def has_pass(self) -> bool: ...
    def is_last_pass(self) -> bool: ...
    def is_whole_step(self) -> bool: ...
    def gradients_are_good(self) -> bool: ...
    def may_step(self) -> bool: ...
    def on_stepped(self, is_whole: bool) -> None: ...
    def num_scheduler_steps(self, trainee: Trainee) -> int: ...
    def context(self, index: int) -> StepContext: ...
    def is_at_m0(self) -> bool: ...
    def on_ready(self) -> None: ...
    def warn(self, message: str) -> None: ...
    def on_gradient(self, trainee: Trainee) -> None: ...
    def on_last(self) -> None: ...
    def confirm(self) -> None: ...
    def on_forward(self, trainee: Trainee, error: BaseException | None) -> bool: ...
    def on_rebuild(self) -> None: ...


class TraineeState(TypedDict):
    model: dict[str, Any] | None  # None for a sharded model
    optimizer: dict[str, Any] | None
    sharded: SmallState | None  # without the shards: see :attr:`Trainee.shards`
    rate: RateState
    scheduler: dict[str, Any] | None
    credited_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The user's objects that belong together: what ``run.prepare`` is given for one model."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: Stateful | None
    scaling: str | ScalingRule
    shard: ShardFunction | None = None
    shard_copies: int = 1


class Trainee:
    """``index`` is its place among the run's models; ``closes``: see :meth:`GradientHook.close`."""

    def __init__(
        self,
        parts: Parts,
        index: int,
        grad_scaler: torch.amp.GradScaler | None,
        team: Team,
        steps: Steps,
        ddp_options: DDPOptions,
        closes: bool = False,
    ) -> None:
        model, optimizer, lr_scheduler, scaling = parts.model, parts.optimizer, parts.lr_scheduler, parts.scaling
        check_trainable(model, optimizer, lr_scheduler)
        if parts.shard is not None:
            check_shardable(model, optimizer, parts.shard, parts.shard_copies)
        self.module, self.optimizer, self.index = model, optimizer, index
        self._scheduler, self._scaler, self._steps, self._closes = lr_scheduler, grad_scaler, steps, closes
        self.is_applied = False  # the optimizer has made the step under way
        self.credited_epoch = -1  # the last one for which the scheduler was stepped between epochs
        self._has_outlived_schedule = False
        self.signature = signature_of(model, optimizer)
        self._may_skip = bool(ddp_options.get("find_unused_parameters"))
        self._used: set[int] = set()  # identities of parameters that earlier passes of the step have used
        context = partial(steps.context, index)
        self.rate = ScaledRate(optimizer, scaling, context, glides=True, is_at_m0=steps.is_at_m0)
        self.alignment = Alignment(optimizer)
        self.rate.is_earned = scaling == AUTO  # a rule that the user names is followed without evidence
        self.norm_layers = NormLayers(
            model, optimizer, loss_scale=self.loss_scale, beta_exponent=lambda: self.rate.beta_exponent
        )
        self.hook: GradientHook | ShardedGradients
        self.model: ElasticModel | ShardedModel
        self.shards: ModelShards | None = None
        try:
            if parts.shard is None:
                self.hook, self.model = self._replicate(team, ddp_options)
            else:
                self.hook, self.model, self.shards = self._shard(parts, team, ddp_options)
        except BaseException:
            self.rate.detach()  # a second call of run.prepare would scale twice
            raise
        self._has_buffers, self._has_sent_buffers = any(True for _ in model.buffers()), False
        self._kept_buffers: KeptBuffers = []  # as they were before the step under way
        self.has_batch_norm = any(isinstance(layer, _BatchNorm) for layer in model.modules())
        self.model.on_forward, self.model.on_rebuild = partial(steps.on_forward, self), steps.on_rebuild
        self._gates: list[Gate] = [gate_optimizer(optimizer, self)]
        if lr_scheduler is not None:
            self._gates.append(gate_scheduler(lr_scheduler, partial(steps.num_scheduler_steps, self)))

    def begin_step(self) -> None:
        self.is_applied = self._has_sent_buffers = False
        self._kept_buffers = []

    def send_buffers(self, team: Team) -> None:
        """Give rank 0's buffers to all, as DDP does, but once a step.

        Not before a second forward pass: the graph of the first needs them as they were, as with two views of a batch.
        """
        if self._has_sent_buffers or not self._has_buffers or team.size == 1:
            return
        self._has_sent_buffers = True
        try:
            self._kept_buffers = broadcast_buffers(self.module, team)
            if team.is_cuda and team.rank > 0:
                self.hook.sums.note()
        except RuntimeError as caught:
            self.hook.abandon(caught)

    def _replicate(self, team: Team, options: DDPOptions) -> tuple[GradientHook, ElasticModel]:
        hook = GradientHook(
            self.optimizer,
            parameters=self.module.parameters(),
            loss_scale=self.loss_scale,
            beta_exponent=lambda: self.rate.beta_exponent,
            on_ready=self._steps.on_ready,
            on_last=self._steps.on_last,
            keeps_views=self._may_skip,
        )
        lone = hook.begin_lone_forward
        return hook, ElasticModel(self.module, hook.reduce, team.process_group, on_lone_forward=lone, **options)

    def _shard(
        self, parts: Parts, team: Team, options: DDPOptions
    ) -> tuple[ShardedGradients, ShardedModel, ModelShards]:
        if options:
            raise InvalidValueError(
                f"{', '.join(map(repr, options))}: an option of DistributedDataParallel; a sharded model has no DDP, "
                "so set it in fully_shard instead"
            )
        if self._scaler is not None and self._scaler.is_enabled():
            raise InvalidValueError(
                "a GradScaler cannot be used with shard=: train in bfloat16, with "
                "fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), which needs none"
            )
        assert parts.shard is not None
        hook = ShardedGradients(
            self.optimizer,
            team,
            beta_exponent=lambda: self.rate.beta_exponent,
            on_ready=self._steps.on_ready,
            on_last=self._steps.on_last,
            confirm=self._steps.confirm,
        )
        self.norm_layers.layers.clear()  # their weights' gradients exist for a moment only, and are not seen by hooks
        self.signature = f"{self.signature}-sharded"
        return (
            hook,
            ShardedModel(self.module),
            ModelShards(self.module, self.optimizer, parts.shard, hook, parts.shard_copies),
        )

    def follow(self, rule: str) -> None:
        """Use the learning-rate rule of a batch policy, unless the user named one."""
        if self.rate.is_earned:
            self.rate.rule, self.rate.is_earned = rule_for(rule, self.optimizer), False

    # --- what the optimizer's gate asks and tells ----------------------------------------------------------------

    def is_last_pass(self) -> bool:
        return self._steps.is_last_pass()

    def is_whole_step(self) -> bool:
        return self._steps.is_whole_step()

    def may_step(self) -> bool:
        """Whether the optimizer may step. First restores gradients that DDP has dropped.

        DDP leaves a parameter without a gradient if the last backward pass did not use it, even if earlier passes of
        the step did.
        """
        self._steps.on_gradient(self)
        for parameter in self.module.parameters() if self._used else ():
            if id(parameter) in self._used and parameter.grad is None:
                parameter.grad = self.hook.views.get(id(parameter))
        self._used.clear()
        if isinstance(self.hook, ShardedGradients):
            self.hook.agree()
        return self._steps.may_step()

    def on_stepped(self, is_whole: bool) -> None:
        """The optimizer has made its step; in part only if that raised."""
        self.is_applied = is_whole
        self._steps.on_stepped(is_whole)
        self._end_turn()

    def on_pass(self) -> None:
        """The loop called the optimizer's step in a pass that only accumulates."""
        if self._may_skip:
            self._used |= {id(parameter) for parameter in self.module.parameters() if parameter.grad is not None}
        self._end_turn()

    def _end_turn(self) -> None:
        if self._closes:
            self.hook.close()

    def epochs_due(self, last_trained_epoch: int) -> int:
        """How many times to step a scheduler that is called between epochs: once for each epoch."""
        if last_trained_epoch <= self.credited_epoch:
            return 0
        self.credited_epoch = last_trained_epoch
        return 1

    def within_schedule(self, num_steps: int) -> int:
        """As many of these steps of the scheduler as its schedule still has.

        A step of a larger batch is worth several at M0, and epochs are rounded to whole passes, so training may go on
        a little longer than the schedule was made for. OneCycleLR raises then. Its rate after the last of
        ``total_steps`` steps is not meant to be used, and may be below 0: the one before stays.
        """
        scheduler = self._scheduler
        if not isinstance(scheduler, OneCycleLR):
            return num_steps
        if scheduler.last_epoch + num_steps > scheduler.total_steps and not self._has_outlived_schedule:
            self._has_outlived_schedule = True
            self._steps.warn(f"the LR schedule is over after {scheduler.total_steps} steps: its last rate stays")
        return max(min(num_steps, scheduler.total_steps - 1 - scheduler.last_epoch), 0)

    def move(self, team: Team) -> None:
        """Move to the team's new process group. A sharded model has no values until it receives its shard."""
        self.hook.reset()
        if isinstance(self.model, ElasticModel):
            self.model.move(team.process_group)
        if self.shards is not None:
            self.shards.attach(team)
            self.alignment.reset()

    def release(self) -> None:
        """Drop all references to the process group, so that its connections close and peers notice."""
        if isinstance(self.model, ElasticModel):
            self.model.release()
        if self.shards is not None:
            self.shards.release()

    def begin_again(self) -> None:
        """Remove what a failed step has left in the user's objects, before the step is repeated.

        Its forward pass may have changed buffers. With a lost peer and SyncBatchNorm these are no averages at all. One
        replica alone keeps no copy to put back, as that would cost time in every step: when memory ran out, BatchNorm
        has averaged the repeated examples twice.
        """
        kept, self._kept_buffers = self._kept_buffers, []
        if not self.is_applied:
            set_buffers(kept)
        self.optimizer.zero_grad()
        self.norm_layers.clear()
        self._used.clear()

    def state_dict(self) -> TraineeState:
        self.rate.restore()
        is_whole = self.shards is None
        return {
            "model": self.module.state_dict() if is_whole else None,
            "optimizer": self.optimizer.state_dict() if is_whole else None,
            "sharded": None if self.shards is None else self.shards.small_state(),
            "rate": self.rate.state_dict(),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "credited_epoch": self.credited_epoch,
        }

    def load_state_dict(self, state: TraineeState) -> None:
        if self.shards is not None and state["sharded"] is not None:
            self.shards.load_small_state(state["sharded"])
        elif state["model"] is not None and state["optimizer"] is not None:
            self.module.load_state_dict(state["model"])
            load_optimizer(self.optimizer, state["optimizer"])
        self.rate.load_state_dict(state["rate"])  # after the optimizer's, whose hook resets it
        if self._scheduler is not None and state["scheduler"] is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        self.credited_epoch = state["credited_epoch"]

    def apply_params(self, before: Mapping[str, object], after: Mapping[str, object]) -> None:
        """Parameters that are named as one of the optimizer's (lr, momentum, weight_decay) change there by as much.

        By the ratio of new and old value: groups with rates of their own, and schedules, keep their proportions.
        """
        for name, new in after.items():
            old = before.get(name)
            if new == old or not _is_number(new) or not _is_number(old):
                continue
            for group in self.optimizer.param_groups:
                for key in (name, "initial_lr") if name == "lr" else (name,):
                    if key in group:
                        group[key] = _scaled(group[key], float(str(old)), float(str(new)))
            bases = getattr(self._scheduler, "base_lrs", None) if name == "lr" else None
            if self._scheduler is not None and isinstance(bases, list):
                self._scheduler.base_lrs = [_scaled(one, float(str(old)), float(str(new))) for one in bases]  # type: ignore[attr-defined]

    def detach(self) -> None:
        self.rate.detach()
        self.norm_layers.clear()
        for gate in self._gates:
            gate.open()
        self._gates.clear()

    def loss_scale(self) -> Tensor | float:
        if self._scaler is None or not self._scaler.is_enabled():
            return 1.0
        device = next(self.module.parameters()).device
        scale: Tensor = self._scaler.scale(torch.ones((), device=device))  # not get_scale(), which waits
        return scale


def check_trainable(model: nn.Module, optimizer: torch.optim.Optimizer, lr_scheduler: object) -> None:
    """Raises InvalidValueError if these objects cannot be trained together."""
    if not isinstance(model, nn.Module):
        raise InvalidValueError(f"the model is a {type(model).__name__}; a torch.nn.Module is needed")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise InvalidValueError(
            f"the model is wrapped in {type(model).__name__} already: pass the plain model; run.prepare replicates it"
        )
    sharded = next((name for name, one in model.named_parameters() if isinstance(one, DTensor)), None)
    if sharded is not None:
        raise InvalidValueError(
            f"the model is sharded already ({sharded!r} is a DTensor, as fully_shard and tensor parallelism make it), "
            f"over a mesh that a resize ends: {WAY}. To have it replicated, pass the plain model alone"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidValueError(f"the optimizer is a {type(optimizer).__name__}; a torch.optim.Optimizer is needed")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(id(parameter) not in names for parameter in trained)
    if foreign:
        raise InvalidValueError(
            f"{foreign} of the optimizer's {len(trained)} parameters are not the model's: "
            "make the optimizer from model.parameters() after the model has its final form and device"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidValueError("no parameter of the model requires a gradient; at least 1 is needed to train")
    devices = {parameter.device.type for parameter in model.parameters()}
    if len(devices) > 1:
        raise InvalidValueError(
            f"the model is on several kinds of device ({', '.join(sorted(devices))}); move it to one"
        )
    held = getattr(lr_scheduler, "optimizer", optimizer)
    if held is not optimizer:
        raise InvalidValueError("the LR scheduler belongs to another optimizer; make it from the one that you pass")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _scaled(value: Any, old: float, new: float) -> Any:
    """``value`` times new over old; a tensor in place, as captured graphs refer to it."""
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.mul_(new / old) if old else value.fill_(new)
        return value
    if not _is_number(value):
        return value
    return value * (new / old) if old and value != old else new
