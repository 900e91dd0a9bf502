"""Routes about jobs: submit, list, describe, cancel, reports, logs.

Routes that read the database are plain functions, which run in threads; reports, which are many, are taken on the event
loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool

from pollux.api.codec import MAX_INTEGER
from pollux.api.job import (
    Cancellation,
    JobDetail,
    JobList,
    JobLogFile,
    JobLogFileList,
    JobPage,
    JobSelection,
    JobStateName,
    JobSummary,
    JobsUpdate,
    JobUpdate,
    SelectedJobs,
    ShellPlace,
)
from pollux.api.report import MAX_REPORT_BYTES, Report, ReportAnswer, ReportList, encode_report, read_report
from pollux.api.request import JobRequest
from pollux.errors import PolluxError
from pollux.server.http.auth import Caller
from pollux.server.http.dependencies import (
    READY,
    ClusterQueries,
    ItsCaller,
    ItsCluster,
    ItsQueries,
    Limit,
    ServedCluster,
    Since,
    body_of,
    decoded,
    is_still_allowed,
    of_people,
    owned_by,
    read_body,
    read_json,
    require_owner,
)
from pollux.server.http.errors import Refusal, answer
from pollux.server.http.openapi import Responses, body_schema, error_answers, job_body
from pollux.server.http.report_rates import BYTES_PER_S, ReportRates
from pollux.server.live.job_table import LiveJob
from pollux.server.storage.logs import LogReader, Stream, list_files

FOLLOW_EVERY_S = 0.25

logger = logging.getLogger(__name__)

# Jobs -----------------------------------------------------------------------------------------

jobs = of_people("jobs")


@jobs.post(
    "/jobs",
    summary="Submit a job",
    status_code=201,
    response_model=JobList,
    responses=error_answers(404, 413, 422),
    dependencies=READY,
    openapi_extra=job_body(),
)
def submit(cluster: ItsCluster, caller: ItsCaller, body: Annotated[object, Depends(read_json)]) -> Response:
    """Take in a job, or all jobs of an array. A name that is taken gets a number behind it.

    It is the caller's. An admin may name another owner.
    """
    request = owned_by(caller, JobRequest.from_dict(body), cluster)
    if request.study:  # a trial gets states of others and has a say in its study
        message = f"study {request.study!r:.80}; only a study submits its trials: POST /api/v1/studies"
        raise Refusal(422, "InvalidValueError", message)
    return answer(JobList(jobs=tuple(cluster.submit(request))), 201)


@jobs.get("/jobs", summary="List jobs", response_model=JobPage, responses=error_answers(422))
def list_jobs(
    queries: ItsQueries,
    state: Annotated[list[JobStateName] | None, Query(description="Only those in these states.")] = None,
    limit: Limit = 100,
    offset: Annotated[int, Query(ge=0, le=MAX_INTEGER, description="Leave out so many first.")] = 0,
    newest: Annotated[bool, Query(description="Newest first.")] = True,
) -> Response:
    found, total = queries.jobs(state or None, limit, offset, newest)
    return answer(JobPage(jobs=tuple(found), total=total))


@jobs.get("/jobs/{name}", summary="All about a job", response_model=JobDetail, responses=error_answers(404, 422))
def describe(queries: ItsQueries, name: str) -> Response:
    """Its request, its state and why, its model, decisions, resizes and replicas."""
    return answer(queries.job(name))


@jobs.post(
    "/jobs/{name}/cancel",
    summary="Cancel a job",
    response_model=JobSummary,
    responses=error_answers(404, 413, 422),
    dependencies=READY,
    openapi_extra=body_schema(Cancellation, is_required=False),
)
def cancel(
    cluster: ItsCluster,
    caller: ItsCaller,
    name: str,
    body: Annotated[Cancellation, Depends(body_of(Cancellation))],
) -> Response:
    """It checkpoints and leaves. One that has ended already stays as it is."""
    require_owner(caller, name, cluster.queries.summary_of(name).owner)
    return answer(cluster.cancel(name, body.reason))


@jobs.post(
    "/job-actions",
    summary="Cancel, hold or release many jobs",
    response_model=SelectedJobs,
    responses=error_answers(404, 413, 422),
    dependencies=READY,
    openapi_extra=body_schema(JobSelection, is_required=True),
)
def act(
    cluster: ItsCluster, caller: ItsCaller, body: Annotated[JobSelection, Depends(body_of(JobSelection))]
) -> Response:
    """The jobs that it was done with: all or, on an error, none. Patterns choose a member's own jobs."""
    chosen = _chosen(cluster, caller, body)
    cluster.operations.act(chosen, body.action, body.reason)
    return answer(SelectedJobs(names=tuple(job.name for job in chosen)))


