"""Tensors in one file, in the safetensors format: a length, a JSON header, and the tensors' bytes. No code is in it.

Called by :mod:`pollux.train.checkpoint_files`. torch's own formats are pickles, which run whatever a file says. Other
tools read the file as well: ``safetensors.torch.load_file``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from pollux.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # as other readers of the format
LENGTH_BYTES = 8
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    # Not in the format's own list: other readers refuse files with these.
    "C128": torch.complex128,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raises OSError, and CheckpointError for a type of numbers that the format does not have."""
    header: dict[str, dict[str, object]] = {}
    at = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise CheckpointError(f"{name} is a tensor of {tensor.dtype}; save it as one of {sorted(_NAMES, key=str)}")
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)  # so that the tensors begin at a whole number of words
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"the names of {len(tensors)} tensors take {len(text)} bytes; at most {MAX_HEADER_BYTES}")
    with open(path, "wb", buffering=0) as file:
        _write(file, memoryview(len(text).to_bytes(LENGTH_BYTES, "little") + text))
        for tensor in tensors.values():
            _write(file, _bytes_of(tensor.detach().cpu().contiguous()))


def read_rows(path: Path, name: str, begin: int, end: int) -> Tensor:
    """Some rows of one tensor of a file, without reading the others. Raises CheckpointError."""
    with _reading(path), open(path, "rb", buffering=0) as file:
        entries, start = _read_header(file)
        dtype, shape, at = next(entry[1:] for entry in entries if entry[0] == name)
        if not 0 <= begin <= end <= shape[0]:
            raise ValueError(f"{name} has {shape[0]} rows, not {begin} to {end}")
        rows = torch.empty((end - begin, *shape[1:]), dtype=dtype)
        file.seek(start + at + begin * math.prod(shape[1:]) * dtype.itemsize)
        _read(file, _bytes_of(rows))
        return rows


def read_tensors(path: Path, device: torch.device) -> dict[str, Tensor]:
    """Raises CheckpointError for a file that is damaged or no such file, and MemoryError or the device's own."""
    with _reading(path), open(path, "rb", buffering=0) as file:
        entries, begin = _read_header(file)
        tensors = {}
        for name, dtype, shape, at in entries:
            tensor = torch.empty(shape, dtype=dtype)
            file.seek(begin + at)
            _read(file, _bytes_of(tensor))
            tensors[name] = tensor.to(device)
        return tensors


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raises CheckpointError for all that may be wrong with a file."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"it has no {path.name}") from error
    except OSError as error:
        raise CheckpointError(f"its {path.name} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError, StopIteration) as error:
        raise CheckpointError(f"its {path.name} is no file of tensors: {error!r}") from error


_Entry = tuple[str, torch.dtype, list[int], int]


def _read_header(file: FileIO) -> tuple[list[_Entry], int]:
    """Each tensor's name, type, shape and place; and where the tensors begin."""
    length = bytearray(LENGTH_BYTES)
    _read(file, memoryview(length))
    size = int.from_bytes(length, "little")
    file.seek(0, 2)
    left = file.tell() - LENGTH_BYTES - size
    if size > MAX_HEADER_BYTES or left < 0:
        raise ValueError(f"a header of {size} bytes")
    text = bytearray(size)
    file.seek(LENGTH_BYTES)
    _read(file, memoryview(text))
    entries: list[_Entry] = []
    for name, entry in json.loads(text.decode()).items():
        if name == "__metadata__":
            continue
        dtype, shape, (at, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if not all(isinstance(number, int) and number >= 0 for number in (*shape, at, end)):
            raise ValueError(f"{name} has the shape {shape} at {at} to {end}")
        if end - at != math.prod(shape) * dtype.itemsize or end > left:
            raise ValueError(f"{name} of shape {shape} is at {at} to {end} of {left} bytes")
        entries.append((name, dtype, shape, at))
    return entries, LENGTH_BYTES + size


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of the host."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _write(file: FileIO, data: memoryview) -> None:
    while len(data):
        data = data[file.write(data) :]


def _read(file: FileIO, data: memoryview) -> None:
    while len(data):
        size = file.readinto(data)
        if not size:
            raise ValueError("it ends too early")
        data = data[size:]
