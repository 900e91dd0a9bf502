"""What comes in: who asks, and what they say. FastAPI calls these before the routes.

Stands in ``server``, below :mod:`pollux.server.routes`. The cluster is known by :class:`LiveCluster` alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar, cast

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from pollux import wire
from pollux.errors import InvalidValueError
from pollux.jobs import JobRequest
from pollux.server import schemas
from pollux.server.access import Access, Caller
from pollux.server.answers import RETRY_AFTER_S, Refusal, problems
from pollux.server.feed import Watched
from pollux.server.metrics import Metrics
from pollux.server.simulations import Simulations
from pollux.wire import MAX_REPORT_BYTES, WireReport

MAX_BODY_BYTES = MAX_REPORT_BYTES
_F = TypeVar("_F", bound=schemas.Body)
_LOCAL_HOST = re.compile(r"(localhost|127(\.[0-9]+){3}|\[::1\])(:[0-9]+)?", re.IGNORECASE)


class LiveCluster(Watched, Protocol):
    """What is asked of :class:`pollux.server.cluster.Cluster`. Any thread may ask; every call is bounded in time."""

    @property
    def is_ready(self) -> bool: ...
    @property
    def problem(self) -> str: ...
    @property
    def metrics(self) -> Metrics: ...
    @property
    def simulations(self) -> Simulations: ...
    def submit(self, request: JobRequest) -> list[dict[str, Any]]: ...
    def cancel(self, name: str, reason: str) -> dict[str, Any]: ...
    def jobs(
        self, states: Sequence[str] | None, limit: int, offset: int, newest_first: bool
    ) -> tuple[list[dict[str, Any]], int]: ...
    def job(self, name: str) -> dict[str, Any]: ...
    def view(self, name: str) -> dict[str, Any]: ...
    def report(self, job: str, report: WireReport) -> dict[str, Any]: ...
    def reports(self, name: str, since: int | None, limit: int) -> list[dict[str, Any]]: ...
    def drain(self, node: str, is_draining: bool) -> dict[str, Any]: ...
    def round(self, id_: int) -> dict[str, Any]: ...
    def samples(self, since: float | None, until: float | None, points: int) -> list[dict[str, Any]]: ...
    def timeline(self, since: float | None, until: float | None, limit: int) -> dict[str, Any]: ...
    def curves(self, name: str, points: int) -> dict[str, Any]: ...
    def model(self, name: str) -> dict[str, Any]: ...
    def job_directory(self, name: str) -> Path: ...
    def is_ended(self, name: str) -> bool: ...


# Who ------------------------------------------------------------------------------------------

bearer = HTTPBearer(auto_error=False, scheme_name="token", description="The operator's token, or that of a job.")


async def find_cluster(request: Request) -> LiveCluster:
    return cast(LiveCluster, request.app.state.cluster)


async def find_caller(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Security(bearer)]
) -> Caller:
    access: Access = request.app.state.access
    if not access.needs_token and not _is_local(request):
        raise Refusal(403, "AccessDeniedError", "without a token only programs on this machine may ask")
    caller = access.caller(None if credentials is None else credentials.credentials)
    if caller is None:
        seen = "this token is not known here" if credentials else "no token came with it"
        message = f"{seen}; send 'Authorization: Bearer TOKEN', with the token in the server's data directory"
        raise Refusal(401, "AccessDeniedError", message, {"WWW-Authenticate": "Bearer"})
    return caller


ItsCluster = Annotated[LiveCluster, Depends(find_cluster)]
ItsCaller = Annotated[Caller, Depends(find_caller)]


async def require_operator(caller: ItsCaller) -> None:
    if not caller.is_operator:
        message = f"this is the token of job {caller.job!r}, which may only report for it; the operator's is needed"
        raise Refusal(403, "AccessDeniedError", message)


async def require_known_parameters(request: Request) -> None:
    """A misspelt one would be ignored, and the answer be to another question."""
    known = sorted(one.alias for one in request.scope["route"].dependant.query_params)
    for name in request.query_params:
        if name not in known:
            allowed = f"allowed are {', '.join(known)}" if known else "none is allowed"
            raise InvalidValueError(f"unknown parameter {wire.shown(name)}; {allowed}")


async def require_ready(cluster: ItsCluster) -> None:
    """Nothing is taken in that could not be carried out."""
    if not cluster.is_ready:
        message = f"the cluster is not ready: {cluster.problem or 'it is starting or ending'}; try again later"
        raise Refusal(503, "ServerUnavailableError", message, {"Retry-After": str(RETRY_AFTER_S)})


def _is_local(request: Request) -> bool:
    """Not a page in a browser that was led here. Asked where no token tells friend from foe."""
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    is_own = origin is None or origin.partition("://")[2] == host
    return is_own and _LOCAL_HOST.fullmatch(host) is not None


# What -----------------------------------------------------------------------------------------


async def read_body(request: Request, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The body, of which no more than this is ever kept."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise _too_large(max_bytes)
            parts.append(part)
    except ClientDisconnect:
        raise Refusal(422, "InvalidValueError", "the body ended too early") from None
    return b"".join(parts)


def _too_large(max_bytes: int) -> Refusal:
    # What is left of the body is not read, so nothing else can come through this connection.
    message = f"the body is too large; at most {max_bytes} bytes are allowed"
    return Refusal(413, "TooLargeError", message, {"Connection": "close"})


def body_of(form: type[_F], *, is_required: bool = True) -> Callable[[Request], Coroutine[Any, Any, _F]]:
    """A dependency that reads a JSON body. FastAPI would read all of it before anybody asked for the token."""

    async def read(request: Request) -> _F:
        data = await read_body(request)
        value = wire.loads(data, "body") if data or is_required else {}
        try:
            return form.model_validate(value)
        except ValidationError as error:
            raise InvalidValueError(problems(error.errors(include_url=False, include_context=False))) from None

    return read
