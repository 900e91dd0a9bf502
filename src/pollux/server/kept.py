"""Small things that outlive a server, each in a file of its own: which nodes are drained, what they have cost,
how it decided.

Stands in ``server``, below :mod:`pollux.server.cluster`. Written whole or not at all; what cannot be read is nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pollux.errors import StoreError

SETTINGS_FILE = "settings.json"


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
    """What the last server here decided with: policy, interval_s, resize_s (what a resize is charged), node_price."""
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
    beside = path.with_name(f"{path.name}.new")
    try:
        beside.write_text(json.dumps(value), encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}; free some space, or make it writable for this user") from error
