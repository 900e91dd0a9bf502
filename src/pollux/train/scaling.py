"""Learning-rate rules: the factor on the tuned rate when the batch is S = M/M0 times the tuned one.

``run.prepare`` attaches a :class:`ScaledRate` to the optimizer; users may do so in their own loops. A rule has a method
``factor(step) -> float``; :func:`rule_for` finds one by name. A user's rate may be close to the highest that works, so
the default rules raise it only as far as the lower 90 % bound of the noise scale justifies: by S (or its root) while
noise dominates, not at all once it does not.

:class:`ScaledRate` applies a rule during ``optimizer.step()`` only, through the optimizer's own step hooks. Before and
after a step the parameter groups hold the rate of the user and the LR scheduler, so schedulers and checkpoints never
see the scaled one. The factor is computed on the host at every step from a :class:`StepContext`, which holds the noise
scale too; the caller decides how old that may be, as reading it waits for the device.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, runtime_checkable

import torch
from torch import Tensor

from pollux.errors import InvalidValueError, UnknownNameError
from pollux.train.moments import NoiseStats
from pollux.train.progress import gain_of

logger = logging.getLogger(__name__)

# The fastest changes of a rate, chosen by hand. Faster ones follow the batch sooner, and disturb the optimizer more.
GLIDE = 1.02  # largest rise over the examples of a step at M0: a doubling takes 35 such steps
MAX_GLIDE = GLIDE**4  # largest rise in one step of a larger batch
FALL = 1.1  # largest fall in a step. Faster than a rise: too high a rate hurts, too low a rate only costs time


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """What a rule may use about the next step.

    One object instead of several arguments, so that new fields do not break rules that users wrote.
    """

    total_batch: float  # M, examples in this step
    initial_batch: float  # M0, the batch for which the rate was tuned
    noise: NoiseStats | None = None  # None: not measured yet
    num_examples: float = 0.0  # examples in all steps before this one
    progress: float = 0.0  # steps at M0 that all steps before were worth: the sum of their gains
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

        Between 1 (no noise: a larger batch teaches nothing more) and S (all noise); 1 before anything is measured. It
        is taken at φ's lower bound, so that a rate rises only on evidence.
        """
        low = None if self.noise is None else self.noise.noise_scale_low
        return gain_of(low, self.initial_batch, self.total_batch)


@runtime_checkable
class ScalingRule(Protocol):
    """Gives the factor on the tuned learning rate in one step: a positive number."""

    def factor(self, step: StepContext) -> float: ...


@dataclass(frozen=True, slots=True)
class AdaScale:
    """The gain r itself (Johnson et al., 2020): linear while noise dominates, none once it does not. For SGD."""

    def factor(self, step: StepContext) -> float:
        return step.gain

    def most(self, step: StepContext) -> float:
        """The highest factor, for updates that are measurably too short: the linear rule's."""
        return max(step.scale, 1.0)


@dataclass(frozen=True, slots=True)
class DampedRoot:
    """√S times the batch's efficiency, at least 1: the root while noise dominates, less later.

    For optimizers whose steps do not grow with the gradient (Adam and variants, Lion, Adafactor, Muon). Their best rate
    rises as √M up to M = φ and falls beyond (Li et al., 2024, arXiv 2405.14578: rate ∝ 1/(√(φ/M) + √(M/φ)), which is
    √S·(φ + M0)/(φ + M) times that of M0). It is never below the tuned rate.
    """

    scales_betas: bool = False

    def factor(self, step: StepContext) -> float:
        root = math.sqrt(step.scale)
        return max(step.gain / root, 1.0) if root > 1 else root

    def most(self, step: StepContext) -> float:
        """The highest factor, for updates that are measurably too short: √S."""
        return max(math.sqrt(step.scale), 1.0)


@dataclass(frozen=True, slots=True)
class SquareRoot:
    """√S: keeps the variance of the step constant (Krizhevsky, 2014). For Adam and variants.

    With ``scales_betas`` Adam's β become β^S, so that its averages span the same number of examples at any batch
    (to first order 1 − β grows by S, which Malladi et al., 2022, derive together with √S). β2^S stays at least
    LEAST_BETA2.
    """

    scales_betas: bool = True

    def factor(self, step: StepContext) -> float:
        return math.sqrt(step.scale)


@dataclass(frozen=True, slots=True)
class Linear:
    """S (Goyal et al., 2017). Right while noise dominates; too high later, and at the start without a warm-up."""

    def factor(self, step: StepContext) -> float:
        return step.scale


@dataclass(frozen=True, slots=True)
class LEGW:
    """Linear-epoch gradual warm-up (You et al., 2019): √S, reached over S times the epochs that M0 warms up for.

    ``warmup_steps`` is the warm-up's length at M0, in steps. S times the epochs are the same number of steps of S times
    the examples; examples are counted, so the batch may change during the warm-up.
    The rule does the warm-up: do not put another one into the LR scheduler.
    """

    warmup_steps: float

    def __post_init__(self) -> None:
        _require(0 <= self.warmup_steps < math.inf, "warmup_steps", self.warmup_steps, "a number >= 0")

    def factor(self, step: StepContext) -> float:
        length = step.total_batch * self.warmup_steps  # examples: S times warmup_steps batches of M0
        reached = step.num_examples + step.total_batch  # with this step, or the first would have rate 0
        return math.sqrt(step.scale) * (1.0 if reached >= length else reached / length)


