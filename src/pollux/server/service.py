"""A server as a process, or as a part of one: takes the data directory, starts the cluster and HTTP, and ends them.

:class:`Service` runs in threads of the process it is made in (a test, a demo, ``pollux run``); :func:`serve` is one
that lasts until a signal ends it (``pollux up``).

A data directory belongs to one server at a time. What a server leaves there when it is killed is all that the next
one needs: the database, the token, the port (replicas that train on report to that), and the jobs' folders. Servers on
one PostgreSQL database share a directory: one leads, the others stand by (:mod:`pollux.server.standby`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import os
import queue
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Self
from urllib.parse import urlsplit

from pollux.errors import NotLeaderError, StoreError
from pollux.server.config import DEFAULT_HOST, ServiceConfig
from pollux.server.http.app import create_app
from pollux.server.http.auth import Access, is_loopback, load_token
from pollux.server.http.dependencies import ServedCluster
from pollux.server.listener import checked_certificate, describe, listen, serving, url_of
from pollux.server.live.factory import ClusterMaker, make_cluster, owner_of, prepared
from pollux.server.live.trials import ClusterJobs
from pollux.server.oidc.verifier import persons_of
from pollux.server.present.metrics import counted_log
from pollux.server.standby import TOKEN_FILE, Standby
from pollux.server.storage.backup import DATABASE_FILE, keep_copy_of_other_version, note_database
from pollux.server.storage.database import require_content
from pollux.server.storage.drained import DrainedNodes
from pollux.server.storage.files import SERVER_FILE, locked, make_directory, read_object, write_whole
from pollux.server.storage.leadership import FIRST_PAUSE_S, LONGEST_PAUSE_S, Leadership
from pollux.server.storage.restore import finish_restore
from pollux.server.storage.store import SqlStore
from pollux.tune.studies import Studies
from pollux.version import __version__

PORT_FILE, STORE_FILE = "port", "pollux.db"
MAX_OPEN_FILES = 65536  # a connection for every job

logger = logging.getLogger(__name__)


# The service ----------------------------------------------------------------------------------


class Service:
    """A server in threads of this process.

    Raises:
        DirectoryInUseError: another server has the data directory.
        StoreError: its database cannot be used.
        NotLeaderError: another server leads on its database.
        InvalidValueError: the address cannot be listened at.
    """

    is_standby = False

    def __init__(
        self,
        config: ServiceConfig,
        make_cluster: ClusterMaker = make_cluster,
        leadership: Leadership | None = None,
    ) -> None:
        """``leadership``: taken already, and given back with the service. Without it the service takes it, if need be.

        A service that loses it ends by itself; jobs train on.
        """
        self.config, self._make_cluster, self._leadership = config, make_cluster, leadership
        self.steps_down = False  # it ends because another server leads
        self.url = self.token = ""
        self._cleanup = contextlib.ExitStack()
        self._beginning, self._stopping = threading.Lock(), threading.Lock()
        self._keeps_jobs = True  # if it cannot start, jobs that train go on
        self._is_asked, self._has_ended = threading.Event(), threading.Event()
        self._cluster: ServedCluster | None = None
        self._is_cluster_stopped = False
        self._failure: BaseException | None = None

    @property
    def cluster(self) -> ServedCluster:
        assert self._cluster is not None, "start() comes first"
        return self._cluster

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    @property
    def is_stopping(self) -> bool:
        return self._is_asked.is_set()

    def start(self) -> Self:
        """Returns when jobs are taken."""
        directory = self.config.data_directory
        with self._beginning, contextlib.ExitStack() as stack:
            make_directory(directory)
            stack.enter_context(locked(directory, is_shared=self.config.database is not None))
            finish_restore(directory)
            self.token = load_token(directory / TOKEN_FILE)
            store = self._open_store(stack)
            server_file = directory / SERVER_FILE
            server_file.unlink(missing_ok=True)  # of one that was killed
            stack.callback(_remove_own, server_file)
            self.config = stack.enter_context(prepared(self.config))
            host = self.config.host or DEFAULT_HOST
            listener = stack.enter_context(listen(host, self.config.port, directory / PORT_FILE))
            self.url = url_of(host, self.config.reached_at, listener, has_tls=self.config.tls_cert is not None)
            certificate = checked_certificate(self.config, self.url)
            cluster = self._make_cluster(self.config, store, self.url)
            self._cluster = cluster
            stack.callback(self._stop_cluster)
            stack.enter_context(counted_log(cluster.metrics))
            access = Access(
                self.token if self.config.needs_token else None,
                cluster.job_of_token,
                persons_of(self.config.oidc, lambda: cluster.accounts),
            )
            # Replicas of the server before may report as soon as the cluster is there; until then they queue.
            cluster.start()
            studies = Studies(directory, ClusterJobs(cluster, self.config.settings.p))
            studies.start()
            stack.callback(studies.stop)
            app = create_app(cluster, access, self.begin_stop, studies, has_open_metrics=self.config.has_open_metrics)
            stack.enter_context(serving(app, listener, self.config))
            stack.callback(self._stop_cluster)  # before HTTP: jobs report what they did last, logs are read to the end
            stack.callback(studies.stop)  # first of all: no trial is begun or ended while the cluster stops
            if self._leadership is not None:
                self._leadership.announce(self.url)
            # Jobs of other Unix users look there for the server that leads now; nothing in it is secret.
            mode = 0o600 if self.config.database is None else 0o644
            write_whole(server_file, json.dumps(describe(self.url, certificate)) + "\n", mode=mode)
            self._cleanup = stack.pop_all()
        logger.info("Pollux %s listens at %s; data in %s", __version__, self.url, directory)
        if not is_loopback(host) and not certificate:
            logger.warning(
                "other machines reach this server at %s, and what they send is not encrypted, tokens included: "
                "use --tls-cert and --tls-key, put a tunnel in front of it, or listen at 127.0.0.1",
                host,
            )
        return self

    def _open_store(self, stack: contextlib.ExitStack) -> SqlStore:
        directory, database = self.config.data_directory, self.config.database
        store = self._connect(stack)
        if store.names() and (copy := keep_copy_of_other_version(directory, database or directory / STORE_FILE)):
            logger.info("another version of Pollux was here before: a backup is in %s", copy)
        DrainedNodes(store).take_over(directory)
        note_database(directory, database)
        return store

    def _connect(self, stack: contextlib.ExitStack) -> SqlStore:
        directory, database = self.config.data_directory, self.config.database
        if database is None:
            require_content(directory / STORE_FILE, directory / DATABASE_FILE)
            return stack.enter_context(SqlStore(directory / STORE_FILE))
        if (directory / STORE_FILE).exists():
            logger.warning("jobs of before are in %s, and not in %s", directory / STORE_FILE, database)
        leadership = self._leadership or leadership_of(self.config)
        stack.callback(leadership.close)
        if self._leadership is None and not leadership.try_take():
            raise NotLeaderError(f"{leadership.place}: another server leads; stop it, or start a standby: pollux up")
        self._leadership = leadership
        store = stack.enter_context(SqlStore(database, leadership))
        leadership.on_change = self._look_at_leadership
        return store

    def _look_at_leadership(self) -> None:
        """It was lost, or the database answers again."""
        if self._leadership is not None and self._leadership.is_lost:
            self._begin_stop(keeps_jobs=True, steps_down=True)
        elif self._cluster is not None:
            self._cluster.wake()

    def stop(self, *, keeps_jobs: bool = False) -> None:
        """Returns when all is over. Jobs checkpoint and leave, and go on with the next server; or they are kept."""
        self.begin_stop(keeps_jobs)
        self.wait()
        if self._failure is not None:
            raise self._failure

    def begin_stop(self, keeps_jobs: bool) -> None:
        """Returns at once. Only the first call counts; a server that steps down does not stand by after it."""
        self._begin_stop(keeps_jobs=keeps_jobs, steps_down=False)

    def _begin_stop(self, *, keeps_jobs: bool, steps_down: bool) -> None:
        with self._stopping:
            if self._is_asked.is_set():
                self.steps_down = self.steps_down and (steps_down or self._has_ended.is_set())
                return
            self._keeps_jobs, self.steps_down = keeps_jobs, steps_down
            self._is_asked.set()
        threading.Thread(target=self._end, name="pollux-stop").start()

    def hurry(self) -> None:
        """While it stops: do not wait long for jobs any more."""
        if self._cluster is not None and not self._has_ended.is_set():
            self._cluster.hurry(self.config.hurry_timeout_s)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has stopped; whether that was in time."""
        return self._has_ended.wait(timeout_s)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _end(self) -> None:
        try:
            with self._beginning:  # a client may be quicker than the start
                pass
            self._cleanup.close()
        except BaseException as error:
            logger.exception("the server did not end as it should")
            self._failure = error
        finally:
            self._has_ended.set()

    def _stop_cluster(self) -> None:
        if not self._is_cluster_stopped:
            self._is_cluster_stopped = True
            self.cluster.stop(keeps_jobs=self._keeps_jobs, timeout_s=self.config.stop_timeout_s)


