"""Sends the state of a run to another job, once, over a socket of its own. No code and no pickle is sent.

:mod:`pollux.train.copies` calls it on rank 0 of both jobs, in threads: training goes on meanwhile. Both ends prove that
they know the secret of this one copy, and every message has a tag, as in a job's store
(:mod:`pollux.membership.channel`). What arrives is used when all of it has arrived, or not at all.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pollux.errors import InvalidValueError, PeerLostError
from pollux.membership.channel import (
    GREETING,
    NONCE_BYTES,
    PROOF_BYTES,
    TAG_BYTES,
    ForgedMessageError,
    Handshake,
    Sealer,
    keep_alive,
)
from pollux.train.encoding import decode, encode
from pollux.train.state import FlatState, TensorEntry

OFFER_S = 30.0  # that a state waits to be fetched
GREETING_S = 3.0  # for a stranger to prove that it knows the secret; the next one waits meanwhile
SILENCE_S = 10.0  # without a byte, after which the other side counts as lost
PIECE_BYTES = 4 << 20
_HEAD_BYTES = 4 + TAG_BYTES

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A state that does not change any more, on the host, and what a run must be like to use it."""

    flat: FlatState
    signature: str  # of model and optimizer
    identity: tuple[str | int | None, ...]  # of the data
    on_device: frozenset[str]  # names of tensors that were on a device

    @property
    def num_bytes(self) -> int:
        return sum(one.numel() * one.element_size() for one in self.flat.tensors.values())

    def on(self, device: torch.device) -> FlatState:
        """The state, with those tensors on ``device`` that were on one."""
        moved = {name: one.to(device) if name in self.on_device else one for name, one in self.flat.tensors.items()}
        return FlatState(moved, self.flat.blob)


def take_snapshot(flat: FlatState, signature: str, identity: tuple[str | int | None, ...]) -> Snapshot:
    """Copies the tensors: the run goes on training."""
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in flat.tensors.items()}
    on_device = frozenset(name for name, tensor in flat.tensors.items() if tensor.device.type != "cpu")
    return Snapshot(flat=FlatState(tensors, flat.blob), signature=signature, identity=identity, on_device=on_device)


class Offer:
    """Serves a snapshot to the one that knows the secret, in a thread that ends by itself."""

    def __init__(self, snapshot: Snapshot, secret: str, host: str) -> None:
        """Listens at ``host``, this machine's address as the other job's machine sees it. Raises OSError."""
        self._snapshot, self._secret = snapshot, secret
        self._socket = socket.create_server((host, 0), backlog=4)
        port = self._socket.getsockname()[1]
        self.address = f"{host}:{port}"
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="pollux-offer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give up what was not fetched yet."""
        self._is_closed = True
        self._socket.close()
        self._thread.join(1.0)

    def _serve(self) -> None:
        ends_at = time.monotonic() + OFFER_S
        try:
            while not self._is_closed and (left_s := ends_at - time.monotonic()) > 0:
                self._socket.settimeout(min(left_s, 0.5))
                try:
                    connection, _ = self._socket.accept()
                except TimeoutError:
                    continue
                with connection:
                    try:
                        self._send(connection)
                        return
                    except (OSError, ForgedMessageError) as error:
                        logger.info("a copy of this run's state was not fetched: %s", error)
        except OSError:
            pass  # closed
        finally:
            self._socket.close()

    def _send(self, connection: socket.socket) -> None:
        keep_alive(connection)
        connection.settimeout(GREETING_S)
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(GREETING + nonce)
        answer = _receive(connection, NONCE_BYTES + PROOF_BYTES)
        handshake = Handshake(self._secret, nonce, bytes(answer[:NONCE_BYTES]))
        if not handshake.is_proof("client", bytes(answer[NONCE_BYTES:])):
            raise ForgedMessageError("what came does not know the secret of this copy")
        connection.sendall(handshake.proof_of("server"))
        connection.settimeout(SILENCE_S)
        sealer = handshake.sealer_to("client")
        tensors = self._snapshot.flat.tensors
        on_device = self._snapshot.on_device
        entries = [(name, tuple(one.shape), one.dtype, name in on_device) for name, one in tensors.items()]
        head = {
            "blob": self._snapshot.flat.blob,
            "entries": entries,
            "signature": self._snapshot.signature,
            "identity": self._snapshot.identity,
        }
        connection.sendall(sealer.seal([encode(head, "the head of a copy")]))
        for piece in _pieces(tensors):
            connection.sendall(sealer.seal([piece]))


