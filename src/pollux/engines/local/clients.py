"""The supervisor's connections: one engine that commands it, and visitors that have not proved yet who they are.

A visitor becomes the client by an authenticated hello of the right version, and only then does the client before it
lose its place. All others are refused, or dropped after a while. Called by ``supervisor``; one thread, no waiting.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pollux.engines.local.files import SOCKET, socket_address
from pollux.engines.local.secret import is_proof, make_secret, new_nonce
from pollux.engines.messages import PROTOCOL_VERSION
from pollux.engines.transport import MAX_MESSAGE_BYTES, Channel, Message

MAX_VISITORS = 16  # more at a time are no servers of ours; the oldest is dropped
VISIT_S = 10.0  # a server says hello at once
MAX_HELLO_BYTES = 4 << 20  # one line for each of at most 4096 devices

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _Visitor:
    channel: Channel
    nonce: str
    ends_at: float


class Clients:
    def __init__(self, directory: Path, refusal_of: Callable[[Message], str]) -> None:
        """``refusal_of`` says why a hello cannot be accepted; "" if it can. The caller holds the directory's lock."""
        self._directory, self._refusal_of = directory, refusal_of
        self._secret = make_secret(directory)  # first: a server that finds the socket reads it
        self._listener = _listen(directory)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._client: Channel | None = None
        self._visitors: dict[int, _Visitor] = {}  # by descriptor
        self.is_replaced = False  # there is another client, or none, since this was last set to False

    @property
    def has_client(self) -> bool:
        return self._client is not None

    @property
    def has_unsent(self) -> bool:
        return self._client is not None and self._client.has_unsent

    def send(self, message: Message) -> None:
        """To the client, if there is one. Never waits."""
        if self._client is not None:
            self._client.queue(message)

    def flush(self) -> None:
        if self._client is not None:
            self._client.flush()

    def receive(self, timeout_s: float) -> list[Message]:
        """What the client says, its hello included, as soon as there is anything. Sees to visitors meanwhile."""
        messages: list[Message] = []
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif self._client is not None and key.fd == self._client.fileno():
                messages += self._hear()
            elif key.fd in self._visitors and (found := self._meet(self._visitors[key.fd])):
                messages = found  # the client before has lost its place, and its say
        for visitor in [one for one in self._visitors.values() if time.monotonic() > one.ends_at]:
            self._dismiss(visitor, "it did not say hello in time")
        return messages

    def close(self) -> None:
        self.flush()
        for visitor in list(self._visitors.values()):
            self._dismiss(visitor)
        self._drop_client()
        self._selector.close()
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            (self._directory / SOCKET).unlink()

    def _hear(self) -> list[Message]:
        assert self._client is not None
        messages = self._client.receive(0.0)
        if messages is None:
            self._drop_client()
        return messages or []

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            channel = Channel(connection, max_bytes=MAX_HELLO_BYTES)
            visitor = _Visitor(channel=channel, nonce=new_nonce(), ends_at=time.monotonic() + VISIT_S)
            if len(self._visitors) >= MAX_VISITORS:
                self._dismiss(next(iter(self._visitors.values())), "there are too many others")
            self._visitors[channel.fileno()] = visitor
            self._selector.register(channel, selectors.EVENT_READ)
            channel.queue({"event": "challenge", "nonce": visitor.nonce})

    def _meet(self, visitor: _Visitor) -> list[Message]:
        messages = visitor.channel.receive(0.0)
        if messages is None:
            self._dismiss(visitor)
            return []
        if not messages:
            return []
        if reason := self._refuse(visitor, messages[0]):
            visitor.channel.queue({"event": "refused", "version": PROTOCOL_VERSION, "reason": reason})
            self._dismiss(visitor, reason)
            return []
        self._replace_client(visitor)
        return messages

    def _refuse(self, visitor: _Visitor, hello: Message) -> str:
        if hello.get("op") != "hello" or not is_proof(self._secret, visitor.nonce, hello.get("proof")):
            return "no hello with a proof that it has read the supervisor's secret"
        if self._client is not None and hello.get("takes_over") is False:
            return "another server commands this supervisor"
        return self._refusal_of(hello)

    def _replace_client(self, visitor: _Visitor) -> None:
        del self._visitors[visitor.channel.fileno()]
        if self._client is not None:
            logger.info("a new client takes the place of the old one")
            self._client.queue({"event": "replaced"})
            self._drop_client()
        self._client, self.is_replaced = visitor.channel, True
        self._client.max_bytes = MAX_MESSAGE_BYTES

    def _dismiss(self, visitor: _Visitor, why: str = "") -> None:
        if why:
            logger.warning("a connection is refused: %s", why)
        del self._visitors[visitor.channel.fileno()]
        self._selector.unregister(visitor.channel)
        visitor.channel.close()

    def _drop_client(self) -> None:
        if self._client is not None:
            self._selector.unregister(self._client)
            self._client.close()
            self._client, self.is_replaced = None, True


def _listen(directory: Path) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        (directory / SOCKET).unlink()  # an earlier supervisor's, which is dead: we hold the lock
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old_mask = os.umask(0o177)
    try:
        with socket_address(directory) as address:
            listener.bind(address)
    finally:
        os.umask(old_mask)
    listener.listen(8)
    listener.setblocking(False)
    return listener
