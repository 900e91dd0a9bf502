"""Who is in one generation of a job: its members in rank order. Written by ``controller``, read by ``replica``."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pollux.errors import InvalidValueError

ROSTER_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One line of a roster; its place in the roster is its rank."""

    replica_id: str
    node: str

    def __post_init__(self) -> None:
        for name, value in (("replica_id", self.replica_id), ("node", self.node)):
            if not isinstance(value, str) or not value or not value.isprintable():
                raise InvalidValueError(f"{name} must be printable text, not empty; got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """The members of one generation in rank order, and whose loss made it necessary.

    A collective with a replica named in ``lost`` can never end: the others must leave it.
    """

    generation: int
    members: tuple[Member, ...]
    lost: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.generation, int) or isinstance(self.generation, bool) or self.generation < 1:
            raise InvalidValueError(f"generations count from 1; got {self.generation!r}")
        if not self.members:
            raise InvalidValueError(f"generation {self.generation} has no members; it needs at least one")
        ids = [member.replica_id for member in self.members]
        if len(set(ids)) != len(ids):
            raise InvalidValueError(f"generation {self.generation} names a replica twice: {', '.join(ids)}")
        if not all(isinstance(replica_id, str) and replica_id for replica_id in self.lost):
            raise InvalidValueError(f"lost must hold replica ids; got {self.lost!r}")
        if both := set(ids) & set(self.lost):
            raise InvalidValueError(f"generation {self.generation} has {sorted(both)} as members and as lost")

    def rank_of(self, replica_id: str) -> int | None:
        return next((rank for rank, member in enumerate(self.members) if member.replica_id == replica_id), None)

    def to_json(self) -> str:
        members = [{"replica_id": member.replica_id, "node": member.node} for member in self.members]
        value = {"version": ROSTER_VERSION, "generation": self.generation, "members": members, "lost": list(self.lost)}
        return json.dumps(value)

    @classmethod
    def from_json(cls, text: str | bytes) -> Roster:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise InvalidValueError(f"a roster must be JSON; got {text[:80]!r} ({error})") from error
        if not isinstance(value, dict) or value.get("version") != ROSTER_VERSION:
            seen = value.get("version") if isinstance(value, dict) else value
            raise InvalidValueError(f"a roster of version {ROSTER_VERSION} was expected; got {seen!r}: update Pollux")
        try:
            members = tuple(Member(replica_id=row["replica_id"], node=row["node"]) for row in value["members"])
            return cls(generation=value["generation"], members=members, lost=tuple(value["lost"]))
        except (KeyError, TypeError) as error:
            problem = f"a roster needs generation, members (replica_id, node) and lost; got {text[:200]!r} ({error!r})"
            raise InvalidValueError(problem) from error
