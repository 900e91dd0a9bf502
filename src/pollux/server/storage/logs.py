"""Reads a job's log files as one text, also while they grow.

HTTP routes call it, in threads. A job writes ``logs/<start>/<replica>.out`` and ``.err``, where ``start`` is the
generation it was started with. Files are read in pieces of bounded size; only how far they were read is remembered.
"""

from __future__ import annotations

import codecs
import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pollux.engines.processes.log_cap import content_begin

Stream = Literal["out", "err"]
PIECE_BYTES = 1 << 16
MAX_TAIL_BYTES = 1 << 28  # that last lines are looked for in
IDLE_LINE_S = 1.0  # a line that is not ended and does not grow is shown after this long: a prompt, a progress bar
_STREAMS: dict[str, Stream] = {"out": "out", "err": "err"}
_NUMBERS = re.compile(r"([0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFile:
    path: Path
    replica: str
    stream: Stream
    start: int  # the generation the job was started with
    size_bytes: int
    file_id: tuple[int, int]  # device and inode: another file may come to stand at the same path


def list_files(directory: Path, replica: str | None = None, stream: Stream | None = None) -> list[LogFile]:
    """The log files in a job's directory, oldest start first, of this replica and stream only if given.

    Of one start, that which was written to last comes last: the end of a job's log is the end of the job. Lines carry
    no time, so the lines of two files are not mixed.

    ``replica`` is compared, never looked up: whatever it holds, no other file is found.
    """
    found: list[tuple[int, LogFile]] = []
    for start in _entries(directory / "logs"):
        if not (start.name.isdecimal() and start.name.isascii() and len(start.name) < 19):
            continue
        for entry in _entries(Path(start.path)):
            stem, _, suffix = entry.name.rpartition(".")
            kind = _STREAMS.get(suffix)
            if not stem or kind is None or stem != (replica or stem) or kind != (stream or kind):
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:  # gone again
                continue
            if stat.S_ISREG(status.st_mode):
                file = LogFile(
                    path=Path(entry.path),
                    replica=stem.encode("utf-8", "replace").decode(),
                    stream=kind,
                    start=int(start.name),
                    size_bytes=status.st_size,
                    file_id=(status.st_dev, status.st_ino),
                )
                found.append((status.st_mtime_ns, file))
    written_s: dict[tuple[int, str], float] = {}  # by replica: its two streams stay together
    for mtime_ns, file in found:
        key = (file.start, file.replica)
        written_s[key] = max(written_s.get(key, 0.0), mtime_ns // 10**9)

    def order(entry: tuple[int, LogFile]) -> tuple[int, float, list[tuple[int, str]], int, bool]:
        mtime_ns, file = entry
        written = written_s[file.start, file.replica]
        return file.start, written, _in_order(file.replica), mtime_ns // 10**9, file.stream != "out"

    return [file for _, file in sorted(found, key=order)]


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError:  # not there yet, or not any more
        return []


def _in_order(name: str) -> list[tuple[int, str]]:
    """So that replica 10 comes behind replica 9."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in _NUMBERS.split(name)]


@dataclass(slots=True)
class _Place:
    """How far a file was read, and what was read of a line that is not ended."""

    offset: int
    file_id: tuple[int, int]
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )
    line: str = ""
    grew_at: float = 0.0
    is_in_line: bool = False  # the beginning of the line was sent already


class LogReader:
    """Reads a job's logs pass by pass: each sends what was added since the one before.

    With more than one replica every line begins with ``[replica] ``. Only whole lines are sent, unless one is too long
    to keep, does not grow any more, or is the last.
    """

    def __init__(
        self,
        directory: Path,
        *,
        replica: str | None = None,
        stream: Stream | None = None,
        tail: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``tail``: only so many last lines of each file that is there now; None: all."""
        self._directory, self._replica, self._stream, self._clock = directory, replica, stream, clock
        self._places: dict[Path, _Place] = {}
        self._open_line: Path | None = None  # whose unfinished line was sent last
        if tail is not None:
            for file in self._list():
                self._places[file.path] = _Place(offset=tail_offset(file, tail), file_id=file.file_id)

    def read(self, *, is_last: bool = False) -> Iterator[str]:
        """What was added until now, in pieces; ``is_last``: lines that are not ended are sent too."""
        files = self._list()
        has_prefix = len({file.replica for file in files}) > 1
        for file in files:
            place = self._places.setdefault(file.path, _Place(offset=0, file_id=file.file_id))
            prefix = f"[{file.replica}] " if has_prefix else ""
            if place.file_id != file.file_id or file.size_bytes < place.offset:  # another file, or cut off
                yield from self._send(file.path, place, prefix, place.decoder.decode(b"", True), ends=True)
                if place.is_in_line:
                    yield "\n"
                    place.is_in_line, self._open_line = False, None
                place.offset, place.file_id = 0, file.file_id
                place.decoder.reset()
            for piece in _pieces(file, place):
                yield from self._send(file.path, place, prefix, place.decoder.decode(piece), ends=False)
            if is_last:
                yield from self._send(file.path, place, prefix, place.decoder.decode(b"", True), ends=True)
            elif place.line and self._clock() - place.grew_at >= IDLE_LINE_S:
                yield from self._send(file.path, place, prefix, "", ends=True)

    def _list(self) -> list[LogFile]:
        return list_files(self._directory, self._replica, self._stream)

    def _send(self, path: Path, place: _Place, prefix: str, text: str, *, ends: bool) -> Iterator[str]:
        """The whole lines of what is kept and ``text``; the rest too, if the text ``ends`` or the rest is too long."""
        if text:
            place.grew_at = self._clock()
        *lines, place.line = (place.line + text.replace("\0", "\ufffd")).split("\n")
        parts = [f"{line}\n" for line in lines]
        if place.line and (ends or len(place.line) >= PIECE_BYTES):
            parts.append(place.line)
            place.line = ""
        if not parts:
            return
        if self._open_line is not None and self._open_line != path:
            yield "\n"  # another file's unfinished line
            self._places[self._open_line].is_in_line = False
        first = "" if place.is_in_line else prefix
        place.is_in_line = not parts[-1].endswith("\n")
        self._open_line = path if place.is_in_line else None
        yield first + prefix.join(parts)


def _pieces(file: LogFile, place: _Place) -> Iterator[bytes]:
    """What stands between ``place`` and the size the file was listed with. Moves ``place`` on."""
    if place.offset >= file.size_bytes:
        return
    try:
        # A named pipe put there would block us for ever; a link would lead elsewhere.
        descriptor = os.open(file.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    with os.fdopen(descriptor, "rb", buffering=0) as source:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or (status.st_dev, status.st_ino) != file.file_id:
            return  # replaced since: the next pass sees it
        place.offset = max(place.offset, content_begin(descriptor))
        source.seek(place.offset)
        while place.offset < file.size_bytes:
            try:
                place.offset = _after_hole(descriptor, place.offset, file.size_bytes)
                source.seek(place.offset)
                piece = source.read(min(PIECE_BYTES, file.size_bytes - place.offset))
            except OSError:
                return
            if not piece:
                return
            place.offset += len(piece)
            yield piece


def _after_hole(descriptor: int, offset: int, size: int) -> int:
    """Where the next bytes are that were ever written: a job can make its log terabytes long without writing any."""
    try:
        data = os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError as error:
        return size if error.errno == errno.ENXIO else offset  # the rest is a hole; or the disk cannot tell
    return min(data, size)


def tail_offset(file: LogFile, num_lines: int) -> int:
    """Where the last lines begin. A last line that is not ended counts."""
    try:
        with open(os.open(file.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as source:
            position = file.size_bytes
            first = max(content_begin(source.fileno()), position - MAX_TAIL_BYTES)
            wanted = num_lines
            if num_lines == 0 or position == 0:
                return position
            source.seek(position - 1)
            if source.read(1) == b"\n":  # ends the last line: none begins behind it
                position -= 1
            while position > first:
                size = min(PIECE_BYTES, position - first)
                source.seek(position - size)
                piece = source.read(size)
                if (count := piece.count(b"\n")) >= wanted:
                    end = len(piece)
                    for _ in range(wanted):
                        end = piece.rindex(b"\n", 0, end)
                    return position - size + end + 1
                wanted -= count
                position -= size
            return first
    except OSError:
        return 0
