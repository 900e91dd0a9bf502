"""How wrong the model's outputs are, from the gradient that comes back to them. No loss has to be logged for it.

Called by the model's forward pass on some steps, and read by the session for its guard. With a mean loss over n
examples, ∂L/∂output of one example is 1/n of that example's own error signal: for squared errors the residual itself,
for cross entropy the predicted probabilities less the right answer. So n·|∂L/∂output|² is the mean squared error
signal of an example: it falls as the model learns, whatever the batch size. Only its change matters. Where the model
returns its loss (a single number), that is taken instead.

Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from pollux.train.noise import squared_norm
from pollux.train.pending_scalars import PendingScalars

EVERY = 16  # steps: a norm of the output costs little, but not nothing


class OutputError:
    """``watch`` a forward pass's outputs; ``take`` the values that have arrived since."""

    def __init__(self) -> None:
        self._pending = PendingScalars()

    def watch(self, outputs: Any, num_examples: int, loss_scale: Tensor | float) -> None:
        """``num_examples``: in this pass. ``loss_scale``: what the loss is multiplied with before ``backward()``."""
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


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """All tensors in nested outputs: tuples, lists, mappings, and objects with fields (as transformers returns)."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from _tensors(value)
    elif isinstance(outputs, list | tuple):
        for value in outputs:
            yield from _tensors(value)
    elif hasattr(outputs, "__dataclass_fields__"):
        for name in outputs.__dataclass_fields__:
            yield from _tensors(getattr(outputs, name))
