"""Values as bytes that can be read without running code: what replicas tell each other, and the small part of a state.

Used by ``team`` and ``state`` in place of pickle, which would run whatever a peer or a file says. The bytes are JSON.
Numbers, text, bytes, tensors, numpy arrays, and lists, tuples, sets and dictionaries of these come back as they were;
tensors come back on the CPU. A dataclass or named tuple must be registered by :func:`sendable`. Everything else is
refused with the place where it was found.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from pollux import errors
from pollux.errors import InvalidValueError, PolluxError

_Class = TypeVar("_Class", bound=type)
_RECORDS: dict[str, type] = {}


def sendable(kind: _Class) -> _Class:
    """Let values of this dataclass or named tuple be written and read, by the class's name."""
    known = _RECORDS.setdefault(kind.__name__, kind)
    assert known is kind, f"two classes are called {kind.__name__}"
    return kind


def encode(value: object, where: str = "value") -> bytes:
    """``where`` names the value in an error.

    Raises:
        InvalidValueError: something in it is of another kind than those above.
    """
    return json.dumps(_write(value, where), allow_nan=False, separators=(",", ":")).encode()


def decode(data: bytes | bytearray) -> object:
    """What :func:`encode` was given.

    Raises:
        InvalidValueError: the bytes were not made by :func:`encode`, or by another version.
    """
    try:
        return _read(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:  # too deep a nesting, too
        raise InvalidValueError(f"state or message that cannot be read: {error!r}") from error


# --- writing ---------------------------------------------------------------------------------------------------
# A plain JSON value stands for itself, a list for a list. All else is an object with one key, which tells its kind.


def _write(value: object, where: str) -> object:
    if value is None or isinstance(value, bool) or type(value) in (int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if type(value) is list:
        return _items(value, where)
    for kind, is_of, write in _KINDS:
        if is_of(value):
            return {kind: write(value, where)}
    raise InvalidValueError(
        f"{where} is a {type(value).__name__}, which cannot be saved or sent; numbers, text, tensors, arrays, and "
        "lists and dictionaries of these can"
    )


def _items(values: object, where: str) -> list[object]:
    return [_write(item, f"{where}[{index}]") for index, item in enumerate(values)]  # type: ignore[arg-type,var-annotated]


def _pairs(value: object, where: str) -> object:
    assert isinstance(value, Mapping)
    return [[_write(key, f"a key of {where}"), _write(item, f"{where}[{key!r}]")] for key, item in value.items()]


def _fields(value: object, where: str) -> object:
    kind = type(value)
    return [kind.__name__, [_write(getattr(value, name), f"{where}.{name}") for name in _field_names(kind)]]


def _field_names(kind: type) -> tuple[str, ...]:
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind) if field.init)
    return tuple(kind._fields)  # type: ignore[attr-defined]  # a named tuple


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _array(value: object, _: str) -> object:
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise InvalidValueError("an array of Python objects cannot be saved or sent; use one of numbers")
    return [array.dtype.str, list(array.shape), _text(np.ascontiguousarray(array).tobytes())]


def _tensor(value: object, _: str) -> object:
    assert isinstance(value, Tensor)
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return [str(value.dtype).removeprefix("torch."), list(value.shape), _text(flat.numpy().tobytes())]


def _error(value: object, _: str) -> object:
    return [type(value).__name__, str(value)]


_Write = Callable[[object, str], object]
_KINDS: tuple[tuple[str, Callable[[object], bool], _Write], ...] = (
    ("record", lambda value: _RECORDS.get(type(value).__name__) is type(value), _fields),
    ("tuple", lambda value: isinstance(value, tuple), _items),  # torch.Size, too
    ("dict", lambda value: isinstance(value, Mapping), _pairs),
    ("set", lambda value: isinstance(value, set | frozenset), lambda value, where: _items(sorted(value), where)),  # type: ignore[call-overload]
    ("bytes", lambda value: isinstance(value, bytes | bytearray), lambda value, _: _text(bytes(value))),  # type: ignore[call-overload]
    ("tensor", lambda value: isinstance(value, Tensor), _tensor),
    ("array", lambda value: isinstance(value, np.ndarray), _array),
    ("scalar", lambda value: isinstance(value, np.generic), _array),
    ("dtype", lambda value: isinstance(value, torch.dtype), lambda value, _: str(value).removeprefix("torch.")),
    ("device", lambda value: isinstance(value, torch.device), lambda value, _: str(value)),
    ("error", lambda value: isinstance(value, PolluxError) and hasattr(errors, type(value).__name__), _error),
)


# --- reading ---------------------------------------------------------------------------------------------------


def _read(value: object) -> object:
    if isinstance(value, list):
        return [_read(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    return _READERS[kind](inner)


def _read_items(inner: list[object]) -> list[object]:
    return [_read(item) for item in inner]


def _read_record(inner: tuple[str, list[object]]) -> object:
    name, values = inner
    kind = _RECORDS[name]
    names = _field_names(kind)
    if len(names) != len(values):
        raise InvalidValueError(f"a {name} of {len(values)} fields; it has {len(names)}")
    return kind(**dict(zip(names, _read_items(values), strict=True)))


def _read_tensor(inner: tuple[str, list[int], str]) -> Tensor:
    name, shape, text = inner
    dtype = _read_dtype(name)
    data = bytearray(base64.b64decode(text, validate=True))
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


def _read_array(inner: tuple[str, list[int], str]) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    name, shape, text = inner
    dtype = np.dtype(name)
    if dtype.hasobject:
        raise InvalidValueError(f"an array of {name}, which are Python objects")
    return np.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype).reshape(shape)


def _read_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise InvalidValueError(f"torch.{name} is no type of tensors")
    return dtype


def _read_error(inner: tuple[str, str]) -> PolluxError:
    name, message = inner
    kind = getattr(errors, name)
    if not (isinstance(kind, type) and issubclass(kind, PolluxError)):
        raise InvalidValueError(f"{name} is no error of Pollux")
    error = kind.__new__(kind)
    Exception.__init__(error, message)  # an error's own arguments have become its message
    return error


_READERS: Mapping[str, Callable[..., object]] = {
    "float": float,
    "record": _read_record,
    "tuple": lambda inner: tuple(_read_items(inner)),
    "dict": lambda inner: {_read(key): _read(item) for key, item in inner},
    "set": lambda inner: set(_read_items(inner)),
    "bytes": lambda inner: base64.b64decode(inner, validate=True),
    "tensor": _read_tensor,
    "array": _read_array,
    "scalar": lambda inner: _read_array(inner)[()],
    "dtype": _read_dtype,
    "device": torch.device,
    "error": _read_error,
}
