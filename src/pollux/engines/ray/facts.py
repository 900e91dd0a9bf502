"""What is known of a node of a Ray cluster: what Ray says of it, and what it offers. Ray is not imported here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from pollux.engines.ray.scale import GROUP_LABEL

SHORT_LABELS = {
    "ray.io/availability-zone": "zone",
    "ray.io/availability-region": "region",
    "ray.io/market-type": "market",
    GROUP_LABEL: "group",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A node that can be used."""

    id: str  # Ray's
    name: str
    address: str
    num_slots: int
    accelerator: str
    labels: tuple[tuple[str, str], ...] = ()
    cpus: float | None = None
    memory_bytes: int | None = None
    notice: str = ""  # why it will be gone soon
    device_memory_bytes: int | None = None


class RayRow(TypedDict):
    """What is read of an entry of ``ray.nodes()``."""

    NodeID: str
    NodeName: str
    NodeManagerAddress: str
    NodeManagerHostname: str
    Resources: dict[str, float]
    Labels: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What Ray says of a node besides its slots."""

    labels: tuple[tuple[str, str], ...] = ()
    cpus: float | None = None
    memory_bytes: int | None = None


def facts_of(row: RayRow) -> NodeFacts:
    """A node's own labels, and by short names those that Ray's auto-scalers and KubeRay give it."""
    labels = {key: value for key, value in row.get("Labels", {}).items() if key != "ray.io/node-id"}
    for key, short in SHORT_LABELS.items():
        if key in labels:
            labels.setdefault(short, labels[key])
    resources = row["Resources"]
    memory = resources.get("memory")
    return NodeFacts(
        labels=tuple(sorted(labels.items())),
        cpus=resources.get("CPU", 0.0),
        memory_bytes=None if memory is None else int(memory),
    )


def gpu_problem(num_told: int, num_seen: int, others_have: bool) -> str:
    """Why a node gets no work that has fewer GPUs than Ray was told; "" if it gets some.

    Where the driver shows none on any node, they are of a kind that only Ray knows.
    """
    if num_seen >= num_told or (num_seen == 0 and not others_have):
        return ""
    return f"Ray counts {num_told} GPUs there, and the driver shows {num_seen}: see nvidia-smi on it"
