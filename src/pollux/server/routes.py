"""What can be asked over HTTP, route by route.

Stands in ``server``, below :mod:`pollux.server.app`. Questions that read the database are plain functions, which run in
threads; reports of jobs, which are many, are taken on the event loop. Answers are only described here: the forms in
:mod:`pollux.server.schemas` are for the documentation, and what the cluster says goes out as it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool

from pollux import wire
from pollux.errors import PolluxError
from pollux.jobs import JobRequest
from pollux.server import schemas
from pollux.server.answers import Refusal, answer, retry_later
from pollux.server.gate import (
    ItsCaller,
    ItsCluster,
    LiveCluster,
    body_of,
    read_body,
    require_known_parameters,
    require_operator,
    require_ready,
)
from pollux.server.logs import LogReader, Stream, list_files
from pollux.version import __version__
from pollux.wire import MAX_INTEGER, MAX_REPORT_BYTES

FOLLOW_EVERY_S = 0.25

logger = logging.getLogger(__name__)

Responses = dict[int | str, dict[str, Any]]
_Limit = Annotated[int, Query(ge=0, le=10_000, description="At most so many.")]
_Since = Annotated[
    int | None, Query(ge=0, le=MAX_INTEGER, description="Only those after this id, oldest first; else the last ones.")
]
READY = [Depends(require_ready)]


def error_answers(*statuses: int) -> Responses:
    return {
        status: {"model": schemas.ErrorAnswer, "description": HTTPStatus(status).phrase}
        for status in (401, 403, *statuses, 503)
    }


def of_operator(tag: str) -> APIRouter:
    first = [Depends(require_operator), Depends(require_known_parameters)]
    return APIRouter(prefix="/api/v1", tags=[tag], dependencies=first)


# Health: no token -----------------------------------------------------------------------------

health = APIRouter(tags=["health"])
_NOT_READY: Responses = {503: {"model": schemas.ErrorAnswer, "description": "Not ready; the message says why."}}


@health.get("/healthz", summary="Does the process live?", response_model=schemas.Health)
async def healthz() -> Response:
    return answer({"status": "ok"})


@health.get("/readyz", summary="Does it take jobs?", response_model=schemas.Health, responses=_NOT_READY)
async def readyz(cluster: ItsCluster) -> Response:
    if cluster.is_ready:
        return answer({"status": "ok"})
    return retry_later("ServerUnavailableError", cluster.problem or "starting or ending")


# Jobs -----------------------------------------------------------------------------------------

jobs = of_operator("jobs")


@jobs.post(
    "/jobs",
    summary="Submit a job",
    status_code=201,
    response_model=schemas.JobList,
    responses=error_answers(413, 422),
    dependencies=READY,
    openapi_extra=schemas.body_schema(schemas.JobForm, is_required=True, example=schemas.JOB_EXAMPLE),
)
def submit(cluster: ItsCluster, form: Annotated[schemas.Body, Depends(body_of(schemas.JobForm))]) -> Response:
    """Take in a job, or all jobs of an array. A name that is taken gets a number behind it."""
    request = JobRequest.from_dict(form.model_dump(exclude_unset=True))
    return answer({"jobs": cluster.submit(request)}, 201)


@jobs.get("/jobs", summary="List jobs", response_model=schemas.JobPage, responses=error_answers(422))
def list_jobs(
    cluster: ItsCluster,
    state: Annotated[list[schemas.JobStateName] | None, Query(description="Only those in these states.")] = None,
    limit: _Limit = 100,
    offset: Annotated[int, Query(ge=0, le=MAX_INTEGER, description="Leave out so many first.")] = 0,
    newest: Annotated[bool, Query(description="Newest first.")] = True,
) -> Response:
    views, total = cluster.jobs(state or None, limit, offset, newest)
    return answer({"jobs": views, "total": total})


@jobs.get(
    "/jobs/{name}", summary="All about a job", response_model=schemas.JobDetail, responses=error_answers(404, 422)
)
def describe(cluster: ItsCluster, name: str) -> Response:
    """What it asked for and has, why it has that, and what became of it."""
    return answer(cluster.job(name))


@jobs.post(
    "/jobs/{name}/cancel",
    summary="Cancel a job",
    response_model=schemas.JobView,
    responses=error_answers(404, 413, 422),
    dependencies=READY,
    openapi_extra=schemas.body_schema(schemas.CancelForm, is_required=False),
)
def cancel(
    cluster: ItsCluster,
    name: str,
    form: Annotated[schemas.CancelForm, Depends(body_of(schemas.CancelForm, is_required=False))],
) -> Response:
    """It checkpoints and leaves. One that has ended already stays as it is."""
    return answer(cluster.cancel(name, form.reason))


@jobs.get(
    "/jobs/{name}/reports",
    summary="What a job reported",
    response_model=schemas.ReportList,
    responses=error_answers(404, 422),
)
def list_reports(cluster: ItsCluster, name: str, since: _Since = None, limit: _Limit = 100) -> Response:
    return answer({"reports": cluster.reports(name, since, limit)})


reporting = APIRouter(prefix="/api/v1", tags=["jobs"])  # for jobs too, with their own tokens


@reporting.post(
    "/jobs/{name}/reports",
    summary="Report for a job",
    response_model=schemas.ReportAnswer,
    responses=error_answers(404, 409, 413, 422),
    openapi_extra=schemas.body_schema(schemas.ReportForm, is_required=True),
)
async def report(request: Request, cluster: ItsCluster, caller: ItsCaller, name: str) -> Response:
    """What a job tells while it trains. The answer is what was learnt of its throughput.

    409: the replica that tells it is none of the job's any more; others have its place.
    """
    if not caller.may_report_for(name):
        raise Refusal(403, "AccessDeniedError", f"this is the token of job {caller.job!r}, not of {name!r}")
    if caller.is_operator:  # a job's token proves that there is that job
        await run_in_threadpool(cluster.view, name)
    told = wire.report_from_json(await read_body(request, MAX_REPORT_BYTES))
    if told.job != name:
        raise Refusal(403, "AccessDeniedError", f"a report for job {told.job!r} was sent as one for {name!r}")
    return answer(cluster.report(name, told))


# Logs -----------------------------------------------------------------------------------------

logs = of_operator("logs")
_TEXT: Responses = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "The text, as it comes."}
}


def _directory_of(cluster: LiveCluster, name: str) -> Path:
    """Of a job there is: a name that nobody has is never made into a path."""
    cluster.view(name)  # raises UnknownNameError
    return cluster.job_directory(name)


@logs.get(
    "/jobs/{name}/log-files",
    summary="Which log files a job has",
    response_model=schemas.LogFileList,
    responses=error_answers(404, 422),
)
def list_log_files(cluster: ItsCluster, name: str) -> Response:
    """In order of their start."""
    files = [
        {"replica": file.replica, "stream": file.stream, "start": file.start, "size_bytes": file.size_bytes}
        for file in list_files(_directory_of(cluster, name))
    ]
    return answer({"files": files})


@logs.get(
    "/jobs/{name}/logs",
    summary="A job's output",
    response_class=StreamingResponse,
    responses={**error_answers(404, 422), **_TEXT},
)
async def read_logs(
    request: Request,
    cluster: ItsCluster,
    name: str,
    follow: Annotated[bool, Query(description="Go on until the job has ended.")] = False,
    tail: Annotated[int | None, Query(ge=0, le=1_000_000, description="Only so many last lines per file.")] = None,
    replica: Annotated[str | None, Query(description="Of this replica only.")] = None,
    stream: Annotated[Literal["out", "err", "both"], Query(description="stdout, stderr or both.")] = "both",
) -> Response:
    """Of a job with more than one replica, every line begins with ``[replica]``."""
    directory = await run_in_threadpool(_directory_of, cluster, name)
    only: Stream | None = None if stream == "both" else stream
    reader = await run_in_threadpool(LogReader, directory, replica=replica or None, stream=only, tail=tail)

    async def passes() -> AsyncIterator[str]:
        while True:
            try:
                # Asked before reading: what it wrote last is there by then.
                is_last = not follow or await run_in_threadpool(cluster.is_ended, name)
            except PolluxError as error:  # too late for another status; whoever follows asks again
                logger.warning("the logs of job %s are not followed any more: %s", name, error)
                return
            async for part in iterate_in_threadpool(reader.read(is_last=is_last)):
                yield part
            if is_last or request.app.state.is_ending or await request.is_disconnected():
                return
            await asyncio.sleep(FOLLOW_EVERY_S)

    headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
    return StreamingResponse(passes(), media_type="text/plain; charset=utf-8", headers=headers)


# The cluster ----------------------------------------------------------------------------------

cluster = of_operator("cluster")


@cluster.get("/cluster", summary="At a glance", response_model=schemas.ClusterView, responses=error_answers())
def summarise(cluster: ItsCluster) -> Response:
    return answer({"version": __version__, **cluster.summary()})


@cluster.get("/nodes", summary="The nodes", response_model=schemas.NodeList, responses=error_answers())
def list_nodes(cluster: ItsCluster) -> Response:
    return answer({"nodes": cluster.nodes()})


@cluster.post(
    "/nodes/{name}/drain",
    summary="Give no more jobs to a node; those on it are moved",
    response_model=schemas.NodeView,
    responses=error_answers(404, 422),
    dependencies=READY,
)
def drain(cluster: ItsCluster, name: str) -> Response:
    return answer(cluster.drain(name, True))


@cluster.post(
    "/nodes/{name}/undrain",
    summary="Use a node again",
    response_model=schemas.NodeView,
    responses=error_answers(404, 422),
    dependencies=READY,
)
def undrain(cluster: ItsCluster, name: str) -> Response:
    return answer(cluster.drain(name, False))


@cluster.get("/rounds", summary="Decisions", response_model=schemas.RoundList, responses=error_answers(422))
def list_rounds(cluster: ItsCluster, since: _Since = None, limit: _Limit = 100) -> Response:
    return answer({"rounds": cluster.rounds(since, limit)})


@cluster.post(
    "/shutdown",
    summary="End the server",
    status_code=202,
    response_model=schemas.Ending,
    responses=error_answers(413, 422),
    openapi_extra=schemas.body_schema(schemas.ShutdownForm, is_required=False),
)
def shut_down(
    request: Request, form: Annotated[schemas.ShutdownForm, Depends(body_of(schemas.ShutdownForm, is_required=False))]
) -> Response:
    """Jobs checkpoint, leave, and go on when a server is started again; or train on, if they are kept."""
    request.app.state.shutdown(form.keep_jobs)
    return answer({"keep_jobs": form.keep_jobs}, 202)