def fetch(address: str, secret: str, most_bytes: int) -> Snapshot:
    """The state that is offered at ``address``.

    Raises:
        PeerLostError: it did not arrive whole: the source is gone, or is no such source.
        InvalidValueError: it is larger than ``most_bytes``, or cannot be read.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=GREETING_S) as connection:
            keep_alive(connection)
            sealer = _greet(connection, secret)
            connection.settimeout(SILENCE_S)
            return _read_snapshot(connection, sealer, most_bytes)
    except (OSError, ForgedMessageError) as error:
        raise PeerLostError(f"the state did not arrive from {address}: {error}") from error


def _greet(connection: socket.socket, secret: str) -> Sealer:
    greeting = bytes(_receive(connection, len(GREETING) + NONCE_BYTES))
    if not greeting.startswith(GREETING):
        raise ForgedMessageError("what listens there offers no state")
    nonce = secrets.token_bytes(NONCE_BYTES)
    handshake = Handshake(secret, greeting[len(GREETING) :], nonce)
    connection.sendall(nonce + handshake.proof_of("client"))
    if not handshake.is_proof("server", bytes(_receive(connection, PROOF_BYTES))):
        raise ForgedMessageError("what listens there does not know the secret of this copy")
    return handshake.sealer_to("client")


def _read_snapshot(connection: socket.socket, sealer: Sealer, most_bytes: int) -> Snapshot:
    head = decode(_message(connection, sealer))
    try:
        assert isinstance(head, dict)
        entries: list[TensorEntry] = head["entries"]
        sizes = [_num_bytes(shape, dtype) for _, shape, dtype, _ in entries]
        if sum(sizes) > most_bytes:
            raise InvalidValueError(f"a state of {sum(sizes)} bytes is offered; at most {most_bytes} are allowed here")
        tensors: dict[str, Tensor] = {}
        for (name, shape, dtype, _), size in zip(entries, sizes, strict=True):
            flat = torch.empty(size, dtype=torch.uint8)
            view, at = flat.numpy().data, 0
            while at < size:
                piece = _message(connection, sealer)
                if not 0 < len(piece) <= size - at:
                    raise InvalidValueError(f"a piece of {len(piece)} bytes came where {size - at} are left")
                view[at : at + len(piece)] = piece
                at += len(piece)
            tensors[name] = flat.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
        return Snapshot(
            flat=FlatState(tensors, bytes(head["blob"])),
            signature=str(head["signature"]),
            identity=tuple(head["identity"]),
            on_device=frozenset(name for name, _, _, is_on_device in entries if is_on_device),
        )
    except (AssertionError, KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, InvalidValueError | ForgedMessageError):
            raise
        raise InvalidValueError(f"the offered state cannot be read: {error!r}") from error


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    count = 1
    for length in shape:
        if not isinstance(length, int) or length < 0:
            raise InvalidValueError(f"a tensor of shape {shape} is offered")
        count *= length
    return count * dtype.itemsize


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes]:
    for tensor in tensors.values():
        if tensor.numel():
            data = tensor.reshape(-1).view(torch.uint8).numpy().data
            for at in range(0, len(data), PIECE_BYTES):
                yield bytes(data[at : at + PIECE_BYTES])


def _message(connection: socket.socket, sealer: Sealer) -> bytes:
    head = bytes(_receive(connection, _HEAD_BYTES))
    size = int.from_bytes(head[:4])
    if size > 2 * PIECE_BYTES:
        raise ForgedMessageError(f"a message of {size} bytes")
    (part,) = sealer.open(head[4:], bytes(_receive(connection, size)))
    return part


def _receive(connection: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    view, at = memoryview(data), 0
    while at < num_bytes:
        received = connection.recv_into(view[at:])
        if not received:
            raise ConnectionResetError("the connection ended in the middle")
        at += received
    return data