@jobs.patch(
    "/jobs",
    summary="Change many jobs",
    response_model=SelectedJobs,
    responses=error_answers(404, 413, 422),
    dependencies=READY,
    openapi_extra=body_schema(JobsUpdate, is_required=True),
)
def update_all(
    cluster: ItsCluster, caller: ItsCaller, body: Annotated[JobsUpdate, Depends(body_of(JobsUpdate))]
) -> Response:
    """The jobs that were changed: all or, on an error, none. Patterns choose a member's own jobs."""
    chosen = _chosen(cluster, caller, body)
    cluster.operations.update(chosen, body.change)
    return answer(SelectedJobs(names=tuple(job.name for job in chosen)))


def _chosen(cluster: ServedCluster, caller: Caller, body: JobSelection | JobsUpdate) -> list[LiveJob]:
    """Raises Refusal: one is another user's, or the body chooses none, or by names and all at once."""
    if bool(body.names) == body.is_all:
        raise Refusal(422, "InvalidValueError", "name jobs or patterns, or choose all of them; one of the two")
    chosen = cluster.operations.select(body.names, is_all=body.is_all, owner=None if caller.is_admin else caller.owner)
    for job in chosen:
        require_owner(caller, job.name, job.request.owner if job.request is not None else "")
    return chosen


@jobs.patch(
    "/jobs/{name}",
    summary="Change a job",
    response_model=JobSummary,
    responses=error_answers(404, 413, 422),
    dependencies=READY,
    openapi_extra=body_schema(JobUpdate, is_required=True),
)
def update(
    cluster: ItsCluster, caller: ItsCaller, name: str, body: Annotated[JobUpdate, Depends(body_of(JobUpdate))]
) -> Response:
    """Weight, priority, bounds, time limit; they count with the next decision."""
    require_owner(caller, name, cluster.queries.summary_of(name).owner)
    cluster.operations.update([cluster.operations.active(name)], body)
    return answer(cluster.queries.summary_of(name))


@jobs.post(
    "/jobs/{name}/shell",
    summary="Ask for a shell beside a replica",
    response_model=ShellPlace,
    responses=error_answers(404, 422),
    dependencies=READY,
)
def shell(
    cluster: ItsCluster,
    caller: ItsCaller,
    name: str,
    rank: Annotated[int, Query(ge=0, le=MAX_INTEGER, description="Of the replica.")] = 0,
) -> Response:
    """For the owner and admins, on one machine; the job's history notes who asked. The kernel checks who may enter."""
    require_owner(caller, name, cluster.queries.summary_of(name).owner)
    return answer(cluster.operations.shell(name, rank, caller.owner))


@jobs.post(
    "/jobs/{name}/requeue",
    summary="Let a job wait again, or run one that is over anew",
    response_model=JobList,
    responses=error_answers(404, 422),
    dependencies=READY,
)
def requeue(cluster: ItsCluster, caller: ItsCaller, name: str) -> Response:
    """One that runs checkpoints, leaves and waits. One that is over is submitted again, under a new name."""
    seen = cluster.queries.summary_of(name)
    require_owner(caller, name, seen.owner)
    if seen.is_over:
        return answer(JobList(jobs=tuple(cluster.submit(cluster.operations.request_of(name)))))
    cluster.operations.requeue(name)
    return answer(JobList(jobs=(cluster.queries.summary_of(name),)))


@jobs.get(
    "/jobs/{name}/reports",
    summary="What a job reported",
    response_model=ReportList,
    responses=error_answers(404, 422),
)
def list_reports(queries: ItsQueries, name: str, since: Since = None, limit: Limit = 100) -> Response:
    """The last ones, or the first after ``since``: fewer than ``limit`` where they have more than 8 MB together. Go on
    with the last one's id as ``since`` until there are none.
    """
    return answer({"reports": [encode_report(one) for one in queries.reports(name, since, limit)]})


