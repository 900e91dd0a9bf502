"""The process that owns all replicas of a machine, so that they train on when the server is gone.

``python -m pollux.engines.steward --directory D`` listens on a socket in D and does what :mod:`pollux.engines.protocol`
says; :mod:`pollux.engines.keeper` does it. One thread and one client: a new connection takes the place of the old one.
It ends when it has had nothing to do for long, and with SIGTERM when all jobs have left; its death ends its replicas.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pollux.engines.devices import Device
from pollux.engines.keeper import GRACE_S, Keeper
from pollux.engines.leftovers import MARK, kill_leftovers, mark_of
from pollux.engines.protocol import LOCK, PROTOCOL_VERSION, SOCKET, Lines, Message, socket_address, to_line
from pollux.engines.space import MIN_FREE_BYTES, SpaceWatch, free_bytes
from pollux.errors import PolluxError

BUSY_PERIOD_S = 0.015  # while anything is on its way
CALM_PERIOD_S = 0.05  # while jobs just train
IDLE_PERIOD_S = 1.0
QUIET_S = 0.3
IDLE_S = 600.0

logger = logging.getLogger(__name__)


class Steward:
    """The caller holds the directory's :func:`lock`."""

    def __init__(
        self,
        directory: Path,
        *,
        idle_s: float = IDLE_S,
        min_free_bytes: int = MIN_FREE_BYTES,
        free_at: Callable[[str], int] = free_bytes,
    ) -> None:
        self._directory, self._idle_s = directory, idle_s
        self._keeper = Keeper(directory, SpaceWatch(min_free_bytes, free_at), self._say)
        self._selector = selectors.DefaultSelector()
        self._listener = _listen(directory)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._client: socket.socket | None = None
        self._lines, self._out = Lines(), b""
        self._is_introduced = self._is_closing = False
        self._idle_since = self._heard_at = time.monotonic()

    def serve(self) -> None:
        """Until there has been nothing to do for long, or somebody asks to end."""
        while not self._is_done():
            self.turn()
            # So that the first job starts fast. A client's first questions are not to wait for it.
            if self._is_introduced and not self._out and time.monotonic() - self._heard_at > QUIET_S:
                self._keeper.warm_up()

    def shut_down(self, grace_s: float = GRACE_S) -> None:
        """Let every job checkpoint and leave; :meth:`serve` returns when all have."""
        self._is_closing = True
        self._keeper.shut_down(grace_s)

    def close(self) -> None:
        self._keeper.close()
        self._flush()
        self._drop_client()
        self._selector.close()
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            (self._directory / SOCKET).unlink()

    def turn(self) -> None:
        for key, _ in self._selector.select(self._period_s()):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._client:
                self._hear()
        self._keeper.turn()
        self._flush()

    def _period_s(self) -> float:
        if self._out or not self._keeper.is_calm:
            return BUSY_PERIOD_S
        if self._keeper.num_living or not self._keeper.is_warm:
            return CALM_PERIOD_S
        return min(IDLE_PERIOD_S, self._idle_s)

    def _is_done(self) -> bool:
        if self._keeper.num_living:
            self._idle_since = time.monotonic()
            return False
        if self._client is not None:
            self._idle_since = time.monotonic()
        return self._is_closing or time.monotonic() - self._idle_since > self._idle_s

    # --- the client -----------------------------------------------------------------------------------------------

    def _obey(self, message: Message) -> None:
        op = message["op"]
        if op == "hello":
            self._greet(message)
        elif not self._is_introduced:
            raise PolluxError(f"{op} before a hello")
        elif op == "start":
            self._keeper.start(message)
        elif op == "resize":
            self._keeper.resize(message)
        elif op == "stop":
            self._keeper.stop(message)
        elif op == "forget":
            self._keeper.forget(message)
        elif op == "shutdown":
            self.shut_down(float(message["grace_s"]))
        else:
            raise PolluxError(f"nobody knows the op {op!r}")

    def _greet(self, message: Message) -> None:
        if message["version"] != PROTOCOL_VERSION:
            reason = (
                f"the steward (pid {os.getpid()}) that looks after the jobs in {self._directory} speaks version "
                f"{PROTOCOL_VERSION} of its protocol, and was asked in version {message['version']}: use the Pollux "
                "that started it, or end it with SIGTERM (its jobs checkpoint, and start again later)"
            )
            self._out += to_line({"event": "refused", "version": PROTOCOL_VERSION, "reason": reason})
            return
        rows = [Device(node=row["node"], number=row["number"], gpu=row["gpu"]) for row in message["devices"]]
        self._keeper.use(rows)
        self._is_introduced = True
        state = {"version": PROTOCOL_VERSION, "pid": os.getpid(), "jobs": self._keeper.state()}
        self._say({"event": "state", **state})

    def _say(self, message: Message) -> None:
        """To whoever listens. Who comes later asks for the state."""
        if self._is_introduced:
            self._out += to_line(message)

    def _flush(self) -> None:
        if self._client is None or not self._out:
            return
        try:
            self._out = self._out[self._client.send(self._out) :]
        except BlockingIOError:
            pass
        except OSError:
            self._drop_client()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            if self._client is not None:
                logger.info("a new client takes the place of the old one")
                self._out += to_line({"event": "replaced"})
                self._flush()
                self._drop_client()
            client.setblocking(False)
            self._client, self._lines, self._out, self._is_introduced = client, Lines(), b"", False
            self._selector.register(client, selectors.EVENT_READ)

    def _hear(self) -> None:
        assert self._client is not None
        try:
            data = self._client.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop_client()
            return
        self._heard_at = time.monotonic()
        try:
            messages = self._lines.feed(data)
        except ValueError:
            logger.exception("no JSON; the connection is closed")
            self._drop_client()
            return
        for message in messages:
            try:
                self._obey(message)
            except Exception as error:  # whatever is asked, the replicas train on
                logger.exception("not understood: %s", str(message)[:500])
                if isinstance(message, dict) and message.get("op") in ("start", "resize"):
                    place = {"job": message.get("job"), "generation": message.get("generation")}
                    self._say({"event": "lost", **place, "reason": f"it cannot be placed: {error}"})

    def _drop_client(self) -> None:
        if self._client is not None:
            self._selector.unregister(self._client)
            self._client.close()
            self._client, self._is_introduced, self._out = None, False, b""


