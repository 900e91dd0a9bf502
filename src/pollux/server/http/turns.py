"""Lets a caller have some requests in work at a time; further ones wait for their turn, and not in a thread.

All requests share a few threads and one interpreter. Without turns, a viewer who lists all jobs fifty times at once
holds up all others. Routers for people have :class:`FairRoute`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from pollux.errors import AccessDeniedError
from pollux.server.http.auth import Access, NeedsWork
from pollux.server.http.errors import RETRY_AFTER_S, Refusal

MAX_IN_WORK = 6  # of a caller; there are 40 threads
MAX_QUEUED = 1000  # of a caller, those in work included; they stay when their client has gone

_Who = tuple[str | None, ...]


@dataclass(slots=True)
class _Queue:
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_IN_WORK))
    num_requests: int = 0  # in work, or waiting


class Turns:
    """For the event loop alone."""

    def __init__(self) -> None:
        self._queues: dict[_Who, _Queue] = {}

    @contextlib.asynccontextmanager
    async def one_for(self, who: _Who) -> AsyncIterator[None]:
        """First come, first served.

        Raises:
            Refusal: too many wait already.
        """
        queue = self._queues.setdefault(who, _Queue())
        if queue.num_requests >= MAX_QUEUED:
            message = f"{MAX_QUEUED} requests of yours wait; ask again later"
            raise Refusal(503, "ServerUnavailableError", message, {"Retry-After": str(RETRY_AFTER_S)})
        queue.num_requests += 1
        try:
            async with queue.turns:
                yield
        finally:
            queue.num_requests -= 1
            if not queue.num_requests:
                del self._queues[who]


class FairRoute(APIRoute):
    """Answers that are streams begin in their turn, and go on without it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def in_turn(request: Request) -> Response:
            turns: Turns = request.app.state.turns
            async with turns.one_for(_who_asks(request)):
                return await handle(request)

        return in_turn


def _who_asks(request: Request) -> _Who:
    """Those who are not known yet, or not at all, have one queue together. So have read-only links."""
    access: Access = request.app.state.access
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    try:
        caller = access.caller(token if kind.lower() == "bearer" else None)
    except (AccessDeniedError, NeedsWork):
        caller = None
    return () if caller is None else (caller.job, caller.user, caller.role)
