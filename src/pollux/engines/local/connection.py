"""Finds the supervisor of a data directory, or starts one. Called by the local engine and by the CLI."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import psutil

from pollux.engines.local.files import LOCK, LOG, socket_address
from pollux.engines.local.secret import proof_of, read_secret
from pollux.engines.logs import rotate
from pollux.engines.messages import VERSIONS, ask
from pollux.engines.processes.devices import Device
from pollux.engines.processes.leftovers import MARK
from pollux.engines.transport import Channel, Message
from pollux.errors import EngineError

START_TIMEOUT_S = 90.0  # importing torch may take long on a busy machine
TAIL_BYTES = 2000
_PAUSE_S = 0.02
_NOT_FOR_JOBS = (MARK, "PGPASSWORD", "PGPASSFILE")  # the server's way into its database


class SupervisorProcess:
    """The supervisor of one directory, started by this process or by another."""

    def __init__(self, directory: Path, options: Mapping[str, str]) -> None:
        self.directory, self.log = directory, directory / LOG
        self._options = dict(options)
        self._child: int | None = None

    def hello(self, devices: Sequence[Device], epoch: int) -> Message:
        rows = [asdict(device) for device in devices]
        return {"op": "hello", **VERSIONS, "epoch": epoch, "devices": rows}

    def start(self) -> None:
        """In a session of its own: it outlives this process, and hears nothing of its terminal."""
        rotate(self.log)
        argv = [sys.executable, "-P", "-m", "pollux.engines.local.supervisor", "--directory", str(self.directory)]
        for name, value in self._options.items():
            argv += [f"--{name}", value]
        env = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_JOBS}
        to_log = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        # Not subprocess, which would warn that it is left running.
        self._child = os.posix_spawn(
            sys.executable,
            argv,
            env,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(self.log), to_log, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )

    def reap(self) -> bool:
        """Whether a supervisor that we have started has ended."""
        if self._child is None:
            return False
        try:
            has_ended = os.waitpid(self._child, os.WNOHANG)[0] != 0
        except ChildProcessError:
            has_ended = True
        if has_ended:
            self._child = None
        return has_ended

    def end(self, timeout_s: float = 10.0) -> None:
        """One that we have started and never spoke to. The number is its own until it is reaped."""
        for signum in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + timeout_s
            if self._child is None or self.reap():
                return
            os.kill(self._child, signum)
            while not self.reap() and time.monotonic() < deadline:
                time.sleep(_PAUSE_S)

    @property
    def is_child(self) -> bool:
        return self._child is not None

    def is_locked(self) -> bool:
        """Whether a supervisor lives: it holds a lock for as long."""
        try:
            held = os.open(self.directory / LOCK, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(held)
        return False

    def log_tail(self) -> str:
        try:
            return self.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip() or "(nothing)"
        except OSError as error:
            return f"({error})"


def end_supervisor(directory: Path, timeout_s: float) -> bool:
    """End the supervisor of a directory whose server is gone; its jobs checkpoint and leave. Whether there was one.

    Raises:
        EngineError: it has not ended in time.
    """
    process = SupervisorProcess(directory.resolve(), {})
    if not process.is_locked():
        return False
    try:
        supervisor = psutil.Process(int((process.directory / LOCK).read_text()))
        supervisor.terminate()
        supervisor.wait(timeout_s)
    except (OSError, ValueError, psutil.NoSuchProcess):
        pass  # it was ending just then
    except psutil.TimeoutExpired:
        raise EngineError(f"the supervisor has not ended in {timeout_s:g} s; see {process.log}") from None
    return True


def connect(
    process: SupervisorProcess,
    hello: Message,
    giving_up: threading.Event | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> tuple[Channel, Message]:
    """A connection to the supervisor, which is started if there is none, and its state.

    Raises:
        EngineError: it did not answer in time, ended at once, refused the hello, or speaks another version.
    """
    deadline = time.monotonic() + timeout_s
    num_starts = 0
    while True:
        channel = _try_to_connect(process.directory)
        if channel is not None:
            state = None
            try:
                state = _introduce(channel, process.directory, hello, deadline)
            finally:
                if state is None:
                    channel.close()
            if state is not None:
                return channel, state
        has_ended = process.reap()
        if has_ended and num_starts >= 2 and not process.is_locked():
            raise EngineError(f"the supervisor ended while starting; {process.log} ends with:\n{process.log_tail()}")
        if not process.is_child and not process.is_locked():
            process.start()
            num_starts += 1
        if time.monotonic() > deadline or (giving_up is not None and giving_up.is_set()):
            raise EngineError(
                f"the supervisor of {process.directory} does not answer after {timeout_s:g} s; "
                f"{process.log} ends with:\n{process.log_tail()}"
            )
        time.sleep(_PAUSE_S)


def _introduce(channel: Channel, directory: Path, hello: Message, deadline: float) -> Message | None:
    """The supervisor's state, after it has seen that we know its secret; None where it ends just then."""
    challenge = ask(channel, None, "challenge", deadline)
    if challenge is None:
        return None
    # It is read after the connection: the supervisor that listens has written it before.
    proof = proof_of(read_secret(directory), str(challenge["nonce"]))
    return ask(channel, {**hello, "proof": proof}, "state", deadline)


def _try_to_connect(directory: Path) -> Channel | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket_address(directory) as address:
            connection.connect(address)
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    return Channel(connection)
