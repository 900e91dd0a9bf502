"""A live cluster with a real database and a real thread; its engine is one that tests tell when to be done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pollux.api.cluster import CheckedNode, NodeReading
from pollux.api.job import JobSummary
from pollux.api.report import Report
from pollux.api.request import JobRequest
from pollux.engines.live import NO_PHASE, JobPhase, ReplicaInfo, UnusableNode
from pollux.engines.preflight import CheckRequest, check_here
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.ports import (
    Command,
    Event,
    JobEnded,
    JobLost,
    JobRuns,
    JobStopped,
    ResizeJob,
    StartJob,
    StopJob,
)
from pollux.scheduler.record import JobRecord
from pollux.server.config import ClusterConfig
from pollux.server.live.clock import LiveClock
from pollux.server.live.cluster import Cluster
from pollux.server.storage.store import SqlStore
from pollux.types import Node
from tests.reports import report_fields

PATIENCE_S = 20.0


class ObedientEngine:
    """Starts, resizes and stops at once, and remembers; what jobs do by themselves is said by the test."""

    applies_at_once = False

    def __init__(self, *nodes: Node) -> None:
        self._nodes = nodes
        self._events: list[Event] = []
        self._turn = threading.Lock()
        self.commands: list[Command] = []
        self.adopted: list[list[str]] = []
        self.running: dict[str, int] = {}
        self.obeys_stops = True
        self.notes: dict[str, str] = {}
        self.phases: dict[str, JobPhase] = {}
        self.dumped: list[str] = []
        self.unusable_nodes: list[UnusableNode] = []
        self.is_closed: bool | None = None
        self.wake: Callable[[], None] = lambda: None

    def nodes(self) -> Sequence[Node]:
        return self._nodes

    def apply(self, commands: Sequence[Command]) -> None:
        for command in commands:
            self.commands.append(command)
            if isinstance(command, StartJob | ResizeJob):
                self.running[command.job] = command.generation
                self.say(JobRuns(job=command.job, generation=command.generation))
            elif isinstance(command, StopJob) and self.obeys_stops:
                self.running.pop(command.job, None)
                self.say(JobStopped(job=command.job))

    def say(self, *events: Event) -> None:
        with self._turn:
            self._events.extend(events)
        self.wake()

    def end(self, job: str, state: JobState = JobState.SUCCEEDED, at: float | None = None, **more: Any) -> None:
        self.running.pop(job, None)
        self.say(JobEnded(job=job, state=state, at=time.time() if at is None else at, **more))

    def poll(self) -> Sequence[Event]:
        with self._turn:
            events, self._events = self._events, []
        return events

    def adopt(self, records: Sequence[JobRecord]) -> None:
        self.adopted.append([record.name for record in records])
        for record in records:
            if record.state.holds_slots and record.name not in self.running:
                self.say(JobLost(job=record.name, reason="nobody runs it"))

    def replicas(self, job: str) -> Sequence[ReplicaInfo]:
        return ()

    @property
    def unusable(self) -> list[UnusableNode]:
        return self.unusable_nodes

    def note(self, job: str) -> str:
        return self.notes.get(job, "")

    def phase(self, job: str) -> JobPhase:
        return self.phases.get(job, NO_PHASE)

    def check(self, asked: CheckRequest) -> list[CheckedNode]:
        findings = check_here(CheckRequest(script=asked.script, packages=asked.packages), None)
        return [CheckedNode(name=node.name, findings=findings) for node in self._nodes]

    def dump_stacks(self, job: str) -> None:
        self.dumped.append(job)

    trouble = ""
    readings: Mapping[str, NodeReading] = {}

    def close(self, *, stops_jobs: bool, grace_s: float | None = None) -> None:
        self.is_closed = stops_jobs


class World:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.engine = ObedientEngine(Node(name="a", num_slots=4, accelerator="cpu"))
        self.store = SqlStore(path / "pollux.db")
        self.cluster = self.make()

    def make(self, clock: LiveClock | None = None) -> Cluster:
        config = ClusterConfig(
            data_directory=self.path, secret="s" * 32, url="http://x", min_pause_s=0.0, interval_s=0.2
        )
        self.cluster = Cluster(store=self.store, engine=self.engine, config=config, clock=clock)
        self.engine.wake = self.cluster.wake
        return self.cluster

    def submit(self, *command: str, **options: Any) -> str:
        return self.cluster.submit(JobRequest(command=command or ("sleep", "9"), **options))[0].name

    def until(self, condition: Callable[[], object], what: str = "it") -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{what} never happened; problem: {self.cluster.problem}"
            time.sleep(0.01)
        return found

    def until_state(self, name: str, state: str) -> JobSummary:
        self.until(lambda: self.cluster.queries.summary_of(name).state == state, f"{name} {state}")
        return self.cluster.queries.summary_of(name)


def report(job: str, **values: Any) -> Report:
    return Report(job=job, **report_fields(**values))
