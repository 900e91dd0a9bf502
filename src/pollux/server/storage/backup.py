"""Backups of a data directory: one tar file with the database, secrets and settings; if asked, logs and checkpoints.

``pollux backup`` calls it, and a server of another version before it goes on with a database. The server may run. The
database is always an SQLite file in it (:mod:`pollux.server.storage.database_copy`). The last member, ``backup.json``,
has the size and SHA-256 of all others, so a file that was cut off is not taken for a backup.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import stat
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from pollux.engines.processes.log_cap import content_begin
from pollux.errors import InputFileError, StoreError
from pollux.server.storage.database_copy import Contents, check_sqlite, copy_database, copy_sqlite, read_contents
from pollux.server.storage.drained import DRAINING_FILE
from pollux.server.storage.files import read_object, write_object
from pollux.server.storage.postgres import is_postgres
from pollux.version import __version__

FORMAT = 1
MANIFEST, STORE, STUDIES = "backup.json", "pollux.db", "studies.db"
PLAIN_FILES = ("token", "secret", "port", DRAINING_FILE, "node-seconds.json", "settings.json", "storage.json")
DATABASES = (STORE, STUDIES)
Folder = Literal["logs", "checkpoints"]
FOLDERS: tuple[Folder, ...] = ("logs", "checkpoints")
KEPT, BACKUPS = 3, "backups"  # copies that servers make by themselves
DATABASE_FILE = "database.json"  # where the last server here kept its jobs, and of which version it was
_SPARE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileNote:
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a backup says of itself."""

    pollux: str  # the version that made it
    created: float
    contents: Contents
    folders: tuple[Folder, ...]
    files: dict[str, FileNote] = field(default_factory=dict)
    format: int = FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """One that was made. ``left_out``: bytes of the folders of jobs that are not in it."""

    path: Path
    size: int
    manifest: Manifest
    left_out: dict[Folder, int]


