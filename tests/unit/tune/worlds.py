"""A cluster in memory for studies: jobs train by formula, as fast as the test says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pollux.api.request import JobRequest
from pollux.errors import InvalidValueError
from pollux.tune.ports import Observation, TrialJob


@dataclass
class FormulaJob:
    request: JobRequest
    progress: float = 0.0
    state: str = "running"
    reason: str = ""
    told: list[Observation] = field(default_factory=list)


class FormulaJobs:
    """Implements :class:`pollux.tune.ports.Jobs`. ``value`` of parameters and progress; None: nothing is logged.

    ``also``: what else is logged, from the first value on.
    """

    p = -1.0

    def __init__(
        self,
        value: Callable[[Mapping[str, object], float], float | None],
        num_slots: int = 4,
        also: Callable[[Mapping[str, object], float], Mapping[str, object]] = lambda params, progress: {},
    ) -> None:
        self.value, self.slots, self.others, self.also = value, num_slots, [], also
        self.jobs: dict[str, FormulaJob] = {}
        self.weights: dict[str, float] = {}
        self.saved: dict[str, bool] = {}  # jobs that were cancelled: whether they were to save
        self.num_reports = 0
        self.time = 1000.0

    def submit(self, request: JobRequest) -> None:
        if request.name in self.jobs:
            raise InvalidValueError(f"a job named {request.name!r} exists")
        self.jobs[request.name] = FormulaJob(request)

    def find(self, name: str) -> TrialJob | None:
        job = self.jobs.get(name)
        if job is None:
            return None
        last = {job.request.metric: job.told[-1].value} if job.told else {"other": 1.0}
        return TrialJob(
            state=job.state,
            reason=job.reason,
            num_replicas=1,
            slot_s=10 * job.progress,
            progress=job.progress,
            metrics=last | dict(self.also(job.request.params, job.progress)),
            is_of_study=job.request.study,
        )

    def study_of(self, name: str) -> str:
        job = self.jobs.get(name)
        return job.request.study if job is not None and job.state == "running" else ""

    def cancel(self, name: str, reason: str, saves: bool = True) -> None:
        self.saved[name] = saves
        if self.jobs[name].state == "running":
            self.jobs[name].state, self.jobs[name].reason = "cancelled", reason

    def observations(self, name: str, since: int) -> tuple[list[Observation], int]:
        found = [one for one in self.jobs[name].told if one.id > since]
        return found, max((one.id for one in found), default=since)

    def reweigh(self, weights: Mapping[str, float]) -> None:
        self.weights.update(weights)

    def num_slots(self) -> int:
        return self.slots

    def other_weights(self, study: str) -> Sequence[float]:
        return self.others

    def now(self) -> float:
        return self.time

    @property
    def running(self) -> list[FormulaJob]:
        return [job for job in self.jobs.values() if job.state == "running"]

    def train(self, step: float = 0.1) -> None:
        """Every job that runs goes on by a tenth of its work, and tells its metric."""
        self.time += 1.0
        for job in self.running:
            job.progress = min(job.progress + step, 1.0)
            value = self.value(job.request.params, job.progress)
            if value is not None:
                self.num_reports += 1
                job.told.append(Observation(id=self.num_reports, at=self.time, progress=job.progress, value=value))
            if job.progress > 1 - 1e-9:
                job.state = "succeeded"
