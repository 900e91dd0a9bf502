"""Measures how far the last updates overshoot, to decide whether a higher learning rate may be tried.

The session calls it before some optimizer steps. The derivative of the loss by the length of the last updates is minus
the product of the new gradient and the direction of these updates (Baydin et al., 2018, "hypergradient"). Divided by
its value without curvature, that product is

- 1 if the updates were short,
- 0 if they ended at the lowest point along their direction,
- -1 if they went so far beyond it that they gained nothing.

Trained networks settle a little beyond the lowest point at any batch and rate that work (the edge of stability, Cohen
et al., 2021): seven tasks on an H200 had -0.1 to -0.3 at their users' own rates. So a value below zero is no reason to
lower a rate. The rate is held only where updates overshoot clearly more than that. Where the value is clearly above
zero, not even the lowest point along their direction is reached: the rate is too low for this batch.

The direction is the optimizer's first moment (momentum, exp_avg), divided as its step is. It comes from earlier
batches, so its noise is independent of the new gradient's, and the average is unbiased. For an optimizer without a
first moment there is no evidence, and the learning-rate rule decides alone. Of a large model only some parameters are
measured: an average over a few million elements has the same sign as one over all. Of a sharded model these are rows of
rank 0's shard.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

from pollux.train.noise import GroupOptions, ParameterState, local_part
from pollux.train.pending_scalars import PendingScalars

logger = logging.getLogger(__name__)

SAMPLES = 16  # at most, that a verdict rests on; more make it surer and slower to follow the training
LEAST_SAMPLES = 6  # that a verdict needs; until then the rate does not rise
# Steps between samples: below LEAST_SAMPLES, below SAMPLES, and then, when new samples only replace old ones. A sample
# costs some passes over the gradients, so shorter intervals slow training.
FIRST_EVERY, EVERY, LATER_EVERY = 2, 8, 32
MAX_ELEMENTS = 4_000_000  # of the gradient that are measured; bounds a sample's cost for large models
# The rate stays where the value is below HOLD, and falls where it is below LOWER. Healthy training had -0.1 to -0.3
# (above), so values nearer to 0 would hold back rates that work.
HOLD, LOWER = -0.35, -0.5
SIGMAS = 2.0  # standard errors by which the value must be below: verdicts are many, so few may be chance
UNRESOLVED = 0.5  # a standard error of the value above which it tells nothing: noise dominates, and the rule decides
_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")


class Alignment:
    """``sample`` before a step. ``verdict`` on the rate is

    - +2: the updates are clearly too short. It may rise beyond the learning-rate rule, to the rule's own limit.
    - +1: it may rise as far as the rule wants.
    -  0: it stays.
    - -1: it falls.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._pending = PendingScalars()
        self._recent: deque[float] = deque(maxlen=SAMPLES)
        self._last = 0  # the last verdict
        self._chosen: set[int] | None = None  # identities of the parameters that are looked at
        self._num_empty = 0  # samples in a row without a first moment: normal before the first step, else there is none

    def is_due(self, step: int) -> bool:
        count = len(self._recent)
        return step % (FIRST_EVERY if count < LEAST_SAMPLES else EVERY if count < SAMPLES else LATER_EVERY) == 0

    @torch.no_grad()
    def sample(self) -> None:
        """Measure the cosine between the present gradient and the direction of the last updates."""
        grads: list[Tensor] = []
        moments: list[Tensor] = []
        scaled: list[Tensor] = []  # the gradients times P
        directions: list[Tensor] = []  # the moments times P
        if self._chosen is None:
            self._chosen = _choose(self._optimizer)
        for options in self._optimizer.param_groups:
            of_group = _gather(options, self._chosen, self._optimizer.state)
            for collected, tensors in zip((grads, moments, scaled, directions), of_group, strict=True):
                collected += tensors
        self._num_empty = 0 if grads else self._num_empty + 1
        if not grads:
            return
        # Lengths in the optimizer's metric: its step multiplies by P, so the direction is P times a moment.
        dot = _sum_of_products(directions, grads)
        size = (_sum_of_products(scaled, grads) * _sum_of_products(directions, moments)).sqrt()
        self._pending.send(torch.where(size > 0, dot / size, torch.zeros_like(dot)))

    def reset(self) -> None:
        """The optimizer has other parameter objects now."""
        self._chosen = None

    def clear(self) -> None:
        """Drop all samples: the batch has changed, and they were measured with another."""
        self._recent.clear()
        self._last = 0

    def verdict(self, noise_to_batch: float) -> int:
        """``noise_to_batch`` is φ/M, the noise scale over the total batch, at the lower bound of φ.

        A φ that is too high would take a chance value for a large overshoot.
        """
        if self._num_empty > 1:
            return 1
        arrived = self._pending.take()
        if not arrived:
            return self._last
        self._recent.extend(value for value in arrived if math.isfinite(value))
        self._last = self._judge(noise_to_batch)
        return self._last

    def _judge(self, noise_to_batch: float) -> int:
        count = len(self._recent)
        if count < LEAST_SAMPLES:
            return 0
        mean = sum(self._recent) / count
        error = math.sqrt(sum((value - mean) ** 2 for value in self._recent) / (count - 1) / count)
        unit = without_curvature(noise_to_batch, _decay(self._optimizer))
        if error > UNRESOLVED * unit:
            return 1
        most, least = (mean + SIGMAS * error) / unit, (mean - SIGMAS * error) / unit
        logger.debug("overshoot of the last updates: %.2f to %.2f", least, most)
        return 2 if least > 0 and count == SAMPLES else -1 if most < LOWER else 0 if most < HOLD else 1


