"""Keeps the logs of one job within a limit, while its replicas write to them. The job manager calls it.

The oldest part of a file that has become too long is given back to the disk, and a line says so where the rest begins.
The file keeps its length and its name: replicas append as before, and readers that are further on notice nothing.
Where a disk cannot do that (fallocate's punch hole), the whole file is emptied instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DROPPED = "[pollux: the first"  # begins the line that says so
KEPT_SHARE = 0.75  # of the limit; each look at a job that writes on would else drop a little
LEAST_BYTES = 64 << 10  # of each file, whatever others have written
_BLOCK = 512  # of st_blocks
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02  # linux/falloc.h
_LINE_SEARCH = 1 << 16
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class _Log:
    path: str
    size: int
    on_disk: int  # without what was dropped


def cap_logs(directory: Path, max_bytes: int) -> int:
    """Drop the oldest parts of the longest logs below ``directory``, if together they are too long. Bytes dropped."""
    try:
        logs = list(_logs(directory))
    except OSError:  # there are none yet, or not any more
        return 0
    total = sum(log.on_disk for log in logs)
    if total <= max_bytes:
        return 0
    excess = total - int(KEPT_SHARE * max_bytes)
    dropped = 0
    for log in sorted(logs, key=lambda one: one.on_disk, reverse=True):
        if dropped >= excess:
            break
        kept = max(log.on_disk - (excess - dropped), min(LEAST_BYTES, int(KEPT_SHARE * max_bytes)))
        if kept < log.on_disk:
            with contextlib.suppress(OSError):  # removed since, or its disk has an error: the next look tries again
                _drop(log, kept, max_bytes)
                dropped += log.on_disk - kept
    return dropped


def content_begin(descriptor: int) -> int:
    """Where what is left of a log begins, with the line that says what was dropped; 0: nothing was."""
    try:
        data = os.lseek(descriptor, 0, os.SEEK_DATA)
    except OSError:  # it is empty
        return 0
    head = os.pread(descriptor, _LINE_SEARCH, data)
    rest = head.lstrip(b"\0")
    return data + len(head) - len(rest) if rest.startswith(DROPPED.encode()) else 0


def _logs(directory: Path) -> Iterator[_Log]:
    for root, _, files, descriptor in os.fwalk(directory, follow_symlinks=False):
        for name in files:
            with contextlib.suppress(OSError):
                status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and name.endswith((".out", ".err")):
                    yield _Log(f"{root}/{name}", status.st_size, min(status.st_blocks * _BLOCK, status.st_size))


def _drop(log: _Log, kept: int, max_bytes: int) -> None:
    """Raises OSError."""
    descriptor = os.open(log.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        begin = _line_from(descriptor, log.size - kept)
        line = (
            f"{DROPPED} {begin >> 10} KiB of this log were dropped: a job's logs are kept to {max_bytes >> 20} MiB]\n"
        ).encode()
        if begin <= len(line):
            return
        # Replicas only append, so nothing else is written there.
        if _libc.fallocate(
            descriptor,
            _KEEP_SIZE | _PUNCH_HOLE,
            ctypes.c_long(0),
            ctypes.c_long(begin - len(line)),
        ):
            code = ctypes.get_errno()
            if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise OSError(code, os.strerror(code))
            os.ftruncate(descriptor, 0)
            with open(os.open(log.path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC), "wb") as file:
                file.write(line)
            return
        os.pwrite(descriptor, line, begin - len(line))
    finally:
        os.close(descriptor)


def _line_from(descriptor: int, position: int) -> int:
    """Where the next line begins; the position itself if none does soon: a progress bar, say."""
    found = os.pread(descriptor, _LINE_SEARCH, position).find(b"\n")
    return position + found + 1 if found >= 0 else position