def serve(
    config: ServiceConfig,
    on_ready: Callable[[Service | Standby], None] = lambda service: None,
    make_cluster: ClusterMaker = make_cluster,
) -> None:
    """A server until SIGINT or SIGTERM, or until a client ends it. To be called in the main thread.

    With PostgreSQL it stands by while another server leads, and again when another has taken over. ``on_ready`` is
    called each time.

    At the first signal jobs checkpoint and leave; at the second they get little time for that. SIGHUP is ignored: a
    server that was begun in a terminal does not end with it.
    """
    arrived: queue.SimpleQueue[int] = queue.SimpleQueue()  # a signal handler may use this one
    has_served, pause_s = False, 0.0
    _allow_many_connections()
    prefer_answers()

    def ready(one: Service | Standby) -> None:
        nonlocal has_served, pause_s
        has_served, pause_s = True, 0.0
        on_ready(one)

    with _handling(arrived):
        while True:
            try:
                leadership = None
                if config.database is not None:
                    leadership = leadership_of(config)
                    port = _stand_by(config, leadership, arrived, ready)
                    if port is None:
                        return
                    config = dataclasses.replace(config, port=port or config.port)
                service = Service(config, make_cluster, leadership).start()
            except StoreError as error:  # the database went away just then; at the first start that is for the operator
                if not has_served:
                    raise
                pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
                logger.error("this server can neither lead nor stand by, and tries again: %s", error)
                with contextlib.suppress(queue.Empty):
                    logger.info("%s: the server ends", signal.Signals(arrived.get(timeout=pause_s)).name)
                    return
                continue
            _run(service, arrived, ready)
            if not service.steps_down:
                return
            config = dataclasses.replace(config, port=service.port)


