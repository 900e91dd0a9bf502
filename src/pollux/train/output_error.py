"""Measures how wrong the model's outputs are, from the gradient of the loss by the outputs. No logged loss is needed.

The model's forward pass calls it on some steps; the session gives the values to the growth guard. With a mean loss over
n examples, ∂L/∂output of one example is 1/n of that example's error signal: the residual for squared errors, predicted
probabilities minus the right answer for cross entropy. So n·|∂L/∂output|² is the mean squared error signal of an
example. It falls as the model learns, at any batch size; only its change is used. If the model returns its loss (a
single number), the loss is used instead. Nothing here waits for the device.

A single number beside other outputs may be something else, as the temperature of a contrastive model, which training
raises. The gradient by a loss is the same number at every step, usually 1; by anything else it changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

from pollux.train.noise import squared_norm
from pollux.train.pending_scalars import PendingScalars

SAME = 1e-3  # relative difference up to which two gradients are the same number
NO_LOSS = -math.inf  # sent in place of a number that is no loss
MAX_SILENT = 2  # steps in a row in which a number gets no gradient, after which it counts as no loss
EVERY = 16  # steps between samples: fewer let the guard notice harm sooner, and cost one norm of the outputs each


class OutputError:
    """``watch`` a forward pass's outputs; ``take`` the values that have arrived since."""

    def __init__(self) -> None:
        self._pending = PendingScalars()
        self._has_loss = True  # a number beside other outputs is a loss, as far as is known
        self._slope: Tensor | None = None  # the last gradient by it
        self._num_silent = 0

    def watch(self, outputs: object, num_examples: int, loss_scale: Tensor | float) -> None:
        """``num_examples`` are those of this pass. ``loss_scale`` is the GradScaler's factor on the loss."""
        tensors = [tensor for tensor in _tensors(outputs) if tensor.requires_grad and tensor.is_floating_point()]
        losses = [tensor for tensor in tensors if tensor.numel() == 1]
        if losses and len(losses) == len(tensors):
            self._pending.send(losses[0].float())
        elif losses and self._has_loss and self._num_silent < MAX_SILENT:
            self._num_silent += 1
            self._watch_loss(losses[0], loss_scale)
        elif tensors:
            largest = max(tensors, key=Tensor.numel)

            def on_gradient(grad: Tensor) -> None:
                self._pending.send(squared_norm([grad.detach()], loss_scale) * num_examples)

            largest.register_hook(on_gradient)  # type: ignore[no-untyped-call]

    def _watch_loss(self, loss: Tensor, loss_scale: Tensor | float) -> None:
        """Send it from the second time on, if the gradient by it is the same as the last time."""
        value = loss.detach().float().clone()

        def on_gradient(grad: Tensor) -> None:
            slope, before, self._num_silent = grad.detach().float() / loss_scale, self._slope, 0
            self._slope = slope
            if before is not None:
                change = (slope - before).abs()
                is_other = change > SAME * before.abs()  # not where one of them is NaN: that tells nothing
                self._pending.send(torch.where(is_other, NO_LOSS, value))

        loss.register_hook(on_gradient)  # type: ignore[no-untyped-call]

    def take(self) -> list[float]:
        values = self._pending.take()
        if NO_LOSS in values:
            self._has_loss = False
        return [value for value in values if value != NO_LOSS]


def _tensors(outputs: object) -> Iterator[Tensor]:
    """All tensors in nested outputs: tuples, lists, mappings, and objects with fields (as transformers returns)."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from _tensors(value)
    elif isinstance(outputs, list | tuple):
        for value in outputs:
            yield from _tensors(value)
    elif is_dataclass(outputs):
        for field in fields(outputs):
            yield from _tensors(getattr(outputs, field.name))
