"""Users, teams and their tokens, in memory and in the database. Routes change them, authentication asks them.

A token's text is shown once and never kept: what is kept is its SHA-256, which is enough for a random text of 32 bytes.
A change is in the database before it counts, and counts for the next request: a revoked token is refused at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import pwd
import secrets
import threading
from collections.abc import Callable, Iterable

from pollux.api.access import (
    ROLES,
    NewToken,
    Revocation,
    Role,
    TeamChange,
    TeamSummary,
    TokenRequest,
    TokenSummary,
    UserChange,
    UserSummary,
    check_account_name,
)
from pollux.errors import AccessDeniedError, InvalidValueError, UnknownNameError
from pollux.scheduler.shares import Entitlements, Quota, Standing, TeamMember, check_guarantees, check_inside, unkept
from pollux.server.http.auth import Person
from pollux.server.storage.accounts import AccountStore, Team, Token, User
from pollux.server.storage.database import Database
from pollux.types import Node

MAX_TOKENS = 200  # of one user, that are valid
TOKEN_PREFIX = "plx_"  # so that scanners for leaked secrets can know it

logger = logging.getLogger(__name__)


class Accounts:
    """Any thread may call. One lock orders changes; readers see whole values."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._store, self._now = AccountStore(database), clock
        self.nodes: Callable[[], Iterable[Node]] = lambda: ()  # of the cluster: guarantees must fit into them
        self._turn = threading.Lock()
        self._said_unkept = ""
        self.reload()
        self.standing: Callable[[str], Standing | None] = lambda team: None  # as of the last decision
        self.on_change: Callable[[], None] = lambda: None

    def reload(self) -> None:
        """From the database."""
        self._teams, self._users = self._store.teams(), self._store.users()
        self._tokens = self._store.tokens()
        self._by_hash = {token.token_hash: token for token in self._tokens.values()}
        self._entitlements = self._entitle()

    @property
    def entitlements(self) -> Entitlements:
        """What the scheduler needs of it."""
        return self._entitlements

    @property
    def unkept(self) -> str:
        """Why the cluster cannot keep all guarantees at the moment; empty: it can, or has no node yet."""
        nodes = list(self.nodes())
        return unkept([(team.name, team.quota) for team in self._teams.values()], nodes) if nodes else ""

    def tell_unkept(self) -> None:
        """Log that guarantees exceed the cluster, as after a restore on a smaller one; once."""
        if (news := self.unkept) != self._said_unkept and (news or self.nodes()):
            self._said_unkept = news
            logger.warning("%s", news or "all guarantees can be kept again")

    # Who asks ---------------------------------------------------------------------------------

    def person_of(self, text: str) -> Person | None:
        """Whom a token belongs to; None: it is no token of a person.

        Raises:
            AccessDeniedError: it was revoked, or has expired.
        """
        token = self._by_hash.get(_hash(text))
        if token is None:
            return None
        if token.revoked_at is not None:
            raise AccessDeniedError("this token was revoked; ask an admin for another: pollux user token NAME")
        if not token.is_valid(self._now()):
            raise AccessDeniedError("this token has expired; ask an admin for another: pollux user token NAME")
        if token.user is None:
            return Person(user=None, role=token.role)
        return Person(user=token.user, role=_least(token.role, self._users[token.user].role))

    def role_of(self, name: str) -> Role | None:
        """None: there is no such user."""
        user = self._users.get(name)
        return None if user is None else user.role

    def team_of(self, owner: str) -> str:
        user = self._users.get(owner)
        return "" if user is None else user.team

    def unix_user_of(self, owner: str) -> str:
        """Empty: jobs of this owner run as the server does."""
        user = self._users.get(owner)
        return "" if user is None else user.unix_user

    @property
    def has_unix_users(self) -> bool:
        """Whether jobs of some users run as another Unix user than the server."""
        return any(user.unix_user for user in self._users.values())

    # Teams ------------------------------------------------------------------------------------

    def teams(self) -> list[TeamSummary]:
        return [self._team_summary(team) for team in list(self._teams.values())]

    def team(self, name: str) -> TeamSummary:
        return self._team_summary(self._team(name))

    def set_team(self, name: str, change: TeamChange, *, is_new: bool) -> TeamSummary:
        """Add a team (``is_new``), or change one.

        Raises:
            InvalidValueError: the name is taken or none, or guarantees exceed the cluster; nothing was changed.
            UnknownNameError: there is no such team.
        """
        with self._turn:
            if is_new and name in self._teams:
                raise InvalidValueError(f"there is a team {name!r}; change it with: pollux team set {name}")
            old = None if is_new else self._team(name)
            created_at = self._now() if old is None else old.created_at
            quota = _changed(Quota() if old is None else old.quota, change)
            team = Team(name=check_account_name("team", name), quota=quota, created_at=created_at)
            teams = {**self._teams, name: team}
            if old is None or quota.guarantee != old.quota.guarantee:
                check_guarantees(((one.name, one.quota) for one in teams.values()), self.nodes())
            check_inside(self._guarantees_in(name), name, quota)
            self._store.save_team(team)
            self._teams = teams
            self._changed()
            logger.info("team %s: %s", name, "added" if is_new else "changed")
            return self._team_summary(team)

    def remove_team(self, name: str) -> None:
        """Raises:
        InvalidValueError: it has users.
        """
        with self._turn:
            users = [user.name for user in self._users.values() if user.team == self._team(name).name]
            if users:
                raise InvalidValueError(
                    f"team {name!r} has users: {', '.join(users)}; move them first: pollux user set {users[0]} --team T"
                )
            self._store.remove_team(name)
            self._teams = {key: team for key, team in self._teams.items() if key != name}
            self._changed()

    # Users ------------------------------------------------------------------------------------

    def users(self) -> list[UserSummary]:
        return [self._user_summary(user) for user in list(self._users.values())]

    def user(self, name: str) -> UserSummary:
        return self._user_summary(self._user(name))

    def set_user(self, name: str, change: UserChange, *, is_new: bool) -> UserSummary:
        """Add a user (``is_new``), or change one.

        Raises:
            InvalidValueError: the name is taken or none, or there is no team for it; nothing was changed.
            UnknownNameError: there is no such user or team.
        """
        with self._turn:
            if is_new and name in self._users:
                raise InvalidValueError(f"there is a user {name!r}; change it with: pollux user set {name}")
            old = None if is_new else self._user(name)
            user = User(
                name=check_account_name("user", name),
                team=self._team_for(name, change.team, old),
                role=change.role or ("member" if old is None else old.role),
                unix_user=_unix_user(change.unix_user, old),
                quota=_changed(Quota() if old is None else old.quota, change),
                created_at=self._now() if old is None else old.created_at,
            )
            if user.quota.guarantee:
                others = [entry for entry in self._guarantees_in(user.team) if entry[0] != name]
                check_inside([*others, (name, user.quota)], user.team, self._teams[user.team].quota)
            self._store.save_user(user)
            self._users = {**self._users, name: user}
            self._changed()
            logger.info("user %s: %s, %s of team %s", name, "added" if is_new else "changed", user.role, user.team)
            if not user.unix_user and self.has_unix_users:
                logger.warning("user %s has no Unix user: their jobs run as root, unlike those of others", name)
            return self._user_summary(user)

    def _team_for(self, user: str, wanted: str | None, old: User | None) -> str:
        if wanted is not None:
            return self._team(wanted).name
        if old is not None:
            return old.team
        if len(self._teams) == 1:
            return next(iter(self._teams))
        known = f"teams are {', '.join(self._teams)}" if self._teams else "there is none yet: pollux team add NAME"
        raise InvalidValueError(f"user {user!r} would be in no team; name one with --team ({known})")

    # Tokens -----------------------------------------------------------------------------------

    def tokens(self, user: str | None = None) -> list[TokenSummary]:
        if user is not None:
            self._user(user)
        return [_token_summary(token) for token in list(self._tokens.values()) if user is None or token.user == user]

    def issue(self, request: TokenRequest, asked_as: Role = "admin") -> NewToken:
        """A new token. The answer is the only place where its text is. ``asked_as``: the role of the token that asks.

        Raises:
            InvalidValueError: it would be good for more than its user, or than who asks; or a link for more than
                looking; or the user has too many.
        """
        most: Role = "viewer" if request.user is None else _least(asked_as, self._user(request.user).role)
        role = request.role or most
        if _least(role, most) != role:
            asked = "" if asked_as == "admin" else f", asked for by a {asked_as}"
            whose = "a link without a user" if request.user is None else f"user {request.user!r}{asked}"
            raise InvalidValueError(f"role {role} for a token of {whose}; {most} is the most that it can have")
        text = f"{TOKEN_PREFIX}{secrets.token_urlsafe(32)}"
        now = self._now()
        token = Token(
            id=0,
            user=request.user,
            role=role,
            label=request.label,
            token_hash=_hash(text),
            created_at=now,
            expires_at=None if request.expires_s is None else now + request.expires_s,
            revoked_at=None,
        )
        with self._turn:
            self._require_few_tokens(request.user, now)
            token = dataclasses.replace(token, id=self._store.add_token(token))
            self._put_tokens([token])
        logger.info("token %d: made for %s, %s", token.id, token.user or "a link", token.role)
        return NewToken(token=text, summary=_token_summary(token))

    def _require_few_tokens(self, user: str | None, now: float) -> None:
        num_live = sum(token.user == user and token.is_valid(now) for token in self._tokens.values())
        if user is not None and num_live >= MAX_TOKENS:
            raise InvalidValueError(
                f"there are {num_live} tokens of user {user!r} that are valid; at most {MAX_TOKENS} are allowed: "
                f"revoke those that are not used, see pollux user tokens {user}"
            )

    def revoke(self, which: Revocation) -> list[TokenSummary]:
        """Revoke a token, or all of a user; those that were revoked now.

        Raises:
            UnknownNameError: there is no such token or user.
            InvalidValueError: neither or both were named.
        """
        if (which.user is None) == (which.id is None):
            raise InvalidValueError("say whose tokens to revoke, or the id of one: pollux user revoke NAME, or --token")
        with self._turn:
            if which.id is not None and which.id not in self._tokens:
                raise UnknownNameError("token", str(which.id), [str(id_) for id_ in self._tokens])
            if which.user is not None:
                self._user(which.user)
            named = [token for token in self._tokens.values() if which.id in (None, token.id)]
            chosen = [token for token in named if token.revoked_at is None and which.user in (None, token.user)]
            now = self._now()
            self._store.revoke([token.id for token in chosen], now)
            gone = [dataclasses.replace(token, revoked_at=now) for token in chosen]
            self._put_tokens(gone)
        logger.info("tokens revoked: %s", ", ".join(str(token.id) for token in gone) or "none")
        return [_token_summary(token) for token in gone]

    # Inside -----------------------------------------------------------------------------------

    def _put_tokens(self, tokens: Iterable[Token]) -> None:
        for token in tokens:
            self._tokens = {**self._tokens, token.id: token}
            self._by_hash = {**self._by_hash, token.token_hash: token}

    def _changed(self) -> None:
        self._entitlements = self._entitle()
        self.on_change()

    def _entitle(self) -> Entitlements:
        return Entitlements(
            teams={team.name: team.quota for team in self._teams.values()},
            users={user.name: TeamMember(team=user.team, quota=user.quota) for user in self._users.values()},
        )

    def _guarantees_in(self, team: str) -> list[tuple[str, Quota]]:
        return [(user.name, user.quota) for user in self._users.values() if user.team == team]

    def _team(self, name: str) -> Team:
        if name not in self._teams:
            raise UnknownNameError("team", name, self._teams)
        return self._teams[name]

    def _user(self, name: str) -> User:
        if name not in self._users:
            raise UnknownNameError("user", name, self._users)
        return self._users[name]

    def _team_summary(self, team: Team) -> TeamSummary:
        standing = self.standing(team.name)
        return TeamSummary(
            name=team.name,
            weight=team.quota.weight,
            guarantee=team.quota.guarantee,
            limit=team.quota.limit,
            created_at=team.created_at,
            users=tuple(user.name for user in list(self._users.values()) if user.team == team.name),
            num_held=0 if standing is None else standing.num_held,
            num_wanted=0 if standing is None else standing.num_wanted,
            lent_to={} if standing is None else standing.lent_to,
            lent_since=None if standing is None else standing.since,
        )

    def _user_summary(self, user: User) -> UserSummary:
        now, tokens = self._now(), list(self._tokens.values())
        return UserSummary(
            name=user.name,
            team=user.team,
            role=user.role,
            weight=user.quota.weight,
            guarantee=user.quota.guarantee,
            limit=user.quota.limit,
            unix_user=user.unix_user,
            created_at=user.created_at,
            num_tokens=sum(token.user == user.name and token.is_valid(now) for token in tokens),
        )


