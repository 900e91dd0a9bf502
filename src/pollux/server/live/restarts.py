"""When a restartable job trains: not when its processes live, but when one of them has reported a step.

The inbox calls it, in the scheduler thread. The engine says that all processes were started; a script that imports a
framework and compiles its model trains much later. The time between the command and the first report is what a restart
costs the job, and the scheduler charges it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from pollux.api.report import Report
from pollux.scheduler.ports import Command, Event, JobEnded, JobLost, JobRuns, JobStopped, ResizeJob, StartJob

MAX_SILENCE_S = 600.0  # of a job that never reports: it then counts as running

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Start:
    commanded_at: float | None = None  # None: by an earlier server
    runs: JobRuns | None = None  # the engine's word, held back until the job reports
    held_since: float = 0.0


class Restarts:
    def __init__(
        self,
        is_restartable: Callable[[str], bool],
        replicas_of: Callable[[str], Collection[str]],
        clock: Callable[[], float],
    ) -> None:
        """``replicas_of``: the ids of a job's living replicas. ``clock``: any that goes forward."""
        self._is_restartable, self._replicas_of, self._clock = is_restartable, replicas_of, clock
        self._starts: dict[str, _Start] = {}

    def note(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, StartJob | ResizeJob) and self._is_restartable(command.job):
                self._starts[command.job] = _Start(commanded_at=self._clock())

    def pass_on(self, events: Sequence[Event], reports: Sequence[Report]) -> list[Event]:
        """The engine's events, those held back until now among them, in an order that makes sense."""
        passed: list[Event] = []
        for event in events:
            if isinstance(event, JobRuns) and self._is_restartable(event.job):
                start = self._starts.setdefault(event.job, _Start())
                start.runs, start.held_since = event, self._clock()
                continue
            if isinstance(event, JobEnded | JobLost | JobStopped):
                self._starts.pop(event.job, None)
            passed.append(event)
        passed += [runs for report in reports if (runs := self._released_by(report)) is not None]
        return passed + self._overdue()

    def _released_by(self, report: Report) -> JobRuns | None:
        start = self._starts.get(report.job)
        if start is None or start.runs is None or report.replica not in self._replicas_of(report.job):
            return None
        del self._starts[report.job]
        took_s = None if start.commanded_at is None else self._clock() - start.commanded_at
        return JobRuns(job=report.job, generation=start.runs.generation, took_s=took_s)

    def _overdue(self) -> list[Event]:
        now = self._clock()
        late = [
            job
            for job, start in self._starts.items()
            if start.runs is not None and now - start.held_since > MAX_SILENCE_S
        ]
        for job in late:
            logger.warning("%s: no report for %.0f s after it was started; it counts as running", job, MAX_SILENCE_S)
        return [runs for job in late if (runs := self._starts.pop(job).runs) is not None]
