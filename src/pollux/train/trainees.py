"""All models that a run trains: usually one, several for a GAN or an actor and a critic.

``run.prepare`` makes it; the session uses it. One of the models drives the batch: the one that the user names, or the
one with the largest noise scale. Every model has a noise scale, a learning-rate rule and gradients of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from pollux.errors import InvalidValueError
from pollux.train.elastic_model import DDPOptions
from pollux.train.gates import Gate, gate_scaler
from pollux.train.gradients import Norms, PassPlan
from pollux.train.noise import steps_averaged
from pollux.train.scaling import NoScaling, RateState
from pollux.train.sharded_model import ModelShards
from pollux.train.sharded_module import ShardFunction
from pollux.train.team import Team
from pollux.train.trainee import Parts, Steps, Trainee, TraineeState
from pollux.types import BatchLimits


class TraineesState(TypedDict):
    members: list[TraineeState]
    scaler: dict[str, object] | None


class Trainees:
    """``drives`` is the index of the model that drives the batch; None for the one with the largest noise scale."""

    def __init__(
        self,
        parts: Sequence[Parts],
        grad_scaler: torch.amp.GradScaler | None,
        team: Team,
        steps: Steps,
        ddp_options: DDPOptions,
        drives: int | None = None,
    ) -> None:
        self.members: list[Trainee] = []
        self._gate: Gate | None = None
        self._watch: RemovableHandle | None = None
        self.drives, self._scaler, self._steps = drives, grad_scaler, steps
        try:
            for index, one in enumerate(parts):
                is_one_of_several = len(parts) > 1
                self.members.append(
                    Trainee(one, index, grad_scaler, team, steps, ddp_options, closes=is_one_of_several)
                )
        except BaseException:
            self.detach()
            raise
        if grad_scaler is not None:
            self._gate = gate_scaler(grad_scaler, steps.is_last_pass, steps.gradients_are_good)
        self._known = {id(member.optimizer) for member in self.members}
        self._watch = register_optimizer_step_pre_hook(self._on_any_step)

    def __len__(self) -> int:
        return len(self.members)

    @property
    def signature(self) -> str:
        if len(self.members) == 1:
            return self.members[0].signature
        text = " ".join(member.signature for member in self.members)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def shards(self) -> ModelShards | None:
        """Of the one model, if it is sharded."""
        return self.members[0].shards

    @property
    def has_batch_norm(self) -> bool:
        return any(member.has_batch_norm for member in self.members)

    @property
    def steps_averaged(self) -> list[float]:
        """See :func:`~pollux.train.noise.steps_averaged`."""
        return [steps_averaged(member.optimizer) for member in self.members]

    def most_of(self, limits: BatchLimits) -> int:
        """The largest total batch for an adaptive policy: M0, if no rule is known for one of the optimizers."""
        rules = (member.rate.rule for member in self.members)
        keeps = any(isinstance(rule, NoScaling) and rule.keeps_batch for rule in rules)
        return limits.initial if keeps else limits.maximum

    @property
    def warm_up_steps(self) -> int:
        return max(member.hook.warm_up_steps for member in self.members)

    # --- the step -----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        for member in self.members:
            member.begin_step()

    def begin_pass(self, plan: PassPlan) -> None:
        for member in self.members:
            member.hook.begin_pass(plan)

    def take_norms(self) -> list[Norms | None]:
        return [member.hook.take_norms() for member in self.members]

    @property
    def num_applied(self) -> int:
        """How many optimizers have made the step under way."""
        return sum(member.is_applied for member in self.members)

    @property
    def misuse(self) -> str | None:
        for member in self.members:
            if member.hook.misuse is not None:
                return member.hook.misuse
        return None

    @property
    def failure(self) -> BaseException | None:
        for member in self.members:
            if member.hook.failure is not None:
                return member.hook.failure
        return None

    def abandon(self, reason: BaseException) -> None:
        for member in self.members:
            member.hook.abandon(reason)

    def is_reduced(self) -> bool:
        """Whether the device has finished every sum that an optimizer step waits for, and with the right result."""
        return all(member.hook.sums.are_done() for member in self.members)

    def stop(self, reason: BaseException) -> None:
        """The group is about to be aborted: no optimizer uses a sum from now on. Called by another thread."""
        self.abandon(reason)
        for member in self.members:
            member.hook.sums.cut()

    def seal(self) -> None:
        """The abort begins: see :meth:`DeviceSums.seal`. Never waits."""
        for member in self.members:
            member.hook.sums.seal()

    def begin_again(self) -> None:
        """Remove what a failed step has left in the user's objects, before the step is repeated."""
        for member in self.members:
            member.begin_again()
        if self._scaler is not None and self._scaler.is_enabled():
            self._scaler._per_optimizer_states.clear()  # otherwise the scaler would refuse a second unscale_

    def set_directions(self, directions: Sequence[int]) -> None:
        for member, direction in zip(self.members, directions, strict=True):
            member.rate.direction = direction

    def check_used(self) -> None:
        """Raises InvalidValueError if an optimizer made a step without a gradient of its replicated model."""
        for member in self.members:
            if member.is_applied and not member.hook.has_arrived:
                raise InvalidValueError(
                    "the optimizer made a step, but no gradient came through the replicated model: use the model that "
                    "run.prepare returned (model, optimizer = run.prepare(model, optimizer)), not the one passed to it"
                )

    def _on_any_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """Called before each step of any optimizer of the process."""
        if id(optimizer) in self._known or not self._steps.has_pass():
            return
        self._known.add(id(optimizer))
        self._steps.warn(
            f"{type(optimizer).__name__} makes steps, but run.prepare does not know it: its model is not the same on "
            "all replicas. Prepare all models together: (a, b), (opt_a, opt_b) = run.prepare((a, b), (opt_a, opt_b))"
        )

    # --- groups and state ---------------------------------------------------------------------------------------

    def release(self) -> None:
        for member in self.members:
            member.release()

    def move(self, team: Team) -> None:
        for member in self.members:
            member.move(team)

    def scaler_state(self) -> dict[str, object] | None:
        return None if self._scaler is None else dict(self._scaler.state_dict())

    def load_scaler_state(self, state: dict[str, object] | None) -> None:
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)

    def rate_states(self) -> list[RateState]:
        return [member.rate.state_dict() for member in self.members]

    def load_rate_states(self, states: Sequence[RateState]) -> None:
        for member, state in zip(self.members, states, strict=True):
            member.rate.load_state_dict(state)

    def state_dict(self) -> TraineesState:
        return {"members": [member.state_dict() for member in self.members], "scaler": self.scaler_state()}

    def load_state_dict(self, state: TraineesState) -> None:
        for member, one in zip(self.members, state["members"], strict=True):
            member.load_state_dict(one)
        self.load_scaler_state(state["scaler"])

    def apply_params(self, before: Mapping[str, object], after: Mapping[str, object]) -> None:
        """Optimizers get the parameters of theirs that a study has changed: see :meth:`Trainee.apply_params`."""
        for member in self.members:
            member.apply_params(before, after)

    def follow(self, rule: str | None) -> None:
        """A learning-rate rule that the batch policy brings, if any."""
        if rule is not None:
            for member in self.members:
                member.follow(rule)

    def detach(self) -> None:
        for member in self.members:
            member.detach()
        if self._gate is not None:
            self._gate.open()
        if self._watch is not None:
            self._watch.remove()


