"""Finding the steward of a data directory, or starting one. Stands in ``engines``, below the local engine; no torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from pollux.engines.devices import Device
from pollux.engines.leftovers import MARK
from pollux.engines.protocol import LOCK, LOG, PROTOCOL_VERSION, Lines, Message, socket_address, to_line
from pollux.errors import EngineError

START_TIMEOUT_S = 90.0  # importing torch may take long on a busy machine
SEND_TIMEOUT_S = 10.0
MAX_LOG_BYTES = 16 << 20
TAIL_BYTES = 2000
_PAUSE_S = 0.02


class StewardProcess:
    """The steward of one directory, whoever has started it."""

    def __init__(self, directory: Path, options: Mapping[str, str]) -> None:
        self.directory, self.log = directory, directory / LOG
        self._options = dict(options)
        self._child: int | None = None

    def hello(self, devices: Sequence[Device]) -> Message:
        rows = [{"node": device.node, "number": device.number, "gpu": device.gpu} for device in devices]
        return {"op": "hello", "version": PROTOCOL_VERSION, "devices": rows}

    def start(self) -> None:
        """In a session of its own: it outlives this process, and hears nothing of its terminal."""
        with contextlib.suppress(OSError):
            if self.log.stat().st_size > MAX_LOG_BYTES:
                self.log.replace(self.log.with_suffix(".log.1"))
        argv = [sys.executable, "-P", "-m", "pollux.engines.steward", "--directory", str(self.directory)]
        for name, value in self._options.items():
            argv += [f"--{name}", value]
        env = {name: value for name, value in os.environ.items() if name != MARK}
        to_log = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        # Not subprocess: nobody waits for it, and it is no mistake to leave it running.
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
        """Whether a steward that we have started has ended."""
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
        """Whether a steward lives: it holds a lock for as long."""
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


class Link:
    """A connection to a steward. Sending and receiving may be done by different threads."""

    def __init__(self, connection: socket.socket, send_timeout_s: float = SEND_TIMEOUT_S) -> None:
        self._connection, self._lines = connection, Lines()
        self._early: list[Message] = []
        bound = struct.pack("@ll", int(send_timeout_s), int(send_timeout_s % 1 * 1e6))  # a timeval
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)  # of sending alone

    def send(self, message: Message) -> None:
        """Where nobody takes it the connection ends, as half a message may have been sent; :meth:`receive` says so."""
        try:
            self._connection.sendall(to_line(message))
        except OSError:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def receive(self) -> list[Message] | None:
        """What was told, as soon as there is something; None at the end."""
        if self._early:
            early, self._early = self._early, []
            return early
        try:
            data = self._connection.recv(1 << 16)
        except TimeoutError:
            raise
        except OSError:
            return None
        return self._lines.feed(data) if data else None

    def ask(self, hello: Message, deadline: float) -> Message | None:
        """The answer to a hello; None where the steward ends just then."""
        self.send(hello)
        while True:
            while not self._early:
                self._connection.settimeout(max(deadline - time.monotonic(), 0.1))
                try:
                    told = self.receive()
                except TimeoutError:
                    raise EngineError(
                        "the steward took the connection but does not answer; is it frozen? End it with SIGKILL: its "
                        "replicas end with it, and their jobs start again from their checkpoints"
                    ) from None
                if told is None:
                    return None
                self._early = told
            answer = self._early.pop(0)
            if answer["event"] == "refused":
                raise EngineError(answer["reason"])
            if answer["event"] == "state":  # what comes before was meant for whoever listened then
                self._connection.settimeout(None)
                return answer

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes who receives
        self._connection.close()


def end_steward(directory: Path, timeout_s: float) -> bool:
    """End the steward of a directory whose server is gone; its jobs checkpoint and leave. Whether there was one.

    Raises:
        EngineError: it has not ended in time.
    """
    process = StewardProcess(directory.resolve(), {})
    if not process.is_locked():
        return False
    try:
        steward = psutil.Process(int((process.directory / LOCK).read_text()))
        steward.terminate()
        steward.wait(timeout_s)
    except (OSError, ValueError, psutil.NoSuchProcess):
        pass  # it was ending just then
    except psutil.TimeoutExpired:
        raise EngineError(f"the steward has not ended in {timeout_s:g} s; see {process.log}") from None
    return True


def connect(
    process: StewardProcess,
    hello: Message,
    giving_up: threading.Event | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> tuple[Link, Message]:
    """A connection to the steward, which is started if there is none, and its state.

    Raises:
        EngineError: it did not answer in time, ended at once, or speaks another version.
    """
    deadline = time.monotonic() + timeout_s
    num_starts = 0
    while True:
        link = _try_to_connect(process.directory)
        if link is not None:
            state = None
            try:
                state = link.ask(hello, deadline)
            finally:
                if state is None:
                    link.close()
            if state is not None:
                return link, state
        has_ended = process.reap()
        if has_ended and num_starts >= 2 and not process.is_locked():
            raise EngineError(f"the steward ended while starting; {process.log} ends with:\n{process.log_tail()}")
        if not process.is_child and not process.is_locked():
            process.start()
            num_starts += 1
        if time.monotonic() > deadline or (giving_up is not None and giving_up.is_set()):
            raise EngineError(
                f"the steward of {process.directory} does not answer after {timeout_s:g} s; "
                f"{process.log} ends with:\n{process.log_tail()}"
            )
        time.sleep(_PAUSE_S)


def _try_to_connect(directory: Path) -> Link | None:
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
    return Link(connection)
