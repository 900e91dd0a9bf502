"""The process that owns all replicas of a machine, so that they train on when the server is gone.

``python -m pollux.engines.local.supervisor --directory D``, started by :mod:`pollux.engines.local.connection`, listens
on a socket in D and does what its client asks (:mod:`pollux.engines.messages`). One thread does that; two others only
read what the machine does (:mod:`pollux.engines.processes.readings`) and which GPUs there are
(:mod:`pollux.engines.processes.layout_watch`). It ends after a while without work, and with
SIGTERM when all jobs have left; its replicas end with it.
"""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pollux.engines.local.clients import Clients
from pollux.engines.local.files import LOCK, forget_epoch, read_epoch, write_epoch
from pollux.engines.processes.job_manager import JobManager
from pollux.engines.processes.layout_watch import LayoutWatch
from pollux.engines.processes.leftovers import MARK, kill_leftovers, mark_of
from pollux.engines.processes.readings import Sampler
from pollux.engines.processes.replica_job import GRACE_S
from pollux.engines.processes.request_handler import RequestHandler
from pollux.engines.processes.space import MIN_FREE_BYTES, SpaceWatch, free_bytes

BUSY_PERIOD_S = 0.015  # while a job starts, moves or stops
CALM_PERIOD_S = 0.05  # while jobs just train
IDLE_PERIOD_S = 1.0
QUIET_S = 1.0  # without a request for so long, there is time to start the fork server
IDLE_S = 600.0

logger = logging.getLogger(__name__)


class Supervisor:
    """The caller holds the directory's :func:`lock`."""

    def __init__(
        self,
        directory: Path,
        *,
        idle_s: float = IDLE_S,
        min_free_bytes: int = MIN_FREE_BYTES,
        free_at: Callable[[str], int] = free_bytes,
    ) -> None:
        self._idle_s = idle_s
        space = SpaceWatch(min_free_bytes, free_at)
        manager = JobManager(directory, space, lambda message: self._handler.tell(message))
        self._manager, self._handler = (
            manager,
            RequestHandler(
                manager,
                self._send,
                where=str(directory),
                epoch=read_epoch(directory),
                on_epoch=lambda epoch: write_epoch(directory, epoch),
                lay_out=lambda request: self._watch.lay_out(request),
            ),
        )
        self._watch, self._num_crashes = LayoutWatch(directory), 0
        self._clients = Clients(directory, self._handler.refusal_of)
        self._sampler = Sampler(str(directory), lambda: manager.devices)
        self._idle_since = self._heard_at = time.monotonic()

    def serve(self) -> None:
        """Until there has been nothing to do for long, or :meth:`shut_down` was called and all jobs have left."""
        while not self._is_done():
            self.turn()
            # Starting the fork server must delay neither a client's first requests nor jobs that do without it.
            if self._handler.is_introduced and self._is_quiet():
                self._manager.warm_up()

    def shut_down(self, grace_s: float = GRACE_S) -> None:
        """Let every job checkpoint and leave; :meth:`serve` returns when all have."""
        self._handler.shut_down(grace_s)

    def close(self) -> None:
        self._sampler.close()
        self._watch.close()
        self._manager.close()
        self._clients.close()

    def turn(self) -> None:
        messages = self._clients.receive(self._period_s())
        if self._clients.is_replaced:
            self._clients.is_replaced = self._handler.is_introduced = False
        if messages:
            self._heard_at = time.monotonic()
        for message in messages:
            self._handler.obey(message)
        self._manager.turn()
        if self._manager.num_crashes > self._num_crashes:  # the cause may be a device that is gone
            self._num_crashes = self._manager.num_crashes
            self._watch.look_soon()
        if (layout := self._watch.take()) is not None:
            self._manager.use_layout(layout)
        self._manager.tell_readings(self._sampler.take())
        self._clients.flush()

    def _send(self, message: dict[str, object]) -> None:
        self._clients.send(message)

    def _is_quiet(self) -> bool:
        has_work = self._clients.has_unsent or self._manager.num_living or self._handler.is_closing
        return not has_work and time.monotonic() - self._heard_at > QUIET_S

    def _period_s(self) -> float:
        if self._clients.has_unsent or not self._manager.is_calm:
            return BUSY_PERIOD_S
        if self._manager.num_living or not self._manager.is_warm:
            return CALM_PERIOD_S
        return min(IDLE_PERIOD_S, self._idle_s)

    def _is_done(self) -> bool:
        if self._manager.num_living:
            self._idle_since = time.monotonic()
            return False
        if self._clients.has_client:
            self._idle_since = time.monotonic()
        return self._handler.is_closing or time.monotonic() - self._idle_since > self._idle_s


def lock(directory: Path) -> int | None:
    """A descriptor that holds the supervisor's lock until it is closed; None while another holds it."""
    held = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        return None
    text = f"{os.getpid()}\n".encode()
    os.pwrite(held, text, 0)  # first: a reader finds a number, if there was one before
    os.truncate(held, len(text))
    return held


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pollux.engines.local.supervisor", description="owns replicas")
    parser.add_argument("--directory", type=Path, required=True, help="the data directory")
    parser.add_argument("--idle-s", type=float, default=IDLE_S, help="end after so long without jobs and clients")
    parser.add_argument("--min-free-bytes", type=int, default=MIN_FREE_BYTES, help="jobs pause with less on the disk")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    directory = options.directory.resolve()
    os.chdir(directory)
    held = lock(directory)
    if held is None:
        print(f"another supervisor looks after {directory}", file=sys.stderr)
        return 1
    mark = mark_of(directory)
    if killed := kill_leftovers(mark):
        logger.info("killed what an earlier supervisor left behind: %s", killed)
    os.environ[MARK] = mark  # for all that is started from here
    supervisor = Supervisor(directory, idle_s=options.idle_s, min_free_bytes=options.min_free_bytes)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: supervisor.shut_down())
    try:
        supervisor.serve()
        forget_epoch(directory)
    finally:
        supervisor.close()
        os.close(held)
    return 0


if __name__ == "__main__":
    sys.exit(main())
