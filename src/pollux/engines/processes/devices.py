"""The nodes and slots of this machine: GPUs by NVML, CPU slots where there are none, virtual nodes for trials.

The server calls it when it makes a local engine. A slot's number is that of its device on this machine, in whichever
node it is: two slots with one number are the same device, also after the nodes have been divided differently.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pollux.errors import InvalidValueError
from pollux.types import Node

logger = logging.getLogger(__name__)

CPU = "cpu"
MOST_SLOTS = 4096
_GRID = re.compile(r"([0-9]{1,4})x([0-9]{1,4})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A slot of a node. ``gpu`` is what CUDA knows it by; None for a share of the CPUs."""

    node: str
    number: int
    gpu: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    number: int  # NVML's, which is the order on the PCI bus
    uuid: str
    name: str


def slot_env(device: Device | None) -> dict[str, str]:
    """What a replica in this slot finds in its environment beside what its job has."""
    return {"CUDA_VISIBLE_DEVICES": "" if device is None or device.gpu is None else device.gpu}


def detect_nodes(
    slots: int | None = None,
    nodes: str | None = None,
    *,
    gpus: Sequence[Gpu] | None = None,
    env: Mapping[str, str] = os.environ,
) -> tuple[list[Node], list[Device]]:
    """The nodes of this machine, and the device of each of their slots.

    ``slots`` asks for so many CPU slots, ``nodes`` ("2x4") for so many virtual nodes of so many slots each.

    Raises:
        InvalidValueError: a number or text that cannot be, or more slots than there are GPUs.
    """
    grid = None if nodes is None else _read_grid(nodes)
    if slots is not None and not 1 <= slots <= MOST_SLOTS:
        raise InvalidValueError(f"slots = {slots}; a number from 1 to {MOST_SLOTS} is needed")
    if grid is not None and slots is not None and slots != grid[0] * grid[1]:
        raise InvalidValueError(f"{slots} slots cannot be {nodes} nodes and slots; leave out one of them")
    found = [] if slots is not None else visible_gpus(find_gpus() if gpus is None else gpus, env)
    if grid is not None:
        return _cut(grid, found)
    if found:
        return _by_kind(found)
    host = _hostname()
    num_slots = slots or num_cpus()
    devices = [Device(node=host, number=number) for number in range(num_slots)]
    return [Node(name=host, num_slots=num_slots, accelerator=CPU)], devices


def num_cpus() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_gpus() -> list[Gpu]:
    """By NVML; none where there is no driver or no library for it."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        found = []
        for number in range(pynvml.nvmlDeviceGetCount()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(number)
                uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
            except pynvml.NVMLError as error:  # fallen off the bus: the others are as good as before
                logger.warning("GPU %d cannot be used: %s", number, error)
                continue
            found.append(Gpu(number=number, uuid=_text(uuid), name=_text(name)))
        return found
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def visible_gpus(gpus: Sequence[Gpu], env: Mapping[str, str]) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves to us, in its order; as CUDA does, up to the first that is not there."""
    if (visible := env.get("CUDA_VISIBLE_DEVICES")) is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for entry in visible.split(","):
        word = entry.strip()
        matching = [
            gpu for gpu in gpus if word == str(gpu.number) or (word[:4] == "GPU-" and gpu.uuid.startswith(word))
        ]
        if not matching or matching[0] in chosen:
            break
        chosen.append(matching[0])
    return chosen


def _by_kind(gpus: Sequence[Gpu]) -> tuple[list[Node], list[Device]]:
    """A node for each kind of GPU: the slots of a node are alike."""
    host, kinds = _hostname(), list(dict.fromkeys(gpu.name for gpu in gpus))
    nodes, devices = [], []
    for kind in kinds:
        name = host if len(kinds) == 1 else f"{host}-{re.sub('[^A-Za-z0-9]+', '-', kind)}"
        alike = [gpu for gpu in gpus if gpu.name == kind]
        nodes.append(Node(name=name, num_slots=len(alike), accelerator=kind))
        devices += [Device(node=name, number=gpu.number, gpu=gpu.uuid) for gpu in alike]
    return nodes, devices


def _cut(grid: tuple[int, int], gpus: Sequence[Gpu]) -> tuple[list[Node], list[Device]]:
    num_nodes, per_node = grid
    num_slots = num_nodes * per_node
    if gpus and num_slots > len(gpus):
        raise InvalidValueError(
            f"{num_nodes}x{per_node} are {num_slots} slots, and there are {len(gpus)} GPUs; ask for fewer, "
            f"or for CPU slots with --slots {num_slots}"
        )
    nodes, devices = [], []
    for index in range(num_nodes):
        name, places = f"node-{index}", range(index * per_node, (index + 1) * per_node)
        kinds = {gpus[place].name for place in places} if gpus else {CPU}
        if len(kinds) > 1:
            raise InvalidValueError(f"{name} would have {' and '.join(sorted(kinds))}; the slots of a node are alike")
        nodes.append(Node(name=name, num_slots=per_node, accelerator=kinds.pop()))
        for place in places:
            number, gpu = (gpus[place].number, gpus[place].uuid) if gpus else (place, None)
            devices.append(Device(node=name, number=number, gpu=gpu))
    return nodes, devices


def _read_grid(text: str) -> tuple[int, int]:
    match = _GRID.fullmatch(text.strip())
    if match is None or not 1 <= int(match[1]) * int(match[2]) <= MOST_SLOTS:
        raise InvalidValueError(
            f"nodes = {text!r}; nodes x slots of each is needed, as in 2x4, with 1 to {MOST_SLOTS} slots in all"
        )
    return int(match[1]), int(match[2])


def _hostname() -> str:
    return socket.gethostname() or "localhost"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
