"""What is asked to be drawn, route by route: what changes, as it changes; the cluster over time; a job's curves and
model; decisions in full; and simulations that were published here.

Stands in ``server``, beside :mod:`pollux.server.routes`, and keeps to the same rules.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import HTMLResponse, StreamingResponse
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from pollux import wire
from pollux.errors import InvalidValueError, PolluxError
from pollux.server import schemas, seeing_schemas
from pollux.server.answers import Refusal, answer, problems
from pollux.server.feed import Feed
from pollux.server.gate import ItsCluster, read_body
from pollux.server.routes import Responses, error_answers, of_operator
from pollux.server.simulations import MAX_BYTES
from pollux.wire import MAX_INTEGER

MIN_EVERY_S, MAX_EVERY_S = 0.5, 60.0
STILL_HERE_S = 15.0
LOOK_FOR_END_S = 0.25  # how soon a stream ends with its server or its reader
MAX_POINTS = 10_000
# A page that somebody published may run its own scripts and load this server's (/assets/plotly.js), and nothing else:
# in its sandbox it is nobody here, and can neither ask nor send anything.
REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:"
)

logger = logging.getLogger(__name__)

_Time = Annotated[float | None, Query(ge=0, le=1e12, allow_inf_nan=False, description="Seconds since 1970.")]
_Points = Annotated[int, Query(ge=1, le=MAX_POINTS, description="At most so many, evenly chosen.")]


# What changes ---------------------------------------------------------------------------------

watching = of_operator("watching")
_EVENTS: Responses = {
    200: {
        "content": {"text/event-stream": {"schema": seeing_schemas.StateEvent.model_json_schema()}},
        "description": "Messages without end.",
    }
}


@watching.get(
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
    rounds; the others what has changed since. A stream ends with the server; whoever asks again is told all again.
    """
    feed: Feed = request.app.state.feed
    # Before anything is sent, so that a failure has its status.
    version, message = await run_in_threadpool(feed.message, 0)

    async def is_over() -> bool:
        return bool(request.app.state.is_ending) or await request.is_disconnected()

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
            except PolluxError as error:  # too late for another status; whoever watches asks again
                logger.warning("a stream of events ends: %s", error)
                return

    headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(messages(), media_type="text/event-stream", headers=headers)


# Over time ------------------------------------------------------------------------------------


@watching.get(
    "/samples",
    summary="The cluster over time",
    response_model=seeing_schemas.SampleList,
    responses=error_answers(422),
)
def list_samples(cluster: ItsCluster, since: _Time = None, until: _Time = None, points: _Points = 600) -> Response:
    """One is taken every ten seconds, and the newest 50,000 are kept."""
    return answer({"samples": cluster.samples(since, until, points)})


@watching.get(
    "/timeline", summary="Who held what", response_model=seeing_schemas.Timeline, responses=error_answers(422)
)
def timeline(
    cluster: ItsCluster,
    since: _Time = None,
    until: _Time = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="At most so many jobs.")] = 200,
) -> Response:
    """Jobs that were present in this time. The last hour if nothing is said."""
    return answer(cluster.timeline(since, until, limit))


@watching.get(
    "/jobs/{name}/curves",
    summary="A job over time",
    response_model=seeing_schemas.Curves,
    responses=error_answers(404, 422),
)
def curves(cluster: ItsCluster, name: str, points: _Points = 600) -> Response:
    return answer(cluster.curves(name, points))


@watching.get(
    "/jobs/{name}/model",
    summary="What was learnt of a job's speed",
    response_model=seeing_schemas.JobModel,
    responses=error_answers(404, 422),
)
def model(cluster: ItsCluster, name: str) -> Response:
    """What was measured, what was fitted to it, and what follows for the batch size and the number of replicas."""
    return answer(cluster.model(name))


@watching.get(
    "/rounds/{id}",
    summary="A decision in full",
    response_model=seeing_schemas.RoundDetail,
    responses=error_answers(404, 422),
)
def one_round(cluster: ItsCluster, id: Annotated[int, Path(ge=0, le=MAX_INTEGER)]) -> Response:
    return answer(cluster.round(id))


# Simulations ----------------------------------------------------------------------------------

simulations = of_operator("simulations")


async def _simulation_form(request: Request) -> seeing_schemas.SimulationForm:
    data = await read_body(request, MAX_BYTES)
    return await run_in_threadpool(_read_simulation, data)  # it is large, and others want to be answered


def _read_simulation(data: bytes) -> seeing_schemas.SimulationForm:
    try:
        form = seeing_schemas.SimulationForm.model_validate(wire.loads(data, "body"))
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        raise InvalidValueError(problems(found)) from None
    numbers = (value for row in form.summary for value in row.values() if isinstance(value, float))
    if not all(map(math.isfinite, numbers)):
        raise InvalidValueError("summary has a number that is not finite; null stands for what is not known")
    try:
        form.model_dump_json()
        form.html.encode()
    except ValueError:
        raise InvalidValueError("half of a Unicode pair was seen; valid text is needed") from None
    return form


@simulations.post(
    "/simulations",
    summary="Publish a simulation",
    status_code=201,
    response_model=seeing_schemas.PublishedSimulation,
    responses=error_answers(413, 422),
    openapi_extra=schemas.body_schema(seeing_schemas.SimulationForm, is_required=True),
)
def publish(cluster: ItsCluster, form: Annotated[seeing_schemas.SimulationForm, Depends(_simulation_form)]) -> Response:
    """Its page is shown to whoever knows the address in the answer, and can do nothing but be looked at. The newest 100
    are kept, and no more than 500 MB of them.
    """
    return answer(cluster.simulations.add(form.model_dump(exclude={"html"}), form.html), 201)


@simulations.get(
    "/simulations",
    summary="Simulations that were published",
    response_model=seeing_schemas.SimulationList,
    responses=error_answers(422),
)
def list_simulations(cluster: ItsCluster) -> Response:
    return answer({"simulations": cluster.simulations.all()})


@simulations.get(
    "/simulations/{id}",
    summary="One of them",
    response_model=seeing_schemas.Simulation,
    responses=error_answers(404, 422),
)
def one_simulation(cluster: ItsCluster, id: str) -> Response:
    return answer(cluster.simulations.one(id))


@simulations.delete(
    "/simulations/{id}",
    summary="Forget one",
    response_model=seeing_schemas.Simulation,
    responses=error_answers(404, 422),
)
def remove_simulation(cluster: ItsCluster, id: str) -> Response:
    """The answer is what it was."""
    return answer(cluster.simulations.remove(id))


reports = APIRouter(tags=["simulations"])
_PAGE: Responses = {
    200: {"content": {"text/html": {"schema": {"type": "string"}}}, "description": "The page."},
    404: {"model": schemas.ErrorAnswer, "description": "There is no such page."},
    422: {"model": schemas.ErrorAnswer, "description": "That is no address."},
}


@reports.get("/reports/{address}", summary="A published page", response_class=Response, responses=_PAGE)
def report_page(cluster: ItsCluster, address: Annotated[str, Path(max_length=200)]) -> Response:
    """For whoever knows the address; no token."""
    html = cluster.simulations.html(address)
    if html is None:
        raise Refusal(404, "UnknownNameError", "there is no such report; GET /api/v1/simulations has the addresses")
    headers = {
        "Content-Security-Policy": REPORT_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "private, no-cache",
    }
    return HTMLResponse(html, headers=headers)


ROUTERS = (watching, simulations, reports)
