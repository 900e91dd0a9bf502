"""Finds out whether a node can use the storage of checkpoints. The Ray supervisor and the node agents call it."""

from __future__ import annotations

import os
import tempfile


def write_probe(storage: str | None, cluster: str) -> str | None:
    """What nodes look for: a file in the storage, which only nodes that share it see; of a URL, the URL itself."""
    if storage is None or "://" in storage:
        return storage
    os.makedirs(storage, exist_ok=True)
    path = os.path.join(storage, f".pollux-{cluster}")
    # A link in its place would have root write over another file.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o644), "w", encoding="utf-8") as file:
        file.write("Pollux looks for this file to see whether a node shares this folder.\n")
    return path


def storage_problem(probe: str) -> str:
    """Why this node cannot use the storage; "" if it can. ``probe``: see :func:`write_probe`."""
    if "://" in probe:
        return _url_problem(probe)
    folder = os.path.dirname(probe)
    try:
        with open(probe, "rb") as file:
            file.read(1)
    except FileNotFoundError:
        return f"it does not see the storage at {folder}: mount the same folder there on every node"
    except OSError as error:
        return f"it cannot read the storage at {folder}: {error.strerror}"
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".pollux-probe-") as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return f"it cannot write to the storage at {folder}: {error.strerror}"
    return ""


def _url_problem(url: str) -> str:
    """A package that is missing. Whether the storage answers is not asked: it may need a job's own credentials."""
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError:
        return f"storage at {url} needs the package fsspec, which is not installed on it"
    try:
        fsspec.get_filesystem_class(url.partition("://")[0])
    except (ImportError, ValueError) as error:
        return f"storage at {url} cannot be used on it: {error}"
    return ""
