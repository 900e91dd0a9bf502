"""Measures the gradient noise scale φ = tr(Σ)/|G|², in examples: up to about φ, a larger batch is worth its examples.

The gradient hook uses :class:`Preconditioner`; :class:`NoiseScale` is for users' own loops. Each part works alone:

- :class:`~pollux.train.moments.GradientMoments` turns two squared norms per step into smoothed |G|² and tr(Σ).
- :class:`Preconditioner` gives the metric of Adam, AdamW and RMSprop, in which gradients are measured.
- :class:`NoiseScale` measures in any training loop::

      noise = NoiseScale(optimizer)
      for batches in steps:                       # one or more passes per optimizer step
          for x, y in batches:
              (loss_fn(model(x), y) / len(batches)).backward()
              noise.micro(len(x))
          noise.step()
          optimizer.step()
          optimizer.zero_grad()
      print(noise.noise_scale)

Measuring queues work on the gradients' device without waiting; only reading a number waits.

Letters: c micro-gradients g_i of m examples each, ḡ their mean, G the true gradient, Σ the covariance of one
example's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pollux.errors import InvalidValueError, UnknownNameError
from pollux.train.moments import DEFAULT_SMOOTHING, GradientMoments, NoiseStats, entry, require_positive

# The least √v̂ of an element, as a share of the root mean square over its tensor. Smaller elements count as this; with
# a lower share, a few elements that are hardly ever used would dominate the norm.
LEAST_ROOT = 0.1
# Optimizer steps before the first sample. Until then v̂ is an average of few values, whose inverse is very noisy.
WARM_UP_STEPS = 30

GroupOptions = Mapping[str, Any]  # of one parameter group of a torch optimizer: "lr", "betas", ...
ParameterState = Mapping[str, Any]  # what a torch optimizer keeps for one parameter: "exp_avg_sq", "step", ...
ParameterGroups = Sequence[tuple[GroupOptions, Sequence[Tensor]]]  # each group's options, some of its parameters


class Preconditioner:
    """The metric of an optimizer that divides gradients by √v̂ + ε of its own state, elementwise.

    ``kind`` is "adam" (Adam, AdamW, and any optimizer that keeps ``exp_avg_sq`` and ``step``) or "rmsprop".
    """

    KINDS = ("adam", "rmsprop")

    def __init__(self, optimizer: torch.optim.Optimizer, kind: str) -> None:
        if kind not in self.KINDS:
            raise UnknownNameError("preconditioner", kind, self.KINDS)
        self.optimizer = optimizer
        self.kind = kind
        self.beta_exponent = 1.0  # the power of β in the optimizer's steps: see ``SquareRoot.scales_betas``

    @classmethod
    def for_optimizer(cls, optimizer: torch.optim.Optimizer) -> Preconditioner | None:
        """The preconditioner of this optimizer; None if it does not divide gradients."""
        optim = torch.optim
        if isinstance(optimizer, (optim.Adam, optim.AdamW, optim.NAdam)):
            return cls(optimizer, "adam")
        return cls(optimizer, "rmsprop") if isinstance(optimizer, optim.RMSprop) else None

    def inverse(self, groups: ParameterGroups, is_known_ready: bool = False) -> list[Tensor] | None:
        """1/√(√v̂ + ε) of each parameter, 0 where v̂ is 0, as new tensors in float32 or wider; None if one has no v̂.

        An optimizer that multiplies gradients by P is plain gradient descent in the coordinates θ' = P^(-1/2)·θ, where
        the gradient is P^(1/2)·g. So its loss falls by η·Gᵀ·P·G, and tr(P·Σ)/(Gᵀ·P·G) is the noise scale of its steps.
        Dividing by √v̂ itself would give coordinates that hardly matter (rare rows of an embedding) full weight.

        v̂ comes from earlier steps, so it is independent of the gradients to be measured.
        """
        if not is_known_ready and not self.is_ready(groups):
            return None
        inverses: list[Tensor] = []
        for options, parameters in groups:
            states = [self.optimizer.state[parameter] for parameter in parameters]
            if not states:
                continue
            roots = self._roots(options, states)
            # 0 where v̂ is 0 (an embedding's row that no example has used): with 1/ε, the first example to use such a
            # coordinate would dominate the norm.
            is_known = torch._foreach_sign(roots)
            # Similar where v̂ is far below the tensor's others (a pixel that is hardly ever lit): see LEAST_ROOT.
            floors = list(torch._foreach_norm(roots, 2))
            torch._foreach_mul_(floors, [LEAST_ROOT / math.sqrt(max(root.numel(), 1)) for root in roots])
            torch._foreach_maximum_(roots, floors)
            torch._foreach_add_(roots, options["eps"])
            torch._foreach_div_(is_known, roots)
            torch._foreach_sqrt_(is_known)
            inverses += is_known
        return inverses

    def is_ready(self, groups: ParameterGroups) -> bool:
        """Whether every parameter has been stepped at least once."""
        return all(
            self._second_moment_name(options) in self.optimizer.state.get(parameter, {})
            for options, parameters in groups
            for parameter in parameters
        )

    def _second_moment_name(self, options: GroupOptions) -> str:
        if self.kind == "rmsprop":
            return "square_avg"
        return "max_exp_avg_sq" if options.get("amsgrad") else "exp_avg_sq"

    def _roots(self, options: GroupOptions, states: Sequence[ParameterState]) -> list[Tensor]:
        moments = [_widened(state[self._second_moment_name(options)]) for state in states]
        if self.kind == "rmsprop":
            if options.get("centered"):
                means = [_widened(state["grad_avg"]) for state in states]
                moments = list(torch._foreach_addcmul(moments, means, means, value=-1.0))
                torch._foreach_clamp_min_(moments, 0.0)  # rounding may make it negative
            return list(torch._foreach_sqrt(moments))
        roots = list(torch._foreach_sqrt(moments))
        # Step counts may be on the CPU or on the device: tensor arithmetic works for both without waiting.
        beta2, steps = options["betas"][1], [state["step"] for state in states]
        if self.beta_exponent != 1.0:
            beta2 = beta2**self.beta_exponent
        if isinstance(beta2, Tensor):
            corrections = [beta2**step for step in steps]
        else:
            corrections = list(torch._foreach_pow(beta2, steps))
        torch._foreach_sub_(corrections, 1.0)
        torch._foreach_neg_(corrections)
        torch._foreach_sqrt_(corrections)
        torch._foreach_div_(roots, corrections)
        return roots


SIGN_OF_AVERAGE = ("Lion", "Lion8bit", "PagedLion", "PagedLion8bit")  # class names; other packages have them


def steps_averaged(optimizer: torch.optim.Optimizer) -> float:
    """Over how many steps an optimizer averages gradients before it takes their sign; 1 for all others.

    Lion steps along sign(β1·m + (1-β1)·g), where m is an average with β2. A sign has no size: where the average is
    exact already, a larger batch adds nothing. So the noise that counts is that of the average, with the variance
    β1²·(1-β2)/(1+β2) + (1-β1)² of one gradient's. Steps of other optimizers with momentum add up, and each gradient
    counts in full.
    """
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    betas = optimizer.param_groups[0].get("betas")
    if not names.intersection(SIGN_OF_AVERAGE) or not isinstance(betas, tuple | list) or len(betas) != 2:
        return 1.0
    beta1, beta2 = float(betas[0]), float(betas[1])
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        return 1.0
    return 1 / (beta1**2 * (1 - beta2) / (1 + beta2) + (1 - beta1) ** 2)


@dataclass(slots=True)
class _Passes:
    """The passes measured since the last optimizer step."""

    sizes: list[int]
    sum_sqr: Tensor  # Σ|increment of .grad|², 0-d
    scale: Tensor | float  # the loss scale
    pair: tuple[Tensor, Tensor, float] | None  # mean squared norm, squared norm of the mean, m: with the step before
    is_void: bool  # the optimizer has no state to precondition with yet


class NoiseScale:
    """The gradient noise scale in a user's own training loop; the module's docstring shows the calls.

    With two or more passes per step the estimate is unbiased. With one, the gradient of the previous step is used as
    the second one: the parameters have moved in between, so this differenced estimate is biased. Biased and unbiased
    samples are averaged apart: see :class:`~pollux.train.moments.GradientMoments`.

    ``target``: an optimizer (its parameter groups are read at every pass) or parameters. ``precondition``: "auto"
    (Adam, AdamW, NAdam, RMSprop), "adam" or "rmsprop" for optimizers that keep their state under these names, "none".
    ``accumulation``: "mean" where each loss is divided by the number of passes, so that ``.grad`` ends up as the mean,
    "sum" where it is not. ``initial_batch``: M0, the batch whose steps count once in the smoothing; the first step's
    if not given. ``warm_up_steps``: with preconditioning, the optimizer's steps before the first sample.

    Memory: one copy of the gradients, in their type. Backward accumulates in place, so a pass's own gradient is the
    difference of ``.grad`` before and after. Setting the gradients aside instead would save one operation per pass,
    but would break everything that refers to ``.grad`` (DDP's bucket views, captured graphs, clipping). The copy also
    serves as the previous gradient, and makes ``step()`` independent of clipping and unscaling in between.
    Preconditioning takes one temporary more (two for the differenced estimate), freed before the next pass. Gradients
    in bf16 or fp16 are subtracted in that type; norms are accumulated in float32.
    """

    def __init__(
        self,
        target: torch.optim.Optimizer | Iterable[Tensor],
        *,
        precondition: str = "auto",
        smoothing: float = DEFAULT_SMOOTHING,
        accumulation: str = "mean",
        initial_batch: int | None = None,
        warm_up_steps: int = WARM_UP_STEPS,
    ) -> None:
        self._groups: Sequence[GroupOptions]
        self._preconditioner: Preconditioner | None = None
        if precondition not in ("auto", "none", *Preconditioner.KINDS):
            raise UnknownNameError("preconditioner", precondition, ("auto", "none", *Preconditioner.KINDS))
        if accumulation not in ("mean", "sum"):
            raise UnknownNameError("accumulation", accumulation, ("mean", "sum"))
        if initial_batch is not None:
            require_positive("initial batch size", initial_batch)
        if isinstance(target, torch.optim.Optimizer):
            self._groups = target.param_groups
            if precondition == "auto":
                self._preconditioner = Preconditioner.for_optimizer(target)
            elif precondition != "none":
                self._preconditioner = Preconditioner(target, precondition)
        else:
            self._groups = [{"params": list(target)}]
            if precondition in Preconditioner.KINDS:
                raise InvalidValueError(f"precondition={precondition!r} needs the optimizer, not its parameters")
            if not self._groups[0]["params"]:
                raise InvalidValueError("no parameters to measure the noise scale of; at least 1 is needed")
        self._target = target  # an optimizer replaces its list of groups when a checkpoint is loaded
        self._moments = GradientMoments(smoothing)
        self._accumulation = accumulation
        self._initial_batch = initial_batch
        self._num_steps, self._warm_up_steps = 0, warm_up_steps if self._preconditioner is not None else 0
        self._held: dict[Tensor, Tensor] = {}  # by parameter: .grad as it was after the last pass
        self._previous: tuple[int, Tensor | float] | None = None  # batch and loss scale of the last step, if one pass
        self._passes: _Passes | None = None

    @torch.no_grad()
    def micro(self, batch_size: int, scale: Tensor | float | None = None) -> None:
        """Measure the pass whose ``backward()`` has just ended, over ``batch_size`` examples.

        ``scale`` is the loss scale still in the gradients. For a ``torch.amp.GradScaler``, get it without waiting by
        ``scaler.scale(torch.ones((), device=device))``. Call this before clipping and before ``unscale_``.
        """
        require_positive("batch size", batch_size)
        if isinstance(scale, Tensor):
            scale = scale.detach().reshape(())
        else:
            scale = 1.0 if scale is None else float(scale)
            require_positive("loss scale", scale)
        groups, grads, held = self._gather()
        is_warm = self._num_steps >= self._warm_up_steps
        inverse = self._preconditioner.inverse(groups) if self._preconditioner is not None and is_warm else None
        is_void = self._preconditioner is not None and inverse is None
        passes, pair = self._passes, None
        if is_void:
            sum_sqr = torch.zeros((), device=grads[0].device)
        elif passes is not None:
            torch._foreach_sub_(held, grads)  # the negative increment, which has the same norm
            sum_sqr = squared_norm(weighed(inverse, held), scale)
        elif self._previous is not None:
            sum_sqr, pair = self._compare_with_previous(grads, held, inverse, batch_size, scale)
        else:
            sum_sqr = squared_norm(weighed(inverse, grads), scale)
        torch._foreach_copy_(held, grads)
        if passes is None:
            self._passes = _Passes([batch_size], sum_sqr, scale, pair, is_void)
        else:
            passes.sizes.append(batch_size)
            passes.sum_sqr = passes.sum_sqr + sum_sqr
            passes.scale = scale
            passes.is_void |= is_void

    @torch.no_grad()
    def step(self) -> None:
        """Make one sample of the passes since the last call. Call it just before ``optimizer.step()``."""
        passes = self._passes
        if passes is None:
            raise InvalidValueError("step() without a measured pass; call micro(batch_size) after each backward()")
        self._passes = None
        self._num_steps += 1
        count, total = len(passes.sizes), sum(passes.sizes)
        if self._initial_batch is None:
            self._initial_batch = total
        self._previous = (total, passes.scale) if count == 1 else None
        batch_scale = total / self._initial_batch
        if passes.is_void:
            return
        if count == 1:
            if passes.pair is not None:
                mean_sqr, sqr_mean, batch = passes.pair
                self._moments.update(mean_sqr, sqr_mean, batch_size=batch, count=2, scale=batch_scale, is_biased=True)
            return
        groups, _, held = self._gather(needs_grads=False)
        inverse = None if self._preconditioner is None else self._preconditioner.inverse(groups)
        if self._preconditioner is not None and inverse is None:
            return
        sum_sqr, sqr_sum = passes.sum_sqr, squared_norm(weighed(inverse, held), passes.scale)
        # "mean": an increment is g_i/c and the last .grad is ḡ. "sum": an increment is g_i and the last .grad is c·ḡ.
        is_mean = self._accumulation == "mean"
        self._moments.update(
            sum_sqr * count if is_mean else sum_sqr / count,
            sqr_sum if is_mean else sqr_sum / count**2,
            batch_size=_harmonic_mean(passes.sizes),
            count=count,
            scale=batch_scale,
        )

    def discard(self) -> None:
        """Forget the passes since the last :meth:`step`: they failed, or will be repeated."""
        self._passes = None
        self._previous = None  # the copy of its gradient has been overwritten

    def reset(self) -> None:
        """Forget everything measured so far, and free the copy of the gradients."""
        self.discard()
        self._held.clear()
        self._moments.reset()

    def read(self) -> NoiseStats | None:
        """|G|², tr(Σ) and φ together, or None before the first sample. Waits for the device."""
        return self._moments.read()

    @property
    def noise_scale(self) -> float:
        """φ in examples, NaN before the first sample. Waits for the device."""
        return self._moments.noise_scale

    @property
    def sqr(self) -> float:
        """|G|² (preconditioned, if the optimizer is), NaN before the first sample. Waits for the device."""
        return self._moments.sqr

    @property
    def var(self) -> float:
        """tr(Σ) of one example (preconditioned, if the optimizer is), NaN before the first. Waits for the device."""
        return self._moments.var

    @property
    def is_biased(self) -> bool:
        """Whether the numbers come from differences of successive steps."""
        return self._moments.is_biased

    def state_dict(self) -> dict[str, object]:
        """The averages and M0, without the gradients: the first pair after loading is skipped."""
        return {
            "moments": self._moments.state_dict(),
            "initial_batch": self._initial_batch,
            "num_steps": self._num_steps,
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        moments, initial_batch, num_steps = (entry(state, name) for name in ("moments", "initial_batch", "num_steps"))
        if initial_batch is not None:
            require_positive("initial batch size", initial_batch)
        self._moments.load_state_dict(moments)
        self._initial_batch, self._num_steps = initial_batch, int(num_steps)
        self.discard()

    def _compare_with_previous(
        self,
        grads: list[Tensor],
        held: list[Tensor],
        inverse: list[Tensor] | None,
        batch_size: int,
        scale: Tensor | float,
    ) -> tuple[Tensor, tuple[Tensor, Tensor, float]]:
        """Squared norm of this gradient, and the sample it makes with the last step's. Overwrites ``held``."""
        assert self._previous is not None
        previous_size, previous_scale = self._previous
        if isinstance(scale, Tensor) or isinstance(previous_scale, Tensor) or scale != previous_scale:
            ratio = scale / previous_scale
            if isinstance(ratio, Tensor):
                ratio = ratio.to(held[0].device)
            torch._foreach_mul_(held, ratio)
        # Both in the newer metric: with one metric each, the drift of v̂ would count as noise.
        before = held if inverse is None else list(torch._foreach_mul(inverse, held))
        now = weighed(inverse, grads)
        sqr_before, sqr_now = squared_norm(before, scale), squared_norm(now, scale)
        torch._foreach_sub_(before, now)
        mean_sqr = (sqr_before + sqr_now) / 2
        sqr_mean = mean_sqr - squared_norm(before, scale) / 4  # parallelogram law
        return sqr_now, (mean_sqr, sqr_mean, _harmonic_mean((previous_size, batch_size)))

    def _gather(self, needs_grads: bool = True) -> tuple[ParameterGroups, list[Tensor], list[Tensor]]:
        """Parameters by group, their gradients, and the copies of their gradients, all in the same order.

        The gradient of a parameter that had one before, but has none now, is zero. Others without one are left out.
        """
        if isinstance(self._target, torch.optim.Optimizer):
            self._groups = self._target.param_groups
        groups: list[tuple[GroupOptions, list[Tensor]]] = []
        grads: list[Tensor] = []
        copies: list[Tensor] = []
        for options in self._groups:
            members: list[Tensor] = []
            for parameter in options["params"]:
                grad, held = parameter.grad if needs_grads else None, self._held.get(parameter)
                if grad is not None:
                    if grad.layout is not torch.strided:
                        raise InvalidValueError(
                            f"a parameter of shape {tuple(parameter.shape)} has a gradient of layout {grad.layout}; "
                            "the noise scale needs dense gradients. Use sparse=False, or leave the parameter out"
                        )
                    grad = torch.view_as_real(grad) if grad.is_complex() else grad
                    if held is None or (held.shape, held.dtype, held.device) != (grad.shape, grad.dtype, grad.device):
                        held = self._held[parameter] = torch.zeros_like(grad)
                elif held is None:
                    continue
                elif needs_grads:
                    if not parameter.requires_grad:  # frozen since
                        del self._held[parameter]
                        continue
                    grad = torch.zeros_like(held)
                members.append(parameter)
                copies.append(held)
                if grad is not None:
                    grads.append(grad)
            groups.append((options, members))
        if not copies:
            raise InvalidValueError("no parameter has a gradient; call micro() after backward() and before zero_grad()")
        return groups, grads, copies


def _harmonic_mean(sizes: Sequence[int]) -> float:
    return len(sizes) / sum(1.0 / size for size in sizes)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _widened(moment: Tensor) -> Tensor:
    """An optimizer's second moment as real float32 or float64: 1/ε overflows in half precision."""
    moment = local_part(moment)
    moment = torch.view_as_real(moment) if moment.is_complex() else moment
    return moment.float() if moment.dtype in (torch.float16, torch.bfloat16) else moment


def weighed(inverse: list[Tensor] | None, tensors: list[Tensor]) -> list[Tensor]:
    """``tensors`` times ``inverse``, written over ``inverse``; ``tensors`` themselves if it is None."""
    if inverse is None:
        return tensors
    torch._foreach_mul_(inverse, tensors)
    return inverse


def squared_norm(tensors: Sequence[Tensor], scale: Tensor | float) -> Tensor:
    """|x/scale|² over all tensors as one 0-d float32, on the device of the first."""
    device = tensors[0].device
    # Half-precision norms overflow at 65504; float32 is precise enough for a sum of positive terms.
    narrow = [tensor for tensor in tensors if tensor.dtype != torch.float64]
    wide = [tensor for tensor in tensors if tensor.dtype == torch.float64]
    norms = list(torch._foreach_norm(narrow, 2, torch.float32)) if narrow else []
    norms += [norm.float() for norm in torch._foreach_norm(wide, 2)] if wide else []
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device, non_blocking=True) for norm in norms]))
    # Divide before squaring: the squared norm of a scaled gradient may overflow float32.
    return (total / scale).square()
