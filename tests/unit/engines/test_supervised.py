"""An engine at the other end of a supervisor's line: what the supervisor tells comes in any order."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pollux.engines.launch import Launch
from pollux.engines.supervised import SupervisedEngine
from pollux.engines.transport import Channel, Message
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.ports import Event, JobEnded, JobRuns, StartJob
from pollux.types import Allocation, JobSpec, Node
from tests.unit.live_server import eventually

STATE: Message = {"event": "state", "nodes": None, "unusable": [], "jobs": []}


class Line:
    """A supervisor that does nothing by itself, and how it is reached."""

    log = Path("supervisor.log")

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._engines, self.supervisor = Channel(ours), Channel(theirs)

    def connect(self, giving_up: threading.Event, *, takes_over: bool = True) -> tuple[Channel, Message]:
        return self._engines, STATE

    def is_worth_a_new_connection(self) -> bool:
        return False

    def hello(self) -> Message:
        return {"op": "hello"}

    def wait_for_end(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        self.supervisor.close()

    def heard(self, op: str) -> Message:
        """The next message of this kind; those before it are gone."""
        while True:
            messages = self.supervisor.receive(30.0)
            assert messages, f"no {op} came"
            if found := [message for message in messages if message["op"] == op]:
                return found[0]


def launch_of(job: str) -> Launch:
    return Launch(command=("true",), kind="elastic", directory=job, checkpoint_dir=job, cwd=".", env={})


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def engine(line: Line) -> Iterator[SupervisedEngine]:
    made = SupervisedEngine(line, nodes=[Node(name="n0", num_slots=2, accelerator="cpu")], launch_of=launch_of)
    yield made
    made.close(stops_jobs=False)


def start_beside_namesake(engine: SupervisedEngine, line: Line, generation: int = 1, is_stopping: bool = False) -> None:
    """Start a job "a" while the supervisor still has another of this name, which the server does not know."""
    known = {"generation": generation, "allocation": [["n0", generation]], "runs": generation}
    row = {"job": "a", **known, "is_stopping": is_stopping, "end": None}
    answer = threading.Thread(target=lambda: line.heard("hello") and line.supervisor.send({**STATE, "jobs": [row]}))
    answer.start()
    engine.adopt([])
    answer.join(30.0)
    assert line.heard("stop")["reason"] == "the server does not know it"
    engine.apply([StartJob(job="a", spec=JobSpec(name="a"), allocation=Allocation.of(("n0", 1)), generation=1)])
    line.heard("start")


def test_the_end_of_a_job_that_the_server_did_not_know_is_not_that_of_its_namesake(
    engine: SupervisedEngine, line: Line
) -> None:
    start_beside_namesake(engine, line, generation=2)
    line.supervisor.send({"event": "stopped", "job": "a", "generation": 2})  # was under way when the start was sent
    line.supervisor.send({"event": "runs", "job": "a", "generation": 1})
    seen: list[Event] = []
    eventually(lambda: bool(seen.extend(engine.poll()) or seen), "the engine tells of it", 30.0)
    assert seen == [JobRuns(job="a", generation=1)]


def test_a_late_stop_of_a_namesake_takes_no_end_of_the_new_job_away(engine: SupervisedEngine, line: Line) -> None:
    start_beside_namesake(engine, line)
    line.supervisor.send({"event": "stopped", "job": "a", "generation": 1})
    line.supervisor.send({"event": "runs", "job": "a", "generation": 1})
    eventually(lambda: JobRuns(job="a", generation=1) in engine.poll(), "the engine tells of it", 30.0)
    engine.apply([StartJob(job="b", spec=JobSpec(name="b"), allocation=Allocation.of(("n0", 1)), generation=1)])
    told: list[Message] = []
    while not any(message["op"] == "start" for message in told):
        told += line.supervisor.receive(30.0) or []
    assert [message["op"] for message in told] == ["start"]  # of b; no "forget" of a


def test_a_namesake_that_is_told_to_have_stopped_twice_does_not_hide_the_end(
    engine: SupervisedEngine, line: Line
) -> None:
    """It was asked to stop by a server that ended, and by this one."""
    start_beside_namesake(engine, line, is_stopping=True)
    for _ in range(2):
        line.supervisor.send({"event": "stopped", "job": "a", "generation": 1})
    known = {"state": "succeeded", "at": 1.0, "reason": "", "exit_code": 0, "node": "n0", "cause": ""}
    line.supervisor.send({"event": "ended", "job": "a", "generation": 1, **known})
    seen: list[Event] = []
    eventually(lambda: bool(seen.extend(engine.poll()) or seen), "the engine tells of it", 30.0)
    assert [(type(event), getattr(event, "state", None)) for event in seen] == [(JobEnded, JobState.SUCCEEDED)]
