"""One authenticated connection between a job's store and a replica, for both of its ends.

Both prove that they know the job's secret, which is never sent: the server sends a nonce, the client answers with its
own nonce and a proof, the server with its proof. After that every message carries a tag made with a key of this
connection and its number, so that no message can be forged, repeated or left out. Messages are not encrypted. Used by
``server`` and ``client``.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from collections.abc import Sequence

MAX_MESSAGE_BYTES = 16 << 20
CHUNK_BYTES = 1 << 16
NONCE_BYTES = 32
PROOF_BYTES = 32
TAG_BYTES = 16
GREETING = b"pollux-store-1\n"
SECRET_BYTES = 32

_HEAD = struct.Struct(f">I{TAG_BYTES}s")
_COUNT = struct.Struct(">H")
_LENGTH = struct.Struct(">I")


class ForgedMessageError(ValueError):
    """What came is no message of a peer that knows the secret. The connection must end."""


def new_secret() -> str:
    """A secret for one start of one job, as text for an environment."""
    return secrets.token_hex(SECRET_BYTES)


class Handshake:
    """What both ends of one connection send and expect before the first message."""

    def __init__(self, secret: str, server_nonce: bytes, client_nonce: bytes) -> None:
        self._secret, self._nonces = secret.encode(), server_nonce + client_nonce

    def proof_of(self, role: str) -> bytes:
        """``role``: client or server."""
        return self._derive(f"proof of the {role}")

    def is_proof(self, role: str, proof: bytes) -> bool:
        return hmac.compare_digest(self.proof_of(role), proof)

    def sealer_to(self, role: str) -> Sealer:
        """For the messages to this end. Each direction has a key of its own."""
        return Sealer(self._derive(f"messages to the {role}"))

    def _derive(self, purpose: str) -> bytes:
        return hmac.digest(self._secret, b"pollux-store:" + purpose.encode() + b":" + self._nonces, "sha256")


class Sealer:
    """Adds tags to the messages of one direction, or checks them. Both ends count the messages."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def seal(self, parts: Sequence[bytes]) -> bytes:
        body = encode(parts)
        if len(body) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message to a store has at most {MAX_MESSAGE_BYTES} bytes; got {len(body)}")
        return _HEAD.pack(len(body), self._next_tag(body)) + body

    def open(self, tag: bytes, body: bytes) -> list[bytes]:
        """Raises ForgedMessageError."""
        if not hmac.compare_digest(self._next_tag(body), tag):
            raise ForgedMessageError("a message with a wrong tag")
        return decode(body)

    def _next_tag(self, body: bytes) -> bytes:
        self._number += 1
        return hmac.digest(self._key, self._number.to_bytes(8) + body, "sha256")[:TAG_BYTES]


def encode(parts: Sequence[bytes]) -> bytes:
    pieces = [_COUNT.pack(len(parts))]
    for part in parts:
        pieces += (_LENGTH.pack(len(part)), part)
    return b"".join(pieces)


def decode(body: bytes) -> list[bytes]:
    """Raises ForgedMessageError."""
    try:
        (count,) = _COUNT.unpack_from(body)
        parts, at = [], _COUNT.size
        for _ in range(count):
            (size,) = _LENGTH.unpack_from(body, at)
            at += _LENGTH.size
            parts.append(body[at : at + size])
            at += size
    except struct.error as error:
        raise ForgedMessageError(f"a message that ends too early ({error})") from error
    if at != len(body):
        raise ForgedMessageError("a message whose length is not that of its parts")
    return parts


class Unsealed:
    """The messages in a stream that arrives in pieces."""

    def __init__(self, sealer: Sealer) -> None:
        self._sealer, self._data = sealer, bytearray()

    def feed(self, data: bytes) -> None:
        self._data += data

    def next(self) -> list[bytes] | None:
        """The next message that is complete. Raises ForgedMessageError."""
        if len(self._data) < _HEAD.size:
            return None
        size, tag = _HEAD.unpack_from(self._data)
        if size > MAX_MESSAGE_BYTES:
            raise ForgedMessageError(f"a message of {size} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
        end = _HEAD.size + size
        if len(self._data) < end:
            return None
        body = bytes(self._data[_HEAD.size : end])
        del self._data[:end]
        return self._sealer.open(tag, body)


def keep_alive(connection: socket.socket) -> None:
    """Send at once, and notice within about two minutes that the other machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
