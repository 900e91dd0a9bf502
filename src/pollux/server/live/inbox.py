"""Carries reports of jobs to the scheduler, and the scheduler's fitted models back to the jobs.

To the scheduler it is the engine: reports are events, and a model is a command. Both travel over HTTP, with any engine.
HTTP threads put reports in; the scheduler thread takes them out.
"""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from pollux.api.report import Report
from pollux.engines.live import LiveEngine
from pollux.engines.processes.failure import tells_no_checkpoint
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.ports import Command, Event, JobEnded, JobLost, JobReport, StartJob, StopJob, TuneJob
from pollux.server.live.job_table import JobTable
from pollux.server.live.restarts import Restarts
from pollux.types import Node

MAX_WAITING_BYTES = 32_000_000  # of reports, as JSON; the oldest go if the database is away for long
OVERHEAD_BYTES = 1000  # that a report counts beside its own
# What a run notes of where it goes on (train/handover.py).
_RESUMED = re.compile(r"step (\d{1,18}): (?:goes on from a checkpoint|begins anew)")
Unsaved = tuple[float, Report]  # when it came, and the report
_T = TypeVar("_T")


class _Waiting(Generic[_T]):
    """Reports that wait, oldest first, with the bytes of each."""

    def __init__(self) -> None:
        self._entries: deque[tuple[_T, int]] = deque()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entries: Iterable[tuple[_T, int]]) -> None:
        for entry in entries:
            self._entries.append(entry)
            self._num_bytes += entry[1] + OVERHEAD_BYTES
        while self._num_bytes > MAX_WAITING_BYTES and len(self._entries) > 1:
            self._num_bytes -= self._entries.popleft()[1] + OVERHEAD_BYTES

    def take(self) -> list[tuple[_T, int]]:
        taken = list(self._entries)
        self._entries.clear()
        self._num_bytes = 0
        return taken


class Inbox:
    def __init__(self, engine: LiveEngine, jobs: JobTable) -> None:
        self._engine, self._jobs = engine, jobs
        self._unseen = _Waiting[Unsaved]()
        self._unsaved = _Waiting[Unsaved]()
        self._turn = threading.Lock()
        self._restarts = Restarts(self._is_restartable, self._replicas_of, time.monotonic)
        self.applies_at_once = engine.applies_at_once

    def _is_restartable(self, job: str) -> bool:
        request = self._jobs.request_of(job)
        return request is not None and request.kind == "restartable"

    def _replicas_of(self, job: str) -> set[str]:
        return {replica.replica_id for replica in self._engine.replicas(job)}

    def put(self, at: float, report: Report, num_bytes: int) -> bool:
        """Whether the scheduler thread should be woken: it is the first report since it looked."""
        with self._turn:
            self._unsaved.add([((at, report), num_bytes)])
            self._unseen.add([((at, report), num_bytes)])
            return len(self._unseen) == 1

    def replay(self, at: float, report: Report) -> None:
        """Show the scheduler a report that is in the database already."""
        with self._turn:
            self._unseen.add([((at, report), 0)])

    def take_unsaved(self) -> list[tuple[Unsaved, int]]:
        """Each with its bytes."""
        with self._turn:
            return self._unsaved.take()

    def put_back(self, reports: Sequence[tuple[Unsaved, int]]) -> None:
        """Try again later to save these."""
        with self._turn:
            self._unsaved.add([*reports, *self._unsaved.take()])

    def nodes(self) -> Sequence[Node]:
        return self._engine.nodes()

    def apply(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, StartJob | TuneJob) and command.params:
                self._jobs.advise(command.job, dict(command.params))
        self._restarts.note(commands)
        self._engine.apply([self._hurried(command) for command in commands])

    def _hurried(self, command: Command) -> Command:
        """A trial that was pruned has nothing to save: the next one begins sooner."""
        if isinstance(command, StopJob) and (job := self._jobs.get(command.job)) is not None and job.is_disposable:
            return dataclasses.replace(command, saves=False)
        return command

    def poll(self) -> Sequence[Event]:
        with self._turn:
            reports = [entry for entry, _ in self._unseen.take()]
        types = {node.accelerator for node in self._engine.nodes()}
        # The cluster's own name for the type is the one to plan with; torch may know the device by another.
        known = types.pop() if len(types) == 1 else None
        events = self._restarts.pass_on(self._engine.poll(), [report for _, report in reports])
        return [*map(self._judged, events), *(_to_event(at, report, known) for at, report in reports)]

    def _judged(self, event: Event) -> Event:
        """A job that can use none of its checkpoints is not over: its owner can mend them, or let it begin anew.

        Trials are: a study has others, and goes on without this one.
        """
        if not isinstance(event, JobEnded) or event.state is not JobState.FAILED:
            return event
        request, failure = self._jobs.request_of(event.job), event.reason.partition("\n")[0]
        if not tells_no_checkpoint(failure) or request is None or request.study:
            return event
        why = (
            "held: none of its checkpoints can be used, and it does not begin anew by itself. Mend or remove those in "
            f"{self._jobs.checkpoints_of(event.job)}, then: pollux release {event.job}"
        )
        return JobLost(job=event.job, reason=f"{why}\n{event.reason}", is_halted=True)


def _resumed_at(report: Report) -> int | None:
    found = next((match for note in reversed(report.notes) if (match := _RESUMED.match(note))), None)
    return None if found is None else int(found[1])


def _to_event(at: float, report: Report, accelerator: str | None) -> JobReport:
    return JobReport(
        job=report.job,
        accelerator=accelerator or report.accelerator,
        timings=report.timings,
        noise_scale=report.noise_scale,
        noise_scale_error=report.noise_scale_error,
        remaining_examples=report.remaining_examples,
        progress=report.progress,
        total_batch=report.total_batch,
        throughput=report.throughput,
        batch=report.batch,
        at=at,
        replica=report.replica or "",
        generation=report.generation,
        num_steps=report.num_steps,
        stalled_s=report.stalled_s,
        resumed_at=_resumed_at(report),
    )
