"""Removes working directories that were used longest ago, so that their folder stays within a bound.

:class:`~pollux.server.storage.workdirs.Workdirs` calls :func:`tidy` when it has kept a new one. What a job that is not
over needs stays, and so does what was sent or used within the last hour: its job may be about to be submitted. Of a
storage behind a URL nothing is removed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from pollux.engines.code_store import CodeStore
from pollux.errors import StoreError

GRACE_S = 3600.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tidied:
    num_directories: int = 0
    num_files: int = 0
    num_bytes: int = 0


def count_bytes(store: CodeStore, in_use: Collection[str]) -> tuple[int, int]:
    """Of all files, and of those that the directories ``in_use`` need."""
    sizes = _sizes(Path(store.root))
    needed = {one for id_ in in_use for one in _files_of(store, id_)}
    return sum(sizes.values()), sum(sizes.get(one, 0) for one in needed)


def tidy(store: CodeStore, in_use: Collection[str], max_bytes: int, now: float) -> Tidied:
    """Remove lists of directories, the least recently used first, until what the others need is within the bound.

    ``in_use``: ids of directories that stay. Then go the files that no list names. Called by one thread at a time.
    """
    root = Path(store.root)
    if "://" in store.root or not root.is_dir():
        return Tidied()
    sizes = _sizes(root)
    if sum(sizes.values()) <= max_bytes:
        return Tidied()
    used_at = {path.stem: path.stat().st_mtime for path in root.glob("lists/*.json")}
    needs = {id_: _files_of(store, id_) for id_ in used_at}
    num_needing: dict[str, int] = {}
    for hashes in needs.values():
        for one in hashes:
            num_needing[one] = num_needing.get(one, 0) + 1
    left = sum(sizes.get(one, 0) for one in num_needing)
    gone = []
    for id_ in sorted(used_at, key=used_at.__getitem__):
        if left <= max_bytes:
            break
        if id_ in in_use or now - used_at[id_] < GRACE_S:
            continue
        gone.append(id_)
        for one in needs[id_]:
            num_needing[one] -= 1
            left -= 0 if num_needing[one] else sizes.get(one, 0)
    for id_ in gone:
        _remove(root, "lists", id_, root / "lists" / f"{id_}.json")
    num_files = num_bytes = 0
    for path in list(root.glob("files/*/*")):
        with contextlib.suppress(OSError):
            status = path.stat()
            if not num_needing.get(path.name) and now - status.st_mtime >= GRACE_S:
                _remove(root, "files", path.name, path)
                num_files, num_bytes = num_files + 1, num_bytes + status.st_size
    if gone or num_files:
        logger.info("removed %d working directories that were not used lately: %d bytes", len(gone), num_bytes)
    return Tidied(num_directories=len(gone), num_files=num_files, num_bytes=num_bytes)


def _sizes(root: Path) -> dict[str, int]:
    """Of the files that are here as a whole."""
    sizes = {}
    for path in root.glob("files/*/*"):
        if not path.name.endswith(".new"):
            with contextlib.suppress(FileNotFoundError):
                sizes[path.name] = path.stat().st_size
    return sizes


def _files_of(store: CodeStore, id_: str) -> set[str]:
    try:
        return {one.sha256 for one in store.read_list(id_).files if one.kind != "link"}
    except StoreError:
        return set()  # damaged: no job can use it


def _remove(root: Path, kind: str, sha256: str, path: Path) -> None:
    """With what says that users have sent it: they would have to send it again."""
    for note in root.glob(f"senders/*/{kind}/{sha256[:2]}/{sha256}"):
        note.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
