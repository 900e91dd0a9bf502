"""One checkpoint's folder: its tensors, its manifest, and every file operation under them.

Stands in ``train`` under :mod:`pollux.train.checkpoint`, which says what is written and when; here is only how. Where
checkpoints lie is a :class:`Storage`: a folder of this machine (:class:`LocalStorage`, here), or anything with a URL
(:mod:`pollux.train.checkpoint_remote`). What the system refuses is an :class:`OSError` when writing; what cannot be
read is a :class:`CheckpointError` that gives the reason, for a list of them.
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
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from pollux.errors import CheckpointError, ForeignCheckpointError

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2  # 2: the information has a lineage
MANIFEST = "manifest.json"
ALGORITHM = "sha256"  # the fastest strong one of hashlib where the processor knows SHA; sha256sum can check it
# Step; then lineage and generation, which older ones do not have; then how often the same was saved before.
CHECKPOINT = re.compile(r"step-([0-9]+)(?:-([0-9]+)-([0-9]+))?(?:\.([0-9]+))?")
TEMPORARY = re.compile(r"\.temporary\.(.+)\.(\d{1,9})\.(\d+)\.[0-9a-f]+")  # host, process, its start
STALE_S = 24 * 3600.0  # no write takes a day, so an older temporary folder is nobody's
_UNKNOWN = "0"
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}  # some shares cannot, and need not


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What a file must be to count as whole."""

    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    info: dict[str, Any]
    algorithm: str
    records: Mapping[str, FileRecord]


class Storage(Protocol):
    """Where the checkpoints of a job lie, by name.

    A checkpoint is written to a draft, a folder of this machine. It is then brought to where it belongs, where nobody
    sees it yet, and published: one small step that makes it count. Every call is bounded in time.
    """

    root: Path | str  # for people to read: no secrets in it

    def names(self) -> list[str]:
        """What there is, other things too; nothing where there is no such place. Raises OSError."""

    def read_manifest(self, name: str) -> Manifest:
        """After a look at its own digest and at the files' sizes. Raises CheckpointError."""

    def fetch(self, name: str, manifest: Manifest) -> AbstractContextManager[Path]:
        """A folder of this machine with the files, for as long as it is needed. Raises CheckpointError."""

    def make_draft(self) -> Path:
        """A new empty folder of this machine. What dead writers left is removed before: its room may be needed."""

    def bring(self, draft: Path, name: str) -> bool:
        """Put the files of a sealed draft under ``name``, not counting yet. False if the name is taken."""

    def publish(self, draft: Path, name: str) -> bool:
        """What was brought counts from now on. False if another had the name first: nothing has changed then."""

    def discard(self, draft: Path, name: str | None) -> None:
        """Forget a draft, and what was brought of it under ``name``, as far as possible."""

    def remove(self, name: str) -> None:
        """Take a checkpoint away: it stops to count at once. What cannot be removed is logged and left."""


class LocalStorage:
    """A folder of this machine, or one that looks like it (NFS, Lustre): publishing is a rename."""

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
    # seal() syncs. No copying ahead: that would wait for the device's current stream, in whichever thread this runs.
    writer = FileSystemWriter(folder, sync_files=False, per_thread_copy_ahead=0)
    _expect_no_group()
    try:
        state_dict_saver.save(dict(state), storage_writer=writer, no_dist=True)
    except CheckpointException as error:
        cause = _cause(error)
        # On a full disk torch fails again while it closes its file; the system's own words are further down.
        refusal: BaseException | None = cause
        while refusal is not None and not isinstance(refusal, OSError):
            refusal = refusal.__context__
        raise refusal or cause from cause


def read_tensors(folder: Path, device: torch.device) -> dict[str, Tensor]:
    """The tensors of a folder whose digests are right."""
    reader = FileSystemReader(folder)
    try:
        entries = reader.read_metadata().state_dict_metadata
    except Exception as error:  # a pickle can fail in any way
        raise CheckpointError(f"torch {torch.__version__} cannot read its .metadata: {error!r}") from error
    state = {}
    for name, entry in entries.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"its entry {name} is not a tensor")
        # Outside any try: too little memory is no reason to take an older checkpoint.
        state[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
    _expect_no_group()
    try:
        state_dict_loader.load(state, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        cause = _cause(error)
        if not isinstance(cause, Exception) or isinstance(cause, MemoryError | torch.OutOfMemoryError):
            raise cause from None
        raise CheckpointError(f"torch {torch.__version__} cannot read its tensors: {cause!r}") from cause
    return state


def seal(folder: Path, info: Mapping[str, Any]) -> None:
    """Put every file of ``folder`` on the disk, once each, with a manifest that says what they hold."""
    records = {}
    for name in sorted(os.listdir(folder)):
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
    """The manifest, after a look at its own digest and at the files' sizes."""
    try:
        text = (folder / MANIFEST).read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"it has no {MANIFEST}") from error
    except OSError as error:
        raise CheckpointError(f"it cannot be read: {error}") from error
    return parse_manifest(text, lambda name: os.stat(folder / name).st_size)


def parse_manifest(text: bytes, size_of: Callable[[str], int]) -> Manifest:
    """``size_of`` a file by its name, in bytes; an OSError where there is none."""
    try:
        content = json.loads(text.decode("utf-8"))
        version = content["version"]
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise ForeignCheckpointError(
                f"a newer Pollux wrote it, in format {version}; this one reads up to {FORMAT_VERSION}, so update Pollux"
            )
        if content.pop("digest") != _digest(content):
            raise CheckpointError(f"its {MANIFEST} has changed since it was written")
        records = {name: FileRecord(**record) for name, record in content["files"].items()}
        manifest = Manifest(info=content["info"], algorithm=content["algorithm"], records=records)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"its {MANIFEST} is torn or damaged: {error!r}") from error
    for name, record in records.items():
        try:
            size = size_of(name)
        except OSError as error:
            raise CheckpointError(f"its file {name} is missing or out of reach: {error}") from error
        if size != record.size_bytes:
            raise CheckpointError(f"its file {name} has {size} bytes instead of {record.size_bytes}")
    return manifest


