"""Finds jobs that hold slots and make no step. The scheduler thread looks once a second, and stops what is found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pollux.engines.live import LiveEngine
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.record import JobRecord
from pollux.server.live.job_table import JobTable, LiveJob

MANY_STEPS = 100  # of a job's usual time: no step for so long is a hang, if it is also longer than the time-out
STACKS_S = 2.0  # for replicas to write their stacks, before they are stopped
LONGEST_LOOK_S = 5.0  # that counts: a machine that slept has not hung


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    job: str
    reason: str
    is_last: bool  # it has hung more often than it may be started again


@dataclass(slots=True)
class _Watched:
    num_steps: int | None
    reported_at: float | None
    state: JobState
    idle_s: float = 0.0  # without a new step
    silent_s: float = 0.0  # without a report
    usual_s: float = 0.0  # from one step to the next
    has_dumped: bool = False

    def see(self, job: LiveJob, state: JobState, passed_s: float) -> None:
        self.idle_s += passed_s
        self.silent_s += passed_s
        if job.reported_at != self.reported_at:
            self.reported_at, self.silent_s = job.reported_at, 0.0
        num_steps = None if job.report is None else job.report.num_steps
        has_begun = self.state is JobState.STARTING is not state
        if num_steps != self.num_steps or has_begun:
            if num_steps is not None and self.num_steps is not None and num_steps > self.num_steps:
                taken_s = self.idle_s / (num_steps - self.num_steps)
                self.usual_s = taken_s if not self.usual_s else 0.9 * self.usual_s + 0.1 * taken_s
            self.num_steps, self.idle_s, self.has_dumped = num_steps, 0.0, False
        self.state = state

    @property
    def text(self) -> str:
        if self.state is JobState.STARTING:
            return f"its replicas have not started training in {self.idle_s:.0f} s"
        usual = f" (usually {self.usual_s:.2g} s)" if self.usual_s else ""
        silence = f", no report for {self.silent_s:.0f} s" if self.silent_s > self.idle_s / 2 else ""
        return f"no step for {self.idle_s:.0f} s{usual}{silence}"


class HangWatch:
    """Of jobs that report their steps: elastic ones, and others whose usual step is known.

    Only the scheduler thread calls it.
    """

    def __init__(self, jobs: JobTable, engine: LiveEngine, timeout_s: float | None) -> None:
        """``timeout_s``: how long a job may make no step at least; None: for ever."""
        self._jobs, self._engine, self._timeout_s = jobs, engine, timeout_s
        self._watched: dict[str, _Watched] = {}
        self._looked_at: float | None = None

    def look(self, records: Iterable[JobRecord], now: float) -> list[Hang]:
        """Jobs to stop now; the stacks of their replicas are in their logs."""
        if self._timeout_s is None:
            return []
        passed_s = 0.0 if self._looked_at is None else min(max(now - self._looked_at, 0.0), LONGEST_LOOK_S)
        self._looked_at, before, self._watched = now, self._watched, {}
        found = []
        for record in records:
            job = self._jobs.get(record.name)
            if job is None or not record.allocation or record.state is JobState.STOPPING or not _tells_steps(job):
                if job is not None:
                    job.stuck = ""
                continue
            watched = before.get(job.name)
            if watched is None:
                num_steps = None if job.report is None else job.report.num_steps
                watched = _Watched(num_steps, job.reported_at, record.state)
            self._watched[job.name] = watched
            # The time of a job that cannot go on does not count: its disk is full, or its slots are not free yet.
            watched.see(job, record.state, 0.0 if self._engine.note(job.name) else passed_s)
            if (_is_elastic(job) or watched.usual_s) and (hang := self._judged(job, watched, self._timeout_s)):
                found.append(hang)
        return found

    def _judged(self, job: LiveJob, watched: _Watched, timeout_s: float) -> Hang | None:
        most_s = max(timeout_s, MANY_STEPS * watched.usual_s)
        job.stuck = f"{watched.text}; it is stopped after {most_s:.0f} s" if watched.idle_s > most_s / 2 else ""
        if watched.idle_s > most_s and not watched.has_dumped:
            watched.has_dumped = True
            self._engine.dump_stacks(job.name)
        if watched.idle_s <= most_s + STACKS_S:
            return None
        job.num_hangs += 1
        del self._watched[job.name]
        is_last = job.request is not None and job.num_hangs > job.request.num_restarts_allowed
        after = f", after {job.num_hangs - 1} restarts" if is_last and job.num_hangs > 1 else ""
        where = "; the stacks of its replicas are in their logs" if _is_elastic(job) else ""
        return Hang(job=job.name, reason=f"hung: {watched.text}{after}{where}", is_last=is_last)


def _is_elastic(job: LiveJob) -> bool:
    return job.request is not None and job.request.kind == "elastic"


def _tells_steps(job: LiveJob) -> bool:
    return job.report is not None or _is_elastic(job)
