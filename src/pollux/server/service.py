"""A server as a process, or as a part of one: takes the data directory, starts the cluster and HTTP, and ends them.

:class:`Service` runs in threads of the process it is made in (a test, a demo, ``pollux run``); :func:`serve` is one
that lasts until a signal ends it (``pollux up``).

A data directory belongs to one server at a time. What a server leaves there when it is killed is all that the next
one needs: the database, the token, the port (replicas that train on report to that), and the jobs' folders.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import logging
import math
import os
import queue
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Self
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI

from pollux.errors import DirectoryInUseError, InvalidValueError, ServerError, StoreError
from pollux.server.config import DEFAULT_HOST, ServiceConfig
from pollux.server.http.app import create_app
from pollux.server.http.auth import Access, is_loopback, load_token
from pollux.server.http.certificate import check_certificate
from pollux.server.http.connections import BoundedProtocol
from pollux.server.http.dependencies import ServedCluster
from pollux.server.live.factory import ClusterMaker, make_cluster, prepared
from pollux.server.live.trials import ClusterJobs
from pollux.server.present.metrics import counted_log
from pollux.server.storage.files import LOCK_FILE, make_directory, write_whole
from pollux.server.storage.store import SqlStore
from pollux.tune.studies import Studies
from pollux.version import __version__

DEFAULT_PORT = 7077
NUM_PORTS_TRIED = 100
TOKEN_FILE, PORT_FILE = "token", "port"
SERVER_FILE, STORE_FILE = "server.json", "pollux.db"
HTTP_START_S, HTTP_STOP_S = 30.0, 10.0
KEEP_ALIVE_S = 120  # longer than jobs take from one report to the next
MAX_OPEN_FILES = 65536  # a connection for every job

logger = logging.getLogger(__name__)


# The service ----------------------------------------------------------------------------------


class Service:
    """A server in threads of this process.

    Raises:
        DirectoryInUseError: another server has the data directory.
        StoreError: its database cannot be used.
        InvalidValueError: the address cannot be listened at.
    """

    def __init__(self, config: ServiceConfig, make_cluster: ClusterMaker = make_cluster) -> None:
        self.config, self._make_cluster = config, make_cluster
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
    def is_stopping(self) -> bool:
        return self._is_asked.is_set()

    def start(self) -> Self:
        """Returns when jobs are taken."""
        directory = self.config.data_directory
        with self._beginning, contextlib.ExitStack() as stack:
            make_directory(directory)
            stack.enter_context(_locked(directory))
            server_file = directory / SERVER_FILE
            server_file.unlink(missing_ok=True)  # of one that was killed
            stack.callback(server_file.unlink, missing_ok=True)
            self.token = load_token(directory / TOKEN_FILE)
            store = stack.enter_context(SqlStore(directory / STORE_FILE))
            self.config = stack.enter_context(prepared(self.config))
            host = self.config.host or DEFAULT_HOST
            listener = stack.enter_context(_listen(host, self.config.port, directory / PORT_FILE))
            self.url = _url_of(host, self.config.reached_at, listener, has_tls=self.config.tls_cert is not None)
            certificate = self._checked_certificate()
            cluster = self._make_cluster(self.config, store, self.url)
            self._cluster = cluster
            stack.callback(self._stop_cluster)
            stack.enter_context(counted_log(cluster.metrics))
            access = Access(
                self.token if self.config.needs_token else None,
                cluster.job_of_token,
                lambda token: cluster.accounts.person_of(token),
            )
            # Replicas of the server before may report as soon as the cluster is there; until then they queue.
            cluster.start()
            studies = Studies(directory, ClusterJobs(cluster, self.config.settings.p))
            studies.start()
            stack.callback(studies.stop)
            app = create_app(cluster, access, self.begin_stop, studies, has_open_metrics=self.config.has_open_metrics)
            stack.enter_context(_http(app, listener, self.config))
            stack.callback(self._stop_cluster)  # before HTTP: jobs report what they did last, logs are read to the end
            stack.callback(studies.stop)  # first of all: no trial is begun or ended while the cluster stops
            write_whole(server_file, json.dumps(_describe(self.url, certificate)) + "\n")
            self._cleanup = stack.pop_all()
        logger.info("Pollux %s listens at %s; data in %s", __version__, self.url, directory)
        if not is_loopback(host) and not certificate:
            logger.warning(
                "other machines reach this server at %s, and what they send is not encrypted, tokens included: "
                "use --tls-cert and --tls-key, put a tunnel in front of it, or listen at 127.0.0.1",
                host,
            )
        return self

    def _checked_certificate(self) -> str:
        """As text; "" without one."""
        if self.config.tls_cert is None or self.config.tls_key is None:
            return ""
        return check_certificate(self.config.tls_cert, self.config.tls_key, urlsplit(self.url).hostname or "")

    def stop(self, *, keeps_jobs: bool = False) -> None:
        """Returns when all is over. Jobs checkpoint and leave, and go on with the next server; or they are kept."""
        self.begin_stop(keeps_jobs)
        self.wait()
        if self._failure is not None:
            raise self._failure

    def begin_stop(self, keeps_jobs: bool) -> None:
        """Returns at once. Only the first call counts."""
        with self._stopping:
            if self._is_asked.is_set():
                return
            self._keeps_jobs = keeps_jobs
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
    on_ready: Callable[[Service], None] = lambda service: None,
    make_cluster: ClusterMaker = make_cluster,
) -> None:
    """A server until SIGINT or SIGTERM, or until a client ends it. To be called in the main thread.

    At the first signal jobs checkpoint and leave; at the second they get little time for that. SIGHUP is ignored: a
    server that was begun in a terminal does not end with it.
    """
    arrived: queue.SimpleQueue[int] = queue.SimpleQueue()  # a signal handler may use this one
    _allow_many_connections()
    prefer_answers()
    with _handling(arrived):
        service = Service(config, make_cluster).start()
        try:
            on_ready(service)
            while not service.wait(0):
                with contextlib.suppress(queue.Empty):
                    name = signal.Signals(arrived.get(timeout=0.2)).name
                    if service.is_stopping:
                        logger.warning(
                            "%s again: jobs that are not gone in %g s are killed", name, config.hurry_timeout_s
                        )
                        service.hurry()
                    else:
                        logger.info("%s: the server ends", name)
                        service.begin_stop(False)
        finally:
            service.stop()


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


# The data directory ---------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """The lock goes with the process, however that ends; the file stays."""
    path = directory / LOCK_FILE
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}; it must be writable for this user") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(descriptor, 20).decode(errors="replace").strip() or "not known yet"
            raise DirectoryInUseError(
                f"{directory} is used by a server with pid {pid}; use that one, end it (pollux down), "
                "or name another data directory"
            ) from None
        except OSError as error:
            raise StoreError(f"{path}: it cannot be locked: {error.strerror}; name a folder on a local disk") from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)


def _describe(url: str, certificate: str) -> dict[str, str | int | float]:
    """How clients find us."""
    known = {"certificate": certificate} if certificate else {}
    return {**known, "url": url, "pid": os.getpid(), "version": __version__, "started_at": time.time()}


# HTTP -----------------------------------------------------------------------------------------


def _listen(host: str, port: int | None, port_file: Path) -> socket.socket:
    """A socket where the server before listened, if possible: its replicas look for us there."""
    if port:
        listener = _bind(host, port)
        write_whole(port_file, f"{port}\n")
        return listener
    with contextlib.suppress(OSError, ValueError, InvalidValueError):
        return _bind(host, int(port_file.read_text()))
    ports = [0] if port == 0 else [*range(DEFAULT_PORT, DEFAULT_PORT + NUM_PORTS_TRIED), 0]
    for port in ports:
        try:
            listener = _bind(host, port)
        except InvalidValueError as error:
            cause = error.__cause__
            if port == ports[-1] or not isinstance(cause, OSError) or cause.errno != errno.EADDRINUSE:
                raise
        else:
            write_whole(port_file, f"{listener.getsockname()[1]}\n")
            return listener
    raise AssertionError("the last port is taken or raises")


def _bind(host: str, port: int) -> socket.socket:
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)  # from now on it is ours; who comes early waits
        return listener
    except (OSError, UnicodeError) as error:
        if listener is not None:
            listener.close()
        advice = {
            errno.EADDRINUSE: "another program listens there: name another port, or 0 for any",
            errno.EACCES: "ports below 1024 need root: name another",
            errno.EADDRNOTAVAIL: "this machine has no such address: name one of its own, as in 127.0.0.1 or 0.0.0.0",
        }.get(getattr(error, "errno", None) or 0, f"{error}")
        raise InvalidValueError(f"cannot listen at port {port} of {host!r}; {advice}") from error


def _url_of(host: str, reached_at: str | None, listener: socket.socket, *, has_tls: bool) -> str:
    """How jobs and clients reach it; ``reached_at`` where it listens at every address."""
    name = reached_at or {"::": "::1"}.get(host, DEFAULT_HOST) if host in ("0.0.0.0", "::", "") else host
    return f"{'https' if has_tls else 'http'}://{f'[{name}]' if ':' in name else name}:{listener.getsockname()[1]}"


@contextlib.contextmanager
def _http(app: FastAPI, listener: socket.socket, config: ServiceConfig) -> Iterator[None]:
    """Serves in a thread."""
    settings: dict[str, Any] = dict(
        access_log=False,
        lifespan="off",
        log_config=None,
        log_level=logging.WARNING,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(HTTP_STOP_S / 2),
        timeout_keep_alive=KEEP_ALIVE_S,
        ws="none",
        http=BoundedProtocol,
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
    )
    server = uvicorn.Server(uvicorn.Config(app, **settings))
    thread = threading.Thread(target=server.run, args=([listener],), name="pollux-http", daemon=True)
    thread.start()
    ends_at = time.monotonic() + HTTP_START_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > ends_at:
            server.should_exit = server.force_exit = True
            raise ServerError("the HTTP server did not start; the log says why")
        time.sleep(0.005)
    try:
        yield
    finally:
        app.state.is_ending = True
        server.should_exit = True
        thread.join(HTTP_STOP_S)
        if thread.is_alive():
            server.force_exit = True
            thread.join(HTTP_STOP_S)
