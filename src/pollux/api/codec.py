"""JSON to typed values and back: one strict decoder and one encoder for every message and every stored record.

The server decodes requests with it, the client answers, the store its rows. Decoding is strict: a missing or extra
field, a wrong type, NaN, infinity or a number out of range raises :class:`~pollux.errors.InvalidValueError`, which
names the field, the value seen and what is allowed. Nothing else is ever raised. Bounds stand in a field's metadata
(``ge``, ``le``, ``min_length``, ``max_length``), under the names that pydantic reads for OpenAPI.

Why not pydantic: ``train`` needs these messages without any library, lists must become tuples in strict mode, a field
that is there twice must be refused, and messages must say what is allowed in the words of the rest of Pollux.
"""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, Literal, TypeVar

from pollux.errors import InvalidValueError, ProfileError

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
MAX_INTEGER = (1 << 53) - 1  # the largest that every reader of JSON keeps exactly

_T = TypeVar("_T")
_Decode = Callable[[object, str], Any]
_Metadata = Mapping[str, Any]  # of a field
_Limits = Mapping[str, float]  # by the names of a field's metadata
_Hint = object  # an annotation: a class, a union, a generic alias


def about(description: str = "", *, schema: Json = None, **limits: float) -> Mapping[str, object]:
    """Metadata of a field: what it means, for OpenAPI, and its bounds (``ge``, ``le``, ``max_length``, ...).

    ``schema``: parts of its JSON schema, where its JSON differs from what its type says.
    """
    more = {"description": description or None, "json_schema_extra": schema}
    return {**limits, **{name: value for name, value in more.items() if value is not None}}


# Text -----------------------------------------------------------------------------------------


def dumps(value: object, where: str) -> str:
    """``value`` as compact JSON in ASCII.

    Raises:
        InvalidValueError: it is no JSON value: NaN, infinity, an object of some class.
    """
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValueError(f"{where} cannot be written as JSON: {error}") from error


def loads(text: str | bytes, where: str, max_bytes: int | None = None) -> Json:
    """The JSON value in ``text`` (UTF-8), of at most ``max_bytes``.

    Raises:
        InvalidValueError: it is too long, no JSON, or names a field twice.
    """
    if not isinstance(text, str | bytes):
        raise InvalidValueError(f"{where} = {shown(text)}; text is needed")
    try:
        data = text if isinstance(text, bytes) else text.encode("utf-8")
        if max_bytes is None or len(data) <= max_bytes:
            value: Json = json.loads(data.decode("utf-8"), object_pairs_hook=_object)
            return value
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, a number of thousands of digits, too deep
        raise InvalidValueError(f"{where} is no JSON that can be read: {error}; seen: {shown(text)}") from error
    raise InvalidValueError(f"{where} of {len(data)} bytes; at most {max_bytes} are allowed")


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise InvalidValueError(f"the field {shown(name)} is there twice; each is allowed once")
            seen.add(name)
    return result


def shown(value: object) -> str:
    """``value`` for an error message: short, whatever it is."""
    try:
        return reprlib.repr(value)
    except (ValueError, RecursionError):  # an integer of too many digits
        return f"a {type(value).__name__} too large to show"


# Single values --------------------------------------------------------------------------------


def read_integer(value: object, where: str, minimum: int = -MAX_INTEGER, maximum: int = MAX_INTEGER) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise InvalidValueError(f"{where} = {shown(value)}; an integer from {minimum} to {maximum} is needed")
    return value


def read_number(value: object, where: str, minimum: float = -math.inf, maximum: float = math.inf) -> float:
    if not isinstance(value, bool) and isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and minimum <= number <= maximum:
            return number
    bounds = "" if (minimum, maximum) == (-math.inf, math.inf) else f" from {minimum:g} to {maximum:g}"
    raise InvalidValueError(f"{where} = {shown(value)}; a finite number{bounds} is needed")


def read_text(value: object, where: str, min_length: int = 0, max_length: int | None = None) -> str:
    if isinstance(value, str) and min_length <= len(value) and (max_length is None or len(value) <= max_length):
        return value
    length = "" if max_length is None else f" and at most {max_length}"
    raise InvalidValueError(f"{where} = {shown(value)}; a text of at least {min_length}{length} characters is needed")


