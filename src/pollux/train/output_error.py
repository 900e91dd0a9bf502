"""Measures how wrong the model's outputs are, from the gradient of the loss by the outputs. No logged loss is needed.

The model's forward pass calls it on some steps; the session gives the values to the growth guard. With a mean loss over
n examples, ∂L/∂output of one example is 1/n of that example's error signal: the residual for squared errors, predicted
probabilities minus the right answer for cross entropy. So n·|∂L/∂output|² is the mean squared error signal of an
example. It falls as the model learns, at any batch size; only its change is used. If the model returns its loss (a
single number), the loss is used instead. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

from torch import Tensor

from pollux.train.noise import squared_norm
from pollux.train.pending_scalars import PendingScalars

EVERY = 16  # steps between samples: fewer let the guard notice harm sooner, and cost one norm of the outputs each


class OutputError:
    """``watch`` a forward pass's outputs; ``take`` the values that have arrived since."""

    def __init__(self) -> None:
        self._pending = PendingScalars()

    def watch(self, outputs: object, num_examples: int, loss_scale: Tensor | float) -> None:
        """``num_examples`` are those of this pass. ``loss_scale`` is the GradScaler's factor on the loss."""
        tensors = [tensor for tensor in _tensors(outputs) if tensor.requires_grad and tensor.is_floating_point()]
        losses = [tensor for tensor in tensors if tensor.numel() == 1]
        if losses:
            self._pending.send(losses[0].float())
        elif tensors:
            largest = max(tensors, key=Tensor.numel)

            def on_gradient(grad: Tensor) -> None:
                self._pending.send(squared_norm([grad.detach()], loss_scale) * num_examples)

            largest.register_hook(on_gradient)  # type: ignore[no-untyped-call]

    def take(self) -> list[float]:
        return self._pending.take()


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
