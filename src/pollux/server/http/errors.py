"""Answers of the HTTP interface, and the one table of which error gets which status. No answer has a stack trace."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from pollux.api.codec import encode, shown
from pollux.api.errors import ErrorAnswer, ErrorText
from pollux.errors import FencedError, InputFileError, InvalidValueError, PolluxError, UnknownNameError

MAX_MESSAGE_LENGTH = 4000
RETRY_AFTER_S = 2

logger = logging.getLogger(__name__)


def answer(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A message as an HTTP answer."""
    return Response(to_json(content), status, headers, media_type="application/json")


def to_json(content: object) -> str:
    """A message as JSON in ASCII; null for numbers that are not finite."""
    return json.dumps(encode(content), allow_nan=False, separators=(",", ":"))


class Refusal(Exception):
    """What is not an error of ours but of who asks, with its HTTP status."""

    def __init__(self, status: int, kind: str, message: str, headers: dict[str, str] | None = None) -> None:
        self.status, self.kind, self.message, self.headers = status, kind, message, headers
        super().__init__(message)


def refuse(
    status: int, kind: str, message: str, headers: dict[str, str] | None = None, known: Sequence[str] | None = None
) -> Response:
    if len(message) > MAX_MESSAGE_LENGTH:
        message = f"{message[: MAX_MESSAGE_LENGTH // 2]} ... {message[-MAX_MESSAGE_LENGTH // 2 :]}"
    error = ErrorAnswer(error=ErrorText(type=kind, message=message, known=None if known is None else tuple(known)))
    return answer(error, status, headers)


def retry_later(kind: str, message: str) -> Response:
    return refuse(503, kind, message, {"Retry-After": str(RETRY_AFTER_S)})


def answer_error(error: PolluxError) -> Response:
    """The one table of statuses. What is not the caller's fault may work later."""
    kind = type(error).__name__
    match error:
        case UnknownNameError():
            return refuse(404, kind, str(error), known=error.known)
        case InvalidValueError() | InputFileError():
            return refuse(422, kind, str(error))
        case FencedError():
            return refuse(409, kind, str(error))
        case _:
            logger.warning("%s: %s", kind, error)
            return retry_later(kind, str(error))


async def _on_pollux_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PolluxError)
    request.app.state.metrics.failed(error)
    return answer_error(error)


async def _on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return refuse(error.status, error.kind, error.message, error.headers)


async def _on_bad_values(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return refuse(422, InvalidValueError.__name__, problems(error.errors()))


async def _on_timeout(request: Request, error: Exception) -> Response:
    return retry_later("TimeoutError", f"the server did not get to it in time; try again. {error}")


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Routes and methods there are none of."""
    assert isinstance(error, HTTPException)
    kind = f"{HTTPStatus(error.status_code).phrase.title().replace(' ', '')}Error"
    path, headers = request.scope["path"], dict(error.headers or {})
    if "Allow" in headers:  # it names the methods of one route, and a path may have several
        headers["Allow"] = ", ".join(_methods(request.app.openapi()["paths"], path)) or headers["Allow"]
    message = f"{request.method} {path}: {error.detail}; see /api/v1/openapi.json for what there is"
    return refuse(error.status_code, kind, message, headers)


def _methods(paths: Mapping[str, Iterable[str]], path: str) -> list[str]:
    patterns = {template: re.sub(r"\{\w+\}", "[^/]+", template) for template in paths}
    return sorted(
        method.upper() for template in paths if re.fullmatch(patterns[template], path) for method in paths[template]
    )


async def _on_bug(request: Request, error: Exception) -> Response:
    """Ours. The traceback goes to the log (uvicorn writes it), not out."""
    return refuse(500, "InternalError", "the server made a mistake; its log says more")


def problems(errors: Sequence[Any]) -> str:
    """What pydantic says of query parameters, in one line."""
    parts = []
    for entry in errors[:5]:
        where = ".".join(str(part) for part in entry.get("loc", ()))
        parts.append(f"{where} = {shown(entry.get('input'))}: {entry.get('msg')}")
    return "; ".join(parts)


def add_handlers(app: FastAPI) -> None:
    handlers: dict[type[Exception], Callable[[Request, Exception], Coroutine[Any, Any, Response]]] = {
        PolluxError: _on_pollux_error,
        Refusal: _on_refusal,
        RequestValidationError: _on_bad_values,
        HTTPException: _on_http_error,
        TimeoutError: _on_timeout,
        Exception: _on_bug,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
