"""The nodes and slots of this machine: GPUs and MIG slices by NVML, CPU slots where there are none, virtual nodes.

The server calls it when it makes a local engine. A slot's number is that of its device on this machine, in whichever
node it is: two slots with one number are the same device, also after the nodes have been divided differently.

A GPU that is cut into MIG slices is not a slot itself; each slice is one, of its own accelerator type. With
``slots_per_gpu`` several slots share each GPU or slice: each gets that part of its memory, but nothing keeps their
computations apart.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pollux.errors import InvalidValueError
from pollux.membership import keys
from pollux.types import Node

logger = logging.getLogger(__name__)

CPU = "cpu"
MOST_SLOTS = 4096
_GRID = re.compile(r"([0-9]{1,4})x([0-9]{1,4})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A slot of a node. ``gpu`` is what CUDA knows it by; None for a share of the CPUs.

    ``shares_card``: other slots are on the same card, as slices or as shares. ``num_shares``: so many have one device.
    """

    node: str
    number: int
    gpu: str | None = None
    shares_card: bool = False
    num_shares: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A whole GPU, or a MIG slice of one."""

    number: int  # NVML's, which is the order on the PCI bus; of a slice, SLICE_NUMBERS·(card + 1) + its instance
    uuid: str
    name: str
    card: int | None = None  # NVML's number of the card that a slice is of; None: a whole GPU


SLICE_NUMBERS = 100  # a card has at most 7 slices, with instance numbers below 20
SHARE_NUMBERS = 100_000  # share i of a GPU has the number of the GPU + i·SHARE_NUMBERS
MOST_SHARES = 16


def slot_env(device: Device | None) -> dict[str, str]:
    """What a replica in this slot finds in its environment beside what its job has."""
    if device is None or device.gpu is None:
        return {"CUDA_VISIBLE_DEVICES": ""}
    env = {"CUDA_VISIBLE_DEVICES": device.gpu}
    if device.shares_card:  # NCCL refuses two ranks on one card of one host, so each slot is a host of its own to it
        env["NCCL_HOSTID"] = f"{_hostname()}-{device.number}"
    if device.num_shares > 1:
        env[keys.DEVICE_SHARES] = str(device.num_shares)  # train.init() reads it
    return env


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
    shares = [_GpuShare(gpu, share, slots_per_gpu) for gpu in found for share in range(slots_per_gpu)]
    if grid is not None:
        return _cut(grid, shares)
    if shares:
        return _by_kind(shares)
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
                slices = _slices(handle, number)
            except pynvml.NVMLError as error:  # fallen off the bus: the others are as good as before
                logger.warning("GPU %d cannot be used: %s", number, error)
                continue
            whole = Gpu(number=number, uuid=_text(uuid), name=_text(name))
            found += [whole] if slices is None else slices
        return found
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _slices(handle: object, card: int) -> list[Gpu] | None:
    """The MIG slices of a card; None if it is not cut. A card in MIG mode without slices has no slot."""
    import pynvml

    try:
        is_cut = pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except pynvml.NVMLError:  # cards and drivers without MIG
        return None
    if not is_cut:
        return None
    slices = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            uuid, name = pynvml.nvmlDeviceGetUUID(part), pynvml.nvmlDeviceGetName(part)
            instance = pynvml.nvmlDeviceGetGpuInstanceId(part)
        except pynvml.NVMLError:  # no slice has this index, or it has just been taken away
            continue
        number = SLICE_NUMBERS * (card + 1) + int(instance)
        slices.append(Gpu(number=number, uuid=_text(uuid), name=_text(name), card=card))
    if not slices:
        logger.warning("GPU %d is in MIG mode and has no slices, so it has no slots; make some: nvidia-smi mig", card)
    return slices


def visible_gpus(gpus: Sequence[Gpu], env: Mapping[str, str]) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves to us, in its order; as CUDA does, up to the first that is not there."""
    if (visible := env.get("CUDA_VISIBLE_DEVICES")) is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for entry in visible.split(","):
        word = entry.strip()
        is_uuid = word[:4] in ("GPU-", "MIG-")
        matching = [
            gpu
            for gpu in gpus
            if (gpu.uuid.startswith(word) if is_uuid else gpu.card is None and word == str(gpu.number))
        ]
        if not matching or matching[0] in chosen:
            break
        chosen.append(matching[0])
    return chosen


@dataclass(frozen=True, slots=True)
class _GpuShare:
    """One of ``num_shares`` slots on a GPU or slice."""

    gpu: Gpu
    share: int
    num_shares: int

    @property
    def accelerator(self) -> str:
        return self.gpu.name if self.num_shares == 1 else f"{self.gpu.name} 1/{self.num_shares}"

    def device(self, node: str) -> Device:
        return Device(
            node=node,
            number=self.gpu.number + self.share * SHARE_NUMBERS,
            gpu=self.gpu.uuid,
            shares_card=self.gpu.card is not None or self.num_shares > 1,
            num_shares=self.num_shares,
        )


def _by_kind(shares: Sequence[_GpuShare]) -> tuple[list[Node], list[Device]]:
    """A node for each kind of GPU: the slots of a node are alike."""
    host, kinds = _hostname(), list(dict.fromkeys(place.accelerator for place in shares))
    nodes, devices = [], []
    for kind in kinds:
        name = host if len(kinds) == 1 else f"{host}-{re.sub('[^A-Za-z0-9]+', '-', kind)}"
        alike = [place for place in shares if place.accelerator == kind]
        nodes.append(Node(name=name, num_slots=len(alike), accelerator=kind))
        devices += [place.device(name) for place in alike]
    return nodes, devices


def _cut(grid: tuple[int, int], shares: Sequence[_GpuShare]) -> tuple[list[Node], list[Device]]:
    num_nodes, per_node = grid
    num_slots = num_nodes * per_node
    if shares and num_slots > len(shares):
        raise InvalidValueError(
            f"{num_nodes}x{per_node} are {num_slots} slots, and there are {len(shares)} GPUs; ask for fewer, "
            f"or for CPU slots with --slots {num_slots}"
        )
    nodes, devices = [], []
    for index in range(num_nodes):
        name, own = f"node-{index}", range(index * per_node, (index + 1) * per_node)
        kinds = {shares[place].accelerator for place in own} if shares else {CPU}
        if len(kinds) > 1:
            raise InvalidValueError(f"{name} would have {' and '.join(sorted(kinds))}; the slots of a node are alike")
        nodes.append(Node(name=name, num_slots=per_node, accelerator=kinds.pop()))
        devices += [shares[place].device(name) if shares else Device(node=name, number=place) for place in own]
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
