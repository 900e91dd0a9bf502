"""Makes ``optimizer.step()``, ``lr_scheduler.step()`` and a GradScaler wait for the last pass of a step.

A user's loop calls them after every pass, as in plain PyTorch; with accumulation only the last pass of a step may have
an effect. The objects stay the user's own: their methods are wrapped on the instance, nothing is subclassed or proxied,
and :meth:`Gate.open` undoes it. ``trainee`` calls these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch

from pollux.errors import InvalidValueError

Method = Callable[..., Any]  # of the user's object
Arguments = tuple[object, ...]
Options = dict[str, object]
Decide = Callable[[Method, Arguments, Options], object]


class Gate:
    """Wraps methods of one object; each call is decided on when it comes."""

    def __init__(self, target: object) -> None:
        self.target = target
        self._wrapped: dict[str, Method | None] = {}

    def guard(self, name: str, decide: Decide) -> None:
        """``decide(original, args, kwargs)`` is called instead of ``target.name``."""
        original: Method = getattr(self.target, name)
        self._wrapped[name] = self.target.__dict__.get(name)

        def gated(*args: object, **kwargs: object) -> object:
            return decide(original, args, kwargs)

        gated.__wrapped__ = original  # type: ignore[attr-defined]
        setattr(self.target, name, gated)

    def open(self) -> None:
        """Leave the object as it was found."""
        for name, before in self._wrapped.items():
            if before is None:
                delattr(self.target, name)
            else:
                setattr(self.target, name, before)
        self._wrapped.clear()


class Turns(Protocol):
    """What the optimizer's gate asks and tells: see :class:`~pollux.train.trainee.Trainee`."""

    def is_last_pass(self) -> bool: ...

    def is_whole_step(self) -> bool:
        """One replica, one pass: the step is plain PyTorch."""

    def may_step(self) -> bool:
        """Whether the gradients are good."""

    def on_stepped(self, is_whole: bool) -> None:
        """The step was made; in part only if it raised."""

    def on_pass(self) -> None:
        """Called in the other passes, while their gradients are there."""


def gate_optimizer(optimizer: torch.optim.Optimizer, turns: Turns) -> Gate:
    """``step`` does nothing but in a step's last pass, and there only if ``may_step()`` says that gradients are good.

    A closure is called first, in every pass: its backward pass is the pass's gradient.
    """

    def step(original: Method, args: Arguments, kwargs: Options) -> object:
        closure = cast("Callable[[], object] | None", args[0] if args else kwargs.get("closure"))
        loss = None
        if closure is not None:
            if not _calls_closure_once(optimizer):
                _check_closure(optimizer, turns)
            else:
                with torch.enable_grad():
                    loss = closure()
                args, kwargs = (lambda: loss,), {}
        if not turns.is_last_pass():
            turns.on_pass()
            return loss
        if not turns.may_step():
            return loss
        optimizer._opt_called = True  # type: ignore[attr-defined]
        is_whole = False
        try:
            result = original(*args, **kwargs)
            is_whole = True
        finally:
            turns.on_stepped(is_whole)
        return result

    gate = Gate(optimizer)
    gate.guard("step", step)
    # LR schedulers wrap ``step`` to see whether it is called before theirs, and warn when it is not; one made
    # after this would wrap a plain function as if it were a method. They leave alone what bears this mark.
    optimizer.step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return gate


def _calls_closure_once(optimizer: torch.optim.Optimizer) -> bool:
    """torch's optimizers do, before anything else, but for LBFGS. Others (SAM) may move the parameters before it."""
    return type(optimizer).__module__.startswith("torch.optim") and not isinstance(optimizer, torch.optim.LBFGS)


def _check_closure(optimizer: torch.optim.Optimizer, turns: Turns) -> None:
    if not turns.is_whole_step():
        raise InvalidValueError(
            f"{type(optimizer).__name__}.step(closure) calls its closure when and as often as it likes, which works "
            "with one replica and one pass per step only: use an optimizer that needs no closure, or submit the job "
            "with one replica, without max_batch_size and device_batch_size"
        )


def gate_scheduler(scheduler: object, num_steps: Callable[[], int]) -> Gate:
    """``step`` is carried out ``num_steps()`` times: 0 in a pass that accumulates, more where a step teaches more.

    ``state_dict`` must not carry the wrapper: schedulers put every attribute of theirs into it.
    """

    def step(original: Method, args: Arguments, kwargs: Options) -> None:
        for _ in range(num_steps()):
            original(*args, **kwargs)

    def state_dict(original: Method, args: Arguments, kwargs: Options) -> object:
        state = original(*args, **kwargs)
        return {key: value for key, value in state.items() if key not in ("step", "state_dict")}

    gate = Gate(scheduler)
    gate.guard("state_dict", state_dict)
    gate.guard("step", step)
    return gate


def gate_scaler(scaler: object, is_last_pass: Callable[[], bool], is_good: Callable[[], bool]) -> Gate:
    """``unscale_``, ``step`` and ``update`` do nothing in passes that accumulate: the loss scale is a step's.

    They also do nothing when the gradients cannot be used: replicas would come to different scales.
    """

    def wait(original: Method, args: Arguments, kwargs: Options) -> object:
        return original(*args, **kwargs) if is_last_pass() and is_good() else None

    gate = Gate(scaler)
    for name in ("unscale_", "step", "update"):
        gate.guard(name, wait)
    return gate
