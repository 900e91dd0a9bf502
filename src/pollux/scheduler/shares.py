"""What teams and users are entitled to, as plain values: the server keeps them, :mod:`.quotas` uses them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pollux.errors import InvalidValueError
from pollux.types import Node

ANY_TYPE = "any"  # slots of all accelerator types together
_MAX_SLOTS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Slots are by accelerator type; ``"any"`` counts all types together. A type that is not named has no limit."""

    weight: float = 1.0
    guarantee: Mapping[str, int] = field(default_factory=dict, hash=False)
    limit: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise InvalidValueError(f"weight {self.weight}; a positive number is needed")
        for what, slots in (("guarantee", self.guarantee), ("limit", self.limit)):
            for kind, number in slots.items():
                is_whole = isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= _MAX_SLOTS
                if not kind or not is_whole:
                    raise InvalidValueError(
                        f"{what} of {number!r} slots of type {kind!r}; a whole number from 0 to {_MAX_SLOTS} is needed"
                    )
        for kind, number in self.guarantee.items():
            most = min(self.limit.get(kind, _MAX_SLOTS), self.limit.get(ANY_TYPE, _MAX_SLOTS))
            if number > most:
                raise InvalidValueError(
                    f"guarantee of {number} slots of type {kind} above the limit of {most}; raise the limit, or lower "
                    "the guarantee"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamMember:
    """A user in a team."""

    team: str
    quota: Quota = Quota()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entitlements:
    """All teams and users. A job whose owner is not among the users is in a team of its own, of weight 1."""

    teams: Mapping[str, Quota] = field(default_factory=dict)
    users: Mapping[str, TeamMember] = field(default_factory=dict)

    def team_of(self, owner: str) -> str:
        member = self.users.get(owner)
        return owner if member is None else member.team


def check_guarantees(quotas: Iterable[tuple[str, Quota]], nodes: Iterable[Node]) -> None:
    """Refuse guarantees that the nodes cannot keep all at once.

    Raises:
        InvalidValueError: says by how much, and whose they are.
    """
    there: dict[str, int] = {}
    for node in nodes:
        there[node.accelerator] = there.get(node.accelerator, 0) + node.num_slots
    _check_sums(quotas, {**there, ANY_TYPE: sum(there.values())}, "the cluster has")


def unkept(quotas: Iterable[tuple[str, Quota]], nodes: Iterable[Node]) -> str:
    """Why the nodes that are there now cannot keep all guarantees at once; empty: they can."""
    try:
        check_guarantees(quotas, nodes)
    except InvalidValueError as error:
        return f"not all guarantees can be kept: {error}, or add slots"
    return ""


def check_inside(users: Iterable[tuple[str, Quota]], team: str, quota: Quota) -> None:
    """Refuse guarantees of users that exceed their team's.

    Raises:
        InvalidValueError: says by how much, and whose they are.
    """
    total = sum(quota.guarantee.values())
    _check_sums(users, {**quota.guarantee, ANY_TYPE: total}, f"team {team} is guaranteed")


def _check_sums(quotas: Iterable[tuple[str, Quota]], most: Mapping[str, int], where: str) -> None:
    promised: dict[str, int] = {}
    named: list[str] = []
    for name, quota in quotas:
        for kind, number in quota.guarantee.items():
            if kind != ANY_TYPE:
                promised[kind] = promised.get(kind, 0) + number
            promised[ANY_TYPE] = promised.get(ANY_TYPE, 0) + number
        if quota.guarantee:
            named.append(f"{name} {sum(quota.guarantee.values())}")
    for kind, number in promised.items():
        if number > most.get(kind, 0):
            of_type = "" if kind == ANY_TYPE else f" of type {kind}"
            raise InvalidValueError(
                f"guarantees of {number} slots{of_type} in all ({', '.join(named)}); {where} {most.get(kind, 0)}: "
                "lower one of them"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a team, or a user of it, holds of what it is guaranteed, and with whom the rest is."""

    team: str
    user: str = ""
    num_guaranteed: int
    num_held: int
    num_wanted: int = 0  # of those guaranteed, that its jobs can use, as the policy finds
    lent_to: Mapping[str, int] = field(default_factory=dict)  # slots by team; a user's by colleague
    since: float | None = None  # lent
    unmovable: tuple[str, ...] = ()  # jobs of those that it is lent to, which give nothing back before they end

    @property
    def num_lent(self) -> int:
        return sum(self.lent_to.values())
