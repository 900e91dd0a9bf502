"""What a server is started with (:class:`ServiceConfig`), and what its cluster needs of that. No I/O."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pollux.api.constraint import parse_label
from pollux.errors import InvalidValueError
from pollux.policy import PolicySettings
from pollux.scheduler.autoscale import AutoscaleConfig
from pollux.scheduler.node_types import Prices
from pollux.server.http.auth import check_host
from pollux.server.notify.config import NotifyConfig
from pollux.server.oidc.config import OidcConfig
from pollux.server.storage.workdirs import DEFAULT_MAX_MIB

DEFAULT_HOST = "127.0.0.1"
DEFAULT_HANG_S = 1800.0  # longer than evaluations and compilations mostly take
DEFAULT_LOG_BYTES = 1 << 30
MIN_LOG_BYTES = 1 << 20
MIN_LOST_AFTER_S = 1.0
SECRET_FILE = "secret"
LIVE_SETTINGS = PolicySettings(resize_s=1.0)  # until a job's own resizes have been measured
_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
_ADDRESS = re.compile(r"(\[[^\[\]]+\]|[^\s:/\[\]]+):[0-9]{1,5}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """``port`` None: the one used before here, else 7077 or the next that is free; 0: any that is free."""

    data_directory: Path
    database: str | None = None  # the URL of a PostgreSQL database, without a password; None: SQLite in the directory
    host: str | None = None  # None: the loopback, or with Ray this machine's address among the others
    port: int | None = None
    tls_cert: Path | None = None  # PEM; with tls_key it serves https
    tls_key: Path | None = None
    reached_at: str | None = None  # by jobs, where it listens at every address
    slots: int | None = None  # CPU slots; None: the GPUs, or a slot per CPU where there are none
    nodes: str | None = None  # virtual nodes, as in "2x2"
    slots_per_gpu: int = 1  # on each GPU or MIG slice
    labels: tuple[str, ...] = ()  # of nodes, as in zone=a, or node-1:zone=a for one
    policy: str = "pollux"
    settings: PolicySettings = LIVE_SETTINGS
    interval_s: float = 10.0  # decide at least this often
    needs_token: bool = True
    has_open_metrics: bool = False  # /metrics needs no token
    hang_timeout_s: float | None = DEFAULT_HANG_S  # without a step, before a job is stopped; None: never
    grace_s: float = 30.0  # for a job that is told to stop, before it is killed
    min_free_mib: int = 64  # jobs pause when their disk has less
    max_log_bytes: int | None = DEFAULT_LOG_BYTES  # of each job; the oldest part is dropped beyond; None: no limit
    stop_timeout_s: float = 60.0  # for all jobs to checkpoint and leave
    hurry_timeout_s: float = 2.0  # the same, when asked twice
    storage: str | None = None  # for checkpoints: a path or a URL that all nodes reach; None: the data directory
    engine: Literal["local", "ray"] = "local"
    address: str | None = None  # of Ray's head
    name: str = "pollux"  # among those on one Ray cluster
    resource: Literal["GPU", "CPU"] | None = None  # what a slot is, in Ray; None: GPUs where there are any
    lost_after_s: float | None = None  # without a word, before a node is given up; None: 2
    autoscale: AutoscaleConfig | None = None
    node_slots: int | None = None  # of a node that is added; None: as many as the largest has
    node_price: float | None = None  # for an hour
    max_workdir_mib: int = DEFAULT_MAX_MIB  # of a working directory that travels with a job
    config_file: Path | None = None  # that options were taken from, and that a detached server reads again
    notify: NotifyConfig | None = None  # who is told of what happens
    oidc: OidcConfig | None = None  # whose tokens are accepted beside our own

    def __post_init__(self) -> None:
        if self.port is not None and not 0 <= self.port <= 65535:
            raise InvalidValueError(f"port = {self.port}; a number from 1 to 65535 is needed, or 0 for any")
        for name in ("interval_s", "grace_s", "stop_timeout_s", "hurry_timeout_s"):
            if not (math.isfinite(value := getattr(self, name)) and value > 0):
                raise InvalidValueError(f"{name} = {value}; a positive number of seconds is needed")
        if self.hang_timeout_s is not None and not (math.isfinite(self.hang_timeout_s) and self.hang_timeout_s > 0):
            raise InvalidValueError(f"hang_timeout_s = {self.hang_timeout_s}; a positive number of seconds is needed")
        if self.max_log_bytes is not None and self.max_log_bytes < MIN_LOG_BYTES:
            raise InvalidValueError(f"max_log_bytes = {self.max_log_bytes}; at least {MIN_LOG_BYTES} (1M) are needed")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidValueError("--tls-cert and --tls-key belong together: give both, or none for plain http")
        if self.database is not None:
            from pollux.server.storage.postgres import (
                check_address,
            )  # brings SQLAlchemy, which other configurations lack

            check_address(self.database)
        check_host(self.host or DEFAULT_HOST, self.needs_token)
        is_ray = self.engine == "ray"
        if is_ray and (self.slots is not None or self.nodes is not None or self.slots_per_gpu != 1):
            raise InvalidValueError(
                "slots and nodes are Ray's to say: leave out --slots, --nodes and --slots-per-gpu with --engine ray"
            )
        if is_ray and self.labels:
            raise InvalidValueError(
                f"label {self.labels[0]!r}; labels are Ray's to say: start nodes with ray start --labels zone=a"
            )
        for text in self.labels:
            parse_label(text)
        if self.lost_after_s is not None and self.lost_after_s < MIN_LOST_AFTER_S:
            raise InvalidValueError(
                f"lost_after_s = {self.lost_after_s}; at least {MIN_LOST_AFTER_S:g} s: nodes answer twice a second"
            )
        for option in ("address", "resource", "autoscale", "node_slots", "lost_after_s"):
            if not is_ray and getattr(self, option) is not None:
                raise InvalidValueError(f"{option} is for a cluster of several machines: it needs --engine ray")
        if self.address not in (None, "auto") and not _ADDRESS.fullmatch(str(self.address)):
            raise InvalidValueError(
                f"address = {self.address!r}; HOST:PORT of Ray's head is needed, as in 10.0.0.1:6379, or auto"
            )
        if not _NAME.fullmatch(self.name):
            raise InvalidValueError(f"name = {self.name!r}; up to 40 letters, digits, - and _ are needed")
        if self.node_slots is not None and self.node_slots < 1:
            raise InvalidValueError(f"node_slots = {self.node_slots}; a number of at least 1 is needed")
        if (size := self.autoscale) is not None and size.types and self.node_slots is not None:
            raise InvalidValueError(f"node_slots = {self.node_slots} beside node types, which say their slots")
        if size is not None and size.min_nodes == 0 and self.node_slots is None and not size.types:
            raise InvalidValueError(
                "autoscale from 0 nodes: say how large a node is that is added, by --node-slots or --node-type"
            )
        if self.max_workdir_mib < 1:
            raise InvalidValueError(f"max_workdir_mib = {self.max_workdir_mib}; a number of at least 1 is needed")
        if self.node_price is not None and not (math.isfinite(self.node_price) and self.node_price >= 0):
            raise InvalidValueError(f"node_price = {self.node_price}; a number of at least 0 is needed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """What the cluster of a server needs of that, and what it finds out itself."""

    data_directory: Path
    secret: str  # jobs' tokens are made from it
    url: str = ""  # where jobs find the server
    certificate: str = ""  # the server's, as text, with https
    policy: str = "pollux"
    settings: PolicySettings = LIVE_SETTINGS
    interval_s: float = 10.0
    min_pause_s: float = 0.25
    environment: Mapping[str, str] = field(default_factory=dict)  # what every job's begins with
    engine_name: str = "local"
    storage: str | None = None  # for checkpoints, a path or a URL; None: the data directory
    autoscale: AutoscaleConfig | None = None
    node_price: float | None = None  # for an hour
    hang_timeout_s: float | None = DEFAULT_HANG_S
    max_workdir_bytes: int = DEFAULT_MAX_MIB << 20
    max_log_bytes: int | None = DEFAULT_LOG_BYTES
    notify: NotifyConfig | None = None
    keep_rounds: int = 5000
    keep_reports: int = 5000  # of each job

    @property
    def prices(self) -> Prices:
        """Of nodes for an hour."""
        return Prices.of_types(() if self.autoscale is None else self.autoscale.types, self.node_price)