@dataclass(frozen=True, slots=True)
class NoScaling:
    """1: the rate as the user set it. With ``keeps_batch`` an adaptive batch stays, too: it may teach no more."""

    keeps_batch: bool = False

    def factor(self, step: StepContext) -> float:
        return 1.0


_ONE_AT_M0 = (AdaScale, DampedRoot, SquareRoot, Linear, NoScaling)  # rules with factor 1 at M0


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
        "no learning-rate rule is known for %s: its rate and an adaptive batch stay as you set them; "
        "pass scaling=... to run.prepare() to choose a rule ('none': the batch grows, the rate stays)",
        type(optimizer).__name__,
    )
    return NoScaling(keeps_batch=True)


def rule_for(rule: str | ScalingRule, optimizer: torch.optim.Optimizer) -> ScalingRule:
    """The rule of that name, or the given rule after a check.

    "auto": AdaScale for SGD, for which it was derived; the damped root for optimizers whose steps do not grow with the
    gradient (found by class name, as several come from other packages); for others the rate and an adaptive batch stay
    as the user set them, and a warning is logged. A larger batch at the same rate may teach no more than a small one.

    Raises :class:`UnknownNameError` for an unknown name, :class:`InvalidValueError` for an object that is not a rule.
    """
    if isinstance(rule, str):
        if rule == AUTO:
            return _rule_of_family(optimizer)
        if rule not in RULES:
            raise UnknownNameError("learning-rate rule", rule, (AUTO, *RULES))
        return RULES[rule]()
    if isinstance(rule, type) or not isinstance(rule, ScalingRule):
        raise InvalidValueError(
            f"{rule!r} is not a learning-rate rule; pass one of {', '.join((AUTO, *RULES))}, or an object with "
            "factor(step) -> float"
        )
    return rule


ParameterGroup = dict[str, Any]  # of a torch optimizer: "params", "lr", "betas", ...


class RateState(TypedDict):
    factor: float
    cap: float
    has_stepped: bool
    exponent: float
    direction: int
    target: float


@dataclass(slots=True)
class _ScaledGroup:
    """One parameter group whose rate is scaled during the present step."""

    group: ParameterGroup
    unscaled: float | Tensor | None  # for a tensor, a copy of it; None if another group restores it
    scaled: float | Tensor | None  # for a tensor, the tensor in the group itself
    betas: tuple[float, float] | None = None

    def restore(self) -> None:
        if self.betas is not None:
            self.group["betas"] = self.betas
        current = self.group["lr"]
        if isinstance(self.scaled, Tensor):
            assert isinstance(self.unscaled, Tensor)
            # In place: captured graphs and fused kernels refer to the tensor.
            self.scaled.copy_(self.unscaled)
        elif self.scaled is not None and not isinstance(current, Tensor) and current == self.scaled:
            # Any other value was set by the user during the step, and stays.
            self.group["lr"] = self.unscaled


