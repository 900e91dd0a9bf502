"""HTTP connections with bounds: one that sends no request, half of one, or does not read its answer is closed.

``listener`` gives it to uvicorn, which itself only bounds the pause after an answer; a connection that never asks
anything would stay for ever.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

SILENCE_S = 30.0  # without a byte of a request that has begun, or of the first one
REQUEST_S = 300.0  # for all of a request, however slowly its bytes come
UNREAD_S = 600.0  # that an answer may wait for its reader, who may look at a log page by page
LOOK_EVERY_S = 5.0

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as _Protocol
else:
    _Protocol = AutoHTTPProtocol


class BoundedProtocol(_Protocol):
    """Of one connection. All runs in the event loop."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._heard_at = self._began_at = self.loop.time()
        self._is_waiting = True  # for the rest of a request, or for the first
        self._unread_since: float | None = None  # the client has not taken what was sent
        connection: socket.socket | None = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # for machines that vanish
        self._look_again()

    def data_received(self, data: bytes) -> None:
        now = self.loop.time()
        before = self.cycle
        if not self._is_waiting:
            self._began_at = now
        self._heard_at = now
        super().data_received(data)
        # The same cycle, and it is answered: what came is the beginning of another request.
        is_new = self.cycle is not before or self.cycle is None or self.cycle.more_body
        self._is_waiting = self._is_incomplete() if is_new else bool(self.cycle.response_complete)

    def pause_writing(self) -> None:
        self._unread_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._unread_since = None
        super().resume_writing()

    def _is_incomplete(self) -> bool:
        """Whether a part of the request has still to come. ``cycle`` is the last one whose head was complete."""
        cycle: Any = self.cycle
        return cycle is None or bool(cycle.more_body)

    def _look_again(self) -> None:
        self.loop.call_later(LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        now = self.loop.time()
        # Between two requests uvicorn's own keep-alive timer runs, which is longer.
        is_late = now - self._heard_at > SILENCE_S or now - self._began_at > REQUEST_S
        is_unread = self._unread_since is not None and now - self._unread_since > UNREAD_S
        if (self._is_waiting and is_late) or is_unread:
            self.transport.abort()
            return
        self._look_again()
