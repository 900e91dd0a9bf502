"""Removes jobs that ended long ago: their rows, logs and checkpoints. The route of ``pollux prune`` calls it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from pollux.api.cluster import Pruned
from pollux.server.live.checkpoint_folders import open_parents
from pollux.server.live.job_table import JobTable
from pollux.server.storage.retention import count_rows, ended_before, forget
from pollux.server.storage.store import SqlStore

_BLOCK = 512  # of st_blocks

logger = logging.getLogger(__name__)


class Retention:
    """Any thread may call. ``now``: the cluster's time."""

    def __init__(self, jobs: JobTable, store: SqlStore, now: Callable[[], float]) -> None:
        self._jobs, self._store, self._now = jobs, store, now

    def prune(self, older_than_s: float, *, is_dry_run: bool) -> Pruned:
        """Remove jobs that ended longer ago than that, or say which would go.

        Files go first: what is broken off in between is found again by its rows.
        """
        wanted = {name for job in self._jobs.active if job.request is not None for name in job.request.waits_for}
        old = ended_before(self._store, self._now() - older_than_s)
        names = [name for name in old if name not in wanted and name not in self._jobs]
        log_bytes = sum(_size(self._jobs.directory_of(name) / "logs") for name in names)
        checkpoints = {name: self._jobs.checkpoints_of(name) for name in names}
        remote = any("://" in place for place in checkpoints.values())
        checkpoint_bytes = sum(_size(Path(place)) for place in checkpoints.values() if "://" not in place)
        num_rows = count_rows(self._store, names)
        if not is_dry_run and names:
            self._store.require_leader()
            for name in names:
                if "://" not in checkpoints[name]:
                    _remove_checkpoints(Path(checkpoints[name]))
                _remove(self._jobs.directory_of(name))
            forget(self._store, names)
            self._jobs.forget(names)
            logger.info("pruned %d jobs that ended more than %g s ago, and %d rows", len(names), older_than_s, num_rows)
        return Pruned(
            names=tuple(names),
            num_rows=num_rows,
            log_bytes=log_bytes,
            checkpoint_bytes=checkpoint_bytes,
            num_kept=len(old) - len(names),
            leaves_remote_checkpoints=remote,
        )


def _size(folder: Path) -> int:
    """On the disk; links are not followed."""
    total = 0
    try:
        for _, _, files, descriptor in os.fwalk(folder, follow_symlinks=False):
            for name in files:
                total += os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_blocks * _BLOCK
    except OSError:  # gone, or never there
        pass
    return total


def _remove(folder: Path) -> None:
    """Jobs of other users write there: a link in it, or in its place, is removed and not followed."""
    try:
        if folder.is_symlink():
            folder.unlink()
        elif folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        logger.warning("%s is left: %s", folder, error)


def _remove_checkpoints(folder: Path) -> None:
    """Nor is a link followed that is on the way there from the storage. The job's folder goes, too, if it is empty."""
    try:
        with contextlib.ExitStack() as stack:
            *_, server, job = open_parents(stack, folder, makes=False).values()
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISDIR(os.stat(folder.name, dir_fd=job, follow_symlinks=False).st_mode):
                    shutil.rmtree(folder.name, dir_fd=job)
                else:
                    os.unlink(folder.name, dir_fd=job)
            if not os.listdir(job):
                os.rmdir(folder.parent.name, dir_fd=server)
    except FileNotFoundError:
        return  # there never were any
    except OSError as error:
        logger.warning("%s is left: %s", folder, error)