def without_curvature(noise_to_batch: float, decay: float) -> float:
    """The cosine between a gradient and the average of earlier ones, if the true gradient were constant.

    Noise makes a gradient longer by √(1 + φ/M). It makes the average longer by less, as that is made of about
    (1 + β)/(1 - β) gradients.
    """
    return 1 / math.sqrt((1 + noise_to_batch) * (1 + noise_to_batch * (1 - decay) / (1 + decay)))


def _decay(optimizer: torch.optim.Optimizer) -> float:
    options = optimizer.param_groups[0]
    return float(options.get("momentum", options.get("betas", (0.0,))[0]))


def _moment_of(state: Mapping[str, object]) -> Tensor | None:
    found = (state.get(name) for name in _FIRST_MOMENTS)
    return next((moment for moment in found if isinstance(moment, Tensor)), None)


def _choose(optimizer: torch.optim.Optimizer) -> set[int]:
    """Parameters with MAX_ELEMENTS in total, at least one. The smaller ones first, as they come from all layers."""
    chosen: set[int] = set()
    total = 0
    parameters = [parameter for options in optimizer.param_groups for parameter in options["params"]]
    for parameter in sorted(parameters, key=Tensor.numel):
        total += parameter.numel()
        if chosen and total > MAX_ELEMENTS:
            break
        chosen.add(id(parameter))
    return chosen


def _gather(
    options: GroupOptions, chosen: set[int], states: Mapping[Tensor, ParameterState]
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Gradients g of one parameter group, their first moments m, P·g and P·m; the optimizer's step multiplies by P."""
    grads: list[Tensor] = []
    moments: list[Tensor] = []
    variances: list[Tensor] = []
    for parameter in options["params"]:
        if id(parameter) not in chosen:
            continue
        state, grad = states.get(parameter, {}), parameter.grad
        moment = _moment_of(state)
        if grad is None or grad.is_sparse or grad.is_complex() or moment is None or moment.shape != grad.shape:
            continue
        grads.append(local_part(grad))
        moments.append(local_part(moment))
        if "exp_avg_sq" in state:
            variances.append(local_part(state["exp_avg_sq"]))
    if not moments or len(variances) != len(moments):
        return grads, moments, grads, moments
    roots = torch._foreach_sqrt(variances)
    torch._foreach_add_(roots, float(options.get("eps", 1e-8)))
    return grads, moments, list(torch._foreach_div(grads, roots)), list(torch._foreach_div(moments, roots))


def _sum_of_products(left: list[Tensor], right: list[Tensor]) -> Tensor:
    products = torch._foreach_mul(left, right)
    return torch.cat([product.reshape(-1) for product in products]).sum(dtype=torch.float32)
