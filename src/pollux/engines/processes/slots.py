"""Slots, and what others may see of the replicas in them. Shared by jobs, the job manager and the starters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pollux.errors import InvalidValueError


class Slot(NamedTuple):
    """A place for one replica: a device of a node."""

    node: str
    number: int


ReplicaState = Literal["starting", "member", "leaving"]


class ReplicaView(NamedTuple):
    """One living replica as others may see it. ``rank`` is None while it is in no group."""

    replica_id: str
    rank: int | None
    slot: Slot
    pid: int | None
    state: ReplicaState


class Phase(NamedTuple):
    """What a start or resize under way waits for. ``name`` stays while ``detail`` changes; "": for nothing."""

    name: str = ""
    detail: str = ""

    @property
    def text(self) -> str:
        return f"{self.name}: {self.detail}" if self.detail else self.name


NO_PHASE = Phase()


def checked(slots: Sequence[Slot]) -> tuple[Slot, ...]:
    """The slots of an elastic job.

    Raises:
        InvalidValueError: there is none, or one is named twice.
    """
    if not slots:
        raise InvalidValueError("a job has at least 1 replica, got 0; to end it use stop()")
    if len(set(slots)) < len(slots):
        raise InvalidValueError("a slot is named twice; it holds one replica")
    return tuple(slots)
