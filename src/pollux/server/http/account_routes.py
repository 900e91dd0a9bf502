"""Routes about users, teams and tokens. Admins change them; members see themselves and all teams."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query, Response

from pollux.api.access import (
    OPERATOR,
    Identity,
    NewToken,
    Revocation,
    TeamChange,
    TeamList,
    TeamSummary,
    TokenList,
    TokenRequest,
    UserChange,
    UserList,
    UserSummary,
)
from pollux.api.usage import UsageKey, UsageTable
from pollux.server.http.dependencies import ADMIN, READY, ItsCaller, ItsCluster, ItsQueries, body_of, of_people
from pollux.server.http.errors import Refusal, answer
from pollux.server.http.openapi import body_schema, error_answers

accounts = of_people("accounts")
_CHANGES = [*ADMIN, *READY]


@accounts.get("/me", summary="Who asks", response_model=Identity, responses=error_answers())
def who_asks(cluster: ItsCluster, caller: ItsCaller) -> Response:
    team = "" if caller.user is None else cluster.accounts.team_of(caller.user)
    user = caller.user or (OPERATOR if caller.is_admin else "link")
    return answer(Identity(user=user, team=team, role=caller.role))


# Teams ----------------------------------------------------------------------------------------


@accounts.get("/teams", summary="The teams", response_model=TeamList, responses=error_answers())
def list_teams(cluster: ItsCluster) -> Response:
    return answer(TeamList(teams=tuple(cluster.accounts.teams())))


@accounts.post(
    "/teams/{name}",
    summary="Add a team",
    status_code=201,
    response_model=TeamSummary,
    responses=error_answers(413, 422),
    dependencies=_CHANGES,
    openapi_extra=body_schema(TeamChange, is_required=False),
)
def add_team(cluster: ItsCluster, name: str, body: Annotated[TeamChange, Depends(body_of(TeamChange))]) -> Response:
    return answer(cluster.accounts.set_team(name, body, is_new=True), 201)


@accounts.patch(
    "/teams/{name}",
    summary="Change a team",
    response_model=TeamSummary,
    responses=error_answers(404, 413, 422),
    dependencies=_CHANGES,
    openapi_extra=body_schema(TeamChange, is_required=False),
)
def change_team(cluster: ItsCluster, name: str, body: Annotated[TeamChange, Depends(body_of(TeamChange))]) -> Response:
    """Jobs follow with the next decision: over a new limit they shrink, and stop as the last step."""
    return answer(cluster.accounts.set_team(name, body, is_new=False))


@accounts.delete(
    "/teams/{name}",
    summary="Remove a team without users",
    response_model=TeamList,
    responses=error_answers(404, 422),
    dependencies=_CHANGES,
)
def remove_team(cluster: ItsCluster, name: str) -> Response:
    """The teams that are left."""
    cluster.accounts.remove_team(name)
    return answer(TeamList(teams=tuple(cluster.accounts.teams())))


# Users ----------------------------------------------------------------------------------------


@accounts.get("/users", summary="The users", response_model=UserList, responses=error_answers())
def list_users(cluster: ItsCluster, caller: ItsCaller) -> Response:
    """Admins see all users, others themselves."""
    found = cluster.accounts.users()
    return answer(UserList(users=tuple(user for user in found if caller.is_admin or user.name == caller.user)))


@accounts.post(
    "/users/{name}",
    summary="Add a user",
    status_code=201,
    response_model=UserSummary,
    responses=error_answers(404, 413, 422),
    dependencies=_CHANGES,
    openapi_extra=body_schema(UserChange, is_required=False),
)
def add_user(cluster: ItsCluster, name: str, body: Annotated[UserChange, Depends(body_of(UserChange))]) -> Response:
    """Without a token: that is made by ``POST /tokens``."""
    return answer(cluster.accounts.set_user(name, body, is_new=True), 201)


@accounts.patch(
    "/users/{name}",
    summary="Change a user",
    response_model=UserSummary,
    responses=error_answers(404, 413, 422),
    dependencies=_CHANGES,
    openapi_extra=body_schema(UserChange, is_required=False),
)
def change_user(cluster: ItsCluster, name: str, body: Annotated[UserChange, Depends(body_of(UserChange))]) -> Response:
    return answer(cluster.accounts.set_user(name, body, is_new=False))


# Tokens ---------------------------------------------------------------------------------------


@accounts.get("/tokens", summary="Tokens, without their texts", response_model=TokenList, responses=error_answers(404))
def list_tokens(
    cluster: ItsCluster,
    caller: ItsCaller,
    user: Annotated[str | None, Query(description="Of this user only.")] = None,
) -> Response:
    """Admins see all tokens, others their own."""
    if not caller.is_admin:
        if caller.user is None or user not in (None, caller.user):
            raise Refusal(403, "AccessDeniedError", "only admins see the tokens of others")
        user = caller.user
    return answer(TokenList(tokens=tuple(cluster.accounts.tokens(user))))


@accounts.post(
    "/tokens",
    summary="Make a token",
    status_code=201,
    response_model=NewToken,
    responses=error_answers(404, 413, 422),
    dependencies=READY,
    openapi_extra=body_schema(TokenRequest, is_required=False),
)
def make_token(
    cluster: ItsCluster, caller: ItsCaller, body: Annotated[TokenRequest, Depends(body_of(TokenRequest))]
) -> Response:
    """For a user, or without one a read-only link. Members make tokens for themselves. The text is shown this once."""
    if not caller.is_admin and body.user != caller.user:
        raise Refusal(403, "AccessDeniedError", f"members make tokens for themselves: name {caller.user!r}")
    return answer(cluster.accounts.issue(body, caller.role), 201)


@accounts.post(
    "/tokens/revoke",
    summary="Revoke a token, or all of a user",
    response_model=TokenList,
    responses=error_answers(404, 413, 422),
    dependencies=READY,
    openapi_extra=body_schema(Revocation, is_required=True),
)
def revoke_tokens(
    cluster: ItsCluster, caller: ItsCaller, body: Annotated[Revocation, Depends(body_of(Revocation))]
) -> Response:
    """Those that were revoked now. Members revoke their own."""
    if not caller.is_admin:
        own = {token.id for token in cluster.accounts.tokens(caller.user)}
        if (body.user is not None and body.user != caller.user) or (body.id is not None and body.id not in own):
            raise Refusal(403, "AccessDeniedError", "only admins revoke the tokens of others")
    return answer(TokenList(tokens=tuple(cluster.accounts.revoke(body))))


# Usage ----------------------------------------------------------------------------------------

_DAY = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"


@accounts.get("/usage", summary="What was used", response_model=UsageTable, responses=error_answers(422))
def usage(
    cluster: ItsCluster,
    queries: ItsQueries,
    caller: ItsCaller,
    by: Annotated[list[UsageKey] | None, Query(description="What to sum by.")] = None,
    since: Annotated[str | None, Query(pattern=_DAY, description="From this day on, as in 2026-11-01.")] = None,
    until: Annotated[str | None, Query(pattern=_DAY, description="Until this day, it included.")] = None,
) -> Response:
    """Slot-hours, GPU-hours, goodput-hours and cost. Admins see all of it, others their team's."""
    keys: list[UsageKey] = list(by or ["team", "user"])
    if caller.is_admin or caller.user is None:
        return answer(UsageTable(rows=tuple(queries.usage(keys, since, until))))
    team = cluster.accounts.team_of(caller.user)
    found = queries.usage([*keys, "team"], since, until)
    return answer(UsageTable(rows=tuple(row for row in found if row.team == team)))


ROUTERS = (accounts,)
