"""Reads and writes the files of one checkpoint: its tensors and its manifest.

Called by :mod:`pollux.train.checkpoint`, which decides what is written and when. A :class:`Storage` is the place of a
job's checkpoints: a local folder (:class:`LocalStorage`), or a URL (:mod:`pollux.train.checkpoint_remote`). Failed
writes raise :class:`OSError`. A checkpoint that cannot be read raises :class:`CheckpointError` with the reason, worded
to follow the checkpoint's name ("it has no manifest.json").
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pollux.errors import CheckpointError, ForeignCheckpointError
from pollux.train import tensor_file

logger = logging.getLogger(__name__)

FORMAT_VERSION = 3  # higher ones are refused; raise it when older versions of Pollux could misread a checkpoint
MANIFEST = "manifest.json"
TENSORS = "tensors.safetensors"
ALGORITHM = "sha256"  # the fastest strong hash in hashlib on processors with SHA instructions; sha256sum checks it
# Step; lineage and generation, where they are not 0; how often the same step was saved before.
CHECKPOINT = re.compile(r"step-([0-9]+)(?:-([0-9]+)-([0-9]+))?(?:\.([0-9]+))?")
TEMPORARY = re.compile(r"\.temporary\.(.+)\.(\d{1,9})\.(\d+)\.[0-9a-f]+")  # host, process, its start
STALE_S = 24 * 3600.0  # no write takes a day, so the writer of an older temporary folder is gone
_UNKNOWN = "0"  # start time of a process where /proc does not tell
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}  # from network shares that cannot sync folders


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Size and digest that a file must have to count as complete."""

    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    info: dict[str, Any]  # of CheckpointInfo, as JSON gives it
    algorithm: str
    records: Mapping[str, FileRecord]


class Storage(Protocol):
    """The place of a job's checkpoints, by name.

    A checkpoint is written to a draft, a local folder. ``bring`` copies it to its place, where readers ignore it;
    ``publish`` makes it visible in one small step. Every call is bounded in time.
    """

    root: Path | str  # to show people: without secrets

    def names(self) -> list[str]:
        """All names there, not of checkpoints only; empty where the place does not exist. Raises OSError."""

    def read_manifest(self, name: str) -> Manifest:
        """The manifest, after its digest and the files' sizes were checked. Raises CheckpointError."""

    def fetch(self, name: str, manifest: Manifest) -> AbstractContextManager[Path]:
        """A local folder with the files, until the context ends. Raises CheckpointError."""

    def make_draft(self) -> Path:
        """A new empty local folder. First removes what dead writers left, to make room."""

    def bring(self, draft: Path, name: str) -> bool:
        """Put the files of a sealed draft under ``name``, not visible yet. False if the name is taken."""

    def publish(self, draft: Path, name: str) -> bool:
        """Make the checkpoint visible. False, with nothing changed, if another writer has taken the name."""

    def discard(self, draft: Path, name: str | None) -> None:
        """Remove a draft, and what was brought under ``name``, as far as possible."""

    def remove(self, name: str) -> None:
        """Remove a checkpoint; it is invisible at once. Files that cannot be removed are logged and left."""


class LocalStorage:
    """A local folder, or a mounted one (NFS, Lustre). Publishing is a rename."""

    def __init__(self, root: Path) -> None:
        self.root: Path | str = root
        self._root = root

    def names(self) -> list[str]:
        return list_names(self._root)

    def read_manifest(self, name: str) -> Manifest:
        return read_manifest(self._root / name)

    def fetch(self, name: str, manifest: Manifest) -> AbstractContextManager[Path]:
        return nullcontext(self._root / name)

    def make_draft(self) -> Path:
        make_root(self._root)
        remove_stale(self._root)
        return make_temporary(self._root)

    def bring(self, draft: Path, name: str) -> bool:
        return not os.path.lexists(self._root / name)

    def publish(self, draft: Path, name: str) -> bool:
        return publish(draft, self._root / name)

    def discard(self, draft: Path, name: str | None) -> None:
        remove_temporary(draft)

    def remove(self, name: str) -> None:
        remove(self._root / name)


def write_tensors(state: Mapping[str, Tensor], folder: Path) -> None:
    """Not synced: :func:`seal` does that."""
    tensor_file.write_tensors(state, folder / TENSORS)


def read_tensors(folder: Path, device: torch.device) -> dict[str, Tensor]:
    """The tensors of a folder. Check its digests first."""
    return tensor_file.read_tensors(folder / TENSORS, device)


def seal(folder: Path, info: Mapping[str, object], known: Mapping[str, FileRecord] | None = None) -> None:
    """Sync every file of ``folder`` to the disk, and add the manifest with their sizes and digests.

    ``known`` are files that others have written and synced, such as shards.
    """
    records = {name: asdict(record) for name, record in (known or {}).items()}
    for name in sorted(set(os.listdir(folder)) - set(records)):
        with open(folder / name, "rb") as file:
            digest = hashlib.file_digest(file, ALGORITHM).hexdigest()
            os.fsync(file.fileno())
            records[name] = asdict(FileRecord(size_bytes=os.fstat(file.fileno()).st_size, digest=digest))
    content = {
        "format": "pollux-checkpoint",
        "version": FORMAT_VERSION,
        "torch": torch.__version__,
        "info": info,
        "algorithm": ALGORITHM,
        "files": records,
    }
    with open(folder / MANIFEST, "w", encoding="utf-8") as manifest:
        json.dump({**content, "digest": _digest(content)}, manifest, indent=1)
        manifest.flush()
        os.fsync(manifest.fileno())
    _sync_folder(folder)


