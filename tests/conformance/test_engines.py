from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pollux.api.report import read_report
from pollux.errors import SimulationError
from pollux.scheduler.ports import (
    Command,
    Engine,
    Event,
    JobReport,
    JobRuns,
    NodesChanged,
    ResizeJob,
    StartJob,
    StopJob,
    TuneJob,
)
from pollux.simulator.builtin import load_builtin
from pollux.simulator.config import SimulationConfig
from pollux.simulator.engine import SimulatedEngine
from pollux.simulator.workload import job_spec
from pollux.testing import EngineConformance
from pollux.testing.snapshots import make_nodes
from pollux.types import Allocation, JobSpec, Node
from tests.long import long


class TestSimulatedEngine(EngineConformance):
    def make_engine(self) -> SimulatedEngine:
        return SimulatedEngine(
            make_nodes(2), load_builtin(), SimulationConfig(resize_s=30.0, node_start_s=120.0), adapts_batch=True
        )

    def make_spec(self, name: str) -> JobSpec:
        return job_spec(load_builtin()["cifar10"], name=name, time_s=0, num_replicas=2, batch_size=128)

    def pass_time(self, engine: Engine) -> None:
        assert isinstance(engine, SimulatedEngine)
        engine.advance(engine.now + 60)

    def test_a_resize_costs_what_it_was_told_to_cost(self):
        engine = self.make_engine()
        spec = self.make_spec("a")
        engine.apply([StartJob(job="a", spec=spec, allocation=Allocation.of(("n0", 1)), generation=1)])
        engine.advance(29)
        assert engine.jobs["a"].progress == 0.0
        assert list(engine.poll()) == []
        engine.advance(30)
        assert JobRuns(job="a", generation=1) in engine.poll()
        engine.advance(90)
        done = engine.jobs["a"].progress
        assert done > 0
        engine.apply([ResizeJob(job="a", allocation=Allocation.of(("n0", 2)), generation=2)])
        engine.advance(120)
        assert engine.jobs["a"].progress == done

    def test_time_can_stop_at_the_first_end(self):
        engine = self.make_engine()
        for name, node in (("a", "n0"), ("b", "n1")):
            spec = self.make_spec(name)
            shares = ((node, 4),) if name == "a" else ((node, 1),)
            engine.apply([StartJob(job=name, spec=spec, allocation=Allocation.of(*shares), generation=1)])
        a, b = engine.jobs["a"], engine.jobs["b"]
        reached = engine.advance(1e6, stops_at_event=True)
        assert a.completed_at == reached < 1e6
        assert b.completed_at is None
        assert b.clock == reached
        again = engine.advance(1e6, stops_at_event=True)
        assert b.completed_at == again

    def test_jobs_that_ended_are_forgotten(self):
        engine = self.make_engine()
        for name, node, slots in (("a", "n0", 4), ("b", "n1", 1)):
            allocation = Allocation.of((node, slots))
            engine.apply([StartJob(job=name, spec=self.make_spec(name), allocation=allocation, generation=1)])
        engine.apply([StopJob(job="b", reason="test")])
        engine.advance(1e6)
        assert list(engine.jobs) == ["b"]  # stopped, but it will go on where it was
        with pytest.raises(SimulationError, match="'a' was never started, or has ended"):
            engine.apply([TuneJob(job="a", params={})])

    def test_interference_slows_spanning_jobs_that_share_a_node(self):
        nodes = make_nodes(3)
        engine = SimulatedEngine(
            nodes, load_builtin(), SimulationConfig(resize_s=0.0, interference=0.5), adapts_batch=False
        )

        def start(name: str, *shares: tuple[str, int]) -> None:
            allocation = Allocation.of(*shares)
            engine.apply([StartJob(job=name, spec=self.make_spec(name), allocation=allocation, generation=1)])

        start("a", ("n0", 2), ("n1", 2))
        alone = engine.jobs["a"].current_rate()
        start("single", ("n1", 1))
        assert engine.jobs["a"].current_rate() == alone
        start("b", ("n1", 1), ("n2", 1))
        assert engine.jobs["a"].current_rate() == pytest.approx(alone / 2)
        assert engine.jobs["single"].slowdown == 0.0

    def test_nodes_come_late_and_leave_only_when_idle(self):
        engine = self.make_engine()
        self.start(engine, "a", ("n1", 1))
        engine.scale_to(["n0"], 1)
        assert [node.name for node in engine.nodes()] == ["n0", "n1"]
        engine.advance(engine.now + 120)
        assert NodesChanged() in engine.poll()
        assert [node.name for node in engine.nodes()] == ["n0", "n1", "node0"]
        assert engine.nodes()[-1].num_slots == engine.template.num_slots
        engine.apply([ResizeJob(job="a", allocation=Allocation.of(("n0", 1)), generation=2)])
        engine.scale_to(["n0", "node0"], 0)
        assert [node.name for node in engine.nodes()] == ["n0", "node0"]

    def test_asking_twice_for_nodes_is_asking_once_and_they_can_be_called_off(self):
        engine = self.make_engine()
        engine.scale_to(["n0", "n1"], 3)
        engine.advance(60)
        engine.scale_to(["n0", "n1"], 3)
        engine.scale_to(["n0", "n1"], 2)
        engine.advance(120)
        assert len(engine.nodes()) == 4
        engine.scale_to([node.name for node in engine.nodes()], 0)
        engine.advance(1000)
        assert len(engine.nodes()) == 4
        assert engine.node_s == 2 * 1000 + 2 * 1000 + 60  # paid for from when they were asked for

    def test_an_unknown_application_or_job_is_an_error(self):
        engine = self.make_engine()
        with pytest.raises(SimulationError, match="nothing is known of application 'tea'"):
            engine.job_for(JobSpec(name="a", application="tea"))
        with pytest.raises(SimulationError, match="never started"):
            engine.apply([ResizeJob(job="ghost", allocation=Allocation.of(("n0", 1)), generation=1)])


