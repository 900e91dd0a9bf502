"""Opens the folders between a storage and a job's checkpoints, each by itself, and follows no link.

Other users may be allowed to write in a storage. What root makes, gives away or removes in it by a path could be
anywhere, if one of them has put a link into that path. :mod:`~pollux.server.live.unix_users` and
:mod:`~pollux.server.live.retention` call it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

DEPTH = 3  # of checkpoints below the storage or data directory: the server's folder, the job's, and they
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def open_parents(stack: contextlib.ExitStack, checkpoints: Path, *, makes: bool) -> dict[Path, int]:
    """Descriptors of the storage, the server's folder in it and the job's. ``makes``: those that are missing, too.

    Raises:
        OSError: one is missing, cannot be made, or is a link.
    """
    path = checkpoints.parents[DEPTH - 1]
    if makes:
        path.mkdir(parents=True, exist_ok=True)
    folder = os.open(path, _FOLDER)
    stack.callback(os.close, folder)
    opened = {path: folder}
    for name in checkpoints.parts[-DEPTH:-1]:
        path /= name
        opened[path] = folder = open_folder(stack, folder, name, mode=0o755 if makes else None)
    return opened


def open_folder(stack: contextlib.ExitStack, parent: int, name: str, *, mode: int | None) -> int:
    """``mode``: to make it with, if it is missing; None: it is not made. Raises OSError as above."""
    if mode is not None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, mode, dir_fd=parent)
    folder = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
    stack.callback(os.close, folder)
    return folder
