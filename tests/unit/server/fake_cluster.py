"""A cluster in memory that schedules nothing: what the HTTP side is tested against where the real one is too much."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pollux.errors import UnknownNameError
from pollux.jobs import JobRequest, check_dependencies, unique_name
from pollux.server import schemas
from pollux.server.metrics import Metrics
from pollux.server.seeing import curves_view, job_row, model_view
from pollux.server.simulations import Simulations
from pollux.server.views import sizing_view
from pollux.wire import WireReport, report_to_dict


class FakeCluster:
    def __init__(self, directory: Path) -> None:
        self.directory, self.is_ready, self.problem = directory, True, ""
        self.views: dict[str, dict[str, Any]] = {}
        self.requests: dict[str, JobRequest] = {}
        self.tokens: dict[str, str] = {}
        self.told: list[tuple[str, float, WireReport]] = []
        self.draining: set[str] = set()
        self.error: Exception | None = None  # raised by every question, if set
        self.stopped: list[tuple[bool, float]] = []
        self.has_started = False
        self.num_summaries = 0
        self.metrics = Metrics()
        self.simulations = Simulations(directory / "simulations")
        self._lock = threading.Lock()

    # Life

    def start(self) -> None:
        self.has_started = True

    def stop(self, *, keeps_jobs: bool, timeout_s: float = 60) -> None:
        self.is_ready = False
        self.stopped.append((keeps_jobs, timeout_s))

    def hurry(self, timeout_s: float) -> None:
        pass

    # Jobs

    def submit(self, request: JobRequest) -> list[dict[str, Any]]:
        self._fail()
        with self._lock:
            found = []
            existing = {name: (view["state"], view["after"]) for name, view in self.views.items()}
            jobs = request.expand()[:20]
            check_dependencies(jobs, existing)
            for job in jobs:
                name = unique_name(job.name, self.views)
                self.requests[name] = job
                self.views[name] = _view(name, job, len(self.views))
                self.tokens[f"token-of-{name}-0123456789"] = name
                found.append(self.views[name])
            return found

    def cancel(self, name: str, reason: str) -> dict[str, Any]:
        view = self.view(name)
        if not self.is_ended(name):
            view |= {"state": "cancelled", "reason": reason, "finished_at": time.time()}
        return view

    def jobs(
        self, states: Sequence[str] | None, limit: int, offset: int, newest_first: bool
    ) -> tuple[list[dict[str, Any]], int]:
        self._fail()
        chosen = [view for view in self.views.values() if states is None or view["state"] in states]
        if newest_first:
            chosen.reverse()
        return chosen[offset : offset + limit], len(chosen)

    def view(self, name: str) -> dict[str, Any]:
        self._fail()
        if name not in self.views:
            raise UnknownNameError("job", name, self.views)
        return self.views[name]

    def job(self, name: str) -> dict[str, Any]:
        view = self.view(name)
        more = dict(
            request=self.requests[name].to_dict(),
            failure="",
            models={"cpu": dict(params={"alpha_g": float("nan")}, num_configurations=1, max_replicas=1, rmsle=None)},
            decision=None,
            decisions=[],
            transitions=[{"at": 1.0, "source": "pending", "target": "starting", "reason": ""}],
            training_notes=[{"id": 1, "at": 2.0, "text": "step 9: batch 32 -> 64"}],
            resizes=[],
            replicas=[],
            log_directory=str(self.job_directory(name) / "logs"),
        )
        return {**view, **more}

    def report(self, job: str, report: WireReport) -> dict[str, Any]:
        self.view(job)
        self.told.append((job, time.time(), report))
        return {"params": {"cpu": [0.1] * 7}, "report_every_s": 1.0}

    def reports(self, name: str, since: int | None, limit: int) -> list[dict[str, Any]]:
        self.view(name)
        found = [
            {"id": number, "at": at, **report_to_dict(report)}
            for number, (job, at, report) in enumerate(self.told, start=1)
            if job == name and number > (since or 0)
        ]
        return found[:limit]

    # The cluster

    def nodes(self) -> list[dict[str, Any]]:
        self._fail()
        return [_node(name, name in self.draining) for name in ("a", "b")]

    def drain(self, node: str, is_draining: bool) -> dict[str, Any]:
        self._fail()
        if node not in ("a", "b"):
            raise UnknownNameError("node", node, ("a", "b"))
        (self.draining.add if is_draining else self.draining.discard)(node)
        return _node(node, is_draining)

    def rounds(self, since: int | None, limit: int) -> list[dict[str, Any]]:
        self._fail()
        return []

    def round(self, id_: int) -> dict[str, Any]:
        raise UnknownNameError("round", str(id_), [])

    def samples(self, since: float | None, until: float | None, points: int) -> list[dict[str, Any]]:
        self._fail()
        return []

    def samples_after(self, id_: int) -> list[tuple[int, dict[str, Any]]]:
        return []

    def last_sample_id(self) -> int:
        return 0

    def timeline(self, since: float | None, until: float | None, limit: int) -> dict[str, Any]:
        self._fail()
        return {"since": since or 0.0, "until": until or time.time(), "total": 0, "jobs": []}

    def curves(self, name: str, points: int) -> dict[str, Any]:
        self.view(name)
        return curves_view([(at, report) for job, at, report in self.told if job == name][:points])

    def model(self, name: str) -> dict[str, Any]:
        self.view(name)
        return model_view(None, None, (), None)

    def active_rows(self) -> dict[str, dict[str, Any]]:
        self._fail()
        return {name: job_row(view) for name, view in self.views.items() if not self.is_ended(name)}

    def row(self, name: str) -> dict[str, Any]:
        return job_row(self.view(name))

    def last_ended(self, limit: int) -> list[str]:
        return [name for name in self.views if self.is_ended(name)][-limit:]

    def summary(self) -> dict[str, Any]:
        self.num_summaries += 1
        self._fail()
        return dict(
            engine="fake", policy="none", started_at=1.0, now=time.time(), num_slots=4, num_used_slots=0,
            nodes=2, jobs={"pending": len(self.views)}, num_rounds=0, last_decision_s=None, lost_share=None,
            sizing=sizing_view(None, None, None), data_directory=str(self.directory), interval_s=60.0,
        )  # fmt: skip

    def job_directory(self, name: str) -> Path:
        assert name in self.views, "a name nobody has must not become a path"
        return self.directory / "jobs" / name

    def is_ended(self, name: str) -> bool:
        return self.view(name)["state"] in ("succeeded", "failed", "cancelled")

    def job_of_token(self, token: str) -> str | None:
        wanted = hashlib.sha256(token.encode("utf-8", "replace")).digest()
        return next((job for own, job in self.tokens.items() if hashlib.sha256(own.encode()).digest() == wanted), None)

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error


def _node(name: str, is_draining: bool) -> dict[str, Any]:
    return dict(name=name, num_slots=2, accelerator="cpu", is_draining=is_draining, is_leaving=False, used=0, jobs=[])


def _view(name: str, job: JobRequest, sequence: int) -> dict[str, Any]:
    blank = {field: None for field in schemas.JobView.model_fields}
    request = {field: value for field, value in job.to_dict().items() if field in blank}
    known = dict(
        name=name, state="pending", sequence=sequence, submitted_at=time.time(), reason="waiting for slots", note="",
        allocation=[], num_replicas=0, min_replicas=1, max_replicas=4, generation=0, num_restarts=0, num_crashes=0,
        metrics={},
    )  # fmt: skip
    view = {**blank, **request, **known}
    schemas.JobView.model_validate(view)
    return view