class Sink(ThreadingHTTPServer):
    """Takes reports as the server does, and no more."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), SinkHandler)
        self.reports: list[JobReport] = []
        self.turn = threading.Lock()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def drain(self) -> list[JobReport]:
        with self.turn:
            reports, self.reports = self.reports, []
        return reports


class SinkHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Sink

    def do_POST(self) -> None:
        report = read_report(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == f"/api/v1/jobs/{report.job}/reports"
        names = (
            "job",
            "accelerator",
            "timings",
            "noise_scale",
            "remaining_examples",
            "progress",
            "total_batch",
            "batch",
        )
        with self.server.turn:
            self.server.reports.append(JobReport(**{name: getattr(report, name) for name in names}))
        answer = json.dumps({"params": None, "report_every_s": 0.1}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class ReportingEngine:
    """A live engine and the reports of its jobs, as the server puts them together."""

    applies_at_once = False

    def __init__(self, engine: Any, sink: Sink) -> None:
        self.engine, self._sink = engine, sink

    def nodes(self) -> Sequence[Node]:
        return self.engine.nodes()

    def apply(self, commands: Sequence[Command]) -> None:
        self.engine.apply(commands)

    def poll(self) -> Sequence[Event]:
        return [*self.engine.poll(), *self._sink.drain()]


def launcher(folder: Path, url: str, num_epochs: int = 24) -> Callable[[str], Any]:
    """How jobs are launched whose files are in a folder."""
    from pollux.engines.launch import Launch

    def launch_of(job: str) -> Launch:
        env = {**os.environ, "POLLUX_URL": url, "POLLUX_TOKEN": "secret", "POLLUX_JOB_ID": job}
        return Launch(
            command=(sys.executable, str(Path(__file__).parent / "scripts" / "line.py"), str(num_epochs)),
            kind="elastic",
            directory=str(folder / "jobs" / job),
            checkpoint_dir=str(folder / "jobs" / job / "checkpoints"),
            cwd=str(folder),
            env=env,
        )

    return launch_of


def open_engine(directory: Path, launch_of: Callable[[str], Any]) -> Any:
    from pollux.engines.local.engine import LocalEngine
    from pollux.engines.processes.layout import detect_nodes

    nodes, devices = detect_nodes(nodes="2x2", slots=4)
    return LocalEngine(directory, nodes=nodes, devices=devices, launch_of=launch_of)


@pytest.fixture(scope="module")
def supervisor_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of one supervisor for all tests: an engine leaves it running for the next one."""
    pytest.importorskip("torch")
    pytest.importorskip("psutil")
    directory = tmp_path_factory.mktemp("supervisor")
    yield directory
    open_engine(directory, launcher(directory, "")).close(stops_jobs=True)


