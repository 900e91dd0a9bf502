from __future__ import annotations

import pytest

from pollux.errors import SimulationError
from pollux.scheduler.ports import Engine, JobRuns, NodesChanged, ResizeJob, StartJob
from pollux.simulator.builtin import load_builtin
from pollux.simulator.engine import SimulatedEngine
from pollux.simulator.workload import job_spec
from pollux.types import Allocation, JobSpec, Node
from tests.conformance.engine_suite import EngineConformance
from tests.snapshots import make_nodes


class TestSimulatedEngine(EngineConformance):
    def make_engine(self) -> SimulatedEngine:
        return SimulatedEngine(make_nodes(2), load_builtin(), adapts_batch=True, resize_s=30.0, node_start_s=120.0)

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
        reached = engine.advance(1e6, stops_at_event=True)
        assert engine.jobs["a"].completed_at == reached < 1e6
        assert engine.jobs["b"].completed_at is None
        assert engine.jobs["b"].clock == reached
        again = engine.advance(1e6, stops_at_event=True)
        assert engine.jobs["b"].completed_at == again

    def test_interference_slows_spanning_jobs_that_share_a_node(self):
        nodes = make_nodes(3)
        engine = SimulatedEngine(nodes, load_builtin(), adapts_batch=False, resize_s=0.0, interference=0.5)

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
        engine.scale_to([Node(name="n0", num_slots=4), Node(name="extra", num_slots=4)])
        assert [node.name for node in engine.nodes()] == ["n0", "n1"]
        engine.advance(engine.now + 120)
        assert NodesChanged() in engine.poll()
        assert [node.name for node in engine.nodes()] == ["n0", "n1", "extra"]
        engine.apply([ResizeJob(job="a", allocation=Allocation.of(("n0", 1)), generation=2)])
        engine.scale_to([Node(name="n0", num_slots=4), Node(name="extra", num_slots=4)])
        assert [node.name for node in engine.nodes()] == ["n0", "extra"]

    def test_an_unknown_application_or_job_is_an_error(self):
        engine = self.make_engine()
        with pytest.raises(SimulationError, match="nothing is known of application 'tea'"):
            engine.job_for(JobSpec(name="a", application="tea"))
        with pytest.raises(SimulationError, match="never started"):
            engine.apply([ResizeJob(job="ghost", allocation=Allocation.of(("n0", 1)), generation=1)])
