"""Serves what a browser loads: the dashboard's page, its scripts and styles, and plotly.js for published reports.

The files are plain ones in ``server/dashboard/``; the look that they share with reports is :mod:`pollux.reports.look`.
They need no token: they hold no data, and ask the HTTP interface for all of it.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import mimetypes
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from pollux.reports import look

FOLDER = Path(__file__).parents[1] / "dashboard"
INDEX = "index.html"
PIECE_BYTES = 1 << 16
# Scripts and styles come from here alone, so text that a user wrote can never become one.
POLICY = (
    "default-src 'self'; style-src 'self'; img-src 'self' data: blob:; frame-src 'self'; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Cache-Control": "no-cache",  # kept, but asked for again: after an update no old script meets a new one
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept-Encoding",
    "X-Content-Type-Options": "nosniff",
}
_MADE: dict[str, Callable[[], str]] = {
    "look.css": look.style,
    "figures.js": look.script,
    "plotly.js": look.plotly_js,
}

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    plain: bytes
    packed: bytes  # by gzip
    media_type: str
    tag: str


@functools.cache
def load(name: str) -> Asset | None:
    """A file of the dashboard; None: there is no such file.

    Raises:
        PolluxError: it is plotly.js, and plotly is not installed.
    """
    if name in _MADE:
        data = _MADE[name]().encode()
    elif name in _names():
        data = (FOLDER / name).read_bytes()
    else:
        return None
    media_type = "text/javascript" if name.endswith(".js") else mimetypes.guess_type(name)[0] or "text/plain"
    is_text = media_type.startswith("text/") or media_type.endswith("+xml")
    return Asset(
        plain=data,
        packed=gzip.compress(data, 6, mtime=0),
        media_type=f"{media_type}; charset=utf-8" if is_text else media_type,
        tag=hashlib.sha256(data).hexdigest()[:20],
    )


@functools.cache
def _names() -> frozenset[str]:
    """What may be asked for; what is asked for is never made into a path before it is found here."""
    return frozenset(path.name for path in FOLDER.iterdir() if path.is_file())


def _respond(request: Request, asset: Asset, more: dict[str, str]) -> Response:
    is_packed = "gzip" in request.headers.get("accept-encoding", "")
    tag = f'"{asset.tag}{"-gz" if is_packed else ""}"'
    headers = {**HEADERS, **more, "ETag": tag}
    if tag in (part.strip().removeprefix("W/") for part in request.headers.get("if-none-match", "").split(",")):
        return Response(status_code=304, headers=headers)
    if is_packed:
        headers["Content-Encoding"] = "gzip"
    body = asset.packed if is_packed else asset.plain
    headers["Content-Length"] = str(len(body))
    return StreamingResponse(_pieces(body), headers=headers, media_type=asset.media_type)


async def _pieces(body: bytes) -> AsyncIterator[memoryview]:
    """No connection has a copy of its own: they need no token, and a client that reads nothing costs nothing."""
    view = memoryview(body)
    for begin in range(0, len(body), PIECE_BYTES):
        yield view[begin : begin + PIECE_BYTES]


# Plain functions run in threads: plotly.js is compressed on the first request.


@router.api_route("/", methods=["GET", "HEAD"])
def index(request: Request) -> Response:
    asset = load(INDEX)
    assert asset is not None, "the page is part of the package"
    return _respond(request, asset, {"Content-Security-Policy": POLICY, "X-Frame-Options": "DENY"})


@router.api_route("/assets/{name}", methods=["GET", "HEAD"])
def asset(request: Request, name: str) -> Response:
    found = load(name)
    if found is None or name == INDEX:
        raise HTTPException(404, f"the dashboard has no file {name[:80]!r}")
    return _respond(request, found, {})
