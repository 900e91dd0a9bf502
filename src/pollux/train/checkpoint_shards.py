"""The shards of a sharded model in a checkpoint: one file by each replica, read again by any number of replicas.

The checkpointer calls it. Beside ``tensors.safetensors``, which has the small state, a checkpoint has files
``shard-<index>-of-<count>.safetensors``, with the same row ranges of every tensor as the replicas had. The names and
whole shapes of the tensors are in the small state's file, under :data:`ENTRIES`. A reader opens only the files whose
rows it needs. All replicas must see the same folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pollux.errors import CheckpointError
from pollux.train import checkpoint_files as files
from pollux.train import tensor_file
from pollux.train.encoding import decode, encode
from pollux.train.shards import Cut, Entry, Shards, overlap

ENTRIES = "pollux/shards"  # the name of the list of sharded tensors among the small state's tensors


def file_name(cut: Cut) -> str:
    return f"shard-{cut.index:05d}-of-{cut.count:05d}.safetensors"


def is_shard(name: str) -> bool:
    return name.startswith("shard-")


def write_shard(shards: Shards, folder: Path) -> tuple[str, files.FileRecord]:
    """Write this replica's rows, synced to the disk. The file's name and record. Raises OSError, CheckpointError."""
    name = file_name(shards.cut)
    path = folder / name
    tensor_file.write_tensors(shards.tensors, path)
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, files.ALGORITHM).hexdigest()
        os.fsync(file.fileno())
        return name, files.FileRecord(size_bytes=os.fstat(file.fileno()).st_size, digest=digest)


def index_of(shards: Shards) -> Tensor:
    """The list of sharded tensors, as bytes in a tensor, for the small state's file."""
    return torch.frombuffer(bytearray(encode((shards.cut.count, shards.entries), "shards")), dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class ShardFiles:
    """The shards of one checkpoint, as a reader with ``cut`` opens them."""

    folder: Path
    count: int  # of the files
    entries: list[Entry]

    def read(self, entry: Entry, cut: Cut) -> Tensor:
        """The rows of one tensor that ``cut`` needs. Raises CheckpointError."""
        wanted = cut.rows(entry.shape[0])
        parts = []
        for index in range(self.count):
            has = Cut(index, self.count).rows(entry.shape[0])
            begin, end = overlap(has, wanted)
            if end > begin:
                path = self.folder / file_name(Cut(index, self.count))
                parts.append(tensor_file.read_rows(path, entry.name, begin - has[0], end - has[0]))
        if not parts:
            return torch.empty(entry.local_shape(wanted), dtype=entry.dtype)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def open_shards(folder: Path, index: Tensor, records: Mapping[str, files.FileRecord], cut: Cut) -> ShardFiles:
    """Check the digests of the files that ``cut`` needs. Raises CheckpointError, worded to follow the folder's name."""
    count, entries = _read_index(index)
    needed = {
        position
        for entry in entries
        for position in range(count)
        for begin, end in [overlap(Cut(position, count).rows(entry.shape[0]), cut.rows(entry.shape[0]))]
        if end > begin
    }
    for position in sorted(needed):
        name = file_name(Cut(position, count))
        if name not in records:
            raise CheckpointError(f"it has no {name}")
        files.check_digest(folder / name, records[name], files.ALGORITHM)
    return ShardFiles(folder, count, entries)


def _read_index(index: Tensor) -> tuple[int, list[Entry]]:
    value = decode(index.numpy().tobytes())
    if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], int) and isinstance(value[1], list)):
        raise CheckpointError(f"its {ENTRIES} is no list of sharded tensors")
    return value[0], value[1]