class ScaledRate:
    """Multiplies an optimizer's learning rates by a rule's factor while it steps, and only then.

    ``context`` is called once before every step; it should not wait for the device.
    With ``glides`` the rate and β change slowly when the batch changes, so that the optimizer's averages stay valid:
    they rise at most by GLIDE per M0 examples, and fall at most by FALL a step. ``cap`` bounds the factor from above,
    where a higher one has hurt.
    ``is_at_m0`` tells whether a step has M0 examples: most rules give 1 there, and are not called.
    ``direction`` is the evidence on the rate (see :mod:`pollux.train.alignment`): the factor rises only above 0, and
    falls towards 1 with -1. Where ``is_earned``, with +2 it may rise beyond the rule's factor, up to the rule's
    ``most``, and it stays where it is while nothing speaks against it.
    A hook does not notice a step that raises. The rate is then put back at the next step, when the optimizer's state is
    saved, or by :meth:`restore`, whichever comes first. (Loading a state replaces the groups, and so the rates.)
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
            raise InvalidValueError(f"{type(optimizer).__name__} has a parameter group without 'lr'; all need one")
        self.rule = rule_for(rule, optimizer)
        self._context = context
        self._factor = self._applied = 1.0
        self._glides, self._has_stepped = glides, False
        self._is_at_m0 = is_at_m0
        self.cap = math.inf
        self.direction = 1
        self.is_earned = False  # evidence may raise the rate beyond the rule: not of a rule that the user has named
        self.target = 1.0  # what the rule asked for in the last step
        self._optimizer = optimizer
        self._pending: list[_ScaledGroup] = []
        self._exponent = 1.0  # the unit of the step counts in the optimizer's state: see _count_steps_in
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(self._after_step),
            optimizer.register_load_state_dict_post_hook(self._after_loading),
        ]

    @property
    def factor(self) -> float:
        """The factor on the rates in the last step; 1 before the first."""
        return self._applied

    @property
    def reached(self) -> float:
        """The factor reached so far, without that of an epoch's short last step."""
        return self._factor

    @property
    def may_rise(self) -> bool:
        """Whether the rule may give more than the user's rate."""
        return not isinstance(self.rule, NoScaling)

    @property
    def tuned(self) -> float:
        """The present rate of the user's schedule, of the first parameter group; 0 if it is on a device."""
        rate = self._optimizer.param_groups[0]["lr"]
        return float(rate) if not isinstance(rate, Tensor) or rate.device.type == "cpu" else 0.0

    def state_dict(self) -> RateState:
        """The values that the next step's factor depends on, besides the rule."""
        return {
            "factor": self._factor,
            "cap": self.cap,
            "has_stepped": self._has_stepped,
            "exponent": self._exponent,
            "direction": self.direction,
            "target": self.target,
        }

    def load_state_dict(self, state: RateState) -> None:
        """Restore a :meth:`state_dict` of another replica, or of before a restart."""
        self._factor, self.cap, self._has_stepped = state["factor"], state["cap"], state["has_stepped"]
        self._applied = self._factor
        self._exponent, self.direction, self.target = state["exponent"], state["direction"], state["target"]

    @property
    def beta_exponent(self) -> float:
        """The power of Adam's β in the last step, and the unit of the step counts in its state.

        Save it together with the optimizer's state. Converting the counts when saving would round them, and replicas
        that saved would then differ from those that did not.
        """
        return self._exponent

    def restore(self) -> None:
        """Put back the unscaled rates if a step raised; otherwise does nothing."""
        pending, self._pending = self._pending, []
        with torch.no_grad():
            for entry in pending:
                entry.restore()

    def detach(self) -> None:
        """Remove all hooks and scaled values from the optimizer. May be called twice."""
        self.restore()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
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
                f"{self.rule!r} gave the learning-rate factor {factor}; it must be a positive, finite number"
            )
        if context.is_short and self._glides and self._has_stepped:
            # A short step gets at most the rate of the others, and does not change theirs.
            self._apply(optimizer, min(factor, self._factor), self._exponent)
            return
        self.target = factor
        factor = min(self._with_evidence(factor, context), max(self.cap, 1.0))
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

    def _with_evidence(self, factor: float, context: StepContext) -> float:
        """The rule's factor, or more where the last updates were clearly too short."""
        if not self.is_earned or self.direction < 0 or context.noise is None:
            return factor
        if not isinstance(self.rule, AdaScale | DampedRoot):
            return factor
        most = self.rule.most(context)
        return max(factor, most if self.direction > 1 else min(self._factor, most))

    def _apply(self, optimizer: torch.optim.Optimizer, factor: float, exponent: float) -> None:
        """Multiply rates by ``factor`` and raise β to the power ``exponent``, until the step is over."""
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

    def _after_step(self, *_: object) -> None:
        if self._pending:
            self.restore()

    def _after_loading(self, *_: object) -> None:
        self._exponent = 1.0

    @torch.no_grad()
    def _count_steps_in(self, exponent: float) -> None:
        """Convert the optimizer's step counts to another power of β.

        Adam corrects the bias of its averages by 1 − β^step. With β^S that is right if steps are counted in units of
        S: t steps at β and u steps at β^S weigh as much as t/S + u steps at β^S.
        """
        if exponent == self._exponent:
            return
        steps = [state["step"] for state in self._optimizer.state.values() if isinstance(state.get("step"), Tensor)]
        if steps:
            torch._foreach_mul_(steps, self._exponent / exponent)
        self._exponent = exponent


LEAST_BETA2 = 0.9  # for β2^S: an average over about twenty steps. A lower one would make v̂ very noisy


def _exponent_for(optimizer: torch.optim.Optimizer, scale: float) -> float:
    """S, or less if β2^S would be below LEAST_BETA2; 1 for optimizers without β."""
    largest = math.inf
    for group in optimizer.param_groups:
        betas = group.get("betas")
        if not (isinstance(betas, tuple) and all(isinstance(beta, float) for beta in betas)):
            return 1.0
        if not 0 < betas[1] < 1:
            return 1.0
        largest = min(largest, math.log(LEAST_BETA2) / math.log(betas[1]))
    return min(scale, max(largest, 1.0))


def _scale_betas(group: ParameterGroup, exponent: float) -> tuple[float, float] | None:
    """Set β^exponent in the group, and return the old β; None if nothing was changed."""
    betas = group.get("betas")
    if exponent == 1.0 or not (isinstance(betas, tuple) and all(isinstance(beta, float) for beta in betas)):
        return None
    group["betas"] = tuple(beta**exponent for beta in betas)
    return betas


def _require(condition: bool, name: str, value: float, allowed: str) -> None:
    if not condition:
        raise InvalidValueError(f"{name} is {value}; it must be {allowed}")
