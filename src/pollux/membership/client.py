"""A replica's connection to its job's store. ``replica`` and ``torch_store`` call it, from any thread.

Each call takes a connection of its own for as long as it lasts: a call that waits for a key holds up no other.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pollux.errors import MembershipError
from pollux.membership.channel import (
    CHUNK_BYTES,
    GREETING,
    NONCE_BYTES,
    PROOF_BYTES,
    ForgedMessageError,
    Handshake,
    Sealer,
    Unsealed,
    keep_alive,
)

ANSWER_S = 10.0  # the longest a store may take for one answer, beside the wait for a key
MAX_IDLE = 4  # connections kept for the next call


class StoreTimeoutError(MembershipError):
    """The keys that a call waited for did not come in time."""


class _Connection:
    def __init__(self, host: str, port: int, secret: str, timeout_s: float) -> None:
        """Raises OSError, and ForgedMessageError where the other side does not know the secret."""
        self._socket = socket.create_connection((host, port), timeout=timeout_s)
        try:
            self._greet(secret, timeout_s)
        except BaseException:
            self._socket.close()
            raise

    def _greet(self, secret: str, timeout_s: float) -> None:
        keep_alive(self._socket)
        self._socket.settimeout(timeout_s)
        greeting = self._receive_exactly(len(GREETING) + NONCE_BYTES)
        if not greeting.startswith(GREETING):
            raise ForgedMessageError("what listens there is no store of Pollux")
        nonce = secrets.token_bytes(NONCE_BYTES)
        handshake = Handshake(secret, greeting[len(GREETING) :], nonce)
        self._socket.sendall(nonce + handshake.proof_of("client"))
        if not handshake.is_proof("server", self._receive_exactly(PROOF_BYTES)):
            raise ForgedMessageError("what listens there does not know the job's secret")
        self._sealer: Sealer = handshake.sealer_to("server")
        self._stream = Unsealed(handshake.sealer_to("client"))

    def ask(self, parts: Sequence[bytes], timeout_s: float) -> list[bytes]:
        """Raises OSError and ForgedMessageError; the connection must not be used again then."""
        data = self._sealer.seal(parts)
        self._socket.settimeout(timeout_s)
        self._socket.sendall(data)
        while (answer := self._stream.next()) is None:
            data = self._socket.recv(CHUNK_BYTES)
            if not data:
                raise ConnectionResetError("the store has closed the connection")
            self._stream.feed(data)
        return answer

    def close(self) -> None:
        self._socket.close()

    def _receive_exactly(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            piece = self._socket.recv(num_bytes - len(data))
            if not piece:
                raise ForgedMessageError("what listens there closed the connection: it expects another secret")
            data += piece
        return data


class RemoteStore:
    """The store at an address. Every call raises MembershipError when the store does not answer."""

    def __init__(self, host: str, port: int, secret: str, timeout_s: float = ANSWER_S) -> None:
        """Connects once, so that a wrong address or secret is known now. ``timeout_s``: for that, and each answer."""
        self._host, self._port, self._secret, self._timeout_s = host, port, secret, timeout_s
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._pid = os.getpid()
        with self._borrowed():
            pass

    @property
    def address(self) -> str:
        return f"{self._host}:{self._port}"

    def set(self, key: str, value: str | bytes) -> None:
        self._call(b"set", key.encode(), _bytes(value))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        pairs = zip(keys, values, strict=True)
        self._call(b"set", *(part for key, value in pairs for part in (key.encode(), _bytes(value))))

    def get(self, key: str, wait_s: float = ANSWER_S) -> bytes:
        """Waits for a missing key. Raises StoreTimeoutError."""
        return self.multi_get([key], wait_s)[0]

    def multi_get(self, keys: Sequence[str], wait_s: float = ANSWER_S) -> list[bytes]:
        return self._wait(b"get", keys, wait_s)

    def wait(self, keys: Sequence[str], wait_s: float = ANSWER_S) -> None:
        """Until all keys are there. Raises StoreTimeoutError."""
        self._wait(b"wait", keys, wait_s)

    def find(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values at one moment, None for each missing key, without waiting."""
        answer = self._call(b"find", *(key.encode() for key in keys))
        return [value[1:] if value.startswith(b"+") else None for value in answer]

    def check(self, keys: Sequence[str]) -> bool:
        return None not in self.find(keys)

    def add(self, key: str, amount: int) -> int:
        return int(self._call(b"add", key.encode(), b"%d" % amount)[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._call(b"compare_set", key.encode(), _bytes(expected), _bytes(desired))[0]

    def append(self, key: str, value: str | bytes) -> None:
        self._call(b"append", key.encode(), _bytes(value))

    def delete_key(self, key: str) -> bool:
        return self._call(b"delete", key.encode())[0] == b"1"

    def num_keys(self) -> int:
        return int(self._call(b"num_keys")[0])

    def close(self) -> None:
        """Close the connections that no call uses. A later call opens another."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _wait(self, operation: bytes, keys: Sequence[str], wait_s: float) -> list[bytes]:
        milliseconds = max(round(wait_s * 1000.0), 0)
        return self._call(operation, b"%d" % milliseconds, *(key.encode() for key in keys), wait_s=wait_s)

    def _call(self, *parts: bytes, wait_s: float = 0.0) -> list[bytes]:
        with self._borrowed() as connection:
            answer = connection.ask(parts, self._timeout_s + wait_s)
        if answer[:1] == [b"ok"]:
            return answer[1:]
        reason = b" ".join(answer[1:]).decode(errors="replace")
        if answer[:1] == [b"late"]:
            raise StoreTimeoutError(f"the store at {self.address} did not get {reason} within {wait_s:g} s")
        raise MembershipError(f"the store at {self.address} refuses {parts[0].decode()}: {reason}")

    @contextmanager
    def _borrowed(self) -> Iterator[_Connection]:
        connection = self._take_idle()
        try:
            if connection is None:
                connection = _Connection(self._host, self._port, self._secret, self._timeout_s)
            yield connection
        except BaseException as error:  # an interrupt, too: half a message may be on its way
            if connection is not None:
                connection.close()
            if isinstance(error, OSError | ForgedMessageError):
                raise MembershipError(f"the store at {self.address} does not answer: {error}") from error
            raise
        self._give_back(connection)

    def _take_idle(self) -> _Connection | None:
        with self._lock:
            if self._pid != os.getpid():  # in a forked child: the connections are the parent's
                self._idle, self._pid = [], os.getpid()
            return self._idle.pop() if self._idle else None

    def _give_back(self, connection: _Connection) -> None:
        with self._lock:
            if len(self._idle) < MAX_IDLE and self._pid == os.getpid():
                self._idle.append(connection)
                return
        connection.close()


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
