"""Asking about users, teams, tokens, usage and nodes: a part of :class:`pollux.client.client.Client`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar
from urllib.parse import quote

from pollux.api.access import (
    DEFAULT_TOKEN_S,
    Identity,
    NewToken,
    Revocation,
    Role,
    TeamChange,
    TeamList,
    TeamSummary,
    TokenList,
    TokenRequest,
    TokenSummary,
    UserChange,
    UserList,
    UserSummary,
)
from pollux.api.cluster import CheckedNode, NodeCheck, NodeChecks, NodeReading, Pruned, Pruning, ReadingList
from pollux.api.codec import Json, decode, encode
from pollux.api.job import JobAction, JobList, JobSelection, JobSummary, JobsUpdate, JobUpdate, SelectedJobs, ShellPlace
from pollux.api.usage import UsageRow, UsageTable
from pollux.errors import InvalidValueError

Param = str | int | float | Sequence[str] | None
_T = TypeVar("_T")


def path_of(*parts: str) -> str:
    """Of a URL. A name that would be read as a way (``..``) is no name of anything."""
    for part in parts:
        if not part.strip(".") or "/" in part:
            raise InvalidValueError(f"name {part!r:.80}; letters, digits, '.', '_' and '-' make one")
    return "/".join(quote(part, safe="") for part in parts)


class Accounting:
    """Questions about users, teams and tokens."""

    def _ask(self, method: str, path: str, body: Json | bytes = None, **params: Param) -> dict[str, Json]:
        raise NotImplementedError

    def _get(self, kind: type[_T], path: str, **params: Param) -> _T:
        return decode(kind, self._ask("GET", path, None, **params), "answer")

    def _post(self, kind: type[_T], path: str, body: object = None, *, method: str = "POST") -> _T:
        return decode(kind, self._ask(method, path, body=None if body is None else encode(body)), "answer")

    def prune(self, older_than_s: float, *, is_dry_run: bool = False) -> Pruned:
        """Remove jobs that ended longer ago than that; or say which would go."""
        return self._post(Pruned, "prune", Pruning(older_than_s=older_than_s, is_dry_run=is_dry_run))

    def me(self) -> Identity:
        """Whom the server takes us for."""
        return self._get(Identity, "me")

    def check_nodes(self, script: str = "", packages: Sequence[str] = ()) -> list[CheckedNode]:
        """Look at every node: what jobs need there, and where nodes differ. Takes seconds."""
        asked = NodeCheck(script=script, packages=tuple(packages))
        return list(self._post(NodeChecks, "node-checks", asked).nodes)

    def teams(self) -> list[TeamSummary]:
        return list(self._get(TeamList, "teams").teams)

    def add_team(self, name: str, change: TeamChange) -> TeamSummary:
        return self._post(TeamSummary, path_of("teams", name), change)

    def change_team(self, name: str, change: TeamChange) -> TeamSummary:
        return self._post(TeamSummary, path_of("teams", name), change, method="PATCH")

    def remove_team(self, name: str) -> None:
        self._ask("DELETE", path_of("teams", name))

    def users(self) -> list[UserSummary]:
        return list(self._get(UserList, "users").users)

    def add_user(self, name: str, change: UserChange) -> UserSummary:
        """Without a token: see :meth:`make_token`."""
        return self._post(UserSummary, path_of("users", name), change)

    def change_user(self, name: str, change: UserChange) -> UserSummary:
        return self._post(UserSummary, path_of("users", name), change, method="PATCH")

    def tokens(self, user: str | None = None) -> list[TokenSummary]:
        return list(self._get(TokenList, "tokens", user=user).tokens)

    def make_token(
        self,
        user: str | None,
        *,
        role: Role | None = None,
        label: str = "",
        expires_s: float | None = DEFAULT_TOKEN_S,
    ) -> NewToken:
        """A token for a user, or without one a read-only link. Its text comes this once."""
        request = TokenRequest(user=user, role=role, label=label, expires_s=expires_s)
        return self._post(NewToken, "tokens", request)

    def act(self, action: JobAction, names: Sequence[str] = (), *, is_all: bool = False, reason: str = "") -> list[str]:
        """Cancel, hold or release jobs by name, pattern or array, all or none; the names of those it was done with."""
        body = JobSelection(action=action, names=tuple(names), is_all=is_all, reason=reason)
        return list(self._post(SelectedJobs, "job-actions", body).names)

    def update_all(self, names: Sequence[str], change: JobUpdate, *, is_all: bool = False) -> list[str]:
        """Change jobs by name, pattern or array, all or none; the names of those that were changed."""
        body = JobsUpdate(names=tuple(names), is_all=is_all, change=change)
        return list(self._post(SelectedJobs, "jobs", body, method="PATCH").names)

    def update(self, job: str, change: JobUpdate) -> JobSummary:
        """Change weight, priority, bounds or time limit of a job that is not over."""
        return self._post(JobSummary, path_of("jobs", job), change, method="PATCH")

    def requeue(self, job: str) -> JobSummary:
        """A running job waits again; one that is over is submitted again, under a new name."""
        return self._post(JobList, path_of("jobs", job, "requeue")).jobs[0]

    def shell(self, job: str, rank: int = 0) -> ShellPlace:
        """Where a shell beside a replica is to be. For its owner and admins; the server notes who asked."""
        return decode(ShellPlace, self._ask("POST", path_of("jobs", job, "shell"), None, rank=rank), "answer")

    def readings(
        self, node: str, since: float | None = None, until: float | None = None, points: int = 600
    ) -> list[NodeReading]:
        """What a node's machine and GPUs did, evenly thinned; in the last hour if nothing is said."""
        path = path_of("nodes", node, "readings")
        return list(self._get(ReadingList, path, since=since, until=until, points=points).readings)

    def usage(
        self, by: Sequence[str] = ("team", "user"), since: str | None = None, until: str | None = None
    ) -> list[UsageRow]:
        """What was used, summed by month, day, team, user or job; days are as in 2026-11-01, both included."""
        return list(self._get(UsageTable, "usage", by=list(by), since=since, until=until).rows)

    def revoke(self, *, user: str | None = None, id_: int | None = None) -> list[TokenSummary]:
        """Those that were valid until now: one by its id, or all of a user."""
        return list(self._post(TokenList, "tokens/revoke", Revocation(user=user, id=id_)).tokens)