def parts_of(
    models: object,
    optimizers: object,
    schedulers: object,
    scaling: object,
    shard: ShardFunction | None,
    shard_copies: int,
) -> list[Parts]:
    """What ``run.prepare`` was given, by model. Raises InvalidValueError if it does not fit together."""
    if shard is None:
        if shard_copies != 1:
            raise InvalidValueError(f"shard_copies={shard_copies} says how often shards are kept: pass shard= too")
        return pair_up(models, optimizers, schedulers, scaling)
    if isinstance(models, list | tuple):
        raise InvalidValueError(
            f"shard= is for one model, and {len(models)} were given: put them into one torch.nn.Module"
        )
    parts = pair_up(models, optimizers, schedulers, scaling)
    return [replace(one, shard=shard, shard_copies=shard_copies) for one in parts]


def pair_up(models: object, optimizers: object, schedulers: object, scaling: object) -> list[Parts]:
    """One :class:`Parts` per model. Raises InvalidValueError if the numbers do not fit."""
    num_models = len(models) if isinstance(models, list | tuple) else 1
    if num_models == 0:
        raise InvalidValueError("run.prepare was given no model; at least 1 is needed")
    columns: list[list[Any]] = []
    given = (("model", models), ("optimizer", optimizers), ("LR scheduler", schedulers), ("scaling rule", scaling))
    for name, values in given:
        column = list(values) if isinstance(values, list | tuple) else [values]
        if column == [None] or (name == "scaling rule" and not isinstance(values, list | tuple)):
            column *= num_models
        if len(column) != num_models:
            raise InvalidValueError(
                f"run.prepare was given {num_models} models and {len(column)} {name}s: give one {name} for each model; "
                "models that share an optimizer go into one torch.nn.Module"
            )
        columns.append(column)
    return [
        Parts(model=model, optimizer=optimizer, lr_scheduler=scheduler, scaling=rule)
        for model, optimizer, scheduler, rule in zip(*columns, strict=True)
    ]


def index_of(drives: nn.Module | None, parts: Sequence[Parts]) -> int | None:
    """The place of the model that the user names."""
    if drives is None:
        return None
    for index, one in enumerate(parts):
        if one.model is drives:
            return index
    raise InvalidValueError(f"drives is a {type(drives).__name__} that is not among the models given to run.prepare")