reporting = APIRouter(prefix="/api/v1", tags=["jobs"])  # for jobs too, with their own tokens


@reporting.post(
    "/jobs/{name}/reports",
    summary="Report for a job",
    response_model=ReportAnswer,
    responses=error_answers(404, 409, 413, 422, 429),
    openapi_extra=body_schema(Report, is_required=True),
)
async def report(request: Request, cluster: ItsCluster, caller: ItsCaller, name: str) -> Response:
    """What a job reports while it trains. The answer is the model fitted to its speed.

    409: the replica was replaced, and is none of the job's any more. 429: the job reports too much; send it later.
    """
    if not caller.may_report_for(name):
        raise Refusal(403, "AccessDeniedError", f"this is the token of job {caller.job!r}, not of {name!r}")
    if caller.is_person:  # a job's token proves that there is that job
        await run_in_threadpool(cluster.queries.summary_of, name)
    body = await read_body(request, MAX_REPORT_BYTES)
    rates: ReportRates = request.app.state.report_rates
    if wait_s := rates.take(name, len(body)):
        message = f"job {name!r} reports too much; {BYTES_PER_S:.0f} bytes a second are allowed: send this one later"
        raise Refusal(429, "TooManyReportsError", message, {"Retry-After": str(wait_s)})
    told = await decoded(body, read_report)
    if told.job != name:
        raise Refusal(403, "AccessDeniedError", f"a report for job {told.job!r} was sent as one for {name!r}")
    answered = cluster.report(told, len(body))
    if told.observed:  # a study waits for these values; the replica forgets them with the answer
        await run_in_threadpool(cluster.save_reports)
        request.app.state.studies.wake()
    return answer(answered)


# Logs -----------------------------------------------------------------------------------------

logs = of_people("logs")
_TEXT: Responses = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "The text, as it comes."}
}


def _directory_of(queries: ClusterQueries, name: str) -> Path:
    """Of a job there is: an unknown name is never made into a path."""
    queries.summary_of(name)  # raises UnknownNameError
    return queries.job_directory(name)


@logs.get(
    "/jobs/{name}/log-files",
    summary="Which log files a job has",
    response_model=JobLogFileList,
    responses=error_answers(404, 422),
)
def list_log_files(queries: ItsQueries, name: str) -> Response:
    """In order of their start."""
    files = tuple(
        JobLogFile(replica=file.replica, stream=file.stream, start=file.start, size_bytes=file.size_bytes)
        for file in list_files(_directory_of(queries, name))
    )
    return answer(JobLogFileList(files=files))


@logs.get(
    "/jobs/{name}/logs",
    summary="A job's output",
    response_class=StreamingResponse,
    responses={**error_answers(404, 422), **_TEXT},
)
async def read_logs(
    request: Request,
    queries: ItsQueries,
    name: str,
    follow: Annotated[bool, Query(description="Go on until the job has ended.")] = False,
    tail: Annotated[int | None, Query(ge=0, le=1_000_000, description="Only so many last lines per file.")] = None,
    replica: Annotated[str | None, Query(description="Of this replica only.")] = None,
    stream: Annotated[Literal["out", "err", "both"], Query(description="stdout, stderr or both.")] = "both",
) -> Response:
    """Of a job with more than one replica, every line begins with ``[replica]``."""
    directory = await run_in_threadpool(_directory_of, queries, name)
    only: Stream | None = None if stream == "both" else stream
    reader = await run_in_threadpool(LogReader, directory, replica=replica or None, stream=only, tail=tail)

    async def passes() -> AsyncIterator[str]:
        while True:
            try:
                # Asked before reading: what it wrote last is there by then.
                is_last = not follow or await run_in_threadpool(queries.is_ended, name)
            except PolluxError as error:  # too late for another status; the client asks again
                logger.warning("the logs of job %s are not followed any more: %s", name, error)
                return
            async for part in iterate_in_threadpool(reader.read(is_last=is_last)):
                yield part
            if is_last or request.app.state.is_ending or not is_still_allowed(request):
                return
            if await request.is_disconnected():
                return
            await asyncio.sleep(FOLLOW_EVERY_S)

    headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
    return StreamingResponse(passes(), media_type="text/plain; charset=utf-8", headers=headers)


ROUTERS = (reporting, jobs, logs)