class LiveEngineConformance(EngineConformance):
    """Of engines that start real processes, and leave a supervisor running for the next one."""

    num_epochs = 24  # longer than any start or resize

    @pytest.fixture(autouse=True)
    def bench(self, tmp_path: Path) -> Iterator[None]:
        self.folder, self.sink, self.opened = tmp_path, Sink(), list[Any]()
        yield
        for engine in self.opened:
            engine.adopt([])  # nobody knows the test's jobs any more
            engine.close(stops_jobs=False)
        self.sink.shutdown()
        self.sink.server_close()

    def open(self, url: str) -> Any:
        raise NotImplementedError

    def make_engine(self) -> ReportingEngine:
        engine = self.open(f"http://127.0.0.1:{self.sink.server_port}")
        self.opened.append(engine)
        engine.adopt([])
        return ReportingEngine(engine, self.sink)

    def make_spec(self, name: str) -> JobSpec:
        return JobSpec(name=name)

    max_turns = 3000

    def pass_time(self, engine: Engine) -> None:
        time.sleep(0.05)

    def test_jobs_end_by_themselves(self) -> None:
        self.num_epochs = 4
        super().test_jobs_end_by_themselves()

    @long
    def test_every_node_tells_what_its_machine_does(self) -> None:
        engine = self.ready_engine()
        names, live = {node.name for node in engine.nodes()}, self.opened[-1]
        ends_at = time.monotonic() + 60.0
        while set(live.readings) != names:
            assert time.monotonic() < ends_at, f"only {set(live.readings)} of {names} told"
            self.pass_time(engine)
        for reading in live.readings.values():
            assert 0 <= reading.cpu <= 1 and 0 < reading.memory_bytes < reading.memory_total_bytes
            assert time.time() - 30 < reading.at <= time.time()


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork and /proc")
class TestLocalEngine(LiveEngineConformance):
    @pytest.fixture(autouse=True)
    def supervisor(self, supervisor_directory: Path) -> None:
        self.directory = supervisor_directory

    def open(self, url: str) -> Any:
        return open_engine(self.directory, launcher(self.folder, url, self.num_epochs))


def open_ray_engine(directory: Path, address: str, launch_of: Callable[[str], Any]) -> Any:
    from pollux.engines.ray.engine import RayEngine, RaySettings

    settings = RaySettings(address=address, name="conformance", owner="tests", resource="CPU")
    return RayEngine(directory, settings, launch_of=launch_of)


@pytest.fixture(scope="module")
def ray_supervisor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The directory and the address of one supervisor for all tests."""
    pytest.importorskip("torch")
    pytest.importorskip("ray")
    from tests.ray_cluster import RayCluster

    directory = tmp_path_factory.mktemp("ray")
    with RayCluster(directory) as cluster:
        for name in ("r0", "r1"):
            cluster.add(name, 2)
        yield directory, cluster.address
        open_ray_engine(directory, cluster.address, launcher(directory, "")).close(stops_jobs=True)


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork and /proc")
class TestRayEngine(LiveEngineConformance):
    @pytest.fixture(autouse=True)
    def supervisor(self, ray_supervisor: tuple[Path, str]) -> None:
        self.directory, self.address = ray_supervisor

    def open(self, url: str) -> Any:
        return open_ray_engine(self.directory, self.address, launcher(self.folder, url, self.num_epochs))

    # Beyond what the local engine shows of the supervisor that both have, these say little about Ray.

    @long
    def test_jobs_end_by_themselves(self) -> None:
        super().test_jobs_end_by_themselves()

    @long
    def test_nothing_happens_unasked(self) -> None:
        super().test_nothing_happens_unasked()

    @long
    def test_work_done_survives_a_stop(self) -> None:
        super().test_work_done_survives_a_stop()

    @long
    def test_a_stopped_job_says_so_and_can_start_again(self) -> None:
        super().test_a_stopped_job_says_so_and_can_start_again()

    @long
    def test_two_jobs_do_not_disturb_each_other(self) -> None:
        super().test_two_jobs_do_not_disturb_each_other()

    @long
    def test_advice_about_throughput_is_taken(self) -> None:
        super().test_advice_about_throughput_is_taken()
