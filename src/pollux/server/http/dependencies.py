"""What FastAPI resolves before a route runs: the cluster, the caller, the body of a request.

Routes depend on these. The cluster is known by :class:`ServedCluster` and :class:`ClusterQueries` alone.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar, cast

from fastapi import APIRouter, Depends, Query, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from pollux.api.cluster import CheckedNode, ClusterSample, NodeReading, NodeSummary, Timeline
from pollux.api.codec import MAX_INTEGER, Json, decode, loads, shown
from pollux.api.job import JobCurves, JobDetail, JobForecast, JobModel, JobSummary
from pollux.api.report import Report, ReportAnswer, StoredReport
from pollux.api.request import JobRequest
from pollux.api.round import RoundDetail
from pollux.api.usage import UsageKey, UsageRow
from pollux.errors import AccessDeniedError, InvalidValueError
from pollux.server.http.auth import Access, Caller, NeedsWork
from pollux.server.http.errors import RETRY_AFTER_S, Refusal
from pollux.server.http.turns import FairRoute
from pollux.server.live.accounts import Accounts
from pollux.server.live.operations import Operations
from pollux.server.live.retention import Retention
from pollux.server.present.feed import Watched
from pollux.server.present.metrics import Metrics
from pollux.server.storage.simulations import Simulations
from pollux.server.storage.workdirs import Workdirs

MAX_BODY_BYTES = 1_000_000
ON_LOOP_BYTES = 1 << 16  # of a body; larger ones are decoded in a thread, so other requests do not wait
MAX_WORK = 4  # that a token may need before it is checked: keys, a new user
_T = TypeVar("_T")
_LOCAL_HOST = re.compile(r"(localhost|127(\.[0-9]+){3}|\[::1\])(:[0-9]+)?", re.IGNORECASE)


class ClusterQueries(Watched, Protocol):
    """What is asked of :class:`pollux.server.present.queries.Queries`. Any thread may ask."""

    def jobs(
        self, states: Sequence[str] | None, limit: int, offset: int, newest_first: bool
    ) -> tuple[list[JobSummary], int]: ...
    def job(self, name: str) -> JobDetail: ...
    def summary_of(self, name: str) -> JobSummary: ...
    def reports(self, name: str, since: int | None, limit: int) -> list[StoredReport]: ...
    def round(self, id_: int) -> RoundDetail: ...
    def check_nodes(self, script: str, packages: Sequence[str]) -> list[CheckedNode]: ...
    def samples(self, since: float | None, until: float | None, points: int) -> list[ClusterSample]: ...
    def readings(self, node: str, since: float | None, until: float | None, points: int) -> list[NodeReading]: ...
    def timeline(self, since: float | None, until: float | None, limit: int) -> Timeline: ...
    def curves(self, name: str, points: int) -> JobCurves: ...
    def model(self, name: str) -> JobModel: ...
    def job_directory(self, name: str) -> Path: ...
    def is_ended(self, name: str) -> bool: ...
    def forecast(self, name: str) -> JobForecast: ...
    def study_of(self, name: str) -> str: ...
    def speedups_of(self, name: str) -> tuple[float, ...]: ...
    def usage(self, by: Sequence[UsageKey], since: str | None, until: str | None) -> list[UsageRow]: ...


class ServedCluster(Protocol):
    """What is asked of :class:`pollux.server.live.cluster.Cluster`. Any thread may ask; every call returns in time."""

    @property
    def is_ready(self) -> bool: ...
    @property
    def problem(self) -> str: ...
    @property
    def metrics(self) -> Metrics: ...
    @property
    def simulations(self) -> Simulations: ...
    @property
    def queries(self) -> ClusterQueries: ...
    @property
    def accounts(self) -> Accounts: ...
    @property
    def operations(self) -> Operations: ...
    @property
    def workdirs(self) -> Workdirs: ...
    @property
    def retention(self) -> Retention: ...
    def submit(self, request: JobRequest) -> list[JobSummary]: ...
    def cancel(self, name: str, reason: str, saves: bool = True) -> JobSummary: ...
    def report(self, report: Report, num_bytes: int = 0) -> ReportAnswer: ...
    def save_reports(self) -> None: ...
    def drain(self, node: str, is_draining: bool) -> NodeSummary: ...
    def reweigh(self, weights: Mapping[str, float]) -> None: ...
    def weights_outside(self, study: str) -> Sequence[float]: ...
    def start(self) -> None: ...
    def stop(self, *, keeps_jobs: bool, timeout_s: float = 60) -> None: ...
    def hurry(self, timeout_s: float) -> None: ...
    def wake(self) -> None: ...
    def job_of_token(self, token: str) -> str | None: ...


# The caller -----------------------------------------------------------------------------------

bearer = HTTPBearer(auto_error=False, scheme_name="token", description="The operator's token, a user's, or a job's.")


async def find_cluster(request: Request) -> ServedCluster:
    return cast(ServedCluster, request.app.state.cluster)


async def find_queries(request: Request) -> ClusterQueries:
    return cast(ServedCluster, request.app.state.cluster).queries


async def find_caller(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Security(bearer)]
) -> Caller:
    access: Access = request.app.state.access
    if not access.needs_token and not _is_local(request):
        raise Refusal(403, "AccessDeniedError", "without a token only programs on this machine may ask")
    token = None if credentials is None else credentials.credentials
    try:
        for _ in range(MAX_WORK):
            try:
                caller = access.caller(token)
                break
            except NeedsWork as needed:
                await run_in_threadpool(needed.work)
        else:
            raise AccessDeniedError("this token could not be checked; try again")
    except AccessDeniedError as error:
        raise Refusal(401, "AccessDeniedError", str(error), {"WWW-Authenticate": "Bearer"}) from None
    if caller is None:
        seen = "this token is not known here" if credentials else "no token came with it"
        message = f"{seen}; send 'Authorization: Bearer TOKEN', with the token in the server's data directory"
        raise Refusal(401, "AccessDeniedError", message, {"WWW-Authenticate": "Bearer"})
    return caller


def is_still_allowed(request: Request) -> bool:
    """Whether the token that a stream was begun with is still good: it may have been revoked since."""
    access: Access = request.app.state.access
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    try:
        return access.caller(token if kind.lower() == "bearer" else None) is not None
    except (AccessDeniedError, NeedsWork):
        return False


ItsCluster = Annotated[ServedCluster, Depends(find_cluster)]
ItsQueries = Annotated[ClusterQueries, Depends(find_queries)]
ItsCaller = Annotated[Caller, Depends(find_caller)]


async def require_person(request: Request, caller: ItsCaller) -> None:
    """Not a job; and a viewer may only look."""
    if not caller.is_person:
        message = f"this is the token of job {caller.job!r}, which may only report for it; a user's is needed"
        raise Refusal(403, "AccessDeniedError", message)
    if request.method not in ("GET", "HEAD") and not caller.may_submit:
        raise Refusal(403, "AccessDeniedError", "this token is a viewer's, which may only look; a member's is needed")


async def require_admin(caller: ItsCaller) -> None:
    if not caller.is_admin:
        message = f"this is for admins, and {caller.owner!r} is a {caller.role}; ask an admin to do it"
        raise Refusal(403, "AccessDeniedError", message)


def require_owner(caller: Caller, name: str, owner: str, what: str = "job") -> None:
    """Raises:
    Refusal: the caller may not change this job, or what else it is.
    """
    if not caller.may_change(owner):
        message = f"{what} {name!r} is {owner}'s, and {caller.owner!r} is no admin; ask {owner} or an admin"
        raise Refusal(403, "AccessDeniedError", message)


def sender_of(caller: Caller) -> str | None:
    """Whose working directories it may use. None: all."""
    return None if caller.is_admin else caller.owner


def owned_by(caller: Caller, request: JobRequest, cluster: ServedCluster) -> JobRequest:
    """The request with its owner: the caller, or the user that an admin names.

    Raises:
        Refusal: the caller is no admin and submits for another user.
        UnknownNameError: no user has that name.
        InvalidValueError: the caller is no admin and has not sent its working directory.
    """
    if request.workdir:
        cluster.workdirs.check_sender(request.workdir, sender_of(caller))
    if request.owner not in ("", caller.owner):
        if not caller.is_admin:
            raise Refusal(403, "AccessDeniedError", f"job for {request.owner!r}; only admins submit for others")
        cluster.accounts.user(request.owner)
    return dataclasses.replace(request, owner=request.owner or caller.owner)


async def require_known_parameters(request: Request) -> None:
    """Refuse a misspelt parameter, which would be ignored otherwise."""
    known = sorted(one.alias for one in request.scope["route"].dependant.query_params)
    for name in request.query_params:
        if name not in known:
            allowed = f"allowed are {', '.join(known)}" if known else "none is allowed"
            raise InvalidValueError(f"unknown parameter {shown(name)}; {allowed}")


async def require_ready(cluster: ItsCluster) -> None:
    """Refuse what could not be carried out now."""
    if not cluster.is_ready:
        message = f"the cluster is not ready: {cluster.problem or 'it is starting or ending'}; try again later"
        raise Refusal(503, "ServerUnavailableError", message, {"Retry-After": str(RETRY_AFTER_S)})


def _is_local(request: Request) -> bool:
    """Not a page of another site in a browser. Asked where no token is needed."""
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    is_own = origin is None or origin.partition("://")[2] == host
    return is_own and _LOCAL_HOST.fullmatch(host) is not None


# The body --------------------------------------------------------------------------------------


async def read_body(request: Request, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The body, of which no more than this is ever kept."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise too_large(max_bytes)
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise too_large(max_bytes)
            parts.append(part)
    except ClientDisconnect:
        raise Refusal(422, "InvalidValueError", "the body ended too early") from None
    return b"".join(parts)


def too_large(max_bytes: int) -> Refusal:
    # What is left of the body is not read, so nothing else can come through this connection.
    message = f"the body is too large; at most {max_bytes} bytes are allowed"
    return Refusal(413, "TooLargeError", message, {"Connection": "close"})


async def decoded(data: bytes, read: Callable[[bytes], _T]) -> _T:
    """What ``read`` makes of a body. A large one is read in a thread."""
    return read(data) if len(data) <= ON_LOOP_BYTES else await run_in_threadpool(read, data)


async def read_json(request: Request) -> Json:
    """FastAPI would read all of the body before the token is checked; this runs after."""
    return await decoded(await read_body(request), lambda data: loads(data, "body"))


def body_of(kind: type[_T]) -> Callable[[Request], Coroutine[Any, Any, _T]]:
    """A dependency that decodes a JSON body; an empty one stands for one without any field."""

    async def read(request: Request) -> _T:
        return await decoded(
            await read_body(request), lambda data: decode(kind, loads(data, "body") if data else {}, "body")
        )

    return read


# Parameters -----------------------------------------------------------------------------------

Limit = Annotated[int, Query(ge=0, le=10_000, description="At most so many.")]
Since = Annotated[
    int | None, Query(ge=0, le=MAX_INTEGER, description="Only those after this id, oldest first; else the last ones.")
]
READY = [Depends(require_ready)]
ADMIN = [Depends(require_admin)]


def of_people(tag: str) -> APIRouter:
    """A router for people: viewers may look, members may change what is theirs, admins everything."""
    first = [Depends(require_person), Depends(require_known_parameters)]
    return APIRouter(prefix="/api/v1", tags=[tag], dependencies=first, route_class=FairRoute)
