"""``pollux shell``: a shell, or a command, beside a replica: its folder, its GPU, its Unix user.

The server says where, to the job's owner and to admins, and notes who asked. Entering needs no more rights than the
kernel gives: the caller must be the job's Unix user, or root, who becomes that user first.
"""

from __future__ import annotations

import os
import pwd
import shlex
from typing import Annotated

import typer

from pollux.api.job import ShellPlace
from pollux.cli.connect import DataOption, JobArgument, ServerOption, connect, say
from pollux.engines.processes.identity import RUN_AS, become, boot_id, identity_of, plain_environment
from pollux.errors import PolluxError


def shell(
    name: JobArgument,
    command: Annotated[list[str] | None, typer.Argument(metavar="COMMAND", help="Instead of a shell.")] = None,
    rank: Annotated[int, typer.Option("--rank", metavar="N", help="Beside the replica of this rank.")] = 0,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Open a shell beside a replica, on its machine: in its folder, with its GPU, as its Unix user."""
    with connect(data, server) as client:
        place = client.shell(name, rank)
    words = command or [os.environ.get("SHELL") or "/bin/sh"]
    env = {
        **enter(name, place),
        "CUDA_VISIBLE_DEVICES": place.gpu,
        "POLLUX_JOB_ID": name,
        "POLLUX_CHECKPOINT_DIR": place.checkpoint_dir,
    }
    say(f"beside {place.replica.replica_id} of {name} in {os.getcwd()}: {shlex.join(words)}")
    try:
        os.execvpe(words[0], words, env)
    except OSError as error:
        raise PolluxError(f"{words[0]}: {error.strerror}; name a program that this machine has") from error


def enter(job: str, place: ShellPlace) -> dict[str, str]:
    """Become the replica's user and go to its folder; the environment to go on with.

    A user can read the environment of all processes that are theirs, so root's is left behind.

    Raises:
        PolluxError: it is on another machine, has just ended, or is another user's.
    """
    pid, env = place.replica.pid, dict(os.environ)
    if not place.boot_id or place.boot_id != boot_id():
        raise PolluxError(f"job {job} runs on {place.replica.node}, which is not this machine: run pollux shell there")
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
        if os.geteuid() == 0 and place.unix_user:
            identity = identity_of({RUN_AS: place.unix_user})
            if identity is None or identity.uid != owner:
                raise PolluxError(f"process {pid} is not of {place.unix_user}: the replica has just ended; try again")
            become(identity)
            home = pwd.getpwuid(identity.uid).pw_dir
            own = {"HOME": home, "USER": identity.name, "LOGNAME": identity.name}
            env = {**plain_environment(env), **own, "TERM": env.get("TERM", "dumb")}
        if os.geteuid() != owner:
            raise PolluxError(f"the processes of job {job} are of user id {owner}: run pollux shell as that user")
        os.chdir(os.readlink(f"/proc/{pid}/cwd"))
        return env
    except OSError as error:
        raise PolluxError(f"replica {place.replica.replica_id} cannot be entered: {error}") from error
