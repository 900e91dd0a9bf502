"""A cluster in memory that schedules nothing: what the HTTP side is tested against where the real one is too much."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pollux.api.cluster import (
    CheckedNode,
    ClusterSample,
    ClusterSummary,
    NodeFinding,
    NodeReading,
    NodeSummary,
    Timeline,
)
from pollux.api.job import (
    FittedModel,
    JobCurves,
    JobDetail,
    JobForecast,
    JobModel,
    JobRow,
    JobSummary,
    StateChange,
    TrainingNote,
)
from pollux.api.report import Report, ReportAnswer, StoredReport, stored
from pollux.api.request import JobRequest, check_dependencies, unique_name
from pollux.api.round import RoundDetail, RoundSummary
from pollux.api.usage import UsageRow
from pollux.errors import UnknownNameError
from pollux.scheduler.node_types import Prices
from pollux.server.live.accounts import Accounts
from pollux.server.live.operations import Operations
from pollux.server.live.retention import Retention
from pollux.server.present.charts import job_curves, job_model
from pollux.server.present.forecasts import no_forecast
from pollux.server.present.metrics import Metrics
from pollux.server.present.views import KnownJob, cluster_size, job_row, job_summary
from pollux.server.storage.simulations import Simulations
from pollux.server.storage.store import SqlStore
from pollux.server.storage.workdirs import Workdirs
from pollux.types import ThroughputParams
from pollux.version import __version__


class FakeCluster:
    def __init__(self, directory: Path) -> None:
        self.directory, self.is_ready, self.problem = directory, True, ""
        self.views: dict[str, JobSummary] = {}
        self.requests: dict[str, JobRequest] = {}
        self.tokens: dict[str, str] = {}
        self.told: list[tuple[str, float, Report]] = []
        self.draining: set[str] = set()
        self.error: Exception | None = None  # raised by every question, if set
        self.stopped: list[tuple[bool, float]] = []
        self.has_started = False
        self.num_summaries = 0
        self.metrics = Metrics()
        self.simulations = Simulations(directory / "simulations")
        self.queries = self
        self.workdirs = Workdirs(str(directory))
        directory.mkdir(parents=True, exist_ok=True)
        self.accounts = Accounts(SqlStore(directory / "accounts.db"), time.time)
        self._lock = threading.Lock()

    @property
    def operations(self) -> Operations:
        raise NotImplementedError("operators' commands need the real cluster")

    @property
    def retention(self) -> Retention:
        raise NotImplementedError("removing jobs needs the real cluster")

    # Life

    def start(self) -> None:
        self.has_started = True

    def stop(self, *, keeps_jobs: bool, timeout_s: float = 60) -> None:
        self.is_ready = False
        self.stopped.append((keeps_jobs, timeout_s))

    def hurry(self, timeout_s: float) -> None:
        pass

    def wake(self) -> None:
        pass

    # Jobs

    def submit(self, request: JobRequest) -> list[JobSummary]:
        self._fail()
        with self._lock:
            found = []
            existing = {name: (view.state, view.after) for name, view in self.views.items()}
            jobs = request.expand()[:20]
            check_dependencies(jobs, existing)
            for job in jobs:
                name = unique_name(job.name, self.views)
                self.requests[name] = job
                self.views[name] = _view(name, job, len(self.views))
                self.tokens[f"token-of-{name}-0123456789"] = name
                found.append(self.views[name])
            return found

    def change(self, name: str, **values: object) -> JobSummary:
        self.views[name] = dataclasses.replace(self.views[name], **values)
        return self.views[name]

    def cancel(self, name: str, reason: str, saves: bool = True) -> JobSummary:
        if self.is_ended(name):
            return self.summary_of(name)
        return self.change(name, state="cancelled", reason=reason, finished_at=time.time())

    def jobs(
        self, states: Sequence[str] | None, limit: int, offset: int, newest_first: bool
    ) -> tuple[list[JobSummary], int]:
        self._fail()
        chosen = [view for view in self.views.values() if states is None or view.state in states]
        if newest_first:
            chosen.reverse()
        return chosen[offset : offset + limit], len(chosen)

    def summary_of(self, name: str) -> JobSummary:
        self._fail()
        if name not in self.views:
            raise UnknownNameError("job", name, self.views)
        return self.views[name]

    def check_nodes(self, script: str, packages: Sequence[str]) -> list[CheckedNode]:
        self._fail()
        return [CheckedNode(name="a", findings=(NodeFinding(subject="script", state="fine", found=script),))]

    def job(self, name: str) -> JobDetail:
        view = self.summary_of(name)
        params = {"alpha_g": float("nan")}
        return JobDetail(
            **{one.name: getattr(view, one.name) for one in dataclasses.fields(view)},
            request=self.requests[name].to_dict(),
            failure="",
            models={
                "cpu": FittedModel(
                    params=params, num_configurations=1, max_replicas=1, max_on_a_node=1, max_nodes=1, rmsle=None
                )
            },
            decision=None,
            decisions=(),
            why="",
            transitions=(StateChange(at=1.0, source="pending", target="starting", reason=""),),
            training_notes=(TrainingNote(id=1, at=2.0, text="step 9: batch 32 -> 64"),),
            resizes=(),
            restarts=(),
            replicas=(),
            idle="",
            energy_j=None,
            energy_per_percent_j=None,
            log_directory=str(self.job_directory(name) / "logs"),
            versions={},
        )

    def report(self, report: Report, num_bytes: int = 0) -> ReportAnswer:
        self.summary_of(report.job)
        self.told.append((report.job, time.time(), report))
        return ReportAnswer(params={"cpu": ThroughputParams(*[0.1] * 7)}, report_every_s=1.0)

    def study_of(self, name: str) -> str:
        return self.requests[name].study if name in self.requests else ""

    def speedups_of(self, name: str) -> tuple[float, ...]:
        return ()

    def save_reports(self) -> None: ...

    def reports(self, name: str, since: int | None, limit: int) -> list[StoredReport]:
        self.summary_of(name)
        found = [
            stored(report, number, at)
            for number, (job, at, report) in enumerate(self.told, start=1)
            if job == name and number > (since or 0)
        ]
        return found[:limit]

    # The cluster

    def nodes(self) -> list[NodeSummary]:
        self._fail()
        return [_node(name, name in self.draining) for name in ("a", "b")]

    def reweigh(self, weights: Mapping[str, float]) -> None:
        for name, weight in weights.items():
            self.change(name, weight=weight)

    def weights_outside(self, study: str) -> list[float]:
        return [view.weight for view in self.views.values() if view.study != study and not view.is_over]

    def drain(self, node: str, is_draining: bool) -> NodeSummary:
        self._fail()
        if node not in ("a", "b"):
            raise UnknownNameError("node", node, ("a", "b"))
        (self.draining.add if is_draining else self.draining.discard)(node)
        return _node(node, is_draining)

    def rounds(self, since: int | None, limit: int) -> list[RoundSummary]:
        self._fail()
        return []

    def round(self, id_: int) -> RoundDetail:
        raise UnknownNameError("round", str(id_), [])

    def samples(self, since: float | None, until: float | None, points: int) -> list[ClusterSample]:
        self._fail()
        return []

    def samples_after(self, id_: int) -> list[tuple[int, ClusterSample]]:
        return []

    def last_sample_id(self) -> int:
        return 0

    def readings(self, node: str, since: float | None, until: float | None, points: int) -> list[NodeReading]:
        self._fail()
        return []

    def timeline(self, since: float | None, until: float | None, limit: int) -> Timeline:
        self._fail()
        return Timeline(since=since or 0.0, until=until or time.time(), total=0, jobs=())

    def curves(self, name: str, points: int) -> JobCurves:
        self.summary_of(name)
        return job_curves([(at, report) for job, at, report in self.told if job == name][:points])

    def model(self, name: str) -> JobModel:
        self.summary_of(name)
        return job_model(None, None, (), None)

    def active_rows(self) -> dict[str, JobRow]:
        self._fail()
        return {name: job_row(view) for name, view in self.views.items() if not self.is_ended(name)}

    def row(self, name: str) -> JobRow:
        return job_row(self.summary_of(name))

    def last_ended(self, limit: int) -> list[str]:
        return [name for name in self.views if self.is_ended(name)][-limit:]

    def summary(self) -> ClusterSummary:
        self.num_summaries += 1
        self._fail()
        return ClusterSummary(
            version=__version__,
            engine="fake", policy="none", started_at=1.0, now=time.time(), num_slots=4, num_used_slots=0,
            nodes=2, jobs={"pending": len(self.views)}, num_rounds=0, last_decision_s=None, lost_share=None,
            why_free=(), sizing=cluster_size(None, None, Prices()), data_directory=str(self.directory), interval_s=60.0,
        )  # fmt: skip

    def job_directory(self, name: str) -> Path:
        assert name in self.views, "an unknown name must not become a path"
        return self.directory / "jobs" / name

    def is_ended(self, name: str) -> bool:
        return self.summary_of(name).is_over

    def forecast(self, name: str) -> JobForecast:
        self.summary_of(name)
        return no_forecast("it is a fake")

    def usage(self, by: Sequence[str], since: str | None, until: str | None) -> list[UsageRow]:
        return []

    def job_of_token(self, token: str) -> str | None:
        wanted = hashlib.sha256(token.encode("utf-8", "replace")).digest()
        return next((job for own, job in self.tokens.items() if hashlib.sha256(own.encode()).digest() == wanted), None)

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error


def _node(name: str, is_draining: bool) -> NodeSummary:
    return NodeSummary(
        name=name, num_slots=2, accelerator="cpu", is_draining=is_draining, is_leaving=False, used=0, jobs=()
    )


def _view(name: str, job: JobRequest, sequence: int) -> JobSummary:
    known = KnownJob(
        name=name,
        sequence=sequence,
        submitted_at=time.time(),
        record=None,
        request=job.resolved(None),
        report=None,
        reported_at=None,
    )
    return job_summary(known, time.time(), reason="waiting for slots")
