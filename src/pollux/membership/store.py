"""A job's key-value store as its replicas see it: how it is opened, asked, and handed to a process group.

Used by ``controller`` and ``replica``. Nothing here loads torch until a group or torchrun's store is opened.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from pollux.errors import MembershipError, PeerLostError
from pollux.membership import keys
from pollux.membership.client import RemoteStore
from pollux.membership.roster import Roster
from pollux.membership.table import KeyTable

LONGEST_PAUSE_S = 0.02  # between two looks at a store: a resize should not wait longer for one


class KeyStore(Protocol):
    """What our own stores and torch's have in common. ``get`` of a missing key may block, so ``check`` comes first."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def multi_get(self, keys: list[str]) -> Sequence[bytes]: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


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


def for_groups(store: RemoteStore, is_lost: Callable[[], bool] = lambda: False) -> KeyStore:
    """The job's store in the form that torch's process groups take. ``is_lost`` ends its waits for keys."""
    from pollux.membership.torch_store import JobStore

    return JobStore(store, is_lost)


def prefixed(prefix: str, store: KeyStore) -> KeyStore:
    """The same store, every key with this prefix. ``store`` is one of torch's, or of :func:`for_groups`."""
    from pollux.membership import torch_store

    inner: KeyStore = torch_store.prefixed(prefix, store)
    return inner


def private_store() -> KeyStore:
    """A store of this process alone, for a job of one replica."""
    from pollux.membership import torch_store

    store: KeyStore = torch_store.private_store()
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


def connect(host: str, port: int, secret: str, deadline: Deadline) -> RemoteStore:
    """The job's store, as soon as it is served. Raises MembershipError."""
    wait_for_server(host, port, deadline)
    return RemoteStore(host, port, secret)


def wait_for_server(host: str, port: int, deadline: Deadline) -> None:
    while not _is_served(host, port):
        if not deadline.pause():
            raise MembershipError(
                f"no process serves the store at {host}:{port} after {deadline.timeout_s:g} s: "
                "see whether its owner is alive and the port is reachable from here"
            )


def _is_served(host: str, port: int, timeout_s: float = 1.0) -> bool:
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def connect_torchrun(host: str, port: int, deadline: Deadline) -> KeyStore:
    """The store of torchrun, or of rank 0: no store of ours. A TCPStore without a server would print C++ frames."""
    wait_for_server(host, port, deadline)
    from pollux.membership import torch_store

    with explained(f"{host}:{port}"):
        store: KeyStore = torch_store.connect_torchrun(host, port)
    return store


def serve_torchrun(host: str, port: int) -> KeyStore:
    """Serve the others of a torchrun-like job, as torch's ``env://`` does, and with it where the script uses both."""
    from pollux.membership import torch_store

    store: KeyStore = torch_store.serve_torchrun(host, port)
    return store


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


def read_newest(store: RemoteStore) -> int:
    """The newest generation, 0 before the first."""
    return int(store.find([keys.GENERATION])[0] or 0)


def read_roster(store: RemoteStore | KeyTable, generation: int) -> Roster:
    return Roster.from_json(store.get(keys.roster(generation)))