def check_digests(folder: Path, manifest: Manifest) -> None:
    """Raise :class:`CheckpointError` unless every file holds what it held. Reads them all."""
    for name, record in manifest.records.items():
        try:
            with open(folder / name, "rb") as file:
                digest = hashlib.file_digest(file, manifest.algorithm).hexdigest()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"its file {name} cannot be checked: {error}") from error
        if digest != record.digest:
            raise CheckpointError(f"the content of its file {name} has changed (its {manifest.algorithm} differs)")


def list_names(root: Path) -> list[str]:
    """Names in a folder; none where there is no folder."""
    try:
        return os.listdir(root)
    except FileNotFoundError:
        return []


def make_root(root: Path) -> None:
    if not root.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        _sync_folder(root.parent)


def make_temporary(root: Path, mode: int = 0o777) -> Path:
    """A new hidden folder in ``root`` whose name says which process it belongs to."""
    path = _temporary_path(root)
    path.mkdir(mode=mode)
    return path


def publish(temporary: Path, final: Path) -> bool:
    """Give a finished folder its name in one indivisible step. False if the name is taken: nothing has changed then."""
    try:
        os.rename(temporary, final)
    except OSError:
        if os.path.lexists(final):
            return False
        raise
    _sync_folder(final.parent)
    return True


def remove(folder: Path) -> None:
    """Take a checkpoint away: its name at once, its files after that. What cannot be removed is logged and left."""
    try:
        hidden = _temporary_path(folder.parent)  # a kill in mid-removal must not leave half a checkpoint by its name
        os.rename(folder, hidden)
        shutil.rmtree(hidden)
    except FileNotFoundError:
        return  # another process was faster
    except OSError as error:
        logger.warning("%s: cannot remove this old checkpoint: %s. Remove it by hand.", folder, error)


def remove_temporary(folder: Path) -> None:
    """Remove a temporary folder as far as possible; :func:`remove_stale` takes the rest another day."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_stale(root: Path) -> None:
    """Remove the temporary folders that dead writers left: of this machine's processes at once, others by age."""
    for name in list_names(root):
        writer = TEMPORARY.fullmatch(name)
        if writer is None:
            continue
        is_dead = writer[1] == _host() and not _is_alive(int(writer[2]), writer[3])
        if is_dead or _age_s(root / name) > STALE_S:
            remove_temporary(root / name)
            logger.info("%s: removed what a writer that is gone left behind", root / name)


def _temporary_path(root: Path) -> Path:
    pid = os.getpid()
    return root / f".temporary.{_host()}.{pid}.{_start_time(pid)}.{secrets.token_hex(4)}"


def _age_s(folder: Path) -> float:
    """Seconds since anything in a folder last changed; 0 if that cannot be told."""
    try:
        changed = [path.stat().st_mtime for path in (folder, *folder.iterdir())]
    except OSError:
        return 0.0
    return time.time() - max(changed)


def _host() -> str:
    """Where a process number means something: a machine, and the container in it."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino  # containers on the host's network share its name
    except OSError:
        namespace = 0
    return re.sub(r"[^\w.-]", "_", socket.gethostname() or "localhost") + f"-{namespace}"


def _is_alive(pid: int, started: str) -> bool:
    """Whether the process of that number and start is there. In a container a number alone is soon another's."""
    try:
        os.kill(pid, 0)  # signal 0 only asks
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's
    return started == _UNKNOWN or _start_time(pid) in (started, _UNKNOWN)


def _start_time(pid: int) -> str:
    """When a process started, in clock ticks since boot."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return "never" if fields[0] in "ZX" else fields[19]  # a zombie writes no more
    except (OSError, IndexError):
        return _UNKNOWN


def _sync_folder(path: Path) -> None:
    """Put the names in a folder on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def _digest(content: Mapping[str, Any]) -> str:
    """Of values, not of text: spaces and the order of names do not count."""
    return hashlib.new(ALGORITHM, json.dumps(content, sort_keys=True).encode()).hexdigest()


def _expect_no_group() -> None:
    """Keep dcp from warning that it works without a process group, which is what we ask of it.

    For good, not inside ``warnings.catch_warnings``: that one undoes other threads' settings, and we write in a thread.
    """
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def _cause(error: CheckpointException) -> BaseException:
    """dcp wraps whatever happens, interrupts too, in an exception that ``except Exception`` does not catch."""
    return next(iter(error.failures.values()))[0]
