"""What a study needs of a cluster. The server implements it on its jobs, tests and the simulator on their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pollux.api.request import JobRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialJob:
    """A trial's job as it stands."""

    state: str  # one of pollux.api.job.JobStateName
    reason: str
    num_replicas: int
    slot_s: float
    progress: float | None
    metrics: Mapping[str, object]
    is_of_study: str  # the study it was submitted for
    speedups: tuple[float, ...] = ()  # goodput with 1, 2, ... slots over that with one, as far as it is known

    @property
    def is_over(self) -> bool:
        return self.state in ("succeeded", "failed", "cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """``id``: of the report that told it; ``at``: when that came."""

    id: int
    at: float
    progress: float
    value: float


class Jobs(Protocol):
    """Any thread may ask. Every call returns in time or raises a PolluxError."""

    def submit(self, request: JobRequest) -> None:
        """Keep the job under exactly this name; it is in the database on return."""

    def find(self, name: str) -> TrialJob | None:
        """None: there has never been such a job."""

    def study_of(self, name: str) -> str:
        """The study that a job was submitted for; empty: none, or the job is over. From memory."""

    def cancel(self, name: str, reason: str, saves: bool = True) -> None:
        """Not ``saves``: nothing of the job is needed any more, it may end without a checkpoint."""

    def observations(self, name: str, since: int) -> tuple[list[Observation], int]:
        """Values of the study's metric in reports after the id ``since``, and the id of the last report."""

    def reweigh(self, weights: Mapping[str, float]) -> None: ...

    def num_slots(self) -> int: ...

    def other_weights(self, study: str) -> Sequence[float]:
        """Weights of the other jobs that are not over; another study counts as one, by its weight."""

    @property
    def p(self) -> float:
        """The exponent of the policy's power mean."""

    def now(self) -> float: ...
