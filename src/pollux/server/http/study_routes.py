"""Routes about studies: begin, list, describe, stop and resume them, their curves, and their trials as CSV."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Annotated, cast

from fastapi import APIRouter, Depends, Query, Request, Response

from pollux.api.codec import decode, loads
from pollux.api.copy import MAX_COPY_BYTES, WAIT_S, CopyAnswer, CopyNews
from pollux.api.study import (
    StudyCurves,
    StudyDetail,
    StudyList,
    StudyRequest,
    StudyResumption,
    StudySummary,
    decode_study,
)
from pollux.server.http.dependencies import (
    READY,
    ItsCaller,
    ItsCluster,
    body_of,
    decoded,
    of_people,
    owned_by,
    read_body,
    read_json,
    require_owner,
)
from pollux.server.http.errors import Refusal, answer
from pollux.server.http.openapi import Responses, body_schema, error_answers
from pollux.tune.studies import Studies

studies = of_people("studies")
_EXAMPLE = {
    "version": 1,
    "job": {"command": ["python", "train.py"], "cwd": "/home/me/project"},
    "space": [{"name": "lr", "kind": "float", "low": 0.0001, "high": 0.1, "is_log": True}],
    "metric": "val_loss",
    "trials": 20,
}
_CSV: Responses = {200: {"content": {"text/csv": {"schema": {"type": "string"}}}, "description": "A line per trial."}}


async def find_studies(request: Request) -> Studies:
    return cast(Studies, request.app.state.studies)


ItsStudies = Annotated[Studies, Depends(find_studies)]


@studies.post(
    "/studies",
    summary="Begin a study",
    status_code=201,
    response_model=StudySummary,
    responses=error_answers(413, 422),
    dependencies=READY,
    openapi_extra=body_schema(StudyRequest, is_required=True, example=_EXAMPLE),
)
def create_study(
    its: ItsStudies, cluster: ItsCluster, caller: ItsCaller, body: Annotated[object, Depends(read_json)]
) -> Response:
    """Search for the best parameters. Every trial is a job of the caller, named after the study and its number."""
    request = decode_study(body)
    return answer(its.create(dataclasses.replace(request, job=owned_by(caller, request.job, cluster))), 201)


@studies.get("/studies", summary="List studies", response_model=StudyList, responses=error_answers(422))
def list_studies(its: ItsStudies) -> Response:
    return answer(StudyList(studies=tuple(its.all())))


@studies.get(
    "/studies/{name}", summary="All about a study", response_model=StudyDetail, responses=error_answers(404, 422)
)
def describe_study(its: ItsStudies, name: str) -> Response:
    """Its trials, the best so far over time and cost, what each rung cost, and which parameters matter."""
    return answer(its.one(name))


@studies.get(
    "/studies/{name}/curves",
    summary="The metric of every trial over its progress",
    response_model=StudyCurves,
    responses=error_answers(404, 422),
)
def study_curves(its: ItsStudies, name: str) -> Response:
    return answer(its.curves(name))


@studies.get(
    "/studies/{name}/trials.csv",
    summary="Its trials as CSV",
    response_class=Response,
    responses={**_CSV, **error_answers(404, 422)},
)
def study_csv(its: ItsStudies, name: str) -> Response:
    return Response(its.csv(name), media_type="text/csv")


@studies.post(
    "/studies/{name}/stop",
    summary="Stop a study",
    response_model=StudySummary,
    responses=error_answers(404, 422),
    dependencies=READY,
)
def stop_study(its: ItsStudies, caller: ItsCaller, name: str) -> Response:
    """Its trials end; those that were not done begin again when it is resumed. One that is over stays as it is."""
    require_owner(caller, name, its.owner_of(name), "study")
    return answer(its.stop_study(name))


@studies.post(
    "/studies/{name}/resume",
    summary="Resume a study",
    response_model=StudySummary,
    responses=error_answers(404, 413, 422),
    dependencies=READY,
    openapi_extra=body_schema(StudyResumption, is_required=False),
)
def resume_study(
    its: ItsStudies, caller: ItsCaller, name: str, body: Annotated[StudyResumption, Depends(body_of(StudyResumption))]
) -> Response:
    """Go on with it, with more trials if the body says so."""
    require_owner(caller, name, its.owner_of(name), "study")
    return answer(its.resume(name, body.trials))


# Copies between trials ------------------------------------------------------------------------

copying = APIRouter(prefix="/api/v1", tags=["studies"])  # for jobs, with their own tokens
LOOK_S = 0.05  # between two looks for an order


@copying.post(
    "/jobs/{name}/copies",
    summary="Hear of copies between trials",
    response_model=CopyAnswer,
    responses=error_answers(413, 422),
    openapi_extra=body_schema(CopyNews, is_required=True),
)
async def copies(
    request: Request,
    caller: ItsCaller,
    studies: ItsStudies,
    name: str,
    wait: Annotated[bool, Query(description="Answer when there is an order, or after 10 s.")] = False,
) -> Response:
    """A trial's job tells what came of a copy, and hears what it is to do. The state itself never comes here."""
    if not caller.may_report_for(name):
        raise Refusal(403, "AccessDeniedError", f"this is the token of job {caller.job!r}, not of {name!r}")
    body = await read_body(request, MAX_COPY_BYTES)
    news = await decoded(body, lambda data: decode(CopyNews, loads(data, "body"), "body"))
    studies.copy_news(name, news)
    ends_at = time.monotonic() + (WAIT_S if wait else 0.0)
    found = studies.copy_answer(name, news)
    while found.order is None and found.again and time.monotonic() < ends_at and not request.app.state.is_ending:
        await asyncio.sleep(LOOK_S)
        if await request.is_disconnected():
            break
        found = studies.copy_answer(name, news)
    return answer(found)


ROUTERS = (copying, studies)
