"""Writes and reads the tables of teams, users and tokens. :class:`pollux.server.live.accounts.Accounts` calls it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from pollux.api.access import ROLES, Role
from pollux.api.codec import API, dumps, loads
from pollux.scheduler.shares import Quota
from pollux.server.storage.database import Database
from pollux.server.storage.tables import teams as _teams
from pollux.server.storage.tables import tokens as _tokens
from pollux.server.storage.tables import users as _users


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    name: str
    quota: Quota
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    name: str
    team: str
    role: Role
    unix_user: str
    quota: Quota
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    id: int
    user: str | None
    role: Role
    label: str
    token_hash: str
    created_at: float
    expires_at: float | None
    revoked_at: float | None

    def is_valid(self, now: float) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


class AccountStore:
    """Every method is one transaction. Raises StoreError if the database cannot be used."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def teams(self) -> dict[str, Team]:
        with self._database.reading() as connection:
            rows = connection.execute(sa.select(_teams).order_by(_teams.c.created_at, _teams.c.name)).all()
        with self._database.interpreting("teams"):
            return {row.name: Team(name=row.name, quota=_quota(row.quota), created_at=row.created_at) for row in rows}

    def users(self) -> dict[str, User]:
        with self._database.reading() as connection:
            rows = connection.execute(sa.select(_users).order_by(_users.c.created_at, _users.c.name)).all()
        with self._database.interpreting("users"):
            return {
                row.name: User(
                    name=row.name,
                    team=row.team,
                    role=_role(row.role),
                    unix_user=row.unix_user,
                    quota=_quota(row.quota),
                    created_at=row.created_at,
                )
                for row in rows
            }

    def tokens(self) -> dict[int, Token]:
        with self._database.reading() as connection:
            rows = connection.execute(sa.select(_tokens).order_by(_tokens.c.id)).all()
        with self._database.interpreting("tokens"):
            return {row.id: Token(**{**row._mapping, "role": _role(row.role)}) for row in rows}

    def save_team(self, team: Team) -> None:
        values = {"quota": _form(team.quota), "created_at": team.created_at}
        self._put(_teams, team.name, values)

    def save_user(self, user: User) -> None:
        values = {
            "team": user.team,
            "role": user.role,
            "unix_user": user.unix_user,
            "quota": _form(user.quota),
            "created_at": user.created_at,
        }
        self._put(_users, user.name, values)

    def remove_team(self, name: str) -> None:
        with self._database.writing() as connection:
            connection.execute(_teams.delete().where(_teams.c.name == name))

    def add_token(self, token: Token) -> int:
        """Its id, whatever that of ``token`` is."""
        values = {column.name: getattr(token, column.name) for column in _tokens.c if column.name != "id"}
        with self._database.writing() as connection:
            return int(connection.execute(_tokens.insert().values(values)).inserted_primary_key[0])  # type: ignore[index]

    def revoke(self, ids: list[int], at: float) -> None:
        with self._database.writing() as connection:
            where = _tokens.c.id.in_(ids), _tokens.c.revoked_at.is_(None)
            connection.execute(_tokens.update().where(*where).values(revoked_at=at))

    def _put(self, table: sa.Table, name: str, values: Mapping[str, object]) -> None:
        with self._database.writing() as connection:
            if connection.execute(table.update().where(table.c.name == name).values(**values)).rowcount == 0:
                connection.execute(table.insert().values(name=name, **values))


def _form(quota: Quota) -> str:
    return dumps(API.encode(quota), "quota")


def _quota(text: str) -> Quota:
    return API.decode(Quota, loads(text, "quota"), "quota")


def _role(text: str) -> Role:
    for role in ROLES:
        if role == text:
            return role
    raise ValueError(f"role {text!r}; one of {', '.join(ROLES)} is needed")