def read_list(value: object, where: str, max_length: int | None = None, length: int | None = None) -> Sequence[object]:
    """A list of JSON, or a tuple that was made here."""
    if not isinstance(value, list | tuple):
        raise InvalidValueError(f"{where} = {shown(value)}; a list is needed")
    if length is not None and len(value) != length:
        raise InvalidValueError(f"{where} = {shown(value)} has {len(value)} entries; exactly {length} are needed")
    if max_length is not None and len(value) > max_length:
        raise InvalidValueError(f"{where} has {len(value)} entries; at most {max_length} are allowed")
    return value


def read_mapping(value: object, where: str, max_length: int | None = None) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise InvalidValueError(f"{where} = {shown(value)}; an object is needed")
    for key in value:
        read_text(key, f"a name in {where}")
    if max_length is not None and len(value) > max_length:
        raise InvalidValueError(f"{where} has {len(value)} entries; at most {max_length} are allowed")
    return value


def read_unicode(value: str, where: str) -> str:
    """JSON can spell half a character; no file, database or browser takes it."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidValueError(
            f"{where} = {shown(value)}; valid Unicode is needed (half of a pair was seen)"
        ) from None
    return value


@contextmanager
def located(where: str) -> Iterator[None]:
    """Say where the value stands that its own class refuses."""
    try:
        yield
    except (InvalidValueError, ProfileError) as error:
        raise InvalidValueError(f"{where}: {error}") from error


# The codec ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Special:
    """How values of one type are written and read, where the general rules do not fit."""

    encode: Callable[[Any], Json]
    decode: _Decode


class Codec:
    """Dataclasses as objects, named tuples and sequences as lists, enums by their value.

    ``requires_all``: a field with a default may not be missing either. ``nonfinite_in``: dataclasses whose numbers may
    be NaN (null in JSON) or infinite (a text). Anywhere else a number that is not finite is written as null, and
    refused when read.
    """

    def __init__(
        self,
        *,
        special: Mapping[object, Special] | None = None,
        nonfinite_in: Collection[type] = (),
        requires_all: bool = False,
    ) -> None:
        self._requires_all = requires_all
        self._special = dict(special or {})
        self._nonfinite_in = frozenset(nonfinite_in)
        self._decoders: dict[object, _Decode] = {}
        self._records: dict[type, dict[str, _Decode]] = {}
        self._names: dict[type, tuple[frozenset[str], frozenset[str], int | None]] = {}
        self._fields: dict[type, tuple[str, ...]] = {}

    # Writing

    def encode(self, value: object, *, is_nonfinite: bool = False) -> Json:
        """As JSON. A class with a ``VERSION`` writes it first."""
        kind = type(value)
        if kind is str or kind is int or kind is bool or value is None:
            return typing.cast(Json, value)
        if kind is float:
            return _written(typing.cast(float, value), is_nonfinite)
        if kind in self._special:
            return self._special[kind].encode(value)
        if kind is tuple or kind is list:
            return [self.encode(entry, is_nonfinite=is_nonfinite) for entry in typing.cast(tuple[object, ...], value)]
        if dataclasses.is_dataclass(kind):
            return self._encode_record(kind, value)
        return self._encode_other(value, is_nonfinite)

    def _encode_record(self, kind: type, value: object) -> Json:
        names = self._fields.get(kind)
        if names is None:
            names = self._fields[kind] = tuple(one.name for one in dataclasses.fields(kind))
        lenient = kind in self._nonfinite_in
        made: dict[str, Json] = {}
        if (version := getattr(kind, "VERSION", None)) is not None:
            made["version"] = version
        for name in names:
            made[name] = self.encode(getattr(value, name), is_nonfinite=lenient)
        return made

    def _encode_other(self, value: object, is_nonfinite: bool) -> Json:
        if isinstance(value, Mapping):
            return {str(key): self.encode(entry, is_nonfinite=is_nonfinite) for key, entry in value.items()}
        if isinstance(value, Enum):
            return typing.cast(Json, value.value)
        if isinstance(value, frozenset | set):
            return sorted(typing.cast(set[str], value))  # type: ignore[return-value]
        if isinstance(value, str | int):  # a StrEnum, say
            return value
        if isinstance(value, float):
            return _written(float(value), is_nonfinite)
        if isinstance(value, tuple):
            return [self.encode(entry, is_nonfinite=is_nonfinite) for entry in value]
        if hasattr(value, "tolist"):  # of numpy
            return self.encode(value.tolist(), is_nonfinite=is_nonfinite)
        raise InvalidValueError(f"{shown(value)} cannot be written as JSON")

    # Reading

    def decode(self, kind: type[_T], value: object, where: str) -> _T:
        """The value of this type that JSON says.

        Raises:
            InvalidValueError: names the field as ``where.field``.
        """
        found: _T = self._decoder(kind, {}, False)(value, where)
        return found

    def read_record(self, kind: type, value: object, where: str) -> dict[str, object]:
        """Exactly the fields of a dataclass, not looked into yet."""
        values = read_mapping(value, where)
        names, required, version = self._names_of(kind)
        if version is not None:
            seen = values.get("version")
            if isinstance(seen, bool) or not isinstance(seen, int) or seen != version:
                raise InvalidValueError(
                    f"{where}.version = {shown(seen)}; this Pollux reads version {version}: use the same on both sides"
                )
            values = {name: entry for name, entry in values.items() if name != "version"}
        if not required <= values.keys() or not values.keys() <= names:
            missing = sorted(required - values.keys())
            needed = f"exactly {', '.join(sorted(names))} are needed"
            if missing:
                raise InvalidValueError(f"{where} has no {', '.join(missing)} but {shown(list(values))}; {needed}")
            extra = sorted(values.keys() - names)[0]
            raise InvalidValueError(f"{where} has {shown(extra)}, which is no field of it; {needed}")
        return dict(values)

    def _names_of(self, kind: type) -> tuple[frozenset[str], frozenset[str], int | None]:
        """All fields of a dataclass, those that must be there, and its version."""
        known = self._names.get(kind)
        if known is None:
            entries = [one for one in dataclasses.fields(kind) if one.init]
            required = (one.name for one in entries if self._requires_all or not _has_default(one))
            names = frozenset(one.name for one in entries)
            known = self._names[kind] = names, frozenset(required), getattr(kind, "VERSION", None)
        return known

    def read_fields(self, kind: type, values: Mapping[str, object], where: str) -> dict[str, Any]:
        """The fields of a dataclass as their types say, by name."""
        decoders = self._records.get(kind)
        if decoders is None:
            hints, lenient = typing.get_type_hints(kind), kind in self._nonfinite_in
            decoders = self._records[kind] = {
                one.name: self._decoder(hints[one.name], one.metadata, lenient) for one in dataclasses.fields(kind)
            }
        return {name: decoders[name](value, f"{where}.{name}") for name, value in values.items()}

    def _decoder(self, kind: _Hint, metadata: _Metadata, lenient: bool) -> _Decode:
        limits = tuple((name, metadata[name]) for name in ("ge", "le", "min_length", "max_length") if name in metadata)
        key = (kind, limits, lenient)
        known = self._decoders.get(key)
        if known is None:
            known = self._decoders[key] = self._make_decoder(kind, dict(limits), lenient)
        return known

    def _make_decoder(self, kind: _Hint, limits: _Limits, lenient: bool) -> _Decode:
        if kind in self._special:
            return self._special[kind].decode
        plain = _plain_decoder(kind, limits, lenient)
        if plain is not None:
            return plain
        origin, inside = typing.get_origin(kind), typing.get_args(kind)
        if origin in (typing.Union, types.UnionType):
            return self._union(inside, limits, lenient)
        if origin is Literal:
            return _literal(inside)
        if origin in (tuple, list, frozenset):
            return self._sequence(origin, inside, limits, lenient)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return self._mapping(inside[1], limits, lenient)
        if isinstance(kind, type) and issubclass(kind, Enum):
            return _literal(tuple(one.value for one in kind), kind)
        if isinstance(kind, type) and issubclass(kind, tuple):
            return self._named_tuple(kind, lenient)
        if dataclasses.is_dataclass(kind):
            return self._dataclass(typing.cast(type, kind))
        raise TypeError(f"no JSON is read as {kind}")

    def _dataclass(self, kind: type) -> _Decode:
        def decode(value: object, where: str) -> object:
            if type(value) is kind:
                return value
            values = self.read_fields(kind, self.read_record(kind, value, where), where)
            with located(where):
                return kind(**values)

        return decode

    def _named_tuple(self, kind: Any, lenient: bool) -> _Decode:
        hints = typing.get_type_hints(kind)
        parts = [(name, self._decoder(hints[name], {}, lenient)) for name in kind._fields]
        needed = len(parts) - len(kind._field_defaults)

        def decode(value: object, where: str) -> object:
            has_defaults = isinstance(value, list | tuple) and needed <= len(value) < len(parts)
            entries = read_list(value, where, length=len(value) if has_defaults else len(parts))  # type: ignore[arg-type]  # a list, by the line above
            return kind(*(part(entry, f"{where}.{name}") for (name, part), entry in zip(parts, entries, strict=False)))

        return decode

    def _sequence(self, origin: type, inside: tuple[_Hint, ...], limits: _Limits, lenient: bool) -> _Decode:
        max_length = _max_length(limits)
        if origin is tuple and not (len(inside) == 2 and inside[1] is Ellipsis):
            parts = [self._decoder(one, {}, lenient) for one in inside]

            def decode_each(value: object, where: str) -> object:
                entries = read_list(value, where, length=len(parts))
                return tuple(
                    part(entry, f"{where}[{index}]")
                    for index, (part, entry) in enumerate(zip(parts, entries, strict=True))
                )

            return decode_each
        entry_decoder = self._decoder(inside[0], {}, lenient)

        def decode(value: object, where: str) -> object:
            entries = read_list(value, where, max_length=max_length)
            found = [entry_decoder(entry, f"{where}[{index}]") for index, entry in enumerate(entries)]
            if origin is frozenset and len(set(found)) < len(found):
                raise InvalidValueError(f"{where} = {shown(value)}; each may be named once")
            return origin(found)

        return decode

    def _mapping(self, inside: _Hint, limits: _Limits, lenient: bool) -> _Decode:
        entry_decoder, max_length = self._decoder(inside, {}, lenient), _max_length(limits)

        def decode(value: object, where: str) -> object:
            entries = read_mapping(value, where, max_length)
            return {name: entry_decoder(entry, f"{where}.{name}") for name, entry in entries.items()}

        return decode

    def _union(self, inside: tuple[_Hint, ...], limits: _Limits, lenient: bool) -> _Decode:
        has_none = types.NoneType in inside
        parts = [self._decoder(one, limits, lenient) for one in inside if one is not types.NoneType]

        def decode(value: object, where: str) -> object:
            if value is None and has_none:
                return None
            for part in parts[:-1]:
                try:
                    return part(value, where)
                except InvalidValueError:
                    continue
            return parts[-1](value, where)

        return decode


def _written(value: float, is_nonfinite: bool) -> Json:
    if math.isfinite(value):
        return value
    if not is_nonfinite or math.isnan(value):
        return None
    return "inf" if value > 0 else "-inf"


def _has_default(entry: dataclasses.Field[object]) -> bool:
    return entry.default is not dataclasses.MISSING or entry.default_factory is not dataclasses.MISSING


def _max_length(limits: _Limits) -> int | None:
    return int(limits["max_length"]) if "max_length" in limits else None


def _plain_decoder(kind: _Hint, limits: _Limits, lenient: bool) -> _Decode | None:
    if kind is int:
        least, most = int(limits.get("ge", -MAX_INTEGER)), int(limits.get("le", MAX_INTEGER))
        return lambda value, where: read_integer(value, where, least, most)
    if kind is float:
        low, high = float(limits.get("ge", -math.inf)), float(limits.get("le", math.inf))
        if lenient:
            return read_estimate
        return lambda value, where: read_number(value, where, low, high)
    if kind is str:
        shortest, longest = int(limits.get("min_length", 0)), _max_length(limits)
        if longest is not None:
            return lambda value, where: read_unicode(read_text(value, where, shortest, longest), where)
        return lambda value, where: read_text(value, where, shortest, longest)
    if kind is bool:
        return _read_flag
    if kind in (object, Json):
        return lambda value, where: value
    return None


def _read_flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidValueError(f"{where} = {shown(value)}; true or false is needed")
    return value


def read_estimate(value: object, where: str) -> float:
    """A number that a policy computed: null is NaN, and infinity is a text."""
    if value is None:
        return math.nan
    if isinstance(value, str):
        if value in ("inf", "-inf"):
            return float(value)
        raise InvalidValueError(f"{where} = {shown(value)}; a finite number, null, 'inf' or '-inf' is needed")
    return read_number(value, where)


def _literal(allowed: tuple[object, ...], make: type[Enum] | None = None) -> _Decode:
    def decode(value: object, where: str) -> object:
        if make is not None and isinstance(value, make):
            return value
        if any(value == one and type(value) is type(one) for one in allowed):
            return value if make is None else make(value)
        known = ", ".join(str(one) for one in allowed)
        raise InvalidValueError(f"{where} = {shown(value)}; one of {known} is needed")

    return decode


API = Codec()
"""For messages over HTTP."""


def encode(value: object) -> Json:
    return API.encode(value)


def encoded(message: object) -> dict[str, Json]:
    """A message as a JSON object."""
    found = API.encode(message)
    assert isinstance(found, dict), "a dataclass is an object"
    return found


def decode(kind: type[_T], value: object, where: str) -> _T:
    return API.decode(kind, value, where)
