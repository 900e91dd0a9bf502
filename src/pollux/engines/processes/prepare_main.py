"""``python -m pollux.engines.processes.prepare_main DIRECTORY COMMAND...``: becomes the command of a job.

Starters put it before the command of a job whose code or packages have to be brought to this node first. What fails is
the end of the replica's stderr, so that users see it. It is the same process: signals and exit codes are the command's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from pollux.engines.processes.identity import become, identity_of
from pollux.engines.processes.packages import activated, environment_for
from pollux.engines.processes.workdirs import CODE, code_of, unpack
from pollux.errors import PolluxError

FAILED_CODE = 1
MISSING_CODE = 127


def prepared(argv: Sequence[str], directory: str) -> list[str]:
    """The command that prepares ``directory`` and becomes ``argv`` there."""
    return [sys.executable, "-E", "-P", "-m", "pollux.engines.processes.prepare_main", directory, *argv]


def main(argv: Sequence[str]) -> int:
    directory, *command = argv
    env = dict(os.environ)
    try:
        code, identity = code_of(env), identity_of(env)
        if code is not None and code.workdir:
            unpack(code, directory, env, identity)
        if identity is not None:
            become(identity)  # before packages are built: that runs code of theirs
        os.chdir(directory)
        if code is not None and code.pip:
            env = activated(env, environment_for(code, directory))
    except (PolluxError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return FAILED_CODE
    env.pop(CODE, None)
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}; it was looked for from {directory}", file=sys.stderr, flush=True)
        return 126 if isinstance(error, PermissionError) else MISSING_CODE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
