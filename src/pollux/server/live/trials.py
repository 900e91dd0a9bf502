"""A cluster's jobs as a study sees them. The service makes one for :class:`pollux.tune.studies.Studies`."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from pollux.api.report import StoredReport
from pollux.api.request import JobRequest
from pollux.errors import InvalidValueError, UnknownNameError
from pollux.server.http.dependencies import ServedCluster
from pollux.tune.ports import Observation, TrialJob

MAX_REPORTS = 1000  # of a page


class ClusterJobs:
    """See :class:`pollux.tune.ports.Jobs`."""

    def __init__(self, cluster: ServedCluster, p: float) -> None:
        self._cluster, self._p = cluster, p

    @property
    def p(self) -> float:
        return self._p

    def now(self) -> float:
        return time.time()

    def submit(self, request: JobRequest) -> None:
        admitted = self._cluster.submit(request)
        if admitted[0].name != request.name:
            self._cluster.cancel(admitted[0].name, f"a job named {request.name} exists")
            raise InvalidValueError(
                f"a job named {request.name!r} exists and is not of study {request.study!r}; name the study otherwise"
            )

    def find(self, name: str) -> TrialJob | None:
        try:
            job = self._cluster.queries.summary_of(name)
        except UnknownNameError:
            return None
        return TrialJob(
            state=job.state,
            reason=job.reason,
            num_replicas=job.num_replicas,
            slot_s=job.attained_slot_s or 0.0,
            progress=job.progress,
            metrics=job.metrics,
            is_of_study=job.study,
            speedups=self._cluster.queries.speedups_of(name),
        )

    def study_of(self, name: str) -> str:
        return self._cluster.queries.study_of(name)

    def cancel(self, name: str, reason: str, saves: bool = True) -> None:
        self._cluster.cancel(name, reason, saves)

    def observations(self, name: str, since: int) -> tuple[list[Observation], int]:
        found: list[Observation] = []
        while page := self._cluster.queries.reports(name, since, MAX_REPORTS):
            found += observed_in(page)
            since = page[-1].id
        return found, since

    def reweigh(self, weights: Mapping[str, float]) -> None:
        self._cluster.reweigh(weights)

    def num_slots(self) -> int:
        return sum(node.num_slots for node in self._cluster.queries.nodes() if not node.is_draining)

    def other_weights(self, study: str) -> Sequence[float]:
        return self._cluster.weights_outside(study)


def observed_in(reports: Sequence[StoredReport]) -> list[Observation]:
    """Values of the study's metric that reports carry, in the order in which they were logged."""
    return [
        Observation(id=report.id, at=report.at, progress=progress, value=float(value))
        for report in reports
        for progress, value in report.observed
        if math.isfinite(progress)
    ]
