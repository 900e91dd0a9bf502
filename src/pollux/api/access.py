"""Users, teams and tokens: what the server says of them, and the bodies of requests that change them.

Routes of the server return these, the client decodes them, ``pollux user`` and ``pollux team`` show them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pollux.api.codec import about
from pollux.errors import InvalidValueError

Role = Literal["admin", "member", "viewer"]
ROLES: tuple[Role, ...] = ("admin", "member", "viewer")
OPERATOR = "operator"  # the owner of jobs that were submitted with the server's own token
ANY_TYPE = "any"  # slots of all accelerator types together
MAX_SLOTS = 1 << 20
MAX_ACCOUNT_NAME = 40
DEFAULT_TOKEN_S = 90 * 86400.0
DEFAULT_LINK_S = 7 * 86400.0
SlotsByType = Mapping[str, int]
_ACCOUNT = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_ACCOUNT_NAME - 1}}}")


def check_account_name(what: str, name: str) -> str:
    """Raises:
    InvalidValueError: no user or team can have this name.
    """
    if not _ACCOUNT.fullmatch(name) or name == OPERATOR:
        raise InvalidValueError(
            f"{what} {name!r:.80}; 1 to {MAX_ACCOUNT_NAME} of A-Z a-z 0-9 . _ - are needed, the first a letter or "
            f"digit, and not {OPERATOR!r}, which is the server's own"
        )
    return name


def parse_slots(text: str) -> dict[str, int]:
    """Slots of ``"8"`` (any type), ``"a100=8,v100=4"`` (by type) or ``"none"``."""
    if text.strip() in ("none", ""):
        return {}
    found: dict[str, int] = {}
    for part in text.split(","):
        kind, equals, number = part.strip().rpartition("=")
        kind = kind.strip() if equals else ANY_TYPE
        if not kind or not number.strip().isdecimal() or int(number) > MAX_SLOTS or kind in found:
            raise InvalidValueError(
                f"slots {text!r:.80}; a number as in 8, numbers by accelerator type as in a100=8,v100=4, or none"
            )
        found[kind] = int(number)
    return found


def format_slots(slots: SlotsByType) -> str:
    """The reverse of :func:`parse_slots`."""
    return ",".join(str(n) if kind == ANY_TYPE else f"{kind}={n}" for kind, n in slots.items()) or "none"


# Answers --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSummary:
    """A token without its text, which is shown once, when it is made."""

    id: int
    user: str | None = field(metadata=about("Null: a link that belongs to no user."))
    role: Role
    label: str
    created_at: float
    expires_at: float | None = field(metadata=about("Null: never."))
    revoked_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """The only answer that holds a token's text; the server keeps a hash of it."""

    token: str
    summary: TokenSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenList:
    tokens: tuple[TokenSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UserSummary:
    name: str
    team: str
    role: Role
    weight: float
    guarantee: SlotsByType = field(metadata=about("Slots by accelerator type, or of any type; inside the team's."))
    limit: SlotsByType = field(metadata=about("As the guarantee; types that are not named have none."))
    unix_user: str = field(metadata=about("Jobs run as this user, where the server is root. Empty: as the server."))
    created_at: float
    num_tokens: int = field(metadata=about("That are valid now."))


@dataclass(frozen=True, slots=True, kw_only=True)
class UserList:
    users: tuple[UserSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamSummary:
    name: str
    weight: float
    guarantee: SlotsByType
    limit: SlotsByType
    created_at: float
    users: tuple[str, ...]
    num_held: int = field(metadata=about("Slots that its jobs hold, as of the last decision."))
    num_wanted: int = field(metadata=about("Slots of its guarantee that its jobs can use, as the policy finds."))
    lent_to: Mapping[str, int] = field(metadata=about("Slots of its guarantee that others hold, by team."))
    lent_since: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamList:
    teams: tuple[TeamSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who asks."""

    user: str
    team: str
    role: Role


# Requests -------------------------------------------------------------------------------------

_SLOTS = about("Slots by accelerator type; 'any' counts all types together. Null: as before.", max_length=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamChange:
    """What to change of a team, or what a new one has. Null: as before, or the default."""

    weight: float | None = field(default=None, metadata=about("A positive number; 1 by default.", ge=1e-3, le=1e6))
    guarantee: SlotsByType | None = field(default=None, metadata=_SLOTS)
    limit: SlotsByType | None = field(default=None, metadata=_SLOTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserChange(TeamChange):
    """What to change of a user, or what a new one has. Null: as before, or the default."""

    team: str | None = field(default=None, metadata=about(max_length=MAX_ACCOUNT_NAME))
    role: Role | None = None
    unix_user: str | None = field(default=None, metadata=about("Empty: jobs run as the server does.", max_length=64))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """A token for a user, or a read-only link (``user`` null)."""

    user: str | None = field(default=None, metadata=about(max_length=MAX_ACCOUNT_NAME))
    role: Role | None = field(default=None, metadata=about("No more than the user's own, which is the default."))
    label: str = field(default="", metadata=about("Where it is used, for the list.", max_length=100))
    expires_s: float | None = field(
        default=DEFAULT_TOKEN_S, metadata=about("From now on. Null: never.", ge=1.0, le=1e10)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocation:
    """Which tokens to revoke: one, or all of a user."""

    user: str | None = field(default=None, metadata=about(max_length=MAX_ACCOUNT_NAME))
    id: int | None = field(default=None, metadata=about(ge=0))
