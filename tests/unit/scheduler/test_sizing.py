"""Auto-scaling in the loop: a pool that takes its time, jobs that leave before nodes do."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from pollux.errors import InvalidValueError
from pollux.scheduler.autoscale import AutoscaleConfig
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.loop import Scheduler, SchedulerConfig
from pollux.scheduler.ports import MemoryStore, NodesChanged, StartJob
from pollux.testing.snapshots import LIMITS, make_nodes
from pollux.types import Allocation, JobSpec, Node, Plan, Snapshot, slots_in_use
from tests.fakes import HandClock, SlowEngine

TEMPLATE = Node(name="any", num_slots=4)


class Pool:
    """Counts what is asked for; nodes join and leave when the test says so, as in a cloud."""

    template = TEMPLATE

    def __init__(self, engine: SlowEngine) -> None:
        self._engine = engine
        self.keeping: list[str] = []
        self.num_more = 0
        self.num_calls = 0
        self._num_named = 0

    def scale_to(self, keeping: Sequence[str], num_more: int) -> None:
        self.keeping, self.num_more = list(keeping), num_more
        self.num_calls += 1
        used = {node for held in self._engine.held.values() for one in held for node, _ in one.shares}
        self._engine.node_list = [n for n in self._engine.node_list if n.name in keeping or n.name in used]

    def deliver(self, most: int = 99) -> None:
        for _ in range(min(self.num_more, most)):
            self._engine.node_list.append(Node(name=f"cloud{self._num_named}", num_slots=4))
            self._num_named += 1
        self._engine.events.append(NodesChanged())


class Greedy:
    """One replica for every job, in order, on the first node with room; nobody is moved who need not be."""

    name = "greedy"
    adapts_batch = True
    needs_oracle = False
    shares_slots = False

    def decide(self, snapshot: Snapshot) -> Plan:
        free = {node.name: node.num_slots for node in snapshot.nodes}
        plan = {job.name: job.allocation for job in snapshot.jobs if job.allocation}
        for node, count in slots_in_use(list(plan.values())).items():
            free[node] -= count
        for job in snapshot.jobs:
            home = next((name for name, num_slots in free.items() if num_slots), None)
            if job.name not in plan and home is not None:
                free[home] -= 1
                plan[job.name] = Allocation.of((home, 1))
        return Plan(allocations=plan)

    def reset(self) -> None:
        pass


class World:
    def __init__(self, num_nodes: int = 1, policy: object | None = None, **config: object) -> None:
        self.clock, self.engine, self.store = HandClock(), SlowEngine(make_nodes(num_nodes)), MemoryStore()
        self.pool = Pool(self.engine)
        limits = {"min_nodes": 1, "max_nodes": 8, "low": 0.5, "high": 0.8, "settle_s": 120.0}
        self.scheduler = Scheduler(
            policy=policy or Greedy(),  # type: ignore[arg-type]
            engine=self.engine,
            store=self.store,
            clock=self.clock,
            config=SchedulerConfig(autoscale=AutoscaleConfig(**(limits | config))),  # type: ignore[arg-type]
            pool=self.pool,
        )

    def submit(self, *names: str, **spec: object) -> None:
        defaults = {"batch": LIMITS, "requested_replicas": 1, "submitted_at": self.clock.time}
        for name in names:
            self.scheduler.submit(JobSpec(name=name, **(defaults | spec)))  # type: ignore[arg-type]

    def round(self, num_rounds: int = 1) -> None:
        for _ in range(num_rounds):
            self.clock.time += 60
            for _ in range(3):
                self.scheduler.tick()
                self.engine.finish()
            self.scheduler.tick()

    def end(self, *names: str) -> None:
        for name in names:
            self.engine.end(name, self.clock.time)

    def replicas(self) -> dict[str, str]:
        """The node of every job that runs."""
        return {r.name: r.allocation.shares[0].node for r in self.store.jobs.values() if r.state is JobState.RUNNING}

    @property
    def up(self) -> list[str]:
        return [node.name for node in self.engine.node_list]


def test_jobs_that_wait_are_what_nodes_are_asked_for():
    world = World()
    world.submit(*(f"j{i}" for i in range(12)))
    world.round()
    # 12 jobs of one slot each: on 5 nodes utility is nearest to the middle of the band, but two would stay empty.
    assert (world.pool.keeping, world.pool.num_more, world.scheduler.num_wanted_nodes) == (["n0"], 2, 3)
    assert world.scheduler.last_size is not None
    assert world.scheduler.last_size.reason == "utility above the band"


def test_asking_again_neither_piles_up_nor_forgets():
    world = World()
    world.submit(*(f"j{i}" for i in range(12)))
    world.round(5)
    assert (world.pool.num_calls, world.pool.num_more) == (5, 2)
    world.pool.deliver(1)
    world.round()
    assert (world.pool.num_more, world.pool.keeping) == (1, ["n0", "cloud0"])
    world.pool.deliver()
    world.round()
    assert (world.pool.num_more, len(world.pool.keeping)) == (0, 3)
    assert all(record.state is JobState.RUNNING for record in world.store.jobs.values())


def test_what_was_asked_for_and_is_needed_no_longer_is_called_off():
    world = World()
    world.submit(*(f"j{i}" for i in range(12)))
    world.round()
    assert world.pool.num_more == 2
    for name in [f"j{i}" for i in range(4, 12)]:
        world.scheduler.cancel(name)
    world.round(4)
    assert (world.pool.num_more, world.scheduler.num_wanted_nodes) == (0, 1)


def test_jobs_leave_before_nodes_do():
    world = World(num_nodes=4)
    world.submit(*(f"j{i}" for i in range(10)))
    world.round()
    assert len(world.up) == 4
    for name in ("j0", "j1", "j2", "j4", "j5", "j6", "j8"):
        world.end(name)
    seen = []
    for _ in range(8):
        world.round()
        seen.append((len(world.up), len(world.scheduler.releasing)))
    assert seen[0] == (4, 0)  # not at once
    assert seen[-1] == (1, 0)
    running = [record for record in world.store.jobs.values() if record.state is JobState.RUNNING]
    assert {record.name for record in running} == {"j3", "j7", "j9"}
    assert {node for record in running for node, _ in record.allocation.shares} == set(world.up)


def test_a_node_on_its_way_out_is_kept_again_before_new_ones_are_asked_for():
    world = World(num_nodes=3)
    world.submit(*(f"j{i}" for i in range(9)))
    world.round()
    world.end(*(f"j{i}" for i in range(7)))
    world.round()
    finish, world.engine.finish = world.engine.finish, lambda: None  # type: ignore[method-assign]
    while not world.scheduler.releasing:  # and whoever is asked to move takes for ever
        world.round()
    assert (world.scheduler.releasing, world.pool.num_more) == ({"n0", "n2"}, 0)
    assert world.up == ["n1", "n2"]  # nobody was on the other
    world.submit(*(f"k{i}" for i in range(8)))
    world.round()
    assert world.scheduler.releasing == frozenset()
    assert (world.pool.keeping, world.pool.num_more, world.scheduler.num_wanted_nodes) == (["n1", "n2"], 1, 3)
    world.engine.finish = finish  # type: ignore[method-assign]
    world.pool.deliver()
    world.round(2)
    assert len(world.replicas()) == 10


def test_jobs_that_must_not_be_moved_keep_their_node():
    world = World(num_nodes=3)
    world.submit(*(f"j{i}" for i in range(8)))
    world.submit("bound", is_preemptible=False)
    world.round()
    assert world.store.jobs["bound"].allocation.as_mapping() == {"n2": 1}
    world.end(*(f"j{i}" for i in range(3)), *(f"j{i}" for i in range(4, 7)))
    world.round(6)
    assert world.up == ["n2"]
    assert world.replicas() == {"j3": "n2", "j7": "n2", "bound": "n2"}


def test_two_jobs_that_must_not_be_moved_keep_two_nodes_until_one_of_them_ends():
    world = World(num_nodes=2, min_nodes=1)
    world.submit("a", is_preemptible=False)
    world.submit("j0", "j1", "j2")
    world.submit("b", is_preemptible=False)
    world.submit("j3")
    world.round()
    assert (world.replicas()["a"], world.replicas()["b"]) == ("n0", "n1")
    world.end("j0", "j1", "j2", "j3")
    world.round(6)
    assert (len(world.up), len(world.scheduler.releasing), world.scheduler.num_wanted_nodes) == (2, 1, 1)
    assert set(world.pool.keeping) == set(world.up)
    (leaving,) = world.scheduler.releasing
    gone = next(name for name in ("a", "b") if leaving in world.store.jobs[name].allocation.as_mapping())
    world.submit("late")
    world.round()
    assert leaving not in world.store.jobs["late"].allocation.as_mapping()
    world.end(gone)
    world.round(2)
    assert leaving not in world.up
    assert len(world.up) == 1


def test_what_the_operator_drains_is_not_counted_and_not_taken():
    world = World(num_nodes=3)
    world.submit(*(f"j{i}" for i in range(10)))
    world.round()
    assert (world.scheduler.num_wanted_nodes, world.pool.num_more) == (3, 0)
    world.scheduler.drain(["n2"])
    world.round()
    assert (world.scheduler.draining, world.scheduler.releasing) == ({"n2"}, frozenset())
    assert world.pool.keeping == ["n0", "n1", "n2"]
    assert world.pool.num_more == 1  # in its place
    world.pool.deliver()
    world.round()
    assert world.up == ["n0", "n1", "n2", "cloud0"]
    world.end(*(f"j{i}" for i in range(9)))
    world.round(6)
    assert "n2" not in world.up  # smaller anyway
    assert world.scheduler.draining == {"n2"}


def test_the_operators_drain_and_the_autoscalers_are_two_things():
    world = World(num_nodes=4)
    world.submit("j0")
    world.scheduler.drain(["n1"])
    while not world.scheduler.releasing:
        world.round()
    assert world.scheduler.draining == {"n1"}
    world.scheduler.drain([])
    assert world.scheduler.draining == frozenset()
    assert "n1" not in {node.name for node in world.scheduler.snapshot(0).nodes} or "n1" in world.pool.keeping


def test_no_jobs_need_the_fewest_nodes_after_a_while():
    world = World(num_nodes=4, settle_s=300.0)
    world.round(3)
    assert len(world.up) == 4
    world.round(5)
    assert len(world.up) == 1


def test_a_cluster_without_nodes_gets_some():
    world = World(num_nodes=0, min_nodes=2)
    world.submit("a")
    world.round()
    assert world.pool.num_more == 2
    world.pool.deliver()
    world.round()
    assert world.store.jobs["a"].state is JobState.RUNNING


def test_a_lost_node_is_asked_for_again():
    world = World(num_nodes=3)
    world.submit(*(f"j{i}" for i in range(10)))
    world.round()
    world.engine.lose("n1")
    world.round()
    assert (world.pool.keeping, world.pool.num_more) == (["n0", "n2"], 1)


def test_what_if_decisions_that_fail_leave_the_size_alone(caplog):
    class Broken(Greedy):
        def decide(self, snapshot: Snapshot) -> Plan:
            if len(snapshot.nodes) != 2:
                raise InvalidValueError("two nodes or none")
            return super().decide(snapshot)

    world = World(num_nodes=2, policy=Broken())
    world.submit(*(f"j{i}" for i in range(12)))
    with caplog.at_level(logging.ERROR):
        world.round()
    assert "two nodes or none" in caplog.text
    assert (world.scheduler.num_wanted_nodes, world.pool.keeping) == (2, ["n0", "n1"])
    assert sum(isinstance(command, StartJob) for command in world.engine.commands) == 8


def test_a_round_does_not_decide_twice_what_it_knows_already():
    class Counting(Greedy):
        num_decisions = 0

        def decide(self, snapshot: Snapshot) -> Plan:
            Counting.num_decisions += 1
            return super().decide(snapshot)

    world = World(num_nodes=3, policy=Counting())
    world.submit(*(f"j{i}" for i in range(8)))
    world.clock.time = 60.0
    world.scheduler.tick()
    assert (Counting.num_decisions, world.scheduler.num_rounds) == (1, 1)


def test_a_budget_bounds_the_size_and_savings_raise_the_bound():
    world = World(num_nodes=2, budget_slots=12.0, budget_window_s=48 * 600.0, max_nodes=20)
    world.submit(*(f"j{i}" for i in range(40)))
    world.round()
    assert world.scheduler.num_wanted_nodes == 3
    saving = World(num_nodes=1, budget_slots=12.0, budget_window_s=48 * 600.0, max_nodes=20)
    saving.round(20)
    saving.submit(*(f"j{i}" for i in range(40)))
    saving.round()
    assert saving.scheduler.num_wanted_nodes is not None
    assert saving.scheduler.num_wanted_nodes > 3


def test_a_budget_that_does_not_pay_for_the_fewest_is_refused():
    with pytest.raises(InvalidValueError, match="cost 8"):
        World(min_nodes=2, budget_slots=7.0)


def test_auto_scaling_needs_a_pool():
    with pytest.raises(InvalidValueError, match="come and go"):
        Scheduler(
            policy=Greedy(),  # type: ignore[arg-type]
            engine=SlowEngine(make_nodes(1)),
            store=MemoryStore(),
            clock=HandClock(),
            config=SchedulerConfig(autoscale=AutoscaleConfig(min_nodes=1, max_nodes=2)),
        )


def test_node_seconds_are_counted_by_accelerator_and_go_on_after_a_restart():
    world = World(num_nodes=2)
    world.engine.node_list.append(Node(name="t", num_slots=1, accelerator="t4"))
    world.clock.time = 30.0
    world.scheduler.tick()
    assert world.scheduler.node_s == {"gpu": 60.0, "t4": 30.0}
    world.engine.node_list.pop()  # it is charged up to when this is seen
    world.clock.time = 40.0
    world.scheduler.tick()
    world.clock.time = 50.0
    world.scheduler.tick()
    assert world.scheduler.node_s == {"gpu": 100.0, "t4": 40.0}
    heir = Scheduler(
        policy=Greedy(),  # type: ignore[arg-type]
        engine=world.engine,
        store=world.store,
        clock=world.clock,
        config=SchedulerConfig(),
        node_s=world.scheduler.node_s,
    )
    world.clock.time = 60.0
    heir.tick()
    assert heir.node_s == {"gpu": 120.0, "t4": 40.0}


def test_an_empty_cluster_goes_to_zero_and_grows_again_for_a_job_that_waits():
    world = World(2, min_nodes=0, settle_s=60.0)
    for _ in range(4):
        world.round()
        world.clock.time += 60.0
    assert world.scheduler.num_wanted_nodes == 0 and world.engine.node_list == []
    world.submit("first")
    world.round()
    assert world.scheduler.num_wanted_nodes == 1 and world.pool.num_more == 1
    world.pool.deliver()
    world.round()
    assert [record.name for record in world.scheduler.active_jobs if record.allocation] == ["first"]


def test_a_job_that_waits_keeps_a_cluster_from_going_to_zero():
    world = World(1, min_nodes=0, settle_s=0.0)
    world.submit("large", requested_replicas=1)
    for _ in range(4):
        world.round()
        world.clock.time += 600.0
    assert world.scheduler.num_wanted_nodes == 1


def test_decisions_on_the_size_are_told_with_the_rounds():
    world = World(1)
    world.submit(*(f"job{number}" for number in range(9)))
    world.round()
    assert [record.sizing for record in world.store.rounds] == ["1 -> 3 nodes: utility above the band"]
    world.round()
    assert world.store.rounds[-1].sizing == ""