def _listen(directory: Path) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        (directory / SOCKET).unlink()  # an earlier steward's, which is dead: we hold the lock
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old_mask = os.umask(0o177)
    try:
        with socket_address(directory) as address:
            listener.bind(address)
    finally:
        os.umask(old_mask)
    listener.listen(8)
    listener.setblocking(False)
    return listener


def lock(directory: Path) -> int | None:
    """A descriptor that holds the steward's lock until it is closed; None while another holds it."""
    held = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        return None
    os.truncate(held, 0)
    os.pwrite(held, f"{os.getpid()}\n".encode(), 0)
    return held


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pollux.engines.steward", description="owns a machine's replicas")
    parser.add_argument("--directory", type=Path, required=True, help="the data directory")
    parser.add_argument("--idle-s", type=float, default=IDLE_S, help="end after so long without jobs and clients")
    parser.add_argument("--min-free-bytes", type=int, default=MIN_FREE_BYTES, help="jobs pause with less on the disk")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    directory = options.directory.resolve()
    os.chdir(directory)
    held = lock(directory)
    if held is None:
        print(f"another steward looks after {directory}", file=sys.stderr)
        return 1
    mark = mark_of(directory)
    if killed := kill_leftovers(mark):
        logger.info("killed what an earlier steward left behind: %s", killed)
    os.environ[MARK] = mark  # for all that is started from here
    steward = Steward(directory, idle_s=options.idle_s, min_free_bytes=options.min_free_bytes)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: steward.shut_down())
    try:
        steward.serve()
    finally:
        steward.close()
        os.close(held)
    return 0


if __name__ == "__main__":
    sys.exit(main())
