"""Small things that outlive a server, each in a file of its own: which nodes are drained, what they have cost,
how it decided. And how the data directory is made, and any file of it written: whole or not at all.

Stands in ``server``, below everything there that keeps files. What cannot be read is nothing.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pollux.errors import StoreError

LOCK_FILE = "lock"  # held by the server that the directory belongs to
SETTINGS_FILE = "settings.json"

logger = logging.getLogger(__name__)


def make_directory(directory: Path) -> None:
    """Its owner's alone. A folder that holds somebody else's things keeps its mode."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = stat.S_IMODE(directory.stat().st_mode)
        if mode & 0o077:
            if (directory / LOCK_FILE).exists() or not any(directory.iterdir()):
                directory.chmod(0o700)
            else:
                logger.warning("%s can be read by others (mode %o), so the jobs' logs can be", directory, mode)
    except OSError as error:
        raise StoreError(
            f"{directory}: {error.strerror}; a data directory must be a folder that this user can write to"
        ) from error


def write_whole(path: Path, text: str, *, mode: int = 0o600) -> None:
    """All of it or nothing, whatever crashes in between: it is on the disk before it has its name.

    ``mode``: who may read it, but for what the umask takes away. Raises OSError.
    """
    beside = path.with_name(f"{path.name}.new")
    beside.unlink(missing_ok=True)
    with os.fdopen(os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def read_names(path: Path) -> set[str]:
    names = _read(path)
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def write_names(path: Path, names: Iterable[str]) -> None:
    """Raises StoreError."""
    _write(path, sorted(names))


def read_seconds(path: Path) -> dict[str, float]:
    """Node-seconds by accelerator."""
    found = _read(path)
    if not isinstance(found, dict):
        return {}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float) and value >= 0}


def write_seconds(path: Path, seconds: Mapping[str, float]) -> None:
    """Raises StoreError."""
    _write(path, dict(seconds))


def read_settings(path: Path) -> dict[str, Any]:
    """What the last server here decided with: policy, interval_s, resize_s (charged for one), weights, node_price."""
    found = _read(path)
    return dict(found) if isinstance(found, dict) else {}


def write_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Raises StoreError."""
    _write(path, dict(settings))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write(path: Path, value: Any) -> None:
    try:
        write_whole(path, json.dumps(value), mode=0o666)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}; free some space, or make it writable for this user") from error
