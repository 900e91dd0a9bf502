"""A working directory that travels with a job: its list of files, and what client and server say about it.

The client makes the list, the server keeps list and files, nodes unpack them. A directory is known by the hash of its
list, a file by the hash of its bytes: what the server has is not sent again. Pure.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pollux.api.codec import about, dumps, encode
from pollux.errors import InvalidValueError

WorkdirEntryKind = Literal["file", "program", "link"]
MAX_FILES = 20_000
MAX_LIST_BYTES = 16 << 20  # of the list as JSON
MAX_PATH_LENGTH = 1024
BUNDLE_BYTES = 8 << 20  # of files that are sent in one request; a larger file is sent alone
HASH = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkdirEntry:
    """One file. ``program``: it may be executed. Of a link ``target`` is where it leads, within the directory."""

    path: str = field(metadata=about("Below the directory, with slashes.", min_length=1, max_length=MAX_PATH_LENGTH))
    kind: WorkdirEntryKind = "file"
    sha256: str = field(default="", metadata=about("Of its bytes, in hexadecimal digits; empty for a link."))
    size_bytes: int = field(default=0, metadata=about(ge=0))
    target: str = field(default="", metadata=about("Of a link.", max_length=MAX_PATH_LENGTH))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkdirFiles:
    """All files of a working directory, in the order of their paths."""

    files: tuple[WorkdirEntry, ...] = field(metadata=about(max_length=MAX_FILES))

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkdirLimits:
    max_bytes: int = field(metadata=about("Of all files of a working directory together."))
    max_files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkdirAnswer:
    id: str = field(metadata=about("What a job names it by."))
    missing: tuple[str, ...] = field(metadata=about("Hashes of files to send; none: it can be used."))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkdirReceipt:
    num_files: int = field(metadata=about("How many files were taken from this bundle."))


def workdir_id(found: WorkdirFiles) -> str:
    """The hash of the list."""
    return hashlib.sha256(dumps(encode(found), "workdir").encode()).hexdigest()


def check_workdir(found: WorkdirFiles) -> None:
    """Raises InvalidValueError if a file would lie outside of the directory, twice in it, or below another file."""
    taken: set[str] = set()
    folders: set[str] = set()
    for one in found.files:
        parts = _parts(one.path, "path")
        if one.path in taken:
            raise InvalidValueError(f"workdir: {one.path!r} is there twice")
        taken.add(one.path)
        folders.update("/".join(parts[:end]) for end in range(1, len(parts)))
        if one.kind == "link":
            check_link(one.path, one.target)
            if one.sha256 or one.size_bytes:
                raise InvalidValueError(f"workdir: the link {one.path!r} has a sha256 or a size; only files have them")
        elif not HASH.fullmatch(one.sha256):
            raise InvalidValueError(f"workdir: sha256 = {one.sha256!r:.80} of {one.path!r}; 64 digits are needed")
        elif one.target:
            raise InvalidValueError(f"workdir: the file {one.path!r} has a target, {one.target!r}; only links have one")
    if both := sorted(taken & folders):
        raise InvalidValueError(f"workdir: {both[0]!r} is a file and a folder")


def check_link(path: str, target: str) -> None:
    """Raises InvalidValueError if a link leads out of the directory."""
    depth = path.count("/")
    for part in target.split("/"):
        depth += -1 if part == ".." else part not in ("", ".")
        if depth < 0:
            break
    if not target or target.startswith("/") or depth < 0 or "\0" in target:
        raise InvalidValueError(f"workdir: the link {path!r} leads to {target!r}, out of the directory")


def _parts(path: str, what: str) -> Sequence[str]:
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in path:
        raise InvalidValueError(f"workdir: {what} {path!r:.80}; a path below the directory is needed")
    return parts
