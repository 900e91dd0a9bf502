"""Learning-rate rules: by how much to multiply the tuned rate when the batch is S = M/M0 times the tuned one.

A rule is anything with ``factor(step) -> float``; :func:`rule_for` finds one by name. A user's rate may be near the
edge of what the model bears, so the default rules raise it only as far as the noise scale justifies, at its lower 90 %
bound: all of S (or its root) while noise dominates, nothing once it does not.
:class:`ScaledRate` applies a rule to an optimizer during ``optimizer.step()`` alone, through the optimizer's own
step hooks: before and after, the parameter groups hold the rate that the user and the LR scheduler set, so schedulers
and checkpoints never see the scaled one.

The factor is computed on the host at every step, from what the step's context says. Rules that need the noise scale
find it there; the caller decides how old it may be (reading it waits for the device).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from pollux.errors import InvalidValueError, UnknownNameError
from pollux.train.moments import NoiseStats
from pollux.train.progress import gain_of

logger = logging.getLogger(__name__)

GLIDE = 1.02  # by which a rate rises at most over the examples of a step at M0: a doubling takes 35 of these
MAX_GLIDE = GLIDE**4  # and in one step of a larger batch
FALL = 1.1  # downwards it may go faster: a rate that is too high hurts, one that is too low only costs time


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """What a rule may know about the step that is about to be taken.

    One value rather than a list of arguments, so that it can grow without breaking the rules that users wrote.
    """

    total_batch: float  # M, examples in this step
    initial_batch: float  # M0, the batch for which the rate was tuned
    noise: NoiseStats | None = None  # None: not measured yet
    num_examples: float = 0.0  # examples in all steps before this one
    progress: float = 0.0  # scale-invariant iterations before this one: the sum of their gains
    is_short: bool = False  # the last step of an epoch, smaller than the others

    def __post_init__(self) -> None:
        for name in ("total_batch", "initial_batch"):
            _require(0 < getattr(self, name) < math.inf, name, getattr(self, name), "a positive number")
        for name in ("num_examples", "progress"):
            _require(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "a number >= 0")

    @property
    def scale(self) -> float:
        """S = M/M0."""
        return self.total_batch / self.initial_batch

    @property
    def gain(self) -> float:
        """r = (v + q)/(v/S + q) with v = tr(Σ)/M0, q = |G|²: how many steps at M0 this one is worth, at least.

        Between 1 (no noise: a larger batch teaches nothing more) and S (all noise); 1, the cautious end, while
        nothing has been measured. It is taken at φ's lower bound: a rate is earned by evidence.
        """
        low = None if self.noise is None else self.noise.noise_scale_low
        return gain_of(low, self.initial_batch, self.total_batch)


@runtime_checkable
class ScalingRule(Protocol):
    """By how much to multiply the tuned learning rate in one step: a positive number."""

    def factor(self, step: StepContext) -> float: ...


@dataclass(frozen=True, slots=True)
class AdaScale:
    """The gain r itself (Johnson et al., 2020): linear while noise dominates, none once it does not. For SGD."""

    def factor(self, step: StepContext) -> float:
        return step.gain


@dataclass(frozen=True, slots=True)
class DampedRoot:
    """√S times the batch's efficiency, at least 1: the root while noise dominates, less and less of it later.

    For optimizers whose steps do not grow with the gradient (Adam and its like, Lion, Adafactor, Muon). Their best rate
    rises as √M up to M = φ and falls beyond (Li et al., 2024, arXiv 2405.14578: rate ∝ 1/(√(φ/M) + √(M/φ)), which is
    √S·(φ + M0)/(φ + M) times that of M0). A rate below the tuned one is never asked for.
    """

    scales_betas: bool = False

    def factor(self, step: StepContext) -> float:
        root = math.sqrt(step.scale)
        return max(step.gain / root, 1.0) if root > 1 else root


@dataclass(frozen=True, slots=True)
class SquareRoot:
    """√S: keeps the variance of the step constant (Krizhevsky, 2014). For Adam and its like.

    With ``scales_betas`` Adam's β become β^S, so that its averages span the same number of examples at any batch
    (to first order 1 − β grows by S, which Malladi et al., 2022, derive together with √S), as long as β2^S leaves an
    average to speak of (0.9, some twenty steps).
    """

    scales_betas: bool = True

    def factor(self, step: StepContext) -> float:
        return math.sqrt(step.scale)


@dataclass(frozen=True, slots=True)
class Linear:
    """S (Goyal et al., 2017). Right while noise dominates; too much later, and at the start without a warm-up."""

    def factor(self, step: StepContext) -> float:
        return step.scale


@dataclass(frozen=True, slots=True)
class LEGW:
    """Linear-epoch gradual warm-up (You et al., 2019): √S, reached over S times the epochs that M0 warms up for.

    ``warmup_steps`` is the warm-up's length at M0, in steps. S times the epochs are the same number of steps,
    each of them S times as large; position is counted in examples, so it holds when the batch changes on the way.
    The rule does the warm-up itself: do not put another one into the LR scheduler.
    """

    warmup_steps: float

    def __post_init__(self) -> None:
        _require(0 <= self.warmup_steps < math.inf, "warmup_steps", self.warmup_steps, "a number >= 0")

    def factor(self, step: StepContext) -> float:
        length = step.total_batch * self.warmup_steps  # examples: S times warmup_steps batches of M0
        reached = step.num_examples + step.total_batch  # this step included, or the first would have rate 0
        return math.sqrt(step.scale) * (1.0 if reached >= length else reached / length)


@dataclass(frozen=True, slots=True)
class NoScaling:
    """1: the rate as the user set it."""

    def factor(self, step: StepContext) -> float:
        return 1.0


_ONE_AT_M0 = (AdaScale, DampedRoot, SquareRoot, Linear, NoScaling)


def _legw_by_name() -> ScalingRule:
    raise InvalidValueError(
        "the rule 'legw' needs the warm-up's length: pass LEGW(warmup_steps=...) instead of its name"
    )


RULES: dict[str, Callable[[], ScalingRule]] = {
    "adascale": AdaScale,
    "damped": DampedRoot,
    "legw": _legw_by_name,
    "linear": Linear,
    "none": NoScaling,
    "seesaw": lambda: SquareRoot(scales_betas=False),
    "sqrt": SquareRoot,
}
AUTO = "auto"


NORMALISED = {  # by class name: their steps do not grow with the gradient
    *("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "SparseAdam", "RMSprop", "Adagrad", "Adafactor", "Lion", "Muon"),
    *("Adam8bit", "AdamW8bit", "PagedAdamW8bit", "LAMB", "Lamb", "FusedAdam", "FusedLAMB", "SOAP", "Shampoo"),
}


def _rule_of_family(optimizer: torch.optim.Optimizer) -> ScalingRule:
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    if isinstance(optimizer, torch.optim.SGD):
        return AdaScale()
    if names & NORMALISED:
        return DampedRoot()
    logger.warning(
        "no learning-rate rule is known for %s: its rate stays as you set it at any batch size; "
        "pass scaling=... to prepare() for another rule",
        type(optimizer).__name__,
    )
    return NoScaling()


def rule_for(rule: str | ScalingRule, optimizer: torch.optim.Optimizer) -> ScalingRule:
    """A rule by name, or the given one.

    "auto": AdaScale for SGD, whose theory it is; the damped root for optimizers whose steps do not grow with the
    gradient (by the names of their classes, as several are in packages of their own); for any other optimizer the rate
    stays as the user set it, which is said once.

    Raises :class:`UnknownNameError` for an unknown name and :class:`InvalidValueError` for what is no rule.
    """
    if isinstance(rule, str):
        if rule == AUTO:
            return _rule_of_family(optimizer)
        if rule not in RULES:
            raise UnknownNameError("learning-rate rule", rule, (AUTO, *RULES))
        return RULES[rule]()
    if isinstance(rule, type) or not isinstance(rule, ScalingRule):
        raise InvalidValueError(
            f"{rule!r} is no learning-rate rule; pass one of {', '.join((AUTO, *RULES))}, or an object with "
            "factor(step) -> float"
        )
    return rule


@dataclass(slots=True)
class _ScaledGroup:
    """One parameter group whose rate is multiplied at the moment."""

    group: dict[str, Any]
    unscaled: Any  # for a tensor, a copy of it; None where another group restores it
    scaled: Any  # for a tensor, the very tensor in the group
    betas: tuple[float, float] | None = None

    def restore(self) -> None:
        if self.betas is not None:
            self.group["betas"] = self.betas
        current = self.group["lr"]
        if isinstance(self.scaled, Tensor):
            # In place: captured graphs and fused kernels hold on to the tensor.
            self.scaled.copy_(self.unscaled)
        elif self.scaled is not None and not isinstance(current, Tensor) and current == self.scaled:
            # Anything else was set by somebody since, and is theirs.
            self.group["lr"] = self.unscaled


class ScaledRate:
    """Multiplies an optimizer's learning rates by a rule's factor while it steps, and only then.

    ``context`` is called once before every step and must not wait for the device if training should not.
    With ``glides`` neither rate nor β jump when the batch changes: they rise by GLIDE at most over as many examples as
    M0 has (and fall by FALL a step), so that the optimizer's averages stay valid. ``cap`` bounds the factor from above,
    where a larger one has hurt.
    ``is_at_m0`` tells that a step has M0 examples: a rule that says 1 there, as most do, need not be asked.
    ``direction`` is the evidence on the rate (see :mod:`pollux.train.alignment`): only with +1 may the factor rise,
    with -1 it falls back towards 1.
    A step that raises cannot be noticed by a hook: the rate is then put back at the next step, when the optimizer's
    state is saved, or by :meth:`restore`, whichever comes first. (Loading a state replaces the groups, and wins.)
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rule: str | ScalingRule,
        context: Callable[[], StepContext],
        *,
        glides: bool = False,
        is_at_m0: Callable[[], bool] = lambda: False,
    ) -> None:
        if not all("lr" in group for group in optimizer.param_groups):
            raise InvalidValueError(f"{type(optimizer).__name__} has a parameter group without 'lr' to scale")
        self.rule = rule_for(rule, optimizer)
        self._context = context
        self._factor = self._applied = 1.0
        self._glides, self._has_stepped = glides, False
        self._is_at_m0 = is_at_m0
        self.cap = math.inf
        self.direction = 1
        self.target = 1.0  # what the rule asked for in the last step
        self._optimizer = optimizer
        self._pending: list[_ScaledGroup] = []
        self._exponent = 1.0  # the unit in which the optimizer's state counts steps: see _count_steps_in
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(self._after_step),
            optimizer.register_load_state_dict_post_hook(self._after_loading),
        ]

    @property
    def factor(self) -> float:
        """What the last step's rates were multiplied by; 1 before the first."""
        return self._applied

    @property
    def reached(self) -> float:
        """How far the factor has come; that of an epoch's short last step is its own."""
        return self._factor

    @property
    def may_rise(self) -> bool:
        """Whether the rule ever asks for more than the user's rate."""
        return not isinstance(self.rule, NoScaling)

    @property
    def tuned(self) -> float:
        """The rate that the user's schedule asks for now, of the first parameter group."""
        rate = self._optimizer.param_groups[0]["lr"]
        return float(rate) if not isinstance(rate, Tensor) or rate.device.type == "cpu" else 0.0

    def state_dict(self) -> dict[str, Any]:
        """What the next step's factor depends on, besides the rule."""
        names = ("_factor", "cap", "_has_stepped", "_exponent", "direction", "target")
        return {name.removeprefix("_"): getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from steps made elsewhere: by another replica, or before a restart."""
        self._factor, self.cap, self._has_stepped = state["factor"], state["cap"], state["has_stepped"]
        self._applied = self._factor
        self._exponent, self.direction, self.target = state["exponent"], state["direction"], state["target"]

    @property
    def beta_exponent(self) -> float:
        """The power to which Adam's β were raised in the last step, and the unit in which its state counts steps.

        Whoever keeps the optimizer's state for later keeps this beside it. Converting the steps instead would not come
        back to the same number, and replicas that saved would differ from those that did not.
        """
        return self._exponent

    def restore(self) -> None:
        """Put back the unscaled rates if a step raised; nothing to do otherwise."""
        pending, self._pending = self._pending, []
        with torch.no_grad():
            for entry in pending:
                entry.restore()

    def detach(self) -> None:
        """Leave the optimizer as it was found. May be called twice."""
        self.restore()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._pending:
            self.restore()
        is_plain = self._factor == 1.0 and self._exponent == 1.0 and isinstance(self.rule, _ONE_AT_M0)
        if is_plain and self._is_at_m0():
            self._has_stepped, self.target, self._applied = True, 1.0, 1.0
            return
        context = self._context()
        factor = float(self.rule.factor(context))
        if not 0 < factor < math.inf:
            raise InvalidValueError(
                f"{self.rule!r} gave the learning-rate factor {factor}; it must be a positive number"
            )
        if context.is_short and self._glides and self._has_stepped:
            # One step with fewer examples has at most the rate of the others, and says nothing about theirs.
            self._apply(optimizer, min(factor, self._factor), self._exponent)
            return
        self.target = factor
        factor = min(factor, max(self.cap, 1.0))
        exponent = _exponent_for(optimizer, context.scale) if getattr(self.rule, "scales_betas", False) else 1.0
        if self._glides and self._has_stepped:
            rise = min(GLIDE ** max(context.scale, 1.0), MAX_GLIDE)
            factor = min(max(factor, self._factor / FALL), self._factor * rise)
            if self.direction <= 0 and factor > 1.0:
                held = self._factor if self.direction == 0 else max(self._factor / GLIDE, 1.0)
                factor = min(factor, max(held, 1.0))
            exponent = min(max(exponent, self._exponent / FALL), self._exponent * rise)
        self._factor, self._has_stepped = factor, True
        self._count_steps_in(exponent)
        self._apply(optimizer, factor, exponent)

    def _apply(self, optimizer: torch.optim.Optimizer, factor: float, exponent: float) -> None:
        """Until the step is over: rates times ``factor``, β to the power ``exponent``."""
        self._applied = factor
        seen: set[int] = set()
        with torch.no_grad():
            for group in optimizer.param_groups:
                betas = _scale_betas(group, exponent)
                rate = group["lr"]
                if not isinstance(rate, Tensor):
                    group["lr"] = rate * factor
                    self._pending.append(_ScaledGroup(group, rate, group["lr"], betas))
                elif id(rate) in seen:  # groups made from one default share its tensor
                    self._pending.append(_ScaledGroup(group, None, None, betas))
                else:
                    seen.add(id(rate))
                    self._pending.append(_ScaledGroup(group, rate.clone(), rate, betas))
                    rate.mul_(factor)

    def _after_step(self, *_: Any) -> None:
        if self._pending:
            self.restore()

    def _after_loading(self, *_: Any) -> None:
        self._exponent = 1.0

    @torch.no_grad()
    def _count_steps_in(self, exponent: float) -> None:
        """Adam corrects its averages' bias by 1 − β^step. With β^S in place of β that is right if steps are counted in
        units of S: t steps at β and u at β^S have the weight of t/S + u steps at β^S."""
        if exponent == self._exponent:
            return
        steps = [state["step"] for state in self._optimizer.state.values() if isinstance(state.get("step"), Tensor)]
        if steps:
            torch._foreach_mul_(steps, self._exponent / exponent)
        self._exponent = exponent


LEAST_BETA2 = 0.9


def _exponent_for(optimizer: torch.optim.Optimizer, scale: float) -> float:
    """S, or less where β2^S would forget too fast; 1 for optimizers without β."""
    largest = math.inf
    for group in optimizer.param_groups:
        betas = group.get("betas")
        if not (isinstance(betas, tuple) and all(isinstance(beta, float) for beta in betas)):
            return 1.0
        if not 0 < betas[1] < 1:
            return 1.0
        largest = min(largest, math.log(LEAST_BETA2) / math.log(betas[1]))
    return min(scale, max(largest, 1.0))


def _scale_betas(group: dict[str, Any], exponent: float) -> tuple[float, float] | None:
    """β^exponent in the group, and what was there before; None where nothing was changed."""
    betas = group.get("betas")
    if exponent == 1.0 or not (isinstance(betas, tuple) and all(isinstance(beta, float) for beta in betas)):
        return None
    group["betas"] = tuple(beta**exponent for beta in betas)
    return betas


def _require(condition: bool, name: str, value: float, allowed: str) -> None:
    if not condition:
        raise InvalidValueError(f"{name} is {value}; it must be {allowed}")
