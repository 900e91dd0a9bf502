"""Puts a backup in the place of a data directory's database, secrets and folders; all of it or nothing.

``pollux restore`` calls it. All is unpacked and checked beside what is there. Then a note of what is to be moved is
written, files change places, and the note goes. A restore that was broken off in between is finished by the next
server (:func:`finish_restore`) or the next restore. What was there before is kept in a folder of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pollux.api.codec import Json
from pollux.engines.local.files import EPOCH
from pollux.engines.ownership import where_jobs_run
from pollux.engines.processes.job_manager import ENDS_FILE
from pollux.errors import EngineError, InputFileError, StoreError
from pollux.server.storage import backup
from pollux.server.storage.backup import DATABASES, FOLDERS, MANIFEST, PLAIN_FILES, STORE, FileNote, Manifest
from pollux.server.storage.database import SCHEMA_VERSION
from pollux.server.storage.database_copy import (
    Contents,
    check_sqlite,
    load_postgres,
    newer_than_backup,
    read_contents,
)
from pollux.server.storage.files import locked, make_directory, read_object, write_object

NOTE, STAGE = "restore.json", "restore.new"
_JOB_PART = re.compile(r"jobs/[A-Za-z0-9._-]+/(logs|checkpoints)")
_MAX_MANIFEST = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """``before``: the folder with what was replaced; None: there was nothing."""

    manifest: Manifest
    before: Path | None


def restore(file: Path, directory: Path, database: str | None = None, *, force: bool = False) -> Restored:
    """Put a backup into a data directory, and into a PostgreSQL database if one is named.

    ``force``: also over a database with something newer than the backup.

    Raises:
        InputFileError: the file is no backup, or damaged.
        DirectoryInUseError: a server runs there.
        EngineError: jobs run there.
        StoreError: the database is newer, of another version, or cannot be written.
    """
    make_directory(directory)
    with locked(directory):
        if where := where_jobs_run(directory):
            raise EngineError(f"jobs of {directory} still run {where}: end them first: pollux down")
        if read_object(directory / NOTE).get("step") == "database":
            (directory / NOTE).unlink()  # it is repeated now
        finish_restore(directory)
        stage = directory / STAGE
        shutil.rmtree(stage, ignore_errors=True)  # of one that was broken off before anything was moved
        try:
            manifest = _unpack(file, stage)
            contents = _check_database(file, stage / STORE)
            _require_older(directory, contents, force)
            if database is not None:
                _to_postgres(directory, stage, database, contents, force)
            backup.note_database(stage, database)
            before = _note_moves(directory, stage)
        except OSError as error:
            raise StoreError(f"{directory}: {error}; nothing was replaced") from error
        finally:
            if not (directory / NOTE).exists():
                shutil.rmtree(stage, ignore_errors=True)
        finish_restore(directory)
        return Restored(manifest=manifest, before=before if before.exists() else None)


def finish_restore(directory: Path) -> bool:
    """Finish a restore that was broken off while files changed places. Whether there was one.

    Raises:
        StoreError: it was broken off before that, and has to be repeated.
    """
    note = read_object(directory / NOTE)
    if not note:
        return False
    if note.get("step") != "files":
        raise StoreError(f"{directory}: a restore was broken off, and has to be repeated: pollux restore FILE")
    stage, before = directory / STAGE, directory / str(note["before"])
    # The data directory may be passed through by jobs of other Unix users: each folder says for itself who may look.
    before.mkdir(mode=0o700, exist_ok=True)
    (directory / "jobs").mkdir(mode=0o711, exist_ok=True)
    for name in map(str, _list(note["away"])):
        _put_away(directory / name, before / name)
    for name in map(str, _list(note["names"])):
        if (stage / name).exists():  # else it has been moved
            _put_away(directory / name, before / name)
            (directory / name).parent.mkdir(mode=0o711, parents=True, exist_ok=True)
            (stage / name).rename(directory / name)
    if not any(before.iterdir()):
        before.rmdir()
    shutil.rmtree(stage, ignore_errors=True)
    (directory / NOTE).unlink()
    return True


def _put_away(place: Path, before: Path) -> None:
    if place.exists():
        before.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.rename(before)


def _list(value: Json) -> list[Json]:
    assert isinstance(value, list), "as it was written"
    return value


def _note_moves(directory: Path, stage: Path) -> Path:
    """From here on the restore is finished, whatever happens. The folder for what is replaced."""
    before = directory / f"before-restore-{time.strftime('%Y%m%d-%H%M%S')}"
    parts = [str(path.relative_to(stage)) for folder in FOLDERS for path in stage.glob(f"jobs/*/{folder}")]
    # The log of a database goes before the database itself: it must never meet another one.
    logs = [f"{name}{suffix}" for name in DATABASES for suffix in ("-wal", "-shm")]
    plain = (*DATABASES, *PLAIN_FILES, backup.DATABASE_FILE)
    names = [*(name for name in plain if (stage / name).exists()), *parts]
    # What the backup lacks was not there then. A database and its log go together.
    missing = [name for name in plain if name not in names]
    moves: dict[str, Json] = {"before": before.name, "away": [*logs, *missing, ENDS_FILE, EPOCH], "names": list(names)}
    write_object(directory / NOTE, {"step": "files", **moves})
    return before


def _to_postgres(directory: Path, stage: Path, database: str, contents: Contents, force: bool) -> None:
    secret = (stage / "secret").read_text(encoding="ascii").strip()
    owner = hashlib.sha256(f"owner {secret}".encode()).hexdigest()[:12]
    # A server that finds this note refuses to start: its database and its secrets may not belong together.
    write_object(directory / NOTE, {"step": "database"})
    try:
        load_postgres(stage / STORE, database, owner, replaces_newer=force, before=contents.latest)
    except BaseException:
        (directory / NOTE).unlink(missing_ok=True)
        raise
    (stage / STORE).unlink()


def _require_older(directory: Path, contents: Contents, force: bool) -> None:
    path = directory / STORE
    if force or not path.exists() or path.stat().st_size == 0:
        return
    try:
        check_sqlite(path)
        there = read_contents(path)
    except StoreError:
        return  # it is damaged: that is what backups are for
    if there.schema_version > SCHEMA_VERSION:
        raise StoreError(
            f"{path}: written by a newer Pollux (schema version {there.schema_version}; this one has {SCHEMA_VERSION}"
            "): use that one, or add --force to replace it"
        )
    if there.latest > contents.latest:
        raise StoreError(newer_than_backup(str(path), there.latest - contents.latest))


def _check_database(file: Path, path: Path) -> Contents:
    try:
        check_sqlite(path)
        contents = read_contents(path)
    except StoreError as error:
        raise InputFileError(file, f"the database in it cannot be used: {error}") from error
    if contents.schema_version != SCHEMA_VERSION:
        raise InputFileError(
            file,
            f"it was made by another Pollux (schema version {contents.schema_version}; this one reads "
            f"{SCHEMA_VERSION}): restore it with that one",
        )
    return contents


# The file ---------------------------------------------------------------------------------------


def _unpack(file: Path, stage: Path) -> Manifest:
    """All of it, compared with what the manifest says."""
    stage.mkdir(mode=0o700)
    found: dict[str, FileNote] = {}
    manifest: Manifest | None = None
    folders: list[tuple[Path, tarfile.TarInfo]] = []
    try:
        with tarfile.open(file, mode="r|*") as tar:
            for member in tar:
                if member.name == MANIFEST and member.isreg() and member.size <= _MAX_MANIFEST:
                    manifest = _decode(file, _content(tar, member).read())
                    continue
                target = _target_of(file, stage, member)
                if member.isdir():
                    target.mkdir(mode=0o700, parents=True, exist_ok=True)
                    folders.append((target, member))
                else:
                    found[member.name] = _extract(tar, member, target)
    except (tarfile.TarError, EOFError) as error:
        raise InputFileError(file, f"it is no backup of Pollux, or damaged: {error}") from error
    except FileNotFoundError as error:
        raise InputFileError(file, f"cannot be read: {error.strerror}") from error
    if manifest is None:
        raise InputFileError(file, "it is no backup of Pollux, or its end is missing")
    if wrong := sorted(name for name in {*found, *manifest.files} if found.get(name) != manifest.files.get(name)):
        raise InputFileError(file, f"it is damaged: {', '.join(wrong[:3])} is not as it was written")
    if missing := [name for name in (STORE, "token", "secret") if name not in found]:
        raise InputFileError(file, f"it is damaged: {missing[0]} is missing")
    for path, member in reversed(folders):
        _give(path, member)
    return manifest


def _target_of(file: Path, stage: Path, member: tarfile.TarInfo) -> Path:
    """Only what a backup has, and nothing outside of the folder."""
    parts = PurePosixPath(member.name).parts
    is_part = bool(_JOB_PART.match("/".join(parts[:3]))) and len(parts) >= 3 and parts[1] not in (".", "..")
    is_known = member.name in (*DATABASES, *PLAIN_FILES) or is_part
    if not is_known or ".." in parts or member.name.startswith("/") or not (member.isreg() or member.isdir()):
        raise InputFileError(file, f"it is no backup of Pollux: it holds {member.name!r}")
    return stage.joinpath(*parts)


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> FileNote:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    source = _content(tar, member)
    with os.fdopen(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600), "wb") as output:
        while piece := source.read(1 << 20):
            output.write(piece)
            digest.update(piece)
            size += len(piece)
        output.flush()
        os.fsync(output.fileno())
    if "/" in member.name:
        _give(target, member)
    return FileNote(size=size, sha256=digest.hexdigest())


def _give(path: Path, member: tarfile.TarInfo) -> None:
    """Its owner and mode, as far as we may; what jobs write is theirs."""
    if os.geteuid() == 0:
        os.chown(path, member.uid, member.gid, follow_symlinks=False)
    path.chmod(member.mode & 0o777)
    os.utime(path, (member.mtime, member.mtime))


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Any:
    content = tar.extractfile(member)
    assert content is not None, "a regular file has one"
    return content


def _decode(file: Path, text: bytes) -> Manifest:
    try:
        found = json.loads(text)
        if found["format"] != backup.FORMAT:
            raise InputFileError(
                file, f"it is a backup of format {found['format']}; this Pollux reads {backup.FORMAT}: use another"
            )
        return Manifest(
            pollux=str(found["pollux"]),
            created=float(found["created"]),
            contents=Contents(**found["contents"]),
            folders=tuple(found["folders"]),
            files={name: FileNote(**note) for name, note in found["files"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputFileError(file, f"its {MANIFEST} cannot be read: {error!r}") from error
