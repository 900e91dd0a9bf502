"""A server that does not lead: it answers reads from the database and waits for its turn. ``serve`` makes one."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from typing import Self
from urllib.parse import urlsplit

from pollux.errors import InvalidValueError, StoreError
from pollux.server.config import DEFAULT_HOST, SECRET_FILE, ClusterConfig, ServiceConfig
from pollux.server.http.app import create_app
from pollux.server.http.auth import Access, load_token
from pollux.server.http.leader_only import LeaderOnly
from pollux.server.listener import checked_certificate, describe, listen, serving, url_of
from pollux.server.live.read_only import ReadOnlyCluster
from pollux.server.live.trials import ClusterJobs
from pollux.server.oidc.verifier import persons_of
from pollux.server.storage.files import locked, make_directory, write_whole
from pollux.server.storage.leadership import Leader, Leadership
from pollux.server.storage.store import SqlStore
from pollux.tune.studies import Studies

TOKEN_FILE = "token"
STANDBY_FILE, STANDBY_PORT_FILE = "standby.json", "standby-port"
POLL_S, LONGEST_PAUSE_S = 0.5, 4.0
START_S = 60.0  # for the leader to make its tables

logger = logging.getLogger(__name__)


class Standby:
    """In ``with``: it answers inside. ``leadership`` is not taken yet, and stays the caller's.

    Raises:
        StoreError: the database cannot be used.
        InvalidValueError: it could never take over, or the address cannot be listened at.
    """

    is_standby = True

    def __init__(self, config: ServiceConfig, leadership: Leadership) -> None:
        self.config, self._leadership = config, leadership
        self.url = self.token = self._leader = ""
        self.pause_s = POLL_S  # until the next attempt
        self.is_asked_to_end = False
        self._has_lock = False
        self._cleanup = contextlib.ExitStack()

    @property
    def leader(self) -> str:
        """The URL of the server that leads; "": none does, as far as is known."""
        return self._leader

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    def __enter__(self) -> Self:
        directory = self.config.data_directory
        with contextlib.ExitStack() as stack:
            make_directory(directory)
            stack.enter_context(locked(directory, is_shared=True))
            leader = self._wait_for_leader()
            if leader is None:
                return self
            self._check(leader)
            self._leader, self.token = leader.url, load_token(directory / TOKEN_FILE)
            assert self.config.database is not None, "a standby needs a database that is shared"
            store = stack.enter_context(SqlStore(self.config.database))
            host = self.config.host or DEFAULT_HOST
            listener = stack.enter_context(listen(host, self.config.port, directory / STANDBY_PORT_FILE))
            self.url = url_of(host, self.config.reached_at, listener, has_tls=self.config.tls_cert is not None)
            certificate = checked_certificate(self.config, self.url)
            secret = load_token(directory / SECRET_FILE)
            about = ClusterConfig(data_directory=directory, secret=secret, url=self.url, engine_name=self.config.engine)
            cluster = ReadOnlyCluster(store, about, lambda: self._leader)
            cluster.start()
            stack.callback(cluster.stop)
            needed = self.token if self.config.needs_token else None
            access = Access(needed, cluster.job_of_token, persons_of(self.config.oidc, lambda: cluster.accounts))
            studies = Studies(directory, ClusterJobs(cluster, self.config.settings.p))  # never started: they are read
            stack.callback(studies.stop)
            app = create_app(cluster, access, self._ask_to_end, studies, has_open_metrics=self.config.has_open_metrics)
            app.add_middleware(LeaderOnly, leader_of=lambda: self._leader)
            stack.enter_context(serving(app, listener, self.config))
            standby_file = directory / STANDBY_FILE
            write_whole(standby_file, json.dumps(describe(self.url, certificate)) + "\n")
            stack.callback(standby_file.unlink, missing_ok=True)
            self._cleanup = stack.pop_all()
        logger.info("stands by at %s; %s leads, in epoch %d", self.url, leader.url, leader.epoch)
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def try_take(self) -> bool:
        """Whether this server leads from now on. To be asked again after ``pause_s``."""
        if self._has_lock:
            return True
        try:
            self._has_lock = self._leadership.try_take()
            leader = None if self._has_lock else self._leadership.leader()
        except StoreError as error:
            if self.pause_s == POLL_S:
                logger.error("the standby cannot see who leads; trying again: %s", error)
            self._leader, self.pause_s = "", min(2 * self.pause_s, LONGEST_PAUSE_S)
            return False
        self._leader, self.pause_s = "" if leader is None else leader.url, POLL_S
        if self._has_lock:
            logger.warning("no server leads any more: this one takes over")
        return self._has_lock

    def _wait_for_leader(self) -> Leader | None:
        """The one that leads, when it can be reached; None: this server leads."""
        for _ in range(int(START_S / POLL_S)):
            leader = self._leadership.leader()
            if leader is not None and leader.url:
                return leader
            if self.try_take():
                return None
            time.sleep(POLL_S)
        raise StoreError(f"{self._leadership.place}: another server has had the lock for {START_S:g} s without leading")

    def _check(self, leader: Leader) -> None:
        here = socket.gethostname()
        if self.config.engine == "local" and leader.host != here:
            raise InvalidValueError(
                f"{leader.url} leads on {leader.host}, and its jobs are processes of that machine: a server on {here} "
                f"could not take them over; start the standby on {leader.host}, or both with --engine ray"
            )
        self._leadership.require_owner(leader)

    def _ask_to_end(self, keeps_jobs: bool) -> None:
        self.is_asked_to_end = True