def read_manifest(folder: Path) -> Manifest:
    """The manifest, after its digest and the files' sizes were checked."""
    try:
        text = (folder / MANIFEST).read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"it has no {MANIFEST}") from error
    except OSError as error:
        raise CheckpointError(f"it cannot be read: {error}") from error
    return parse_manifest(text, lambda name: os.stat(folder / name).st_size)


def parse_manifest(text: bytes, size_of: Callable[[str], int]) -> Manifest:
    """``size_of`` gives a file's size in bytes by its name, or raises OSError."""
    try:
        content = json.loads(text.decode("utf-8"))
        version = content["version"]
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise ForeignCheckpointError(
                f"a newer Pollux wrote it in format {version}; this Pollux reads up to {FORMAT_VERSION}: update Pollux"
            )
        if content.pop("digest") != _digest(content):
            raise CheckpointError(f"its {MANIFEST} has changed since it was written")
        records = {name: FileRecord(**record) for name, record in content["files"].items()}
        manifest = Manifest(info=content["info"], algorithm=content["algorithm"], records=records)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"its {MANIFEST} is incomplete or damaged: {error!r}") from error
    for name, record in records.items():
        if name != os.path.basename(name) or name in ("", ".", ".."):
            raise CheckpointError(f"its {MANIFEST} names {name!r}, which is not a plain file name")
        try:
            size = size_of(name)
        except OSError as error:
            raise CheckpointError(f"its file {name} is missing or cannot be reached: {error}") from error
        if size != record.size_bytes:
            raise CheckpointError(f"its file {name} has {size} bytes instead of {record.size_bytes}")
    return manifest


def check_digests(folder: Path, manifest: Manifest, names: Collection[str] | None = None) -> None:
    """Read the files, all if no names are given; CheckpointError unless each has its recorded digest."""
    for name, record in manifest.records.items():
        if names is None or name in names:
            check_digest(folder / name, record, manifest.algorithm)


def check_digest(path: Path, record: FileRecord, algorithm: str) -> None:
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, algorithm).hexdigest()
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"its file {path.name} cannot be checked: {error}") from error
    if digest != record.digest:
        raise CheckpointError(f"the content of its file {path.name} has changed (its {algorithm} differs)")


def list_names(root: Path) -> list[str]:
    """Names in a folder; empty if it does not exist."""
    try:
        return os.listdir(root)
    except FileNotFoundError:
        return []


def make_root(root: Path) -> None:
    if not root.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        _sync_folder(root.parent)


def make_temporary(root: Path, mode: int = 0o777) -> Path:
    """A new hidden folder in ``root``, named after this process."""
    path = _temporary_path(root)
    path.mkdir(mode=mode)
    return path


def publish(temporary: Path, final: Path) -> bool:
    """Give a finished folder its name atomically. False, with nothing changed, if the name is taken."""
    try:
        os.rename(temporary, final)
    except OSError:
        if os.path.lexists(final):
            return False
        raise
    _sync_folder(final.parent)
    return True


def remove(folder: Path) -> None:
    """Remove a checkpoint: first its name, then its files. Files that cannot be removed are logged and left."""
    try:
        hidden = _temporary_path(folder.parent)  # a kill during removal must not leave half a checkpoint under its name
        os.rename(folder, hidden)
        shutil.rmtree(hidden)
    except FileNotFoundError:
        return  # another process was faster
    except OSError as error:
        logger.warning("%s: cannot remove this old checkpoint: %s. Remove it by hand.", folder, error)


def remove_temporary(folder: Path) -> None:
    """Remove a temporary folder as far as possible; :func:`remove_stale` removes the rest later."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_stale(root: Path) -> None:
    """Remove the temporary folders of dead writers: of local processes at once, of others after STALE_S."""
    for name in list_names(root):
        writer = TEMPORARY.fullmatch(name)
        if writer is None:
            continue
        is_dead = writer[1] == _host() and not _is_alive(int(writer[2]), writer[3])
        if is_dead or _age_s(root / name) > STALE_S:
            remove_temporary(root / name)
            logger.info("%s: removed the temporary folder of a writer that has ended", root / name)


def _temporary_path(root: Path) -> Path:
    pid = os.getpid()
    return root / f".temporary.{_host()}.{pid}.{_start_time(pid)}.{secrets.token_hex(4)}"


def _age_s(folder: Path) -> float:
    """Seconds since anything in a folder last changed; 0 if unknown."""
    try:
        changed = [path.stat().st_mtime for path in (folder, *folder.iterdir())]
    except OSError:
        return 0.0
    return time.time() - max(changed)


def _host() -> str:
    """The machine and the container: where a process number is unique."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino  # containers on the host's network share its name
    except OSError:
        namespace = 0
    return re.sub(r"[^\w.-]", "_", socket.gethostname() or "localhost") + f"-{namespace}"


def _is_alive(pid: int, started: str) -> bool:
    """Whether the process with that number and start time lives. Numbers alone are soon reused in containers."""
    try:
        os.kill(pid, 0)  # signal 0 only checks
    except ProcessLookupError:
        return False
    except OSError:
        pass  # a process of another user
    return started == _UNKNOWN or _start_time(pid) in (started, _UNKNOWN)


def _start_time(pid: int) -> str:
    """When a process started, in clock ticks since boot; "never" for one that has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return "never" if fields[0] in "ZX" else fields[19]  # a zombie has ended
    except (OSError, IndexError):
        return _UNKNOWN


def _sync_folder(path: Path) -> None:
    """Sync a folder's list of names to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def _digest(content: Mapping[str, object]) -> str:
    """The digest of the values: spaces and the order of names do not matter."""
    return hashlib.new(ALGORITHM, json.dumps(content, sort_keys=True).encode()).hexdigest()
