"""Serves one job's store to the job's replicas, in a thread of its own. ``controller`` starts it.

A visitor that does not prove within seconds that it knows the job's secret is dropped; it can read and change nothing.
One connection carries one request at a time, so a peer that does not read its answers cannot pile them up here.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
from pollux.membership.table import KeyTable

MAX_VISITORS = 64  # with more at a time, the oldest is dropped
VISIT_S = 10.0  # a replica proves who it is at once
MAX_WAIT_S = 3600.0  # the longest that one request may wait for keys
IDLE_S = 60.0
CLOSE_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Wait:
    keys: tuple[str, ...]
    with_values: bool
    ends_at: float


@dataclass(slots=True, kw_only=True, eq=False)
class _Peer:
    """One connection. ``stream`` is None until the peer has proved that it knows the secret."""

    connection: socket.socket
    nonce: bytes
    ends_at: float
    hello: bytearray = field(default_factory=bytearray)
    stream: Unsealed | None = None
    sealer: Sealer | None = None
    out: bytearray = field(default_factory=bytearray)
    wait: _Wait | None = None
    events: int = selectors.EVENT_READ


class StoreServer:
    """The address is known after the constructor; requests are answered until :meth:`close`."""

    def __init__(self, host: str, port: int, secret: str, *, visit_s: float = VISIT_S) -> None:
        """``port`` 0: any free one. Raises MembershipError where the port cannot be had."""
        self.table = KeyTable()
        self._secret, self._visit_s = secret, visit_s
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            raise MembershipError(f"no store can be served at {host}:{port}; is the port taken? {error}") from error
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._visitors: dict[_Peer, None] = {}  # the oldest first
        self._peers: dict[_Peer, None] = {}
        self._waiting: dict[_Peer, None] = {}
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="pollux-store", daemon=True)
        self.table.on_change = self._on_change
        self._thread.start()

    def close(self) -> None:
        self._is_closing = True
        self._ring()
        self._thread.join(CLOSE_S)

    def _on_change(self) -> None:
        if threading.current_thread() is not self._thread and self._waiting:
            self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: it rings already
            self._ringer.send(b"1")

    def _serve(self) -> None:
        try:
            while not self._is_closing:
                for key, events in self._selector.select(self._pause_s()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._bell:
                        self._bell.recv(4096)
                    else:
                        self._attend(key.data, events)
                self._answer_waits()
                self._drop_late_visitors()
        except Exception:
            logger.exception("the store on port %d has ended", self.port)
        finally:
            for peer in [*self._visitors, *self._peers]:
                self._drop(peer)
            for end in (self._selector, self._listener, self._bell, self._ringer):
                end.close()

    def _pause_s(self) -> float:
        ends = [peer.wait.ends_at for peer in self._waiting if peer.wait is not None]
        ends += [next(iter(self._visitors)).ends_at] if self._visitors else []
        return min(max(min(ends, default=IDLE_S + time.monotonic()) - time.monotonic(), 0.0), IDLE_S)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the peer has gone already, or this process has no descriptor left
            time.sleep(0.01)
            return
        connection.setblocking(False)
        keep_alive(connection)
        nonce = secrets.token_bytes(NONCE_BYTES)
        peer = _Peer(connection=connection, nonce=nonce, ends_at=time.monotonic() + self._visit_s)
        if len(self._visitors) >= MAX_VISITORS:
            self._drop(next(iter(self._visitors)), "there are too many others")
        self._visitors[peer] = None
        self._selector.register(connection, peer.events, peer)
        peer.out += GREETING + nonce
        self._flush(peer)

    def _drop_late_visitors(self) -> None:
        for peer in [one for one in self._visitors if time.monotonic() > one.ends_at]:
            self._drop(peer, "it did not prove in time that it knows the job's secret")

    def _drop(self, peer: _Peer, why: str = "") -> None:
        if why:
            logger.warning("the store on port %d drops a connection: %s", self.port, why)
        for group in (self._visitors, self._peers, self._waiting):
            group.pop(peer, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.connection)
        peer.connection.close()

    def _attend(self, peer: _Peer, events: int) -> None:
        if peer not in self._visitors and peer not in self._peers:
            return  # dropped in this turn
        if events & selectors.EVENT_WRITE:
            self._flush(peer)
        if events & selectors.EVENT_READ:
            self._read(peer)
        if peer in self._peers:
            self._work(peer)

    def _read(self, peer: _Peer) -> None:
        num_bytes = CHUNK_BYTES if peer.stream else NONCE_BYTES + PROOF_BYTES - len(peer.hello)
        try:
            data = peer.connection.recv(num_bytes)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
        elif peer.stream is not None:
            peer.stream.feed(data)
        else:
            peer.hello += data
            if len(peer.hello) == NONCE_BYTES + PROOF_BYTES:
                self._admit(peer)

    def _admit(self, peer: _Peer) -> None:
        handshake = Handshake(self._secret, peer.nonce, bytes(peer.hello[:NONCE_BYTES]))
        if not handshake.is_proof("client", bytes(peer.hello[NONCE_BYTES:])):
            self._drop(peer, "it does not know the job's secret")
            return
        peer.stream, peer.sealer = Unsealed(handshake.sealer_to("server")), handshake.sealer_to("client")
        del self._visitors[peer]
        self._peers[peer] = None
        peer.out += handshake.proof_of("server")
        self._flush(peer)

    def _work(self, peer: _Peer) -> None:
        """Answer what has arrived, one request after the other, as far as the peer takes the answers."""
        assert peer.stream is not None
        try:
            while peer in self._peers and not peer.out and peer.wait is None:
                message = peer.stream.next()
                if message is None:
                    return
                self._answer(peer, message)
        except ForgedMessageError as error:
            self._drop(peer, f"it sent {error}")

    def _answer(self, peer: _Peer, message: Sequence[bytes]) -> None:
        try:
            operation, *arguments = message
            if operation in (b"get", b"wait"):
                wait_s = min(int(arguments[0]) / 1000.0, MAX_WAIT_S)
                keys = tuple(key.decode() for key in arguments[1:])
                ends_at = time.monotonic() + wait_s
                peer.wait = _Wait(keys=keys, with_values=operation == b"get", ends_at=ends_at)
                self._waiting[peer] = None
                self._answer_wait(peer)
                return
            answer = [b"ok", *_OPERATIONS[operation](self.table, *arguments)]
        except (MembershipError, ValueError, KeyError, TypeError, IndexError) as error:
            answer = [b"error", repr(error)[:500].encode()]
            if isinstance(error, MembershipError):
                answer = [b"error", str(error).encode()]
        self._send(peer, answer)

    def _answer_waits(self) -> None:
        for peer in list(self._waiting):
            self._answer_wait(peer)
            if peer in self._peers:
                self._work(peer)

    def _answer_wait(self, peer: _Peer) -> None:
        wait = peer.wait
        assert wait is not None
        values = self.table.find(wait.keys)
        found = [value for value in values if value is not None]
        if len(found) == len(values):
            answer = [b"ok", *(found if wait.with_values else ())]
        elif time.monotonic() >= wait.ends_at:
            missing = [key for key, value in zip(wait.keys, values, strict=True) if value is None]
            answer = [b"late", ", ".join(missing)[:500].encode()]
        else:
            return
        peer.wait = None
        del self._waiting[peer]
        self._send(peer, answer)

    def _send(self, peer: _Peer, parts: Sequence[bytes]) -> None:
        assert peer.sealer is not None
        try:
            peer.out += peer.sealer.seal(parts)
        except ValueError as error:  # only tagged once the length is known to be right: the numbers still agree
            peer.out += peer.sealer.seal([b"error", str(error).encode()])
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        try:
            while peer.out:
                del peer.out[: peer.connection.send(peer.out)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(peer)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.out else 0)
        if events != peer.events:
            peer.events = events
            self._selector.modify(peer.connection, events, peer)


def _pairs(arguments: Sequence[bytes]) -> list[tuple[str, bytes]]:
    return [(key.decode(), value) for key, value in zip(arguments[::2], arguments[1::2], strict=True)]


def _nothing(_: object) -> list[bytes]:
    return []


_OPERATIONS: dict[bytes, Callable[..., list[bytes]]] = {
    b"set": lambda table, *pairs: _nothing(table.multi_set(_pairs(pairs))),
    b"find": lambda table, *keys: [
        b"-" if value is None else b"+" + value for value in table.find([key.decode() for key in keys])
    ],
    b"add": lambda table, key, amount: [b"%d" % table.add(key.decode(), int(amount))],
    b"compare_set": lambda table, key, expected, desired: [table.compare_set(key.decode(), expected, desired)],
    b"append": lambda table, key, value: _nothing(table.append(key.decode(), value)),
    b"delete": lambda table, key: [b"%d" % table.delete_key(key.decode())],
    b"num_keys": lambda table: [b"%d" % table.num_keys()],
}
