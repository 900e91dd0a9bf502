"""Divides a model's parameters into a few parts, whose squared gradient norms are measured apart.

The gradient hook uses it. Parts of a model may differ in their noise scale: rows of an embedding are used by few
examples, so nearly all of their gradient is noise, while a layer that every example uses has little of it.
:func:`pollux.train.moments.share_of_mean_scale` says why that matters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# The largest parameters are parts of their own, all others are the last part. Each part is two numbers in the message
# that replicas exchange at every step.
NUM_PARTS = 16


class ParameterParts:
    """The parts of an optimizer's parameters, which are the same on every rank."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [one for options in optimizer.param_groups for one in options["params"] if one.requires_grad]
        largest = sorted(range(len(parameters)), key=lambda place: -parameters[place].numel())[: NUM_PARTS - 1]
        self._part_of = {id(parameters[place]): part for part, place in enumerate(sorted(largest))}
        self._members: dict[tuple[int, ...], Tensor] = {}  # (NUM_PARTS, parameters) 1 or 0, by list that was seen

    def squared_norms(self, tensors: Sequence[Tensor], identities: tuple[int, ...], scale: Tensor | float) -> Tensor:
        """(NUM_PARTS,) |x/scale|² by part, in float32 on the device of the first tensor.

        ``identities`` are those of the parameters that the tensors are gradients of, or of rows of it.
        """
        return self.add_up(self.norms(tensors), identities, scale)

    def norms(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """|x| of each, in float32 on the device of the first tensor."""
        device = tensors[0].device
        norms: list[Tensor] = [torch.empty(0)] * len(tensors)
        for is_wide in (False, True):  # half-precision norms overflow at 65504; float64 keeps its own
            places = [place for place, one in enumerate(tensors) if (one.dtype == torch.float64) == is_wide]
            if places:
                dtype = torch.float64 if is_wide else torch.float32
                found = torch._foreach_norm([tensors[place] for place in places], 2, dtype)
                for place, norm in zip(places, found, strict=True):
                    norms[place] = norm.float().to(device, non_blocking=True)
        return norms

    def add_up(self, norms: Sequence[Tensor], identities: tuple[int, ...], scale: Tensor | float) -> Tensor:
        """(NUM_PARTS,) the squares of norms/scale by part, in float32."""
        # Divide before squaring: the squared norm of a scaled gradient may overflow float32.
        squares = (torch.stack(list(norms)) / scale).square()
        # Not index_add, whose order of additions differs from run to run on a GPU.
        return (self._members_of(identities, squares.device) * squares).sum(1)

    def _members_of(self, identities: tuple[int, ...], device: torch.device) -> Tensor:
        members = self._members.get(identities)
        if members is None or members.device != device:
            members = torch.zeros(NUM_PARTS, len(identities), dtype=torch.float32)
            for place, identity in enumerate(identities):
                members[self._part_of.get(identity, NUM_PARTS - 1), place] = 1.0
            members = self._members[identities] = members.to(device)
        return members

    def clear(self) -> None:
        """Forget the lists of parameters: a new group has other buckets."""
        self._members.clear()