def write_backup(
    directory: Path, place: str | Path, target: Path, folders: tuple[Folder, ...] = (), *, now: float | None = None
) -> Backup:
    """Make a backup of a data directory. The file has its name when all of it is on the disk, or not at all.

    ``place``: of the database. ``folders``: which of the jobs' folders are in it.

    Raises:
        StoreError: the database cannot be copied, or is damaged.
        InputFileError: the target exists, or cannot be written.
    """
    if target.exists():
        raise InputFileError(target, "exists already; name another file, or remove it")
    sizes = {name: _size_of(directory, name) for name in FOLDERS}
    try:
        with tempfile.TemporaryDirectory(prefix=".pollux-backup-", dir=target.parent) as made:
            beside = Path(made)  # its owner's alone
            copy_database(place, beside / STORE)
            check_sqlite(beside / STORE)
            if (directory / STUDIES).exists():
                os.close(os.open(beside / STUDIES, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
                copy_sqlite(directory / STUDIES, beside / STUDIES)
                check_sqlite(beside / STUDIES)
            _require_space(target.parent, sum(sizes[name] for name in folders) + (beside / STORE).stat().st_size)
            manifest = Manifest(
                pollux=__version__,
                created=time.time() if now is None else now,
                contents=read_contents(beside / STORE),
                folders=folders,
            )
            archive = beside / "backup.tar"
            _write_archive(archive, directory, beside, manifest)
            os.link(archive, target)  # unlike a rename it never replaces what another has put there meanwhile
            size = target.stat().st_size
    except OSError as error:
        raise InputFileError(target, f"cannot be written: {error.strerror or error}") from error
    left_out = {name: size for name, size in sizes.items() if name not in folders}
    return Backup(path=target, size=size, manifest=manifest, left_out=left_out)


def keep_copy_of_other_version(directory: Path, place: str | Path) -> Path | None:
    """Before a server of this version goes on with what one of another version has left: a backup, the last few kept.

    Raises:
        StoreError, InputFileError: it cannot be made; nothing was changed.
    """
    if read_object(directory / DATABASE_FILE).get("pollux") == __version__:
        return None
    folder = directory / BACKUPS
    folder.mkdir(mode=0o700, exist_ok=True)
    name = f"before-{__version__}-{time.strftime('%Y%m%d-%H%M%S')}.tar"
    made = write_backup(directory, place, folder / name).path
    for old in sorted(folder.glob("before-*.tar"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
        old.unlink(missing_ok=True)
    return made


def note_database(directory: Path, database: str | None) -> None:
    """Where a server of this version keeps its jobs; None: in the data directory. Raises StoreError."""
    write_object(directory / DATABASE_FILE, {"pollux": __version__, "database": database})


def database_of(directory: Path) -> str | None:
    """The PostgreSQL database that the last server here used; None: the file of the data directory."""
    found = read_object(directory / DATABASE_FILE).get("database")
    return found if isinstance(found, str) and is_postgres(found) else None


def _write_archive(archive: Path, directory: Path, beside: Path, manifest: Manifest) -> None:
    descriptor = os.open(archive, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)  # it holds tokens
    with os.fdopen(descriptor, "wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name in DATABASES:
                if (beside / name).exists():
                    _add(tar, name, os.open(beside / name, os.O_RDONLY), manifest)
            for name in PLAIN_FILES:
                if (found := _opened(directory / name)) is not None:
                    _add(tar, name, found, manifest)
            for folder in manifest.folders:
                for path in sorted((directory / "jobs").glob(f"*/{folder}")):
                    _add_folder(tar, path, str(path.relative_to(directory)), manifest)
            text = json.dumps(asdict(manifest), indent=1).encode()
            tar.addfile(_entry(MANIFEST, len(text)), io.BytesIO(text))
        file.flush()
        os.fsync(file.fileno())


def _add_folder(tar: tarfile.TarFile, path: Path, name: str, manifest: Manifest) -> None:
    for root, folders, files, descriptor in _walk(path):
        where = name if root == str(path) else f"{name}/{os.path.relpath(root, path)}"
        tar.addfile(_entry(where, 0, os.fstat(descriptor)))
        for file in sorted(files):
            if (found := _opened(file, descriptor)) is not None:
                _add(tar, f"{where}/{file}", found, manifest)
        folders.sort()


def _walk(path: Path) -> Iterator[tuple[str, list[str], list[str], int]]:
    """Follows no links: jobs write there, and may be of other users than we are."""
    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
        yield from os.fwalk(path, follow_symlinks=False)


def _opened(path: str | Path, folder: int | None = None) -> int | None:
    """A regular file; None: it is something else, or gone again."""
    try:
        found = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        return None
    return found


def _add(tar: tarfile.TarFile, name: str, descriptor: int, manifest: Manifest) -> None:
    """As long as it is now: it may grow. Without what was dropped of a log."""
    with os.fdopen(descriptor, "rb") as source:
        status = os.fstat(descriptor)
        begin = content_begin(descriptor)
        source.seek(begin)
        exact = _Exactly(source, status.st_size - begin)
        tar.addfile(_entry(name, status.st_size - begin, status), exact)  # type: ignore[arg-type]
        manifest.files[name] = FileNote(size=status.st_size - begin, sha256=exact.digest.hexdigest())


class _Exactly:
    """So many bytes of a file, counted into a digest; zeros where it has become shorter."""

    def __init__(self, source: BinaryIO, size: int) -> None:
        self._source, self._left, self.digest = source, size, hashlib.sha256()

    def read(self, size: int) -> bytes:
        wanted = min(size, self._left)
        piece = self._source.read(wanted).ljust(wanted, b"\0")
        self._left -= wanted
        self.digest.update(piece)
        return piece


def _entry(name: str, size: int, status: os.stat_result | None = None) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = size, 0o600, int(time.time())
    if status is not None:
        entry.mode, entry.mtime = stat.S_IMODE(status.st_mode), int(status.st_mtime)
        entry.uid, entry.gid = status.st_uid, status.st_gid
        entry.type = tarfile.DIRTYPE if stat.S_ISDIR(status.st_mode) else tarfile.REGTYPE
    return entry


def _size_of(directory: Path, folder: Folder) -> int:
    return sum(size for path in (directory / "jobs").glob(f"*/{folder}") for size in _sizes(path))


def _sizes(path: Path) -> Iterator[int]:
    for _, _, files, descriptor in _walk(path):
        for file in files:
            try:
                status = os.stat(file, dir_fd=descriptor, follow_symlinks=False)
            except OSError:  # gone again
                continue
            size = status.st_size
            if 512 * status.st_blocks < size and (found := _opened(file, descriptor)) is not None:
                with os.fdopen(found, "rb"):
                    size -= content_begin(found)  # a log that has lost its beginning
            yield size


def _require_space(folder: Path, needed: int) -> None:
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if free < needed + _SPARE_BYTES:
        raise StoreError(
            f"{folder}: the backup needs {needed >> 20} MiB and some to spare, and {free >> 20} MiB are free: name a "
            "file on another disk, or leave out --logs or --checkpoints"
        )
