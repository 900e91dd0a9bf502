"""Stores as torch's process groups take them: a job's own store, torchrun's, or one of this process alone.

The one module of ``membership`` that imports torch. ``store`` imports it when a group or torchrun's store is opened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from pollux.errors import MembershipError
from pollux.membership.client import ANSWER_S, RemoteStore, StoreTimeoutError

GIVE_UP_PERIOD_S = 0.2

_T = TypeVar("_T")
_kept: list[JobStore] = []


class JobStore(Store):
    """A job's store for torch's process groups, which call it from threads of their own, with Python's lock held.

    torch holds the C++ half of this object. Without the Python half the C++ half has no methods, so every object is
    kept until the process ends; there is one for each membership. A wait for keys ends when ``is_lost`` says that a
    member of the group that forms was lost: it will not set them.
    """

    def __init__(self, store: RemoteStore, is_lost: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=ANSWER_S))
        self._store, self._is_lost = store, is_lost
        _kept.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._store.multi_set(keys, values)

    def get(self, key: str) -> bytes:
        return self._wait(lambda wait_s: self._store.get(key, wait_s), self._wait_s())

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._wait(lambda wait_s: self._store.multi_get(keys, wait_s), self._wait_s())

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        wait_s = self._wait_s() if timeout is None else timeout.total_seconds()
        self._wait(lambda wait_s: self._store.wait(keys, wait_s), wait_s)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(keys)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._store.compare_set(key, expected, desired)

    def append(self, key: str, value: str | bytes) -> None:
        self._store.append(key, value)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> JobStore:
        return self  # any thread may call it, so one is enough

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def _wait(self, ask: Callable[[float], _T], wait_s: float) -> _T:
        """``ask`` for as long as ``wait_s``, in pieces."""
        end = time.monotonic() + wait_s
        while True:
            left_s = end - time.monotonic()
            try:
                return ask(max(min(left_s, GIVE_UP_PERIOD_S), 0.0))
            except StoreTimeoutError as error:
                if self._is_lost():
                    raise StoreTimeoutError(f"a member of the group was lost: {error}") from None
                if left_s <= GIVE_UP_PERIOD_S:
                    raise StoreTimeoutError(f"in {wait_s:g} s: {error}") from None

    def _wait_s(self) -> float:
        """As set by ``set_timeout``: a group sets its own when it forms."""
        timeout: timedelta = cast("Any", self).timeout
        return timeout.total_seconds()

    deleteKey = delete_key  # the names under which torch's C++ looks for these two
    getNumKeys = num_keys


def prefixed(prefix: str, store: object) -> Any:
    """The same store, every key with this prefix. ``store`` is one of torch's."""
    return PrefixStore(prefix, cast("Any", store))


def private_store() -> Any:
    return HashStore()


def connect_torchrun(host: str, port: int) -> Any:
    answer = timedelta(seconds=ANSWER_S)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=answer)


def serve_torchrun(host: str, port: int) -> Any:
    """Multi-tenant: servers of one process on one port are one server."""
    answer = timedelta(seconds=ANSWER_S)
    try:
        return TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True, timeout=answer)
    except (OSError, RuntimeError) as error:
        raise MembershipError(f"no store can be served at {host}:{port}; is the port taken? {error}") from error
