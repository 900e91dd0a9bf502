"""The keys and values of one job's store, with the operations that torch's stores have.

The owner of the job calls it directly, its replicas through ``server``. Every operation is atomic and answers at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from pollux.errors import MembershipError

MAX_BYTES = 64 << 20  # of keys and values: groups need a few hundred bytes for each rank and generation


class KeyTable:
    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._values: dict[str, bytes] = {}
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._lock = threading.Lock()
        self.on_change: Callable[[], None] = lambda: None  # called after a change, by the thread that made it

    def set(self, key: str, value: str | bytes) -> None:
        with self._lock:
            self._put(key, _bytes(value))
        self.on_change()

    def get(self, key: str) -> bytes:
        """Raises MembershipError where the key is missing; it does not wait."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        with self._lock:
            missing = [key for key in keys if key not in self._values]
            if missing:
                raise MembershipError(f"the store has no {', '.join(missing)}")
            return [self._values[key] for key in keys]

    def find(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values at one moment; None for each missing key."""
        with self._lock:
            return [self._values.get(key) for key in keys]

    def multi_set(self, pairs: Sequence[tuple[str, bytes]]) -> None:
        with self._lock:
            for key, value in pairs:
                self._put(key, value)
        self.on_change()

    def check(self, keys: Sequence[str]) -> bool:
        with self._lock:
            return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            found = self._values.get(key, b"0")
            try:
                total = int(found) + amount
            except ValueError as error:
                raise MembershipError(f"{key} holds {found[:40]!r}, to which no number can be added") from error
            if amount or key not in self._values:
                self._put(key, b"%d" % total)
        self.on_change()
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """The value afterwards. As in torch's stores a missing key counts as empty, and ``expected`` comes back."""
        with self._lock:
            found = self._values.get(key)
            if found is not None and found != _bytes(expected):
                return found
            if found is None and expected:
                return _bytes(expected)
            self._put(key, _bytes(desired))
        self.on_change()
        return _bytes(desired)

    def append(self, key: str, value: bytes) -> None:
        with self._lock:
            self._put(key, self._values.get(key, b"") + value)
        self.on_change()

    def delete_key(self, key: str) -> bool:
        with self._lock:
            found = self._values.pop(key, None)
            self._num_bytes -= 0 if found is None else len(key) + len(found)
        return found is not None

    def num_keys(self) -> int:
        with self._lock:
            return len(self._values)

    def _put(self, key: str, value: bytes) -> None:
        old = self._values.get(key)
        num_bytes = self._num_bytes + len(value) - (-len(key) if old is None else len(old))
        if num_bytes > self._max_bytes:
            raise MembershipError(f"the job's store is full: it holds at most {self._max_bytes} bytes")
        self._values[key], self._num_bytes = value, num_bytes


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
