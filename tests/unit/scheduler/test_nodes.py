"""The loop when nodes are lost, drained, come back or fail jobs."""

from __future__ import annotations

import dataclasses

import pytest

from pollux.model.profile import Configuration, Timing
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.ports import (
    JobEnded,
    JobLost,
    JobReport,
    NodesChanged,
    ResizeFailed,
    ResizeJob,
)
from pollux.testing.snapshots import make_nodes
from pollux.types import Allocation, Node, Plan, Snapshot
from tests.unit.scheduler.world import World


def test_a_lost_node_moves_its_jobs():
    world = World(num_nodes=2)
    world.submit("a", max_replicas=4)
    world.submit("b", max_replicas=4)
    world.round()
    lost = world.store.jobs["a"].allocation.shares[0].node
    world.engine.lose(lost)
    world.round()
    assert all(node != lost for record in world.store.jobs.values() for node, _ in record.allocation.shares)


def test_survivors_of_a_lost_node_are_what_a_job_holds_and_stay_where_they_are():
    world = World("pollux", num_nodes=2, decides_on_events=True)
    world.submit("a")
    a = world.store.jobs["a"]
    for count in (1, 2, 4):  # it may ask for twice what it has been profiled with
        world.engine.events.append(
            JobReport(
                job="a",
                accelerator="gpu",
                timings=[(Configuration(1, count, 64), Timing(0.1, 0.101))],
                noise_scale=1e6,
            )
        )
        world.round()
    assert a.allocation.as_mapping() == {"n0": 4, "n1": 4}
    generation, attained_slot_s = a.generation, a.attained_slot_s
    lost = a.allocation.shares[0].node
    stays = a.allocation.shares[1].node
    num_commands = len(world.engine.commands)
    world.clock.time += 10
    world.engine.lose(lost)
    world.scheduler.tick()
    assert (a.state, a.allocation, a.generation) == (JobState.RESIZING, Allocation.of((stays, 4)), generation + 1)
    assert a.attained_slot_s == attained_slot_s + 80
    assert a.history[-1].reason == f"lost {lost}: 8 -> 4 replicas"
    # What the engine was told before may be on its way, and names a node that is gone.
    told = [command for command in world.engine.commands[num_commands:] if isinstance(command, ResizeJob)]
    assert told == [ResizeJob(job="a", allocation=a.allocation, generation=generation + 1)]
    assert world.store.rounds[-1].trigger == "nodes"
    view = world.scheduler.snapshot(world.clock.time).jobs[0]
    assert view.allocation == a.allocation


@pytest.mark.parametrize(("spec", "note"), [({"min_replicas": 6}, "too few"), ({"min_replicas": 8}, "not elastic")])
def test_a_job_that_cannot_do_with_its_survivors_waits_for_the_engines_word(spec, note):
    world = World(num_nodes=2, decides_on_events=True)
    world.submit("a", max_replicas=8, **spec)
    world.round()
    held = world.store.jobs["a"].allocation
    assert held.num_replicas == 8
    world.engine.node_list.pop()
    world.engine.events.append(NodesChanged())
    world.scheduler.tick()
    assert world.store.jobs["a"].allocation == held, note
    assert any("lost n1: what is left is not enough" in move.reason for move in world.store.jobs["a"].history)
    world.engine.held.clear()
    world.engine.events.append(JobLost(job="a", reason="too few are left"))
    world.scheduler.tick()
    assert world.store.jobs["a"].state is JobState.PENDING


def test_a_job_that_lost_all_its_nodes_is_left_to_the_engine_and_starts_elsewhere():
    world = World(num_nodes=3, decides_on_events=True)
    world.submit("a", max_replicas=4)
    world.round()
    (node,) = world.store.jobs["a"].allocation.as_mapping()
    world.engine.lose(node)
    world.round()
    assert world.replicas() == {"a": 4}
    assert node not in world.store.jobs["a"].allocation.as_mapping()
    assert world.store.jobs["a"].num_crashes == 1


def test_a_node_lost_in_the_middle_of_a_resize_leaves_the_rest():
    world = World(num_nodes=2, decides_on_events=True)
    world.submit("a", max_replicas=8)
    world.submit("b", max_replicas=2)
    world.round()
    world.engine.end("b", world.clock.time)
    world.scheduler.tick()
    a = world.store.jobs["a"]
    assert (a.state, a.allocation.num_replicas) == (JobState.RESIZING, 8)
    world.engine.lose("n1")
    world.scheduler.tick()
    assert a.allocation.as_mapping() == {"n0": 4}
    world.round()
    assert (a.state, world.replicas()) == (JobState.RUNNING, {"a": 4})


