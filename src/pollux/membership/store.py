"""A job's key-value store: served by the owner of the job, read and written by its replicas.

It is torch's TCPStore, because torch's process groups meet in it as well. This is the one module of ``membership`` that
loads torch, and it does so when a store is opened. Used by ``controller`` and ``replica``.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

from pollux.errors import MembershipError, PeerLostError
from pollux.membership import keys
from pollux.membership.roster import Roster

ANSWER_S = 10.0  # the longest a store may take for one answer
LONGEST_PAUSE_S = 0.02  # between two looks at a store: a resize should not wait longer for one


class KeyStore(Protocol):
    """What is used of torch's stores. ``get`` of a missing key blocks, so ``check`` comes first."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def multi_get(self, keys: list[str]) -> Sequence[bytes]: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


class ServedStore(KeyStore, Protocol):
    @property
    def port(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One membership as one of its replicas sees it; ``store`` serves this generation and attempt alone."""

    generation: int
    attempt: int
    rank: int
    world_size: int
    local_rank: int
    num_nodes: int
    store: KeyStore

    @classmethod
    def on(cls, store: KeyStore, generation: int, attempt: int, ranks: tuple[int, int, int, int]) -> Group:
        """``ranks``: rank, world size, local rank, number of nodes."""
        rank, world_size, local_rank, num_nodes = ranks
        return cls(
            generation=generation,
            attempt=attempt,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            num_nodes=num_nodes,
            store=prefixed(keys.group(generation, attempt), store),
        )


def load_torch() -> None:
    """Import what a store needs, which takes seconds the first time."""
    import torch.distributed  # noqa: F401


def prefixed(prefix: str, store: KeyStore) -> KeyStore:
    """The same store, every key with this prefix."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    inner: KeyStore = PrefixStore(prefix, cast("Any", store))  # one of torch's own
    return inner


def private_store() -> KeyStore:
    """A store of this process alone, for a job of one replica."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    store: KeyStore = HashStore()
    return store


class Deadline:
    """A bound on one wait, with pauses that grow from 1 ms: most waits are short, the long ones must not spin."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s
        self._pause_s = 0.001

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def pause(self) -> bool:
        """Sleep a little; False when the time is over."""
        if self.left_s <= 0:
            return False
        time.sleep(min(self._pause_s, max(self.left_s, 0.0)))
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return True


def is_served(host: str, port: int, timeout_s: float = 1.0) -> bool:
    """A plain connection first: a TCPStore without a server prints pages of C++ frames to stderr."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def connect(host: str, port: int, deadline: Deadline) -> KeyStore:
    while not is_served(host, port):
        if not deadline.pause():
            raise MembershipError(
                f"no process serves the store at {host}:{port} after {deadline.timeout_s:g} s: "
                "see whether its owner is alive and the port is reachable from here"
            )
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    answer = timedelta(seconds=ANSWER_S)
    with explained(f"{host}:{port}"):
        store: KeyStore = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=answer)
    return store


def serve(host: str, port: int, *, multi_tenant: bool = False) -> ServedStore:
    """Port 0: any free one. Multi-tenant servers of one process on one port are one server."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    answer = timedelta(seconds=ANSWER_S)
    listening: int | None = None
    try:
        if not multi_tenant:
            # A socket of our own: torch's would listen on every interface, and see IPv4 peers under mapped IPv6
            # addresses, which /etc/hosts does not know: each connection would wait for a name server, and all with it.
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            with socket.create_server((host, port), family=family, backlog=1024) as listener:
                port = listener.getsockname()[1]
                listening = listener.detach()
        store: ServedStore = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=multi_tenant,
            timeout=answer,
            master_listen_fd=listening,
        )
        return store
    except (OSError, RuntimeError) as error:
        raise MembershipError(f"no store can be served at {host}:{port}; is the port taken? {error}") from error


@contextmanager
def explained(address: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, MembershipError | PeerLostError):
            raise
        raise MembershipError(
            f"the store at {address} does not answer; its owner is gone or cut off: {error}"
        ) from error


def read_newest(store: KeyStore) -> int:
    """The newest generation, 0 before the first. A ``get`` of a missing key would block."""
    return int(store.get(keys.GENERATION)) if store.check([keys.GENERATION]) else 0


def read_roster(store: KeyStore, generation: int) -> Roster:
    return Roster.from_json(store.get(keys.roster(generation)))
