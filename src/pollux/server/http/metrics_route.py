"""``GET /metrics`` for Prometheus, and the counting of requests (:class:`Meter`).

:mod:`pollux.server.present.metrics` keeps the numbers. Prometheus sends the operator's token, as a bearer or as the
password of basic authentication, unless metrics are open to all.
"""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBasic, HTTPBasicCredentials
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pollux.api.errors import ErrorAnswer
from pollux.server.http.dependencies import bearer, find_caller, require_person
from pollux.server.http.errors import Refusal
from pollux.server.http.turns import FairRoute
from pollux.server.present.metrics import Metrics

UNKNOWN_ROUTE = "unknown"  # no route has that path; callers may make up paths


class _Basic(HTTPBasic):
    """A header that cannot be read counts as none: the answer to that is ours, not the framework's."""

    async def __call__(self, request: HTTPConnection) -> HTTPBasicCredentials | None:  # type: ignore[override]
        try:
            return await super().__call__(request)
        except HTTPException:
            return None


_basic = _Basic(auto_error=False, scheme_name="password", description="Any user; the operator's token is the password.")


class Meter:
    """Counts what the application answers, by method, route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, metrics, route = time.perf_counter(), self._metrics, ""

        async def count(message: Message) -> None:
            nonlocal route
            if message["type"] == "http.response.start" and not route:
                route = _route_of(scope)
                metrics.answered(scope["method"], route, message["status"], time.perf_counter() - began)
                metrics.open_answers[route] += 1
            await send(message)

        try:
            await self._app(scope, receive, count)
        except Exception:
            if not route:  # a bug: it is answered further out
                metrics.answered(scope["method"], _route_of(scope), 500, time.perf_counter() - began)
            raise
        finally:
            if route:
                metrics.open_answers[route] -= 1


def _route_of(scope: Scope) -> str:
    return getattr(scope.get("route"), "path", "") or UNKNOWN_ROUTE


async def require_reader(
    request: Request,
    token: Annotated[HTTPAuthorizationCredentials | None, Security(bearer)],
    password: Annotated[HTTPBasicCredentials | None, Security(_basic)],
) -> None:
    if request.app.state.has_open_metrics:
        return
    if token is None and password is not None:
        token = HTTPAuthorizationCredentials(scheme="Bearer", credentials=password.password)
    try:
        await require_person(request, await find_caller(request, token))
    except Refusal as refusal:
        if refusal.status == 401:
            message = f"{refusal.message}; or send it as the password of any user"
            headers = {"WWW-Authenticate": 'Basic realm="Pollux metrics", Bearer'}
            raise Refusal(401, refusal.kind, message, headers) from None
        raise


router = APIRouter(tags=["health"], route_class=FairRoute)


@router.get(
    "/metrics",
    summary="Numbers for Prometheus",
    response_class=Response,
    dependencies=[Depends(require_reader)],
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "In its text format."},
        **{
            status: {"model": ErrorAnswer, "description": text}
            for status, text in ((401, "No token, or a wrong one."), (403, "That of a job."))
        },
    },
)
def read_metrics(request: Request) -> Response:
    metrics: Metrics = request.app.state.metrics
    return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST, headers={"Cache-Control": "no-store"})