def _least(one: Role, other: Role) -> Role:
    """The role that may do less."""
    return max(one, other, key=ROLES.index)


def _changed(quota: Quota, change: TeamChange) -> Quota:
    return Quota(
        weight=quota.weight if change.weight is None else change.weight,
        guarantee=quota.guarantee if change.guarantee is None else dict(change.guarantee),
        limit=quota.limit if change.limit is None else dict(change.limit),
    )


def _unix_user(wanted: str | None, old: User | None) -> str:
    if wanted is None:
        return "" if old is None else old.unix_user
    if wanted and os.geteuid() != 0:
        raise InvalidValueError(
            f"unix user {wanted!r}: this server does not run as root, so its jobs run as its own user; start it as root"
        )
    if wanted:
        try:
            if pwd.getpwnam(wanted).pw_uid == 0:
                raise InvalidValueError(f"unix user {wanted!r} is root; jobs never run as root for a user")
        except KeyError:
            raise InvalidValueError(f"unix user {wanted!r} is not known on the server's machine") from None
    return wanted


def _token_summary(token: Token) -> TokenSummary:
    return TokenSummary(
        id=token.id,
        user=token.user,
        role=token.role,
        label=token.label,
        created_at=token.created_at,
        expires_at=token.expires_at,
        revoked_at=token.revoked_at,
    )


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()
