"""Converts a training run's state to a flat form, for checkpoints and for new replicas.

The run state and the session call it. A state is a tree of dictionaries and lists. :func:`flatten` takes its tensors
out, by name, so that a checkpoint can write them and a process group can broadcast them without pickling. The rest is
small and becomes bytes. Restarts and resizes use the same form, so they keep the same state.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, TypedDict, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pollux.errors import InvalidValueError
from pollux.train.encoding import decode, encode, sendable

CHUNK_BYTES = 64 * 2**20  # of a broadcast message: smaller ones send more messages, larger ones need more memory


Value = TypeVar("Value")
TensorEntry = tuple[str, tuple[int, ...], torch.dtype, bool]  # name, shape, type, whether it is on a device


class Stateful(Protocol):
    """Any object with a state: what ``run.track`` keeps, and LR schedulers."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


class TrackedDict:
    """A dictionary of the user's, as ``run.track`` keeps it: its entries change, it stays the same object."""

    def __init__(self, entries: dict[str, Any]) -> None:
        self._entries = entries

    def state_dict(self) -> dict[str, Any]:
        return dict(self._entries)

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self._entries.clear()
        self._entries.update(state)


def as_stateful(value: object) -> Stateful:
    """Raises InvalidValueError for what has no state that could be kept."""
    missing = [one for one in ("state_dict", "load_state_dict") if not callable(getattr(value, one, None))]
    if missing and isinstance(value, dict):
        return TrackedDict(value)
    if missing:
        raise InvalidValueError(
            f"{type(value).__name__} has no {missing[0]}(): it cannot be tracked; put plain values into a dictionary"
        )
    return cast("Stateful", value)


class RandomState(TypedDict):
    python: tuple[int, tuple[int, ...], float | None]
    numpy: dict[str, Any] | tuple[str, NDArray[np.uint32], int, int, float]
    torch: Tensor
    device: Tensor | None


@sendable
@dataclass(frozen=True, slots=True)
class TensorName:
    """Replaces a tensor in the tree."""

    name: str


@dataclass(frozen=True, slots=True)
class FlatState:
    tensors: dict[str, Tensor]
    blob: bytes


def flatten(tree: object) -> FlatState:
    """The tensors by path, and everything else as bytes. Tensors are not copied."""
    tensors: dict[str, Tensor] = {}

    def strip(node: object, path: str) -> object:
        if isinstance(node, Tensor):
            while path in tensors:  # two keys may give the same path: 1 and "1", or one with a slash
                path += "'"
            tensors[path] = node.detach()
            return TensorName(path)
        if isinstance(node, list | tuple) and type(node) in (list, tuple):  # not a named tuple
            return type(node)(strip(child, f"{path}/{index}") for index, child in enumerate(node))
        if isinstance(node, Mapping):  # a state_dict is an OrderedDict with metadata: a plain dict loads as well
            return {key: strip(child, f"{path}/{key}") for key, child in node.items()}
        return node

    return FlatState(tensors, encode(strip(tree, "state"), "state"))


def unflatten(state: FlatState) -> Any:
    def fill(node: object) -> object:
        if isinstance(node, TensorName):
            return state.tensors[node.name]
        if isinstance(node, list | tuple) and type(node) in (list, tuple):
            return type(node)(fill(child) for child in node)
        if isinstance(node, dict):
            return {key: fill(child) for key, child in node.items()}
        return node

    return fill(decode(state.blob))


def signature_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A hash of the model's architecture and the kind of optimizer, not of values."""
    shapes = [(name, tuple(value.shape), str(value.dtype)) for name, value in model.state_dict().items()
              if isinstance(value, Tensor)]  # fmt: skip
    groups = [len(group["params"]) for group in optimizer.param_groups]
    text = repr((shapes, type(optimizer).__name__, groups))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """``optimizer.load_state_dict``, with the strides of each moment equal to its parameter's.

    Fused kernels go through parameter and moments in memory order. A moment that lost the parameter's strides when it
    was sent (channels_last) would be paired with the wrong elements.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    entries: dict[object, dict[str, object]] = {}
    for index, entry in state["state"].items():
        parameter = parameters[index] if isinstance(index, int) and index < len(parameters) else None
        entries[index] = {
            key: torch.empty_like(parameter, dtype=value.dtype).copy_(value)
            if isinstance(value, Tensor) and parameter is not None and value.shape == parameter.shape
            else value
            for key, value in entry.items()
        }
    optimizer.load_state_dict({**state, "state": entries})


def random_state(device: torch.device) -> RandomState:
    """The states of Python's, numpy's, torch's and the device's generators."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_state(state: RandomState, device: torch.device) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"].cpu())
    if device.type == "cuda" and state["device"] is not None:
        torch.cuda.set_rng_state(state["device"].cpu(), device)


class Peers(Protocol):
    """The replicas that the state is sent to: see :class:`~pollux.train.team.Team`."""

    @property
    def rank(self) -> int: ...

    def share(self, value: Value, source: int = 0) -> Value: ...
    def broadcast(self, tensor: Tensor, source: int) -> None: ...


def broadcast(state: FlatState | None, source: int, device: torch.device, peers: Peers) -> FlatState:
    """Send ``source``'s state to all ranks. Tensors on a device arrive on ``device``.

    ``state`` is read on the source only. Raises what ``peers`` raises when a rank is lost.
    """
    header: tuple[bytes, list[TensorEntry]] | None = None
    is_source = peers.rank == source
    if is_source:
        assert state is not None
        entries = [(name, tuple(t.shape), t.dtype, t.device.type != "cpu") for name, t in state.tensors.items()]
        header = state.blob, entries
    shared = peers.share(header, source)
    assert shared is not None  # the source's
    blob, entries = shared
    received: dict[str, Tensor] = {}
    for chunk in _chunks(entries):
        _, _, dtype, on_device = chunk[0]
        where = device if on_device else torch.device("cpu")
        sizes = [int(np.prod(shape, dtype=np.int64)) for _, shape, _, _ in chunk]
        if is_source:
            assert state is not None
            flat = torch.cat([state.tensors[name].reshape(-1) for name, *_ in chunk])
        else:
            flat = torch.empty(sum(sizes), dtype=dtype, device=where)
        peers.broadcast(flat.view(torch.uint8), source)  # gloo supports few types: no bool, int16 or complex
        if not is_source:
            for (name, shape, _, _), part in zip(chunk, torch.split(flat, sizes), strict=True):
                received[name] = part.view(shape)
    return state if is_source and state is not None else FlatState(received, blob)


def _chunks(entries: list[TensorEntry]) -> Iterator[list[TensorEntry]]:
    """Groups of entries of one type and device, about CHUNK_BYTES each."""
    order = sorted(entries, key=lambda entry: (entry[3], str(entry[2])))
    for _, group in groupby(order, key=lambda entry: (entry[3], entry[2])):
        chunk: list[TensorEntry] = []
        total = 0
        for entry in group:
            size = int(np.prod(entry[1], dtype=np.int64)) * entry[2].itemsize
            if chunk and total + size > CHUNK_BYTES:
                yield chunk
                chunk, total = [], 0
            chunk.append(entry)
            total += size
        yield chunk
