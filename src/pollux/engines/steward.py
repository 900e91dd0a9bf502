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

from pollux.engines.desk import Desk
from pollux.engines.keeper import GRACE_S, Keeper
from pollux.engines.leftovers import MARK, kill_leftovers, mark_of
from pollux.engines.protocol import LOCK, SOCKET, Lines, Message, socket_address, to_line
from pollux.engines.space import MIN_FREE_BYTES, SpaceWatch, free_bytes

BUSY_PERIOD_S = 0.015  # while anything is on its way
CALM_PERIOD_S = 0.05  # while jobs just train
IDLE_PERIOD_S = 1.0
QUIET_S = 1.0
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
        keeper = Keeper(directory, SpaceWatch(min_free_bytes, free_at), lambda message: self._desk.say(message))
        self._keeper, self._desk = keeper, Desk(keeper, self._send, where=str(directory))
        self._selector = selectors.DefaultSelector()
        self._listener = _listen(directory)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._client: socket.socket | None = None
        self._lines, self._out = Lines(), b""
        self._idle_since = self._heard_at = time.monotonic()

    def serve(self) -> None:
        """Until there has been nothing to do for long, or somebody asks to end."""
        while not self._is_done():
            self.turn()
            # Neither a client's first questions are to wait for it, nor jobs that can do without.
            if self._desk.is_introduced and self._is_quiet():
                self._keeper.warm_up()

    def shut_down(self, grace_s: float = GRACE_S) -> None:
        """Let every job checkpoint and leave; :meth:`serve` returns when all have."""
        self._desk.shut_down(grace_s)

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

    def _is_quiet(self) -> bool:
        has_work = self._out or self._keeper.num_living or self._desk.is_closing
        return not has_work and time.monotonic() - self._heard_at > QUIET_S

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
        return self._desk.is_closing or time.monotonic() - self._idle_since > self._idle_s

    # --- the client -----------------------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
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
            self._client, self._lines, self._out, self._desk.is_introduced = client, Lines(), b"", False
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
            self._desk.obey(message)

    def _drop_client(self) -> None:
        if self._client is not None:
            self._selector.unregister(self._client)
            self._client.close()
            self._client, self._desk.is_introduced, self._out = None, False, b""


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
