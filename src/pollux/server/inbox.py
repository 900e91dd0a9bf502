"""Reports of jobs on their way to the scheduler, and what the scheduler learnt on its way back.

Stands in ``server``. To the scheduler it is the engine: reports are events, and advice about throughput is a command;
both go over HTTP here, whatever engine runs the jobs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence

from pollux.engines.live import LiveEngine
from pollux.scheduler.ports import Command, Event, JobReport, StartJob, TuneJob
from pollux.types import Node, ThroughputParams
from pollux.wire import WireReport

MAX_WAITING = 100_000  # reports; the oldest go if the database is away for long


class Inbox:
    def __init__(self, engine: LiveEngine) -> None:
        self._engine = engine
        self._unseen: deque[WireReport] = deque(maxlen=MAX_WAITING)
        self._unsaved: deque[tuple[float, WireReport]] = deque(maxlen=MAX_WAITING)
        self._turn = threading.Lock()
        self.advice: dict[str, Mapping[str, ThroughputParams]] = {}
        self.applies_at_once = engine.applies_at_once

    def put(self, at: float, report: WireReport) -> bool:
        """Whether somebody should be woken: it is the first one since they looked."""
        with self._turn:
            self._unsaved.append((at, report))
            self._unseen.append(report)
            return len(self._unseen) == 1

    def replay(self, report: WireReport) -> None:
        """One that was kept before: it is seen again, and not kept again."""
        with self._turn:
            self._unseen.append(report)

    def take_unsaved(self) -> list[tuple[float, WireReport]]:
        with self._turn:
            taken = list(self._unsaved)
            self._unsaved.clear()
        return taken

    def put_back(self, reports: Sequence[tuple[float, WireReport]]) -> None:
        """They could not be saved: later."""
        with self._turn:
            waiting = [*reports, *self._unsaved]
            self._unsaved = deque(waiting, maxlen=MAX_WAITING)

    def nodes(self) -> Sequence[Node]:
        return self._engine.nodes()

    def apply(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, StartJob | TuneJob) and command.params:
                self.advice[command.job] = dict(command.params)
        self._engine.apply(commands)

    def poll(self) -> Sequence[Event]:
        with self._turn:
            reports = list(self._unseen)
            self._unseen.clear()
        types = {node.accelerator for node in self._engine.nodes()}
        # The cluster's own name for the type is the one to plan with; torch may know the device by another.
        known = types.pop() if len(types) == 1 else None
        return [*self._engine.poll(), *(_to_event(report, known) for report in reports)]


def _to_event(report: WireReport, accelerator: str | None) -> JobReport:
    return JobReport(
        job=report.job,
        accelerator=accelerator or report.accelerator,
        timings=report.timings,
        noise_scale=report.noise_scale,
        noise_scale_error=report.noise_scale_error,
        remaining_examples=report.remaining_examples,
        progress=report.progress,
        total_batch=report.total_batch,
        batch=report.batch,
    )
