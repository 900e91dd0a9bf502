"""Messages between our own processes: JSON objects with their length in front, over a connected stream socket.

Used between an engine and its supervisor, a fork server and its client, and an engine and its Ray proxy. A message has
a bounded length, no wait is without a time-out, and nothing is ever unpickled.

Why no library: ``multiprocessing.connection`` blocks inside one message and in its handshake, without a time-out; anyio
and asyncio need an event loop, and the fork server must fork without one. What is left to write is a length prefix.
"""

from __future__ import annotations

import contextlib
import json
import logging
import select
import socket
import struct
import threading
import time
from typing import Any

MAX_MESSAGE_BYTES = 64 << 20  # the state of thousands of jobs, each with the end of its stderr, stays well below
CHUNK_BYTES = 1 << 16
SEND_TIMEOUT_S = 10.0  # a peer that takes nothing for so long is frozen
_LENGTH = struct.Struct(">I")

Message = dict[str, Any]

logger = logging.getLogger(__name__)


def encode(message: Message) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


class Channel:
    """One end of a connection. One thread may receive while others send.

    A connection that breaks, ends or carries anything but messages is over: :meth:`receive` answers None from then on.
    """

    def __init__(self, connection: socket.socket, *, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """``max_bytes``: the longest message that is accepted; it may be changed later."""
        connection.setblocking(True)  # calls that must not wait say so themselves
        self._connection, self.max_bytes = connection, max_bytes
        self._in, self._out = bytearray(), bytearray()
        self._put_back: list[Message] = []
        self._sending = threading.Lock()  # guards what is to be sent
        self._is_over = False
        self._has_left = False  # the peer takes nothing any more; what it said before may still be unread

    def fileno(self) -> int:
        """-1 after :meth:`close`."""
        return self._connection.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._out)

    def queue(self, message: Message) -> None:
        """Send as much as the kernel takes at once, and the rest with later calls of :meth:`flush`. Never waits."""
        with self._sending:
            if not self._has_left:
                self._out += encode(message)
        self.flush()

    def flush(self) -> None:
        """Send what is left, as far as the kernel takes it. Never waits.

        A peer that has closed its end may have commanded something right before: :meth:`receive` still answers that.
        """
        with self._sending:
            try:
                while self._out and not self._is_over:
                    del self._out[: self._connection.send(self._out, socket.MSG_DONTWAIT)]
            except BlockingIOError:
                pass
            except OSError:
                self._has_left = True
                self._out.clear()

    def send(self, message: Message, timeout_s: float = SEND_TIMEOUT_S) -> bool:
        """Whether the kernel took all of it in time. If not, the connection is over: half of it may have been sent."""
        deadline = time.monotonic() + timeout_s
        self.queue(message)
        while self._out and not self._is_over:
            if not self._wait(select.POLLOUT, deadline - time.monotonic()):
                with self._sending:
                    self._end()
            self.flush()
        return not (self._is_over or self._has_left)

    def receive(self, timeout_s: float) -> list[Message] | None:
        """The next messages; none when there are none in time; None when the connection is over."""
        if self._put_back:
            messages, self._put_back = self._put_back, []
            return messages
        deadline = time.monotonic() + timeout_s
        while True:
            self.flush()
            if self._is_over:
                return None
            ready = self._wait(select.POLLIN | (select.POLLOUT if self._out else 0), deadline - time.monotonic())
            if ready & ~select.POLLOUT or self._has_left:
                messages = self._read()
                if messages or self._is_over:
                    return messages or None
            if time.monotonic() >= deadline:
                return []

    def put_back(self, messages: list[Message]) -> None:
        """Receive these again, first."""
        self._put_back = [*messages, *self._put_back]

    def close(self) -> None:
        """End the connection; another thread that receives wakes up."""
        self._is_over = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def abandon(self) -> None:
        """In a forked child: close this copy, and leave the connection to the parent."""
        self._connection.close()

    def _end(self) -> None:
        self._is_over = True
        self._out.clear()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _wait(self, events: int, timeout_s: float) -> int:
        """What the connection is ready for; 0 when the time is over. poll, as select knows no descriptor above 1023."""
        poll = select.poll()
        try:
            poll.register(self._connection, events)
        except ValueError:  # closed by another thread
            self._is_over = True
            return 0
        found = poll.poll(max(timeout_s, 0.0) * 1000.0)
        return found[0][1] if found else 0

    def _read(self) -> list[Message]:
        try:
            data = self._connection.recv(CHUNK_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            if not self._has_left:
                return []
            data = b""
        except OSError:
            data = b""
        if not data:
            with self._sending:
                self._end()
            return []
        self._in += data
        messages: list[Message] = []
        while len(self._in) >= _LENGTH.size and not self._is_over:
            (size,) = _LENGTH.unpack_from(self._in)
            end = _LENGTH.size + size
            if size > self.max_bytes:
                self._refuse(f"a message of {size} bytes; at most {self.max_bytes} are allowed")
            elif len(self._in) < end:
                break
            else:
                self._take(bytes(self._in[_LENGTH.size : end]), messages)
                del self._in[:end]
        return messages

    def _take(self, body: bytes, messages: list[Message]) -> None:
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            self._refuse(f"no JSON: {error}")
            return
        if isinstance(message, dict):
            messages.append(message)
        else:
            self._refuse(f"a JSON object is needed, not {str(message)[:80]!r}")

    def _refuse(self, why: str) -> None:
        logger.warning("a connection is closed: it carried %s", why)
        with self._sending:
            self._end()
