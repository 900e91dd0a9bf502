"""``python -m pollux.engines.processes.prepare_main FD DIRECTORY COMMAND...``: becomes the command of a job.

Starters put it before the command of a job whose code or packages have to be brought to this node first. What fails is
the end of the replica's stderr, so that users see it. It is the same process: signals and exit codes are the command's.

For a job of another Unix user it begins as root, with nothing of the job's environment: a library or a module that it
names would run as root. That environment is read from a file, FD, and taken on after the change of user.
"""

from __future__ import annotations

import json
import os
import site
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO

from pollux.engines.processes.containers import in_container
from pollux.engines.processes.identity import become, identity_of
from pollux.engines.processes.packages import with_environment
from pollux.engines.processes.trees import die_with
from pollux.engines.processes.workdirs import CODE, code_of, unpack
from pollux.errors import PolluxError

FAILED_CODE = 1
MISSING_CODE = 127
OWN = "-"  # in place of FD: the job's environment is that of the process


def prepared(argv: Sequence[str], directory: str, fd: int | None = None) -> list[str]:
    """The command that prepares ``directory`` and becomes ``argv`` there.

    ``fd``: of the file with the job's environment, which the command inherits; None: it is started with that.
    """
    own = [sys.executable, "-E", "-P", "-m", "pollux.engines.processes.prepare_main", OWN if fd is None else str(fd)]
    return [*own, directory, *argv]


def environment_file(env: Mapping[str, str]) -> IO[bytes]:
    """A file without a name that holds this environment, for :func:`prepared`. Other users cannot open it."""
    if sys.platform == "linux":
        file: IO[bytes] = os.fdopen(os.memfd_create("environment", os.MFD_CLOEXEC), "w+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(json.dumps(dict(env)).encode())
    file.seek(0)
    return file


def main(argv: Sequence[str]) -> int:
    fd, directory, *command = argv
    env, owner = dict(os.environ), os.getppid()
    try:
        if fd != OWN:
            with open(int(fd), "rb") as file:
                env = json.loads(file.read())
        code, identity = code_of(env), identity_of(env)
        env.pop(CODE, None)
        if code is not None and code.workdir:
            unpack(code, directory, env, identity)
        if identity is not None:
            become(identity)  # before packages are built: that runs code of theirs
            die_with(owner)  # which the change of user has undone
            _take_on(env)
        os.chdir(directory)
        if code is not None:
            env = with_environment(code, directory, env)
            command = in_container(code.container, directory, env, command) if code.container else command
    except (PolluxError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return FAILED_CODE
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}; it was looked for from {directory}", file=sys.stderr, flush=True)
        return 126 if isinstance(error, PermissionError) else MISSING_CODE


def _take_on(env: Mapping[str, str]) -> None:
    """And forget what was found in the environment before."""
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = site.USER_BASE = site.USER_SITE = None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
