"""Values that are looked up when they are used, because a resize or a restart may change them.

``run.is_main`` and comparisons with ``run.rank`` give a :class:`LiveFlag`: a script may keep it in a variable before
the loop, as many do (``master_process = run.rank == 0``), and it stays right.
"""

from __future__ import annotations

from collections.abc import Callable


class LiveFlag:
    """True or false at the moment it is asked."""

    __slots__ = ("_ask",)

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask = ask

    def __bool__(self) -> bool:
        return self._ask()

    def __eq__(self, other: object) -> bool:
        return bool(self) == other if isinstance(other, bool | int) else self is other

    def __hash__(self) -> int:
        return hash(bool(self))

    def __and__(self, other: object) -> LiveFlag:
        return LiveFlag(lambda: bool(self) and bool(other))

    def __or__(self, other: object) -> LiveFlag:
        return LiveFlag(lambda: bool(self) or bool(other))

    def __repr__(self) -> str:
        return repr(bool(self))

    def __reduce__(self) -> tuple[type[bool], tuple[bool]]:
        return bool, (bool(self),)


class Rank(int):
    """A rank: an int of this moment whose comparisons with other numbers stay right."""

    _ask: Callable[[], int]

    def __new__(cls, ask: Callable[[], int]) -> Rank:
        rank = super().__new__(cls, ask())
        rank._ask = ask
        return rank

    def __eq__(self, other: object) -> LiveFlag:  # type: ignore[override]
        return LiveFlag(lambda: self._ask() == other)

    def __ne__(self, other: object) -> LiveFlag:  # type: ignore[override]
        return LiveFlag(lambda: self._ask() != other)

    def __lt__(self, other: int) -> LiveFlag:  # type: ignore[override, misc]
        return LiveFlag(lambda: self._ask() < other)

    def __le__(self, other: int) -> LiveFlag:  # type: ignore[override, misc]
        return LiveFlag(lambda: self._ask() <= other)

    def __gt__(self, other: int) -> LiveFlag:  # type: ignore[override, misc]
        return LiveFlag(lambda: self._ask() > other)

    def __ge__(self, other: int) -> LiveFlag:  # type: ignore[override, misc]
        return LiveFlag(lambda: self._ask() >= other)

    def __bool__(self) -> bool:
        return self._ask() != 0

    __hash__ = int.__hash__

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)