def _run(service: Service, arrived: queue.SimpleQueue[int], on_ready: Callable[[Service | Standby], None]) -> None:
    try:
        on_ready(service)
        while not service.wait(0):
            with contextlib.suppress(queue.Empty):
                name = signal.Signals(arrived.get(timeout=0.2)).name
                if service.is_stopping and not service.steps_down:
                    hurry_s = service.config.hurry_timeout_s
                    logger.warning("%s again: jobs that are not gone in %g s are killed", name, hurry_s)
                    service.hurry()
                else:
                    logger.info("%s: the server ends", name)
                    service.begin_stop(False)
    finally:
        service.stop()


def _stand_by(
    config: ServiceConfig,
    leadership: Leadership,
    arrived: queue.SimpleQueue[int],
    on_ready: Callable[[Service | Standby], None],
) -> int | None:
    """Wait until this server leads: the port that it was reached at meanwhile, 0 if it did not have to wait.

    None: it was told to end.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(leadership.close)
        port = 0
        if not leadership.try_take():
            with Standby(config, leadership) as standby:
                if standby.url:  # else the leader went while this one was looking
                    on_ready(standby)
                while not standby.try_take():
                    if standby.is_asked_to_end:
                        return None
                    with contextlib.suppress(queue.Empty):
                        logger.info("%s: the standby ends", signal.Signals(arrived.get(timeout=standby.pause_s)).name)
                        return None
                port = standby.port
        stack.pop_all()
        return port


def leadership_of(config: ServiceConfig) -> Leadership:
    """Not taken yet."""
    assert config.database is not None, "SQLite has no leaders"
    make_directory(config.data_directory)
    return Leadership(config.database, owner=owner_of(config), engine=config.engine)


def _remove_own(server_file: Path) -> None:
    """Not that of a server that has taken over."""
    if read_object(server_file).get("pid") == os.getpid():
        server_file.unlink(missing_ok=True)


@contextlib.contextmanager
def _handling(arrived: queue.SimpleQueue[int]) -> Iterator[None]:
    def note(number: int, frame: FrameType | None) -> None:
        arrived.put(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def prefer_answers() -> None:
    """Requests must not wait for the scheduler's thread, which computes: let it be interrupted often, and by less."""
    sys.setswitchinterval(0.00005)
    gc.collect()
    gc.freeze()  # what is imported stays; looking through it again and again would stop all threads
    gc.set_threshold(50_000, 50, 100)


def _allow_many_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
