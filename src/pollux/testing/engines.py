"""What every engine must do. A test class inherits :class:`EngineConformance` and provides its three hooks."""

from __future__ import annotations

from collections.abc import Callable

from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.ports import (
    Engine,
    Event,
    JobEnded,
    JobReport,
    JobRuns,
    JobStopped,
    NodesChanged,
    ResizeJob,
    StartJob,
    StopJob,
    TuneJob,
)
from pollux.types import Allocation, JobSpec, ThroughputParams


class EngineConformance:
    """Needs two nodes of at least two slots, and jobs that last much longer than a start or a resize.

    ``max_turns``: how often :meth:`pass_time` is called at most until an event comes. Raise it for a slow machine.
    """

    max_turns = 300

    def make_engine(self) -> Engine:
        """Its nodes may come later, if :meth:`pass_time` lets them come."""
        raise NotImplementedError

    def make_spec(self, name: str) -> JobSpec:
        raise NotImplementedError

    def pass_time(self, engine: Engine) -> None:
        """Let the engine do some of its work."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------

    def ready_engine(self) -> Engine:
        """An engine with its nodes. The events that told of them have been taken."""
        engine = self.make_engine()
        if len(engine.nodes()) >= 2:
            return engine
        for _ in range(self.max_turns):
            self.pass_time(engine)
            if len(engine.nodes()) >= 2:
                unasked = [event for event in engine.poll() if event != NodesChanged()]
                assert unasked == []
                return engine
        raise AssertionError(f"fewer than two nodes came: {engine.nodes()}")

    def wait_for(self, engine: Engine, is_found: Callable[[Event], bool], most: int = 0) -> list[Event]:
        """All events up to the first that is wanted."""
        seen: list[Event] = []
        for _ in range(most or self.max_turns):
            seen.extend(engine.poll())
            if any(is_found(event) for event in seen):
                return seen
            self.pass_time(engine)
        raise AssertionError(f"it never happened; seen: {seen[-5:]}")

    def start(self, engine: Engine, name: str, *shares: tuple[str, int]) -> JobSpec:
        spec = self.make_spec(name)
        allocation = Allocation.of(*shares)
        engine.apply([StartJob(job=name, spec=spec, allocation=allocation, generation=1)])
        self.wait_for(engine, lambda event: event == JobRuns(job=name, generation=1))
        return spec

    def names(self, engine: Engine) -> tuple[str, str]:
        first, second = (node.name for node in engine.nodes()[:2])
        return first, second

    def test_has_nodes_with_slots_and_a_type(self) -> None:
        nodes = self.ready_engine().nodes()
        assert len(nodes) >= 2
        assert len({node.name for node in nodes}) == len(nodes)
        assert all(node.num_slots >= 2 and node.accelerator for node in nodes)

    def test_nothing_happens_unasked(self) -> None:
        engine = self.ready_engine()
        self.pass_time(engine)
        assert list(engine.poll()) == []

    def test_a_started_job_runs_and_reports(self) -> None:
        engine = self.ready_engine()
        allocation = Allocation.of((self.names(engine)[0], 2))
        engine.apply([StartJob(job="a", spec=self.make_spec("a"), allocation=allocation, generation=1)])
        events = self.wait_for(engine, lambda event: isinstance(event, JobReport) and bool(event.timings))
        assert JobRuns(job="a", generation=1) in events
        report = next(event for event in events if isinstance(event, JobReport) and event.timings)
        configuration, timing = report.timings[0]
        assert (configuration.num_nodes, configuration.num_replicas) == (1, 2)
        assert 0 < timing.grad_s <= timing.step_s
        assert report.accelerator == engine.nodes()[0].accelerator
        assert report.noise_scale is not None and report.noise_scale >= 0

    def test_a_resize_is_a_new_generation(self) -> None:
        engine = self.ready_engine()
        first, second = self.names(engine)
        self.start(engine, "a", (first, 1))
        for generation, shares in ((2, [(first, 1), (second, 1)]), (3, [(second, 2)]), (4, [(second, 1)])):
            engine.apply([ResizeJob(job="a", allocation=Allocation.of(*shares), generation=generation)])
            self.wait_for(engine, lambda event, g=generation: event == JobRuns(job="a", generation=g))  # type: ignore[misc]

    def test_a_stopped_job_says_so_and_can_start_again(self) -> None:
        engine = self.ready_engine()
        first, second = self.names(engine)
        spec = self.start(engine, "a", (first, 1))
        engine.apply([StopJob(job="a", reason="test")])
        events = self.wait_for(engine, lambda event: event == JobStopped(job="a"))
        assert not any(isinstance(event, JobEnded) for event in events)
        engine.apply([StartJob(job="a", spec=spec, allocation=Allocation.of((second, 1)), generation=2)])
        self.wait_for(engine, lambda event: event == JobRuns(job="a", generation=2))

    def test_work_done_survives_a_stop(self) -> None:
        engine = self.ready_engine()
        first, _ = self.names(engine)
        spec = self.start(engine, "a", (first, 2))
        before = self._progress(engine, at_least=0.0)
        engine.apply([StopJob(job="a", reason="test")])
        self.wait_for(engine, lambda event: event == JobStopped(job="a"))
        engine.apply([StartJob(job="a", spec=spec, allocation=Allocation.of((first, 1)), generation=2)])
        assert self._progress(engine, at_least=before) >= before

    def _progress(self, engine: Engine, at_least: float) -> float:
        events = self.wait_for(
            engine,
            lambda event: isinstance(event, JobReport) and event.progress is not None and event.progress > at_least,
        )
        return max(e.progress for e in events if isinstance(e, JobReport) and e.progress is not None)

    def test_jobs_end_by_themselves(self) -> None:
        engine = self.ready_engine()
        self.start(engine, "a", (self.names(engine)[0], 2))
        events = self.wait_for(engine, lambda event: isinstance(event, JobEnded), most=100_000)
        (end,) = (event for event in events if isinstance(event, JobEnded))
        assert end.job == "a"
        assert end.state is JobState.SUCCEEDED
        self.pass_time(engine)
        assert not any(isinstance(event, JobReport) for event in engine.poll())

    def test_two_jobs_do_not_disturb_each_other(self) -> None:
        engine = self.ready_engine()
        first, second = self.names(engine)
        self.start(engine, "a", (first, 1))
        self.start(engine, "b", (second, 1))
        engine.apply([StopJob(job="a", reason="test")])
        self.wait_for(engine, lambda event: event == JobStopped(job="a"))
        self.wait_for(engine, lambda event: isinstance(event, JobReport) and event.job == "b")

    def test_advice_about_throughput_is_taken(self) -> None:
        engine = self.ready_engine()
        self.start(engine, "a", (self.names(engine)[0], 2))
        params = ThroughputParams(0.02, 0.001, 0.1, 0.01, 0.05, 0.002, 1.5)
        engine.apply([TuneJob(job="a", params={engine.nodes()[0].accelerator: params})])
        self.wait_for(engine, lambda event: isinstance(event, JobReport) and event.job == "a")
