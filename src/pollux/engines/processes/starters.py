"""Starting the processes of replicas: what every starter does, and the one that starts a new process each time.

:class:`~pollux.engines.processes.fork_server.ForkServer` and :class:`~pollux.engines.ray.starter.RayStarter` are the
other starters. Elastic and fixed jobs call them. A starter has no thread: its owner calls ``poll`` often.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from pollux.engines.processes.failure import read_end
from pollux.engines.processes.identity import identity_of, plain_environment
from pollux.engines.processes.leftovers import MARK, REPLICA
from pollux.engines.processes.prepare_main import environment_file, prepared
from pollux.engines.processes.trees import (
    dying_with_parent,
    has_ended,
    has_ended_child,
    has_group,
    kill_group,
    reap,
    signal_politely,
    signal_tree,
)
from pollux.engines.processes.workdirs import CODE

MISSING_CODE = 127  # what a shell says of a command that cannot be started

EventKind = Literal["ready", "spawned", "exited", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StarterEvent:
    kind: EventKind
    replica: ReplicaProcess | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """``python argv...`` with this environment and no other; its output is appended to the two files.

    A starter may take ``argv`` for a whole command instead.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    stdout: str
    stderr: str
    node: str = ""  # where; for starters of many machines


@dataclass(slots=True, kw_only=True, eq=False)
class ReplicaProcess:
    """A started process of a replica, kept up to date by ``poll`` of its starter.

    ``exit_code`` is negative for a signal.
    """

    key: str
    pid: int | None = None
    exit_code: int | None = None
    is_orphan: bool = False  # it ended because its starter did, not by anything of its own


class Starter(Protocol):
    def wait_ready(self, timeout_s: float) -> None:
        """Until spawning is fast; spawning before is allowed."""

    def spawn(self, command: Command) -> ReplicaProcess: ...

    def signal(self, replica: ReplicaProcess, signum: int, *, group: bool | None = None) -> None:
        """``group``: also to all that it started. By default for SIGKILL alone: its workers must not see SIGTERM."""

    def poll(self) -> list[StarterEvent]:
        """What happened since the last call. Does not wait."""

    def close(self) -> None:
        """Ends every replica that is left."""

    def make_folder(self, path: str) -> None:
        """Where replicas write their output."""

    def stderr_tail(self, stderr: str) -> str:
        """The end of what a replica that has ended wrote to this file; "" if that cannot be known."""


class LocalStarter:
    """What the starters of one machine have in common."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError

    def make_folder(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def stderr_tail(self, stderr: str) -> str:
        return read_end(stderr)


class ColdStarter(LocalStarter):
    """Every replica is a new process: ``prefix`` and its argv. By default an interpreter; () for whole commands."""

    def __init__(self, prefix: Sequence[str] = (sys.executable,)) -> None:
        self._prefix = list(prefix)
        self._asked: set[int] = set()  # shells whose commands have been asked to end
        self._replicas: dict[int, tuple[ReplicaProcess, subprocess.Popen[bytes]]] = {}
        self._events = [StarterEvent(kind="ready")]
        self._num_spawned = 0

    def wait_ready(self, timeout_s: float) -> None:
        """Always is."""

    def spawn(self, command: Command) -> ReplicaProcess:
        self._num_spawned += 1
        replica = ReplicaProcess(key=str(self._num_spawned))
        try:
            process = self._start(command)
        except OSError as error:
            with contextlib.suppress(OSError), open(command.stderr, "a", encoding="utf-8") as err_file:
                print(f"cannot start {command.argv[0]} in {command.cwd}: {error}", file=err_file)
            replica.exit_code = MISSING_CODE
            self._events.append(StarterEvent(kind="error", replica=replica, message=str(error)))
            return replica
        replica.pid = process.pid
        self._replicas[process.pid] = replica, process
        self._events.append(StarterEvent(kind="spawned", replica=replica))
        return replica

    def _start(self, command: Command) -> subprocess.Popen[bytes]:
        """Raises OSError."""
        identity = identity_of(command.env)
        argv, cwd, env = [*self._prefix, *command.argv], command.cwd, command.env
        directory = ""  # where it goes by itself
        with contextlib.ExitStack() as files:
            fds: list[int] = []
            if CODE in env and identity is not None:
                # Until it changes to that user itself, it is root: it must not be started with what a job asked for.
                fds = [files.enter_context(environment_file(env)).fileno()]
                argv, cwd, identity = prepared(argv, cwd, fds[0]), "/", None
                marks = {name: env[name] for name in (MARK, REPLICA) if name in env}
                env = {**plain_environment(os.environ), **marks}
            elif CODE in env:
                argv, cwd = prepared(argv, cwd), "/"
            elif identity is not None:
                directory, cwd = cwd, "/"  # root would get into folders that are closed to this user
            return subprocess.Popen(
                dying_with_parent(argv, directory),
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=files.enter_context(open(command.stdout, "ab")),
                stderr=files.enter_context(open(command.stderr, "ab")),
                pass_fds=fds,
                start_new_session=True,
                user=None if identity is None else identity.uid,
                group=None if identity is None else identity.gid,
                extra_groups=None if identity is None else identity.groups,
            )

    def signal(self, replica: ReplicaProcess, signum: int, *, group: bool | None = None) -> None:
        if replica.exit_code is not None or replica.pid is None:
            return
        if signum == signal.SIGKILL or group:
            signal_tree(replica.pid, signum)
        else:
            if signal_politely(replica.pid, signum):
                self._asked.add(replica.pid)

    def poll(self) -> list[StarterEvent]:
        # Many jobs share a starter and each looks at it in every turn: one question for all, while none has ended.
        ended = list(self._replicas.items()) if self._replicas and has_ended_child() else []
        for pid, (replica, process) in ended:
            # Such a shell ends before its commands, which may have something to save.
            if pid in self._asked and has_ended(pid) and has_group(pid):
                continue
            if (code := reap(pid)) is not None:
                self._asked.discard(pid)
                replica.exit_code = process.returncode = code
                del self._replicas[pid]
                self._events.append(StarterEvent(kind="exited", replica=replica))
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        for pid in self._replicas:
            kill_group(pid)
        while self._replicas:
            self._events.extend(self.poll())
            time.sleep(0.01)
