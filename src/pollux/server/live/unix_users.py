"""What a job needs to run as its owner's Unix user: an environment without the server's secrets, folders of its own.

The job table calls it, in a server that is root. Logs stay root's: a user who could replace them by links would have
root write elsewhere. The data directory is made passable (mode 0711), not readable. So every job's folder has to be
closed by itself: the names of jobs are no secret.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import re
from collections.abc import Mapping
from pathlib import Path

from pollux.errors import StoreError
from pollux.server.live.checkpoint_folders import open_folder, open_parents

# What a login would not set and programs need; nothing else of root's environment is passed on.
_PASSED_ON = re.compile(
    "PATH|LANG|LC_.*|TZ|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV|OMP_NUM_THREADS|(CUDA|NVIDIA|NCCL)_.*"
)
_PASSABLE, _CLOSED = 0o711, 0o700
LOGS = "logs"  # in a job's folder

logger = logging.getLogger(__name__)


def close_folder(job_directory: Path) -> None:
    """Of a job that runs as the server does: its logs and checkpoints are for the server's user alone."""
    try:
        job_directory.mkdir(mode=_CLOSED, parents=True, exist_ok=True)
        job_directory.chmod(_CLOSED)
    except OSError as error:  # a full disk, say: the start of the job says so
        logger.warning("%s cannot be closed to others: %s", job_directory, error)


def environment_of(unix_user: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What jobs of this user begin with."""
    entry = pwd.getpwnam(unix_user)
    own = {"HOME": entry.pw_dir, "USER": unix_user, "LOGNAME": unix_user, "SHELL": entry.pw_shell}
    return {name: value for name, value in environ.items() if _PASSED_ON.fullmatch(name)} | own


def give_folders(unix_user: str, data_directory: Path, job_directory: Path, checkpoints: str) -> None:
    """Make a job's folders so that its user can write checkpoints, and read nothing else of the server.

    Raises:
        StoreError: they cannot be made.
    """
    entry = pwd.getpwnam(unix_user)
    try:
        for folder in (data_directory, job_directory.parent, job_directory):
            folder.mkdir(mode=_PASSABLE, exist_ok=True)
            folder.chmod(_PASSABLE)
        logs = job_directory / LOGS
        logs.mkdir(mode=_CLOSED, exist_ok=True)
        logs.chmod(_CLOSED)
        if "://" not in checkpoints:
            _give(Path(checkpoints), entry.pw_uid, entry.pw_gid)
    except OSError as error:
        raise StoreError(f"folders of user {unix_user} cannot be made: {error}; the server must be root") from error


def _give(checkpoints: Path, user: int, group: int) -> None:
    """Where other users may write in the storage, a link of theirs, or a folder that they have put in the place of one
    of ours, would have root make folders and give them away elsewhere.

    Raises:
        StoreError: one of the folders is another user's.
        OSError: one cannot be made, or is a link.
    """
    with contextlib.ExitStack() as stack:
        _, *ours = open_parents(stack, checkpoints, makes=True).items()
        for path, folder in ours:
            if (owner := os.fstat(folder).st_uid) not in (os.geteuid(), 0):
                raise StoreError(
                    f"{path} is user {owner}'s, who could have checkpoints put elsewhere: remove it, or give it to the "
                    "server's user (chown), and let no others write in the folder of --storage"
                )
        os.fchown(open_folder(stack, ours[-1][1], checkpoints.name, mode=0o700), user, group)