def test_a_job_that_was_moving_to_a_lost_node_stays_where_it_was():
    world = World(num_nodes=2, decides_on_events=True)
    world.submit("a", max_replicas=2)
    world.round()
    a = world.store.jobs["a"]
    (before,) = a.allocation.as_mapping()
    world.scheduler.drain({before})
    world.scheduler.tick()
    (moves_to,) = a.allocation.as_mapping()
    assert (a.state, moves_to != before) == (JobState.RESIZING, True)
    world.engine.node_list = [node for node in world.engine.node_list if node.name != moves_to]
    world.engine.events.append(NodesChanged())
    world.scheduler.drain(())
    world.scheduler.tick()
    assert a.allocation.as_mapping() == {before: 2}
    assert world.engine.commands[-1] == ResizeJob(job="a", allocation=a.allocation, generation=3)


def test_a_node_with_notice_is_left_before_it_goes_and_used_again_if_it_stays():
    world = World(num_nodes=2, decides_on_events=True)
    world.submit("a", max_replicas=8)
    world.round()
    nodes = world.engine.node_list
    world.engine.node_list = [nodes[0], dataclasses.replace(nodes[1], notice="taken away at 12:00")]
    world.engine.events.append(NodesChanged())
    world.round()
    assert world.store.jobs["a"].allocation.as_mapping() == {nodes[0].name: 4}
    assert world.store.jobs["a"].num_crashes == 0
    world.engine.node_list = nodes
    world.engine.events.append(NodesChanged())
    world.round()
    world.round()
    assert world.replicas() == {"a": 8}


def test_a_node_that_comes_back_is_used_again():
    world = World(num_nodes=2, decides_on_events=True)
    world.submit("a", max_replicas=8)
    world.round()
    world.engine.lose("n1")
    world.round()
    assert world.replicas() == {"a": 4}
    world.engine.node_list = list(make_nodes(2))
    world.engine.events.append(NodesChanged())
    world.round()
    assert world.replicas() == {"a": 8}


def test_draining_a_node_empties_it():
    world = World(num_nodes=2)
    world.submit("a")
    world.round()
    assert world.store.jobs["a"].allocation.num_nodes == 2
    world.scheduler.drain({"n0"})
    world.round()
    assert world.store.jobs["a"].allocation == Allocation.of(("n1", 4))


def test_draining_leaves_jobs_alone_that_must_not_be_moved():
    world = World(decides_on_events=True, num_nodes=2)
    for name in ("a", "b"):
        world.submit(name, batch=None, requested_replicas=3, min_replicas=3, max_replicas=3, is_preemptible=False)
    world.submit("c")
    world.round()
    sits = world.store.jobs["a"].allocation
    (node,) = sits.as_mapping()
    commands = len(world.engine.commands)
    world.scheduler.drain([node])
    world.round()
    assert world.store.jobs["a"].allocation == sits
    assert not any(command.job == "a" for command in world.engine.commands[commands:])
    assert node not in world.store.jobs["c"].allocation.as_mapping()
    world.engine.end("a", world.clock.time)
    world.round()
    assert node not in {name for node_ in world.scheduler.snapshot(0).nodes for name in [node_.name]}


def test_a_job_that_may_not_run_on_what_is_left_is_told_of():
    """The policy is not even shown it."""
    world = World("pollux")
    world.engine.node_list = [Node(name="rare", num_slots=1, accelerator="tpu")]
    world.submit("a", accelerators=frozenset({"tpu"}))
    world.round()
    world.submit("b")
    world.scheduler.drain(["rare"])
    world.round()
    changes = {change.job: change for kept in world.store.rounds[1:] for change in kept.changes}
    assert (changes["a"].after, changes["a"].barred) == (Allocation(), {"rare": "drained"})


def test_a_node_that_shrank_below_what_must_stay_there_stops_nobody_else():
    world = World(decides_on_events=True)
    world.submit("a", is_preemptible=False, max_replicas=4)
    world.round()
    held = world.store.jobs["a"].allocation
    assert held.as_mapping() == {"n0": 4}
    world.engine.node_list = [dataclasses.replace(node, num_slots=2) for node in world.engine.node_list]
    world.engine.check_capacity = lambda: None  # it is over-committed, and that is the point
    world.submit("b", max_replicas=2)
    world.round()
    assert (world.store.jobs["a"].allocation, world.replicas()) == (held, {"a": 4, "b": 2})
    assert world.store.jobs["b"].allocation.as_mapping() == {"n1": 2}
    assert world.store.rounds[-1].error == ""


class OnNodes:
    """A policy that gives every job what a test says."""

    name, needs_oracle, shares_slots = "on-nodes", False, False

    def __init__(self, **allocations: Allocation) -> None:
        self.allocations = allocations

    def decide(self, snapshot: Snapshot) -> Plan:
        there = {node.name for node in snapshot.nodes}
        wanted = {job.name: self.allocations.get(job.name, Allocation()) for job in snapshot.jobs}
        return Plan(
            allocations={
                job: Allocation(tuple(share for share in allocation.shares if share.node in there))
                for job, allocation in wanted.items()
            }
        )

    def reset(self) -> None: ...


