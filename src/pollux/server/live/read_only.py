"""A cluster as its database tells of it: what a standby answers questions from. It changes nothing.

:class:`pollux.server.standby.Standby` makes one. A thread reads the database again and again, at most a tenth of the
time.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from pollux.api.cluster import CheckedNode, ClusterSummary, NodeReading, NodeSummary
from pollux.api.job import JobSummary
from pollux.api.report import Report, ReportAnswer
from pollux.api.request import JobRequest
from pollux.engines.live import NO_PHASE, JobPhase, ReplicaInfo, UnusableNode
from pollux.engines.preflight import CheckRequest
from pollux.errors import NotLeaderError, PolluxError
from pollux.scheduler.ports import Command, Event
from pollux.scheduler.record import JobRecord
from pollux.server.config import ClusterConfig
from pollux.server.live.clock import LiveClock
from pollux.server.live.job_table import JobTable, launch_settings
from pollux.server.live.operations import Operations
from pollux.server.live.recorder import DecisionLog
from pollux.server.live.retention import Retention
from pollux.server.live.state import ClusterState
from pollux.server.present.gauges import Measured
from pollux.server.present.metrics import Metrics
from pollux.server.present.queries import Queries
from pollux.server.storage.drained import DrainedNodes
from pollux.server.storage.simulations import Simulations
from pollux.server.storage.store import SqlStore
from pollux.types import Node

READ_EVERY_S = 2.0
MAX_DUTY = 0.1
STOP_S = 10.0

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _KeptState(ClusterState):
    """Without a scheduler: the records are those of the database."""

    kept: dict[str, JobRecord] = field(default_factory=dict)

    @property
    def records(self) -> dict[str, JobRecord]:
        return self.kept


class _KeptQueries(Queries):
    leader_of: Callable[[], str] = staticmethod(lambda: "")

    def summary(self) -> ClusterSummary:
        return dataclasses.replace(super().summary(), standby_of=self.leader_of())


class _NoEngine:
    """The nodes of the last decision, and nothing that runs: replicas are the leader's to tell of."""

    applies_at_once = False
    trouble = ""

    def __init__(self) -> None:
        self.last_nodes: Sequence[Node] = ()
        self.unusable: Sequence[UnusableNode] = ()
        self.readings: Mapping[str, NodeReading] = {}

    def nodes(self) -> Sequence[Node]:
        return self.last_nodes

    def replicas(self, job: str) -> Sequence[ReplicaInfo]:
        return ()

    def note(self, job: str) -> str:
        return ""

    def phase(self, job: str) -> JobPhase:
        return NO_PHASE

    def dump_stacks(self, job: str) -> None: ...

    def poll(self) -> Sequence[Event]:
        return ()

    def apply(self, commands: Sequence[Command]) -> None:
        raise NotLeaderError("a standby commands nothing")

    def adopt(self, records: Sequence[JobRecord]) -> None:
        raise NotLeaderError("a standby commands nothing")

    def check(self, asked: CheckRequest) -> Sequence[CheckedNode]:
        raise NotLeaderError("a standby asks no node: ask the server that leads")

    def close(self, *, stops_jobs: bool, grace_s: float | None = None) -> None: ...


class ReadOnlyCluster:
    """See :class:`pollux.server.http.dependencies.ServedCluster`. ``leader_of``: the URL of the leader; "": none."""

    def __init__(self, store: SqlStore, config: ClusterConfig, leader_of: Callable[[], str]) -> None:
        self._store, self._leader_of = store, leader_of
        self._jobs, self._engine = JobTable(store, launch_settings(config)), _NoEngine()
        self._state = _KeptState(jobs=self._jobs)
        self.accounts, self.workdirs = self._jobs.accounts, self._jobs.workdirs
        self.queries = _KeptQueries(
            state=self._state,
            store=store,
            engine=self._engine,
            config=config,
            clock=LiveClock(store.latest_time()),
            decisions=DecisionLog(store, self._state),
            accounts=self.accounts,
        )
        self.queries.leader_of = leader_of
        self.metrics = Metrics()
        self.metrics.watch(self._measured)
        self.simulations = Simulations(config.data_directory / "simulations")
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def operations(self) -> Operations:
        self._refuse()

    @property
    def retention(self) -> Retention:
        self._refuse()

    @property
    def is_ready(self) -> bool:
        return False

    @property
    def problem(self) -> str:
        leader = self._leader_of()
        return f"this server stands by; {leader} leads" if leader else "this server stands by, and no server leads now"

    def start(self) -> None:
        self.read()
        self._thread = threading.Thread(target=self._keep_reading, name="pollux-standby", daemon=True)
        self._thread.start()

    def stop(self, *, keeps_jobs: bool = True, timeout_s: float = STOP_S) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join(min(timeout_s, STOP_S))

    def read(self) -> None:
        """What the database says by now."""
        records, waiting = self._store.records(), self._store.requests()
        names = {record.name for record in records} | {job.name for job in waiting}
        self._jobs.reload()
        for job in self._jobs.active:
            if job.name not in names:
                self._jobs.close(job.name)
        self._jobs.hold(waiting)
        for record in records:
            for kept in self._store.reports(record.name, limit=1) if record.allocation else ():
                self._jobs.take_report(kept, kept.at)
        for stored in self._store.rounds(limit=1):
            self._state.last_round = stored.record
            if stored.snapshot is not None:
                self._engine.last_nodes = stored.snapshot.nodes
        self.accounts.reload()
        self._state.draining = DrainedNodes(self._store).all()
        self._state.kept = {record.name: record for record in records}

    def _keep_reading(self) -> None:
        took_s = 0.0
        while not self._ending.wait(max(READ_EVERY_S, took_s / MAX_DUTY)):
            began = time.perf_counter()
            try:
                self.read()
            except PolluxError as error:  # what was read before stays
                logger.warning("what the standby knows is getting old: %s", error)
            took_s = time.perf_counter() - began

    def _measured(self) -> Measured:
        return self.queries.measured(is_ready=False, node_s_before={})

    # What the leader does -----------------------------------------------------------------------

    def submit(self, request: JobRequest) -> list[JobSummary]:
        self._refuse()

    def cancel(self, name: str, reason: str, saves: bool = True) -> JobSummary:
        self._refuse()

    def report(self, report: Report, num_bytes: int = 0) -> ReportAnswer:
        self._refuse()

    def save_reports(self) -> None: ...

    def drain(self, node: str, is_draining: bool) -> NodeSummary:
        self._refuse()

    def reweigh(self, weights: Mapping[str, float]) -> None:
        self._refuse()

    def weights_outside(self, study: str) -> Sequence[float]:
        return ()

    def hurry(self, timeout_s: float) -> None: ...

    def wake(self) -> None: ...

    def job_of_token(self, token: str) -> str | None:
        return self._jobs.job_of_token(token)

    def _refuse(self) -> NoReturn:
        raise NotLeaderError(self.problem)
