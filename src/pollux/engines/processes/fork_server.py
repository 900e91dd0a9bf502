"""Starts replicas by forking a process that has imported torch already: 0.8 s instead of 10.

:class:`ForkServer` starts and commands that process, :mod:`pollux.engines.processes.fork_main`, over a socket:

    {"op": "spawn", "id", "argv": [script, ...] or ["-m", module, ...], "env", "cwd", "stdout", "stderr"}
    {"op": "signal", "id", "signum", "group": whole process group?}      {"op": "stop"}
    {"event": "ready"}   {"event": "spawned", "id", "pid"}   {"event": "exited", "id", "pid", "code"}
    {"event": "error", "id", "message"}

What is asked before it is ready waits on this side, so that a replica that is not wanted any more ends at once.
Replicas end with their fork server, and that ends when this side of the socket is closed. It is a
:class:`~pollux.engines.processes.starters.Starter`, for scripts of our own interpreter.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping

from pollux.engines.processes.starters import (
    MISSING_CODE,
    Command,
    EventKind,
    LocalStarter,
    ReplicaProcess,
    StarterEvent,
)
from pollux.engines.processes.trees import kill_group
from pollux.engines.transport import Channel, Message
from pollux.errors import MembershipError

TERM_GRACE_S = 5.0
MAX_FAILED_STARTS = 3  # fork servers in a row that ended while they started: it is no accident then


class ForkServer(LocalStarter):
    """The client of one fork server. It is started at once, and again by ``spawn`` should it have died."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._replicas: dict[str, ReplicaProcess] = {}
        self._num_spawned = self._num_failed_starts = 0
        self._events: list[StarterEvent] = []
        self._unsent: list[Message] = []  # until it is ready
        self._start()

    def _start(self) -> None:
        self._is_ready = False
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        with theirs:
            # One BLAS thread: OpenBLAS starts its pool on import, and a forking process should have one thread.
            env = {**self._environment, "OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
            env.pop("OMP_NUM_THREADS", None)
            # -P: the current folder must not shadow the modules that are imported there for all replicas.
            argv = [sys.executable, "-P", "-m", "pollux.engines.processes.fork_main", "--fd", str(theirs.fileno())]
            self._process = subprocess.Popen(
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_starting(self) -> bool:
        """Whether a replica would wait for its imports. As ``poll`` has seen it."""
        return not self._is_ready and self._channel.fileno() >= 0

    def wait_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._is_ready:
            self._receive(max(deadline - time.monotonic(), 0.0))
            if self._channel.fileno() < 0:
                raise MembershipError(
                    f"the fork server ended while starting (exit code {self._process.returncode}): see its stderr"
                )
            if not self._is_ready and time.monotonic() >= deadline:
                raise MembershipError(
                    f"the fork server was not ready after {timeout_s:g} s: is the machine overloaded?"
                )

    def spawn(self, command: Command) -> ReplicaProcess:
        if self._channel.fileno() < 0:
            self._start()
        self._num_spawned += 1
        replica = ReplicaProcess(key=str(self._num_spawned))
        self._replicas[replica.key] = replica
        plain = {"argv": list(command.argv), "env": dict(command.env), "cwd": command.cwd}
        self._send({"op": "spawn", "id": replica.key, "stdout": command.stdout, "stderr": command.stderr, **plain})
        return replica

    def signal(self, replica: ReplicaProcess, signum: int, *, group: bool | None = None) -> None:
        if replica.exit_code is not None:
            return
        if not self._is_ready and signum in (signal.SIGKILL, signal.SIGTERM):  # it ends now, before it began
            self._unsent = [message for message in self._unsent if message["id"] != replica.key]
            del self._replicas[replica.key]
            replica.exit_code = -signum
            self._events.append(StarterEvent(kind="exited", replica=replica))
            return
        group = signum == signal.SIGKILL if group is None else group
        self._send({"op": "signal", "id": replica.key, "signum": int(signum), "group": group})

    def _send(self, message: Message) -> None:
        if self._is_ready:
            self._channel.queue(message)
        else:
            self._unsent.append(message)

    def poll(self) -> list[StarterEvent]:
        self._receive(0.0)
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        if not self._is_ready:
            self._lose()  # it has no replicas yet, and would not listen before it has imported everything
        elif self._channel.fileno() >= 0:
            self._channel.queue({"op": "stop"})
            deadline = time.monotonic() + TERM_GRACE_S + 2.0
            while self._channel.fileno() >= 0 and (left := deadline - time.monotonic()) > 0:
                self._receive(left)
            self._lose()

    def _receive(self, timeout_s: float) -> None:
        while self._channel.fileno() >= 0:
            messages = self._channel.receive(timeout_s)
            if messages is None:
                self._lose()
                return
            if not messages:
                return
            for message in messages:
                self._take(message)
            timeout_s = 0.0

    def _take(self, event: Message) -> None:
        kind: EventKind = event["event"]
        if kind == "ready":
            self._is_ready, self._num_failed_starts = True, 0
            for message in self._unsent:
                self._channel.queue(message)
            self._unsent.clear()
        replica = self._replicas.get(event.get("id", ""))
        if replica is not None and kind == "spawned":
            replica.pid = event["pid"]
        if replica is not None and (kind == "exited" or (kind == "error" and replica.pid is None)):
            replica.exit_code = event.get("code", MISSING_CODE)
            del self._replicas[replica.key]
        self._events.append(StarterEvent(kind=kind, replica=replica, message=event.get("message", "")))

    def _lose(self) -> None:
        """The server is gone or must go: its replicas die with it, and their own children by our hand."""
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0 if self._is_ready else 0.0)
        self._process.kill()
        self._process.wait()
        self._num_failed_starts += not self._is_ready
        for replica in self._replicas.values():
            if replica.pid is not None:
                kill_group(replica.pid)
            replica.exit_code, replica.is_orphan = -signal.SIGKILL, self._num_failed_starts < MAX_FAILED_STARTS
            self._events.append(StarterEvent(kind="exited", replica=replica, message="its fork server died"))
        self._replicas.clear()
        self._unsent.clear()
