"""A scheduler with a slow engine and a clock that tests turn by hand."""

from __future__ import annotations

from pollux.model.profile import Configuration, Timing
from pollux.policy import make_policy
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.loop import Scheduler, SchedulerConfig
from pollux.scheduler.ports import (
    JobReport,
    MemoryStore,
)
from pollux.testing.snapshots import LIMITS, make_nodes
from pollux.types import JobSpec
from tests.fakes import HandClock, SlowEngine


class World:
    """A scheduler with a slow engine; time passes by hand."""

    def __init__(self, policy: str | object = "equal", num_nodes: int = 2, **config: object) -> None:
        self.clock, self.engine, self.store = HandClock(), SlowEngine(make_nodes(num_nodes)), MemoryStore()
        self.scheduler = Scheduler(
            policy=make_policy(policy) if isinstance(policy, str) else policy,  # type: ignore[arg-type]
            engine=self.engine,
            store=self.store,
            clock=self.clock,
            config=SchedulerConfig(**config),  # type: ignore[arg-type]
        )

    def submit(self, name: str, **spec: object) -> None:
        defaults = {"batch": LIMITS, "application": "app", "submitted_at": self.clock.time}
        self.scheduler.submit(JobSpec(name=name, **(defaults | spec)))  # type: ignore[arg-type]

    def round(self, ticks: int = 6) -> None:
        """One interval passes, and then all that was commanded gets done."""
        self.clock.time += 60
        for _ in range(ticks):
            self.scheduler.tick()
            self.engine.finish()
        self.scheduler.tick()

    def replicas(self) -> dict[str, int]:
        return {
            name: record.allocation.num_replicas
            for name, record in self.store.jobs.items()
            if record.state is JobState.RUNNING
        }


def report(job: str, remaining: float) -> JobReport:
    times = [(Configuration(1, 4, 128), Timing(0.1, 0.12))]
    return JobReport(job=job, accelerator="gpu", timings=times, noise_scale=500.0, remaining_examples=remaining)
