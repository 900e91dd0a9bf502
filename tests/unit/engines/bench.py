"""What the tests of engines share: a local engine with real processes, looked after and looked into."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from pollux.engines.launch import Launch
from pollux.engines.live import ReplicaInfo
from pollux.engines.local.engine import LocalEngine
from pollux.engines.processes.layout import detect_nodes
from pollux.scheduler.knowledge import Knowledge
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.ports import Event, JobRuns, ResizeJob, StartJob, StopJob
from pollux.scheduler.record import JobRecord
from pollux.types import Allocation, JobSpec

LEDGER = Path(__file__).parents[2] / "e2e" / "scripts" / "ledger.py"
TIMEOUT_S = 120.0  # a bound for a hang on a busy machine, not an expectation


def until(condition: Callable[[], object], what: str = "", timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain: {what}"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class Bench:
    """Jobs of one engine in one folder. ``directory`` is the supervisor's, which others may share."""

    def __init__(self, folder: Path, directory: Path, **options: Any) -> None:
        self.folder, self.directory, self.options = folder, directory, options
        self.launches: dict[str, Launch] = {}
        self.seen: list[Event] = []
        self.engine = self.open()

    def open(self, **more: Any) -> LocalEngine:
        nodes, devices = detect_nodes(nodes="2x2", slots=4)
        options = {"grace_s": 40.0, **self.options, **more}
        return LocalEngine(self.directory, nodes=nodes, devices=devices, launch_of=self.launches.__getitem__, **options)

    # --- jobs -----------------------------------------------------------------------------------------------------

    def prepare(self, job: str, command: Sequence[str] | None = None, **options: Any) -> None:
        """By default a ledger that trains for ever."""
        if command is None:
            out = str(self.folder / job)
            command = (sys.executable, str(LEDGER), "--out", out, "--epochs", "100000", "--save-s", "0.2")
        env = {name: value for name, value in os.environ.items() if not name.startswith(("POLLUX_", "TORCH"))}
        options = {"kind": "elastic", "env": env, "cwd": str(self.folder), **options}
        folder = self.folder / "jobs" / job
        places = {"directory": str(folder), "checkpoint_dir": str(folder / "checkpoints")}
        self.launches[job] = Launch(command=tuple(command), **places, **options)

    def script(self, code: str, name: str = "script.py") -> tuple[str, str]:
        path = self.folder / name
        path.write_text(code)
        return sys.executable, str(path)

    def start(self, job: str, *shares: tuple[str, int], generation: int = 1) -> None:
        if job not in self.launches:
            self.prepare(job)
        command = StartJob(job=job, spec=JobSpec(name=job), allocation=Allocation.of(*shares), generation=generation)
        self.engine.apply([command])

    def resize(self, job: str, *shares: tuple[str, int], generation: int) -> None:
        self.engine.apply([ResizeJob(job=job, allocation=Allocation.of(*shares), generation=generation)])

    def stop(self, job: str) -> None:
        self.engine.apply([StopJob(job=job, reason="test")])

    def record(self, job: str, state: JobState, generation: int, *shares: tuple[str, int]) -> JobRecord:
        spec = JobSpec(name=job)
        return JobRecord(
            spec=spec,
            sequence=0,
            knowledge=Knowledge(job),
            state=state,
            generation=generation,
            allocation=Allocation.of(*shares),
        )

    # --- what happens ---------------------------------------------------------------------------------------------

    def wait_for(self, is_wanted: Callable[[Event], bool], timeout_s: float = TIMEOUT_S) -> Event:
        """The first such event that has not been waited for before; those before it are gone."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.seen += self.engine.poll()
            while self.seen:
                event = self.seen.pop(0)
                if is_wanted(event):
                    return event
            assert time.monotonic() < deadline, f"it never happened; {self.story()}"
            time.sleep(0.01)

    def wait_runs(self, job: str, generation: int) -> None:
        self.wait_for(lambda event: event == JobRuns(job=job, generation=generation))

    def wait_of(self, kind: type, job: str) -> Any:
        return self.wait_for(lambda event: isinstance(event, kind) and event.job == job)

    def run(self, job: str, *shares: tuple[str, int], generation: int = 1) -> list[ReplicaInfo]:
        self.start(job, *shares, generation=generation)
        self.wait_runs(job, generation)
        return self.members(job)

    def members(self, job: str) -> list[ReplicaInfo]:
        return [replica for replica in self.engine.replicas(job) if replica.state == "member"]

    def pids(self, job: str) -> list[int]:
        return [replica.pid for replica in self.members(job) if replica.pid is not None]

    def log(self, job: str, kind: str = "out") -> str:
        return "".join(path.read_text() for path in sorted((self.folder / "jobs" / job).glob(f"logs/*/*.{kind}")))

    def story(self) -> str:
        return (self.directory / "supervisor.log").read_text()[-4000:]

    def close(self, stops_jobs: bool = True) -> None:
        """Also where a test has failed after it had closed the engine."""
        self.engine.close(stops_jobs=False)
        self.engine = self.open()
        if not stops_jobs:
            self.engine.adopt([])  # nobody knows its jobs any more
        self.engine.close(stops_jobs=stops_jobs)
