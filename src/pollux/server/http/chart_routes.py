"""Routes for charts: the cluster over time, which job held what, a job's curves and its performance model."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Query, Request, Response
from starlette.concurrency import run_in_threadpool

from pollux.api.cluster import ReadingList, SampleList, Timeline
from pollux.api.job import JobCurves, JobForecast, JobModel
from pollux.server.http.dependencies import ItsQueries, of_people
from pollux.server.http.errors import answer, retry_later
from pollux.server.http.openapi import error_answers

MAX_POINTS = 10_000
FORECAST_WAIT_S = 10.0  # until those before it are done

_Time = Annotated[float | None, Query(ge=0, le=1e12, allow_inf_nan=False, description="Seconds since 1970.")]
_Points = Annotated[int, Query(ge=1, le=MAX_POINTS, description="At most so many, evenly chosen.")]

charts = of_people("charts")


@charts.get(
    "/samples",
    summary="The cluster over time",
    response_model=SampleList,
    responses=error_answers(422),
)
def list_samples(queries: ItsQueries, since: _Time = None, until: _Time = None, points: _Points = 600) -> Response:
    """One is taken every ten seconds, and the newest 50,000 are kept."""
    return answer(SampleList(samples=tuple(queries.samples(since, until, points))))


@charts.get(
    "/nodes/{name}/readings",
    summary="What a node does over time",
    response_model=ReadingList,
    responses=error_answers(422),
)
def list_readings(
    queries: ItsQueries, name: str, since: _Time = None, until: _Time = None, points: _Points = 600
) -> Response:
    """Its CPUs, memory, disk, network and GPUs, every ten seconds. The last hour if nothing is said."""
    return answer(ReadingList(readings=tuple(queries.readings(name, since, until, points))))


@charts.get("/timeline", summary="Which job held what", response_model=Timeline, responses=error_answers(422))
def timeline(
    queries: ItsQueries,
    since: _Time = None,
    until: _Time = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="At most so many jobs.")] = 200,
) -> Response:
    """Jobs that were present in this time. The last hour if nothing is said."""
    return answer(queries.timeline(since, until, limit))


@charts.get(
    "/jobs/{name}/curves",
    summary="A job over time",
    response_model=JobCurves,
    responses=error_answers(404, 422),
)
def curves(queries: ItsQueries, name: str, points: _Points = 600) -> Response:
    return answer(queries.curves(name, points))


@charts.get(
    "/jobs/{name}/model",
    summary="Performance model of a job",
    response_model=JobModel,
    responses=error_answers(404, 422),
)
def model(queries: ItsQueries, name: str) -> Response:
    """What was measured, what was fitted to it, and what follows for the batch size and the number of replicas."""
    return answer(queries.model(name))


@charts.get(
    "/jobs/{name}/forecast",
    summary="When a waiting job will start",
    response_model=JobForecast,
    responses=error_answers(404, 422),
)
async def forecast(request: Request, queries: ItsQueries, name: str) -> Response:
    """The queue played on with the cluster's policy, several times, as the ends of jobs are not known. Takes up to 2 s.

    Jobs that will be submitted later or are held back, and deadlines, are not foreseen. One forecast at a time: others
    wait for up to 10 s, and are answered 503 then.
    """
    turn: asyncio.Semaphore = request.app.state.forecast_turn
    try:
        await asyncio.wait_for(turn.acquire(), FORECAST_WAIT_S)
    except TimeoutError:
        return retry_later("ServerUnavailableError", "other forecasts are being made; ask again later")
    try:
        return answer(await run_in_threadpool(queries.forecast, name))
    finally:
        turn.release()


ROUTERS = (charts,)
