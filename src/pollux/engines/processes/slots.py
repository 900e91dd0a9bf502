"""Slots, and what others may see of the replicas in them. Shared by jobs, the job manager and the starters."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Slot(NamedTuple):
    """A place for one replica: a device of a node."""

    node: str
    number: int


class ReplicaView(NamedTuple):
    """One living replica as others may see it. ``rank`` is None while it is in no group."""

    replica_id: str
    rank: int | None
    slot: Slot
    pid: int | None
    state: Literal["starting", "member", "leaving"]
