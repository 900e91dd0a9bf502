"""Messages of the HTTP interface for tests: with what a test cares about, and nothing in all other fields."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def filled(kind: type[T], /, **values: Any) -> T:
    """A message with these fields; those within it may be given as dictionaries and lists, as incomplete."""
    hints = typing.get_type_hints(kind)
    names = [one.name for one in dataclasses.fields(kind)]  # type: ignore[arg-type]
    assert set(values) <= set(names), set(values) - set(names)
    return kind(
        **{name: _value(hints[name], values[name]) if name in values else _blank(hints[name]) for name in names}
    )


def _blank(kind: Any) -> Any:
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return None if types.NoneType in inside else _blank(inside[0])
    if origin is typing.Literal:
        return inside[0]
    if origin is tuple:
        return ()
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {}
    return filled(kind) if dataclasses.is_dataclass(kind) else kind()


def _value(kind: Any, value: Any) -> Any:
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return value if value is None else _value(inside[0], value)
    if origin is tuple:
        each = inside[0] if len(inside) == 2 and inside[1] is Ellipsis else None
        return tuple(value if each is None else (_value(each, entry) for entry in value))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {name: _value(inside[1], entry) for name, entry in value.items()}
    return filled(kind, **value) if dataclasses.is_dataclass(kind) and isinstance(value, dict) else value