def fail_on(world: World, job: str, node: str) -> None:
    """A job that was just started ends there before it is ready."""
    del world.engine.held[job]
    world.engine.under_way = [command for command in world.engine.under_way if command.job != job]
    end = JobEnded(job=job, state=JobState.FAILED, at=world.clock.time, reason="x", node=node, cause="no script")
    world.engine.events.append(end)


def test_a_resize_that_fails_on_a_node_is_given_up_and_not_the_job() -> None:
    policy = OnNodes(a=Allocation.of(("n0", 2)))
    world = World(policy)
    world.submit("a")
    world.round()
    policy.allocations["a"] = Allocation.of(("n0", 2), ("n1", 2))
    world.clock.time += 60
    world.scheduler.tick()
    resize = world.engine.under_way.pop()
    assert isinstance(resize, ResizeJob) and resize.generation == 2
    world.engine.held["a"] = [Allocation.of(("n0", 2))]
    failed = ResizeFailed(job="a", generation=2, allocation=Allocation.of(("n0", 2)), node="n1", reason="no GPU")
    world.engine.events.append(failed)
    world.scheduler.tick()
    record = world.store.jobs["a"]
    assert record.state is JobState.RESIZING and record.allocation == Allocation.of(("n0", 2))
    assert "n1 (no GPU)" in record.reason
    world.round()
    assert record.state is JobState.RUNNING
    assert record.allocation.as_mapping() == {"n0": 4}  # the policy wants n1; the job gets slots elsewhere
    assert world.scheduler.health.conditions(world.clock.time)["n1"].state == "suspect"
    policy.allocations["a"] = Allocation.of(("n0", 2), ("n1", 2))
    world.clock.time += 120
    world.round()
    assert record.allocation.as_mapping() == {"n0": 2, "n1": 2}  # it is tried again
    assert not world.scheduler.health.conditions(world.clock.time)


def test_jobs_that_fail_on_a_bad_node_start_elsewhere_and_it_is_quarantined() -> None:
    names = [f"j{number}" for number in range(3)]
    world = World(OnNodes(**{name: Allocation.of(("n0", 1)) for name in names}))
    for name in names:
        world.submit(name, min_replicas=1, max_replicas=1)
    world.clock.time += 60
    world.scheduler.tick()
    for name in names:
        fail_on(world, name, "n0")
    world.round()
    assert {name: world.store.jobs[name].state for name in names} == dict.fromkeys(names, JobState.RUNNING)
    assert all(world.store.jobs[name].allocation.as_mapping() == {"n1": 1} for name in names)
    condition = world.scheduler.health.conditions(world.clock.time)["n0"]
    assert condition.state == "quarantined" and "no script" in condition.reason
    assert [node.name for node in world.scheduler.snapshot(world.clock.time).nodes] == ["n1"]


def test_a_job_that_fails_on_every_node_has_failed_and_no_node_is_blamed() -> None:
    policy = OnNodes(a=Allocation.of(("n0", 1)))
    world = World(policy)
    world.submit("a", max_replicas=1)
    world.clock.time += 60
    world.scheduler.tick()
    fail_on(world, "a", "n0")
    world.clock.time += 60
    world.scheduler.tick()
    assert world.store.jobs["a"].allocation.as_mapping() == {"n1": 1}
    fail_on(world, "a", "n1")
    world.scheduler.tick()
    assert world.store.jobs["a"].state is JobState.FAILED
    assert not world.scheduler.health.conditions(world.clock.time)


def test_replicas_that_train_on_a_quarantined_node_stay() -> None:
    world = World(OnNodes(a=Allocation.of(("n0", 2))))
    world.submit("a")
    world.round()
    for job in ("x", "y"):
        world.scheduler.health.fail(job, "n0", "no GPU", world.clock.time, is_proven=True)
    world.round()
    assert world.store.jobs["a"].allocation.as_mapping() == {"n0": 2}
    snapshot = world.scheduler.snapshot(world.clock.time)
    assert {node.name: node.num_slots for node in snapshot.nodes} == {"n0": 2, "n1": 4}


def test_a_job_with_an_excluded_node_changes_places_with_one_that_has_not_started() -> None:
    policy = OnNodes(a=Allocation.of(("n0", 4)), b=Allocation.of(("n1", 4)))
    world = World(policy)
    world.scheduler.health.fail("a", "n0", "no module", 0.0, is_proven=False)
    world.scheduler.health.fail("a", "n0", "no module", 0.0, is_proven=False)
    world.submit("a", min_replicas=4, max_replicas=4)
    world.submit("b", min_replicas=4, max_replicas=4)
    world.scheduler.health.see(["n0", "n1"], (), 0.0)
    world.round()
    assert world.store.jobs["a"].allocation.as_mapping() == {"n1": 4}
    assert world.store.jobs["b"].allocation.as_mapping() == {"n0": 4}
