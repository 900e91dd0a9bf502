"""Which nodes of a Ray cluster are wanted, and what to ask Ray's auto-scaler for. Stands in ``engines/ray``; pure.

Ray is told what the cluster as a whole should be able to hold, and ends what is idle and not needed for that. Which
nodes it counts is its own choice, and it must not keep one that we let go. So nothing is asked for unless nodes are
missing: those that are wanted have an agent, and are not idle. While nodes are missing all that are there are counted,
wanted or not, and the missing ones come on top.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the scheduler said last. Nodes that it has not seen yet, it has not refused."""

    keeping: frozenset[str]
    refused: frozenset[str]  # it knew them, and does not want them
    num_more: int
    num_slots: int  # of each of these


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node that is there."""

    name: str
    num_slots: int
    is_released: bool


def unwanted(wish: Wish, members: Sequence[Member], in_use: Collection[str]) -> set[str]:
    """Names of those that may go. Up to ``num_more`` that the scheduler does not know are welcome to it."""
    others = [member for member in members if member.name not in wish.keeping and member.name not in in_use]
    strangers = [member for member in others if member.name not in wish.refused]
    strangers.sort(key=lambda member: member.is_released)  # who has come is there already
    return {member.name for member in others} - {member.name for member in strangers[: wish.num_more]}


def requested(wish: Wish, members: Sequence[Member], resource: str) -> list[dict[str, int]]:
    """Bundles, one for each node that should be there; none if the scheduler has seen all that it wants."""
    if not wish.num_more:
        return []
    num_new = sum(member.name not in wish.keeping | wish.refused and not member.is_released for member in members)
    num_missing = max(wish.num_more - num_new, 0)
    return [{resource: size} for size in [*(m.num_slots for m in members), *[wish.num_slots] * num_missing]]
