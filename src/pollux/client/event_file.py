"""Writes TensorBoard's event files: records of a few protocol-buffer messages, each with its checksums.

:mod:`pollux.client.tensorboard` calls it. The format has not changed since TensorFlow 1, and this writer is shorter
than a dependency on protobuf is costly. Values that are not finite (NaN, infinities) are written: TensorBoard shows
them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # how protocol buffers write a value
_DT_STRING = 7  # TensorFlow's type of texts
_POLYNOMIAL = 0x82F63B78  # of CRC-32C, its bits reversed
_UINT64 = (1 << 64) - 1


def file_begin(wall_time: float) -> bytes:
    """The record that every file begins with."""
    return record(_number(1, wall_time) + _text(3, "brain.Event:2"))


def scalar(tag: str, value: float, step: int, wall_time: float) -> bytes:
    """One point of a curve."""
    try:
        packed = struct.pack("<f", value)
    except OverflowError:  # larger than a float of 32 bits can be
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _event(_text(1, tag) + _key(2, _FIXED32) + packed, step, wall_time)


def text(tag: str, words: str, step: int, wall_time: float) -> bytes:
    """A text, which may be in Markdown."""
    shape = _message(2, _message(2, _integer(1, 1)))  # a list of one
    tensor = _integer(1, _DT_STRING) + shape + _text(8, words)
    plugin = _message(1, _text(1, "text"))
    return _event(_text(1, f"{tag}/text_summary") + _message(8, tensor) + _message(9, plugin), step, wall_time)


def record(data: bytes) -> bytes:
    """Framed as TFRecord: its length, the data, and masked checksums of both."""
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _event(value: bytes, step: int, wall_time: float) -> bytes:
    return record(_number(1, wall_time) + _integer(2, step) + _message(5, _message(1, value)))


# Checksums ------------------------------------------------------------------------------------


def _make_table() -> tuple[int, ...]:
    def entry(value: int) -> int:
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        return value

    return tuple(entry(value) for value in range(256))


_TABLE = _make_table()


def crc32c(data: bytes) -> int:
    checksum = 0xFFFFFFFF
    for byte in data:
        checksum = _TABLE[(checksum ^ byte) & 0xFF] ^ (checksum >> 8)
    return checksum ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    checksum = crc32c(data)
    rotated = (checksum >> 15) | (checksum << 17)
    return struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)


# Protocol buffers -----------------------------------------------------------------------------


def _varint(value: int) -> bytes:
    value &= _UINT64
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _key(field: int, kind: int) -> bytes:
    return _varint(field << 3 | kind)


def _integer(field: int, value: int) -> bytes:
    return _key(field, _VARINT) + _varint(value)


def _number(field: int, value: float) -> bytes:
    return _key(field, _FIXED64) + struct.pack("<d", value)


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode("utf-8", "replace"))


def _message(field: int, value: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(value)) + value


def joined(records: Iterable[bytes], wall_time: float) -> bytes:
    """A whole file of these."""
    return b"".join((file_begin(wall_time), *records))
