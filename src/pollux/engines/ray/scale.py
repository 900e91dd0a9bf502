"""Which nodes of a Ray cluster are wanted, and what to ask Ray's auto-scaler for. Pure; ``nodes`` calls it.

Ray is told what the cluster as a whole should be able to hold, and ends nodes that are idle and not needed for that.
Ray chooses which nodes it counts, and it must not keep one that we let go. So we ask for nothing unless nodes are
missing: wanted nodes have an agent, so they are not idle. While nodes are missing, all present ones are counted, wanted
or not, and the missing ones are added.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

GROUP_LABEL = "ray.io/node-group"  # as KubeRay and the cluster launcher name a node's group


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequest:
    """What the scheduler said last. Nodes that it has not seen yet, it has not refused."""

    keeping: frozenset[str]
    refused: frozenset[str]  # it knew them, and does not want them
    num_more: int
    num_slots: int  # of each of these
    group: str = ""  # the worker group that they should be of; "": of any


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalableNode:
    """A node that is present."""

    name: str
    num_slots: int
    is_released: bool


def unwanted(request: ScaleRequest, members: Sequence[ScalableNode], in_use: Collection[str]) -> set[str]:
    """Names of those that may go. Up to ``num_more`` that the scheduler does not know are welcome to it."""
    others = [member for member in members if member.name not in request.keeping and member.name not in in_use]
    strangers = [member for member in others if member.name not in request.refused]
    strangers.sort(key=lambda member: member.is_released)  # who has come is there already
    return {member.name for member in others} - {member.name for member in strangers[: request.num_more]}


def requested(request: ScaleRequest, members: Sequence[ScalableNode], resource: str) -> list[dict[str, int]]:
    """Bundles, one for each node that should be there; none if the scheduler has seen all that it wants."""
    if not request.num_more:
        return []
    sizes = [*(member.num_slots for member in members), *[request.num_slots] * _num_missing(request, members)]
    return [{resource: size} for size in sizes]


def selectors(request: ScaleRequest, members: Sequence[ScalableNode]) -> list[dict[str, str]]:
    """Labels that nodes for these bundles must have: of those that are there, none; none at all without a group."""
    if not request.num_more or not request.group:
        return []
    return [{} for _ in members] + [{GROUP_LABEL: request.group}] * _num_missing(request, members)


def _num_missing(request: ScaleRequest, members: Sequence[ScalableNode]) -> int:
    num_new = sum(member.name not in request.keeping | request.refused and not member.is_released for member in members)
    return max(request.num_more - num_new, 0)
