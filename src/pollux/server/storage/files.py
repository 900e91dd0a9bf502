"""Small files in the data directory: node-seconds, settings; each written whole or not at all.

Also makes the data directory itself, and locks it. A file that cannot be read counts as missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pollux.api.codec import Json, encode
from pollux.errors import DirectoryInUseError, StoreError

LOCK_FILE = "lock"  # held by the server that the directory belongs to
SETTINGS_FILE = "settings.json"
SERVER_FILE = "server.json"  # where the server listens

logger = logging.getLogger(__name__)


def make_directory(directory: Path) -> None:
    """Its owner's alone. A folder that holds other files keeps its mode; so does one that others may pass through."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        if status.st_uid not in (os.geteuid(), 0):
            raise StoreError(
                f"{directory} is user {status.st_uid}'s, who could read and replace what is in it, tokens too; "
                "give it to the server's user (chown), or name another data directory"
            )
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o066:
            if (directory / LOCK_FILE).exists() or not any(directory.iterdir()):
                directory.chmod(0o700)
            else:
                logger.warning("%s can be read by others (mode %o), so the jobs' logs can be", directory, mode)
    except OSError as error:
        raise StoreError(
            f"{directory}: {error.strerror}; a data directory must be a folder that this user can write to"
        ) from error


@contextlib.contextmanager
def locked(directory: Path, *, is_shared: bool = False) -> Iterator[None]:
    """Keep other servers out of a data directory. The lock goes with the process, however that ends; the file stays.

    ``is_shared``: servers that take turns by their database may come in; one that has the directory alone may not.

    Raises:
        DirectoryInUseError: another server has it.
    """
    path = directory / LOCK_FILE
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}; it must be writable for this user") from error
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(descriptor, 20).decode(errors="replace").strip() or "not known yet"
            raise DirectoryInUseError(
                f"{directory} is used by a server with pid {pid}; use that one, end it (pollux down), "
                "or name another data directory"
            ) from None
        except OSError as error:
            raise StoreError(f"{path}: it cannot be locked: {error.strerror}; name a folder on a local disk") from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)


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


def read_seconds(path: Path) -> dict[str, float]:
    """Node-seconds by accelerator."""
    found = _read(path)
    if not isinstance(found, dict):
        return {}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float) and value >= 0}


def write_seconds(path: Path, seconds: Mapping[str, float]) -> None:
    """Raises StoreError."""
    _write(path, dict(seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionSettings:
    """What the last server here decided with. None: not known."""

    policy: str | None = None
    interval_s: float | None = None
    resize_s: float | None = None  # charged for a resize
    node_price: float | None = None
    weights: str | None = None
    p: float | None = None


def read_decision_settings(path: Path) -> DecisionSettings:
    """A setting that was edited into something else counts as missing."""
    found = read_object(path)

    def text(name: str) -> str | None:
        value = found.get(name)
        return value if isinstance(value, str) else None

    def number(name: str) -> float | None:
        value = found.get(name)
        try:
            return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
        except OverflowError:
            return None

    return DecisionSettings(
        policy=text("policy"),
        interval_s=number("interval_s"),
        resize_s=number("resize_s"),
        node_price=number("node_price"),
        weights=text("weights"),
        p=number("p"),
    )


def write_decision_settings(path: Path, settings: DecisionSettings) -> None:
    """Raises StoreError."""
    _write(path, encode(settings))


def read_object(path: Path) -> dict[str, Json]:
    """A JSON object; empty if there is none that can be read."""
    found = _read(path)
    return found if isinstance(found, dict) else {}


def write_object(path: Path, value: Mapping[str, Json]) -> None:
    """Raises StoreError."""
    _write(path, dict(value))


def _read(path: Path) -> Json:
    try:
        found: Json = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def _write(path: Path, value: object) -> None:
    try:
        write_whole(path, json.dumps(value))
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}; free some space, or make it writable for this user") from error
