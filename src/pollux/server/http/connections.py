"""HTTP connections with bounds: one that sends no request, half of one, or does not read its answer is closed.

``listener`` gives it to uvicorn, which itself only bounds the pause after an answer; a connection that never asks
anything would stay for ever. Of more connections than leave descriptors for the rest of the process, those that were
silent for longest are closed. With TLS the protocol hears of a connection when its handshake is over: the listener
counts those before, and closes the oldest beyond half of all.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import time
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from uvicorn.protocols.http.auto import AutoHTTPProtocol

SILENCE_S = 30.0  # without a byte of a request that has begun, or of the first one
REQUEST_S = 300.0  # for all of a request, however slowly its bytes come
UNREAD_S = 600.0  # that an answer may wait for its reader, who may look at a log page by page
LOOK_EVERY_S = 5.0
MAX_RESERVED = 8192  # descriptors for the database, logs and jobs, and for what comes before others are closed
MAX_BACKLOG = 2048  # connections that are accepted at once
PAUSE_S = 0.01  # where there is no descriptor left
SAY_EVERY_S = 60.0

logger = logging.getLogger(__name__)


def most_connections() -> int:
    """Half of the process's descriptors, or all but so many."""
    limit = _most_descriptors()
    return limit - min(limit // 2, MAX_RESERVED)


def backlog() -> int:
    """What is accepted while others are being closed must fit into the reserve."""
    return min(MAX_BACKLOG, max(_most_descriptors() // 8, 16))


def _most_descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


_unready: dict[int, weakref.ref[socket.socket]] = {}  # accepted, and not open yet: by descriptor, the oldest first


def _note_accepted(connection: socket.socket) -> None:
    """Closes the oldest of those that are not open yet, if there are too many, or else the quietest that is open."""
    _unready.pop(connection.fileno(), None)  # of one that was closed
    _unready[connection.fileno()] = weakref.ref(connection)
    most = most_connections()
    while len(_unready) > max(most // 2, 1):  # without TLS two backlogs at most, which are as many
        number = next(iter(_unready))
        other = _unready.pop(number)()
        if other is not None and other.fileno() == number:
            with contextlib.suppress(OSError):
                other.shutdown(socket.SHUT_RDWR)  # asyncio sees its end
    if len(_unready) + len(BoundedProtocol._open) > most:
        BoundedProtocol.make_room()


class BoundedListener(socket.socket):
    """For asyncio, which tries 2,048 times without a descriptor, and logs each time: that fills a disk."""

    said_at = float("-inf")

    def accept(self) -> tuple[socket.socket, Any]:
        try:
            connection, address = super().accept()
            _note_accepted(connection)
            return connection, address
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise
            if time.monotonic() - self.said_at > SAY_EVERY_S:
                self.said_at = time.monotonic()
                logger.error("connections have to wait: %s", error.strerror)
            time.sleep(PAUSE_S)
            raise BlockingIOError(errno.EAGAIN, "no descriptor is left") from error


if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as _Protocol
else:
    _Protocol = AutoHTTPProtocol


class BoundedProtocol(_Protocol):
    """Of one connection. All runs in the event loop."""

    _open: ClassVar[dict[BoundedProtocol, None]] = {}  # in this process; who was heard longest ago comes first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._heard_at = self._began_at = self.loop.time()
        self._is_waiting = True  # for the rest of a request, or for the first
        self._unread_since: float | None = None  # the client has not taken what was sent
        connection: socket.socket | None = transport.get_extra_info("socket")
        if connection is not None:
            _unready.pop(connection.fileno(), None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # for machines that vanish
        self._look_again()
        self._open[self] = None
        if len(self._open) > most_connections():
            self.make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.pop(self, None)
        super().connection_lost(exc)

    @classmethod
    def make_room(cls) -> None:
        """Close the connection that was silent for longest, if no answer is on its way."""
        loop = asyncio.get_running_loop()
        for other in cls._open:
            is_quiet = other.cycle is None or other._is_waiting or other.cycle.response_complete
            if is_quiet and other.loop is loop and not other.transport.is_closing():
                del cls._open[other]
                other.transport.abort()
                return

    def data_received(self, data: bytes) -> None:
        if self in self._open:
            self._open[self] = self._open.pop(self)  # as the last
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
