"""The nodes and slots of this machine: GPUs and MIG slices by NVML, CPU slots where there are none, virtual nodes.

The server calls :func:`detect_nodes` when it starts. A supervisor of GPUs then lays them out again whenever they change
(:mod:`pollux.engines.processes.layout_watch`), with a :class:`SlotBook` that knows slots by UUID: a slot keeps its
number and its node while other cards come and go, and after restarts.

A GPU that is cut into MIG slices is not a slot itself; each slice is one, of its own accelerator type. With
``slots_per_gpu`` several slots share each GPU or slice: each gets that part of its memory, but nothing keeps their
computations apart.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pollux.engines.processes.devices import CPU, Device, hostname, num_cpus
from pollux.engines.processes.gpus import Gpu, Survey, UnusableGpu, find_gpus, visible_gpus
from pollux.engines.processes.slot_names import SlotNames
from pollux.errors import InvalidValueError
from pollux.types import Node

MOST_SLOTS = 4096
SHARE_NUMBERS = 100_000  # share i of a GPU has the number of the GPU + i·SHARE_NUMBERS
MOST_SHARES = 16
SLOTS_FILE = "slots.json"
_GRID = re.compile(r"([0-9]{1,4})x([0-9]{1,4})")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRequest:
    """How GPUs become slots: what the server was started with. ``visible``: CUDA_VISIBLE_DEVICES, None if not set."""

    nodes: str | None = None
    slots_per_gpu: int = 1
    visible: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLayout:
    nodes: tuple[Node, ...] = ()
    devices: tuple[Device, ...] = ()
    unusable: tuple[UnusableGpu, ...] = ()


def detect_nodes(
    slots: int | None = None,
    nodes: str | None = None,
    *,
    slots_per_gpu: int = 1,
    gpus: Sequence[Gpu] | None = None,
    env: Mapping[str, str] = os.environ,
) -> tuple[list[Node], list[Device]]:
    """The nodes of this machine, and the device of each of their slots.

    ``slots`` asks for so many CPU slots, ``nodes`` ("2x4") for so many virtual nodes of so many slots each,
    ``slots_per_gpu`` for so many slots on each GPU or slice.

    Raises:
        InvalidValueError: a number or text that cannot be, or more slots than there are GPUs.
    """
    grid = None if nodes is None else _read_grid(nodes)
    if slots is not None and not 1 <= slots <= MOST_SLOTS:
        raise InvalidValueError(f"slots = {slots}; a number from 1 to {MOST_SLOTS} is needed")
    if grid is not None and slots is not None and slots != grid[0] * grid[1]:
        raise InvalidValueError(f"{slots} slots cannot be {nodes} nodes and slots; leave out one of them")
    if not 1 <= slots_per_gpu <= MOST_SHARES:
        raise InvalidValueError(f"slots per GPU = {slots_per_gpu}; a number from 1 to {MOST_SHARES} is needed")
    found = [] if slots is not None else visible_gpus(find_gpus() if gpus is None else gpus, env)
    if slots_per_gpu > 1 and not found:
        raise InvalidValueError(f"{slots_per_gpu} slots per GPU, and there is no GPU here; ask for --slots N instead")
    if not found:
        return _cpu_slots(grid, slots)
    if grid is not None:
        _require_fit(grid, [place.gpu.name for place in _shares(found, slots_per_gpu)])
    request = LayoutRequest(nodes=nodes, slots_per_gpu=slots_per_gpu)
    layout = SlotBook().lay_out(request, Survey(gpus=tuple(found)))
    return list(layout.nodes), list(layout.devices)


def _cpu_slots(grid: tuple[int, int] | None, slots: int | None) -> tuple[list[Node], list[Device]]:
    names, each = [hostname()], slots or num_cpus()
    if grid is not None:
        names, each = [f"node-{index}" for index in range(grid[0])], grid[1]
    nodes = [Node(name=name, num_slots=each, accelerator=CPU) for name in names]
    return nodes, [Device(node=names[place // each], number=place) for place in range(len(names) * each)]


def _require_fit(grid: tuple[int, int], kinds: Sequence[str]) -> None:
    """Raises :class:`InvalidValueError`: there are not so many GPUs, or those of a node are not alike."""
    num_nodes, per_node = grid
    num_slots = num_nodes * per_node
    if num_slots > len(kinds):
        raise InvalidValueError(
            f"{num_nodes}x{per_node} are {num_slots} slots, and there are {len(kinds)} GPUs; ask for fewer, "
            f"or for CPU slots with --slots {num_slots}"
        )
    for index in range(num_nodes):
        there = set(kinds[index * per_node : (index + 1) * per_node])
        if len(there) > 1:
            raise InvalidValueError(
                f"node-{index} would have {' and '.join(sorted(there))}; the slots of a node are alike"
            )


@dataclass(frozen=True, slots=True)
class _GpuShare:
    """One of ``num_shares`` slots on a GPU or slice."""

    gpu: Gpu
    share: int
    num_shares: int

    @property
    def key(self) -> str:
        return self.gpu.uuid if self.num_shares == 1 else f"{self.gpu.uuid}#{self.share}"

    @property
    def memory_bytes(self) -> int | None:
        return None if self.gpu.memory_bytes is None else self.gpu.memory_bytes // self.num_shares

    def device(self, node: str, number: int) -> Device:
        return Device(
            node=node,
            number=number,
            gpu=self.gpu.uuid,
            shares_card=self.gpu.card is not None or self.num_shares > 1,
            num_shares=self.num_shares,
        )


def _shares(gpus: Sequence[Gpu], num_shares: int) -> list[_GpuShare]:
    return [_GpuShare(gpu, share, num_shares) for gpu in gpus for share in range(num_shares)]


class SlotBook:
    """Knows each slot by the UUID of its device: its number, its type and its node stay as they were."""

    def __init__(self, directory: Path | None = None) -> None:
        """Kept in ``directory``; None: in memory alone. A file that cannot be read counts as missing."""
        self._path = None if directory is None else directory / SLOTS_FILE
        self._names = SlotNames.of(None if self._path is None else _read(self._path), hostname())

    @property
    def has_seen_gpus(self) -> bool:
        return bool(self._names.numbers)

    def lay_out(self, request: LayoutRequest, found: Survey, faults: Mapping[str, str] | None = None) -> SlotLayout:
        """The slots of the GPUs that were found. ``faults``: why some of them are not to be used, by UUID."""
        faults, before = faults or {}, self._names.to_dict()
        env = {} if request.visible is None else {"CUDA_VISIBLE_DEVICES": request.visible}
        visible = visible_gpus(found.gpus, env, skips_missing=True)
        shares = _shares([gpu for gpu in visible if gpu.uuid not in faults], request.slots_per_gpu)
        places = {place.key: place for place in shares}
        kinds = {place.key: self._kind_of(place) for place in shares}
        node_of = self._names.place(
            kinds, None if request.nodes is None else (request.nodes, _read_grid(request.nodes))
        )
        devices, nodes = [], []
        for name in dict.fromkeys(node_of.values()):
            there = [places[key] for key in places if node_of.get(key) == name]
            sizes = [place.memory_bytes for place in there if place.memory_bytes is not None]
            memory = min(sizes) if len(sizes) == len(there) else None
            kind = kinds[there[0].key]
            nodes.append(Node(name=name, num_slots=len(there), accelerator=kind, device_memory_bytes=memory))
            devices += [place.device(name, self._number_of(place)) for place in there]
        ill = [UnusableGpu(name=gpu.uuid, reason=faults[gpu.uuid]) for gpu in visible if gpu.uuid in faults]
        if self._names.to_dict() != before:
            self._save()
        return SlotLayout(nodes=tuple(nodes), devices=tuple(devices), unusable=(*found.unusable, *ill))

    def _kind_of(self, place: _GpuShare) -> str:
        kind = self._names.kind_of(place.gpu.name, place.gpu.memory_bytes)
        return kind if place.num_shares == 1 else f"{kind} 1/{place.num_shares}"

    def _number_of(self, place: _GpuShare) -> int:
        return self._names.number_of(place.key, place.gpu.number + place.share * SHARE_NUMBERS)

    def _save(self) -> None:
        if self._path is None:
            return
        beside = self._path.with_suffix(".new")
        try:
            beside.write_text(json.dumps(self._names.to_dict()))
            beside.replace(self._path)
        except OSError as error:  # known in memory all the same
            logger.warning("cannot write %s: %s", self._path, error)


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _read_grid(text: str) -> tuple[int, int]:
    match = _GRID.fullmatch(text.strip())
    if match is None or not 1 <= int(match[1]) * int(match[2]) <= MOST_SLOTS:
        raise InvalidValueError(
            f"nodes = {text!r}; nodes x slots of each is needed, as in 2x4, with 1 to {MOST_SLOTS} slots in all"
        )
    return int(match[1]), int(match[2])
