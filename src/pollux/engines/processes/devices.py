"""A slot's device, and what a replica in that slot finds in its environment. Slots are made in ``layout``.

A slot's number is that of its device on this machine, in whichever node it is: two slots with one number are the same
device, also after the nodes have been divided differently.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from pollux.membership import keys

CPU = "cpu"


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


def slot_env(device: Device | None) -> dict[str, str]:
    """What a replica in this slot finds in its environment beside what its job has."""
    if device is None or device.gpu is None:
        return {"CUDA_VISIBLE_DEVICES": ""}
    env = {"CUDA_VISIBLE_DEVICES": device.gpu}
    if device.shares_card:  # NCCL refuses two ranks on one card of one host, so each slot is a host of its own to it
        env["NCCL_HOSTID"] = f"{hostname()}-{device.number}"
    if device.num_shares > 1:
        env[keys.DEVICE_SHARES] = str(device.num_shares)  # train.init() reads it
    return env


def num_cpus() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hostname() -> str:
    return socket.gethostname() or "localhost"
