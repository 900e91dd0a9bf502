"""A policy that fails: a cluster goes on with what its jobs hold, a simulation comes to an end."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from pollux.errors import InvalidPlanError
from pollux.scheduler.autoscale import AutoscaleConfig
from pollux.scheduler.loop import Scheduler, SchedulerConfig
from pollux.scheduler.ports import MemoryStore, StartJob
from pollux.simulator.builtin import ProfiledApplication
from pollux.simulator.config import SimulationConfig
from pollux.simulator.run import simulate
from pollux.simulator.workload import Workload, job_spec
from pollux.testing.snapshots import LIMITS, PARAMS, make_nodes
from pollux.types import Allocation, JobSpec, Node, Plan, Snapshot
from tests.fakes import HandClock, SlowEngine


def wrong() -> Plan:
    raise AssertionError("17 is not\nwhat it was")


def overcommitted() -> Plan:
    return Plan(allocations={"a": Allocation.of(("n0", 99))})


class Moody:
    """Every job has one slot of the first node, unless it is to do something else."""

    name = "moody"
    adapts_batch = True
    needs_oracle = False
    shares_slots = False

    def __init__(self, mood: Callable[[], object] | None = None) -> None:
        self.mood, self.num_resets = mood, 0

    def decide(self, snapshot: Snapshot) -> Plan:
        if self.mood is not None:
            return self.mood()  # type: ignore[return-value]
        return Plan(allocations={job.name: Allocation.of((snapshot.nodes[0].name, 1)) for job in snapshot.jobs})

    def reset(self) -> None:
        self.num_resets += 1


class Pool:
    template = Node(name="any", num_slots=4)

    def scale_to(self, keeping: object, num_more: int) -> None:
        pass


class World:
    def __init__(self, policy: Moody, **config: object) -> None:
        self.clock, self.engine, self.store = HandClock(), SlowEngine(make_nodes(2)), MemoryStore()
        self.scheduler = Scheduler(
            policy=policy,
            engine=self.engine,
            store=self.store,
            clock=self.clock,
            config=SchedulerConfig(**config),  # type: ignore[arg-type]
            pool=Pool(),
        )

    def submit(self, name: str) -> None:
        self.scheduler.submit(JobSpec(name=name, batch=LIMITS, submitted_at=self.clock.time))

    def round(self) -> None:
        self.clock.time += 60
        for _ in range(3):
            self.scheduler.tick()
            self.engine.finish()
        self.scheduler.tick()

    @property
    def error(self) -> str:
        return self.store.rounds[-1].error


@pytest.mark.parametrize("autoscale", [None, AutoscaleConfig(min_nodes=1, max_nodes=4)])
def test_jobs_keep_what_they_have_whatever_a_policy_raises(autoscale: AutoscaleConfig | None, caplog):
    policy = Moody()
    world = World(policy, autoscale=autoscale)
    world.submit("a")
    world.round()
    policy.mood = wrong
    world.submit("b")
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            world.round()
    assert world.error == r"the policy raised AssertionError('17 is not\nwhat it was')"
    assert world.store.rounds[-1].changes == ()
    assert world.store.jobs["a"].allocation == Allocation.of(("n0", 1))
    assert [type(command) for command in world.engine.commands] == [StartJob]
    assert caplog.text.count("policy moody made no valid plan") == 1  # said once, however often it is tried
    assert caplog.text.count("no decision on the number of nodes") == (autoscale is not None)
    assert "in wrong" in caplog.text  # where it happened
    assert policy.num_resets >= 3  # what it remembers may be what it fails on
    policy.mood = None
    world.round()
    assert world.error == ""
    assert world.store.jobs["b"].allocation


def test_jobs_end_while_a_policy_fails():
    policy = Moody()
    world = World(policy)
    world.submit("a")
    world.round()
    policy.mood = wrong
    world.engine.end("a", world.clock.time)
    world.submit("b")
    world.round()
    assert [one.job for one in world.store.rounds[-1].departures] == ["a"]
    assert world.error


@pytest.mark.parametrize("autoscale", [None, AutoscaleConfig(min_nodes=1, max_nodes=4)])
def test_an_answer_that_is_no_plan_is_told(autoscale: AutoscaleConfig | None):
    world = World(Moody(lambda: None), autoscale=autoscale)
    world.submit("a")
    world.round()
    assert world.error == "the policy's answer is None; a Plan is needed"


@pytest.mark.parametrize(("mood", "error"), [(wrong, AssertionError), (overcommitted, InvalidPlanError)])
def test_a_simulation_does_not_hide_it(mood: Callable[[], Plan], error: type[Exception]):
    kind = ProfiledApplication(
        name="kind", limits=LIMITS, max_replicas=4, params={"gpu": PARAMS}, epoch_ends=[1000.0], noise_scales=[1000.0]
    )
    job = job_spec(kind, name="a", time_s=0.0, num_replicas=1, batch_size=128)
    with pytest.raises(error):
        simulate(Workload("one", (job,)), {"kind": kind}, Moody(mood), SimulationConfig(num_nodes=1))
