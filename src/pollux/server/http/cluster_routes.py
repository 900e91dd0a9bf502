"""Routes about the cluster: health, summary, nodes, rounds, the stream of changes, shutdown."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import TypeAdapter
from starlette.concurrency import run_in_threadpool

from pollux.api.cluster import (
    ClusterSummary,
    Health,
    NodeCheck,
    NodeChecks,
    NodeList,
    NodeSummary,
    Pruned,
    Pruning,
    Shutdown,
    StateEvent,
)
from pollux.api.codec import MAX_INTEGER
from pollux.api.errors import ErrorAnswer
from pollux.api.round import RoundDetail, RoundList
from pollux.errors import PolluxError
from pollux.server.http.dependencies import (
    ADMIN,
    READY,
    ItsCaller,
    ItsCluster,
    ItsQueries,
    Limit,
    Since,
    body_of,
    is_still_allowed,
    of_people,
)
from pollux.server.http.errors import Refusal, answer, retry_later
from pollux.server.http.openapi import Responses, body_schema, error_answers
from pollux.server.present.feed import Feed

MIN_EVERY_S, MAX_EVERY_S = 0.5, 60.0
STILL_HERE_S = 15.0
LOOK_FOR_END_S = 0.25  # how soon a stream ends with its server or its reader

logger = logging.getLogger(__name__)

# Health: no token -----------------------------------------------------------------------------

health = APIRouter(tags=["health"])
_NOT_READY: Responses = {503: {"model": ErrorAnswer, "description": "Not ready; the message says why."}}


@health.get("/healthz", summary="Is the process alive?", response_model=Health)
async def healthz() -> Response:
    return answer(Health())


@health.get("/readyz", summary="Does it take jobs?", response_model=Health, responses=_NOT_READY)
async def readyz(cluster: ItsCluster) -> Response:
    if cluster.is_ready:
        return answer(Health())
    return retry_later("ServerUnavailableError", cluster.problem or "starting or ending")


# The cluster ----------------------------------------------------------------------------------

cluster = of_people("cluster")


@cluster.get("/cluster", summary="At a glance", response_model=ClusterSummary, responses=error_answers())
def summarise(queries: ItsQueries) -> Response:
    return answer(queries.summary())


@cluster.get("/nodes", summary="The nodes", response_model=NodeList, responses=error_answers())
def list_nodes(queries: ItsQueries) -> Response:
    return answer(NodeList(nodes=tuple(queries.nodes())))


@cluster.post(
    "/node-checks",
    summary="Look at all nodes: what jobs need, and what differs",
    response_model=NodeChecks,
    responses=error_answers(413, 422),
    openapi_extra=body_schema(NodeCheck, is_required=False),
)
def check_nodes(
    cluster: ItsCluster, caller: ItsCaller, body: Annotated[NodeCheck, Depends(body_of(NodeCheck))]
) -> Response:
    """Takes seconds. Nodes that do not answer in time are told, too.

    Where users have Unix users, only admins name a script: the server looks for it as root, who sees all files.
    """
    if body.script and cluster.accounts.has_unix_users and not caller.is_admin:
        message = f"script {body.script!r:.80}; only admins ask for one here, as jobs run as Unix users: leave it out"
        raise Refusal(403, "AccessDeniedError", message)
    return answer(NodeChecks(nodes=tuple(cluster.queries.check_nodes(body.script, body.packages))))


@cluster.post(
    "/nodes/{name}/drain",
    summary="Give no more jobs to a node; those on it are moved",
    response_model=NodeSummary,
    responses=error_answers(404, 422),
    dependencies=[*ADMIN, *READY],
)
def drain(cluster: ItsCluster, name: str) -> Response:
    return answer(cluster.drain(name, True))


@cluster.post(
    "/nodes/{name}/undrain",
    summary="Use a node again",
    response_model=NodeSummary,
    responses=error_answers(404, 422),
    dependencies=[*ADMIN, *READY],
)
def undrain(cluster: ItsCluster, name: str) -> Response:
    return answer(cluster.drain(name, False))


@cluster.get("/rounds", summary="Decisions", response_model=RoundList, responses=error_answers(422))
def list_rounds(queries: ItsQueries, since: Since = None, limit: Limit = 100) -> Response:
    return answer(RoundList(rounds=tuple(queries.rounds(since, limit))))


@cluster.post(
    "/prune",
    summary="Remove jobs that ended long ago",
    response_model=Pruned,
    responses=error_answers(413, 422),
    dependencies=[*ADMIN, *READY],
    openapi_extra=body_schema(Pruning, is_required=True),
)
def prune(cluster: ItsCluster, body: Annotated[Pruning, Depends(body_of(Pruning))]) -> Response:
    """Their rows, logs and checkpoints go; what they used stays in the accounts. Trials stay with their study."""
    return answer(cluster.retention.prune(body.older_than_s, is_dry_run=body.is_dry_run))


@cluster.post(
    "/shutdown",
    summary="End the server",
    status_code=202,
    response_model=Shutdown,
    responses=error_answers(413, 422),
    dependencies=ADMIN,
    openapi_extra=body_schema(Shutdown, is_required=False),
)
def shut_down(request: Request, body: Annotated[Shutdown, Depends(body_of(Shutdown))]) -> Response:
    """Jobs checkpoint, leave, and go on when a server is started again; or train on, if they are kept."""
    request.app.state.shutdown(body.keep_jobs)
    return answer(body, 202)


@cluster.get(
    "/rounds/{id}",
    summary="A decision in full",
    response_model=RoundDetail,
    responses=error_answers(404, 422),
)
def one_round(queries: ItsQueries, id: Annotated[int, Path(ge=0, le=MAX_INTEGER)]) -> Response:
    return answer(queries.round(id))


# What changes ---------------------------------------------------------------------------------

_EVENTS: Responses = {
    200: {
        "content": {"text/event-stream": {"schema": TypeAdapter(StateEvent).json_schema()}},
        "description": "Messages without end.",
    }
}


@cluster.get(
    "/events",
    summary="What changes, as it changes",
    response_class=StreamingResponse,
    responses={**error_answers(422), **_EVENTS},
)
async def events(
    request: Request,
    every_s: Annotated[
        float, Query(ge=MIN_EVERY_S, le=MAX_EVERY_S, allow_inf_nan=False, description="How often, at most.")
    ] = 1.0,
) -> Response:
    """Server-sent events. The first one tells all: jobs that are not over and those that ended last, nodes, the last
    rounds; the others what has changed since. A stream ends with the server; the next one begins with all again.
    """
    feed: Feed = request.app.state.feed
    # Before anything is sent, so that a failure has its status.
    version, message = await run_in_threadpool(feed.message, 0)

    async def is_over() -> bool:
        is_ending = bool(request.app.state.is_ending) or not is_still_allowed(request)
        return is_ending or await request.is_disconnected()

    async def messages() -> AsyncIterator[str]:
        nonlocal version, message
        said_at = time.monotonic()
        while True:
            if message is not None:
                yield f"event: state\nid: {version}\ndata: {message}\n\n"
                said_at = time.monotonic()
            look_at = time.monotonic() + every_s
            while (left_s := look_at - time.monotonic()) > 0:
                if await is_over():
                    return
                if time.monotonic() - said_at >= STILL_HERE_S:  # also where looks are farther apart
                    yield ": still here\n\n"
                    said_at = time.monotonic()
                await asyncio.sleep(min(left_s, LOOK_FOR_END_S))
            try:
                version, message = await run_in_threadpool(feed.message, version)
            except PolluxError as error:  # too late for another status; the client asks again
                logger.warning("a stream of events ends: %s", error)
                return

    headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(messages(), media_type="text/event-stream", headers=headers)


ROUTERS = (health, cluster)
