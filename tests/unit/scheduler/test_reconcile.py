from __future__ import annotations

import pytest
from hypothesis import given

from pollux.errors import InvalidPlanError
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.reconcile import Actual, Resize, Start, Stop, reconcile, verify_plan
from pollux.testing.examples import examples
from pollux.testing.snapshots import make_job, make_nodes, snapshots
from pollux.types import NO_ALLOCATION, Allocation, JobSpec, Node, Plan, Snapshot

NODES = make_nodes(2)
ONE, TWO = Allocation.of(("n0", 4)), Allocation.of(("n1", 4))
BOTH = Allocation.of(("n0", 4), ("n1", 4))


def running(allocation: Allocation, leaving: Allocation = NO_ALLOCATION) -> Actual:
    return Actual(JobState.RUNNING, allocation, leaving)


WAITING = Actual(JobState.PENDING, NO_ALLOCATION)


def test_desired_minus_actual():
    assert reconcile({"a": ONE}, {"a": WAITING}, NODES) == [Start("a", ONE)]
    assert reconcile({"a": BOTH}, {"a": running(ONE)}, NODES) == [Resize("a", BOTH)]
    assert reconcile({}, {"a": running(ONE)}, NODES) == [Stop("a")]
    assert reconcile({"a": ONE}, {"a": running(ONE)}, NODES) == []
    assert reconcile({"a": ONE}, {"a": Actual(JobState.SUCCEEDED, NO_ALLOCATION)}, NODES) == []


def test_who_waits_for_slots_is_told_later():
    actual = {"a": running(BOTH), "b": WAITING}
    desired = {"a": ONE, "b": TWO}
    assert reconcile(desired, actual, NODES) == [Resize("a", ONE)]
    actual["a"] = Actual(JobState.RESIZING, ONE, leaving=BOTH)
    assert reconcile(desired, actual, NODES) == []
    actual["a"] = running(ONE)
    assert reconcile(desired, actual, NODES) == [Start("b", TWO)]


def test_a_stopping_job_keeps_its_slots_until_it_has_stopped():
    actual = {"a": Actual(JobState.STOPPING, ONE), "b": WAITING}
    assert reconcile({"b": ONE}, actual, NODES) == []


def test_a_circle_is_broken_by_stopping_one():
    actual = {"a": running(ONE), "b": running(TWO)}
    desired = {"a": TWO, "b": ONE}
    assert reconcile(desired, actual, NODES) == [Stop("a")]
    actual["a"] = Actual(JobState.STOPPING, ONE)
    assert reconcile(desired, actual, NODES) == []
    actual["a"] = WAITING
    assert reconcile(desired, actual, NODES) == [Resize("b", ONE)]


def test_an_engine_that_trades_gets_everything_at_once():
    actual = {"a": running(ONE), "b": running(TWO), "c": WAITING}
    changes = reconcile({"a": TWO, "c": ONE}, actual, NODES, trades_at_once=True)
    assert changes == [Stop("b"), Resize("a", TWO), Start("c", ONE)]


@pytest.mark.parametrize(
    ("allocations", "message"),
    [
        ({"ghost": ONE}, "not in the snapshot"),
        ({"a": Allocation.of(("n9", 1))}, "unknown nodes"),
        ({"a": Allocation.of(("n0", 5))}, "has 4 slots, 5 are given away"),
        ({"a": Allocation.of(("n0", 3)), "b": Allocation.of(("n0", 2))}, "5 are given away"),
        ({"small": Allocation.of(("n0", 3))}, r"given 3 replicas; allowed: 1\.\.2"),
        (
            {"pinned": ONE},
            r"'pinned' is pinned for this round \(is_pinned\): it must keep 1 on 'n1'; .* gives it 4 on 'n0'$",
        ),
        ({"waiting": ONE}, "'waiting' is pinned .* must keep no replicas; the plan gives it 4 on 'n0'$"),
        ({"rigid": ONE}, r"'rigid' runs and is not preemptible \(is_fixed\): it must keep 2 on 'n1'"),
        ({"a": Allocation.of(("n0", 1), ("t4", 1))}, "several accelerator types"),
        ({"picky": ONE}, r"may run on \['t4'\]"),
    ],
)
def test_impossible_plans_are_refused(allocations, message):
    jobs = (
        make_job("a"),
        make_job("b"),
        make_job("small", max_replicas=2),
        make_job("picky", accelerators=frozenset({"t4"})),
        make_job("pinned", is_pinned=True, allocation=Allocation.of(("n1", 1))),
        make_job("waiting", is_pinned=True),
        make_job("rigid", is_preemptible=False, allocation=Allocation.of(("n1", 2))),
    )
    nodes = (*NODES, Node(name="t4", num_slots=1, accelerator="t4"))
    kept = {"pinned": Allocation.of(("n1", 1)), "rigid": Allocation.of(("n1", 2))}
    plan = Plan(allocations={**kept, **allocations})
    with pytest.raises(InvalidPlanError, match=message):
        verify_plan(Snapshot(now=0, nodes=nodes, jobs=jobs), plan)


def test_what_was_requested_is_allowed_even_beyond_the_bounds():
    job = make_job("a", max_replicas=1, requested_replicas=4)
    verify_plan(Snapshot(now=0, nodes=NODES, jobs=(job,)), Plan(allocations={"a": ONE}))


@examples(200)
@given(snapshots(spans_exclusively=False), snapshots(spans_exclusively=False))
def test_any_plan_is_reached_without_ever_overcommitting(now, then):
    """Whatever the two allocations are, repeated reconciling gets from one to the other in finitely many steps."""
    capacity = {node.name: node.num_slots for node in now.nodes}
    desired = {
        job.name: job.allocation
        for job in then.jobs
        if job.allocation and all(count <= capacity.get(node, 0) for node, count in job.allocation.shares)
    }
    used: dict[str, int] = {}
    for name, allocation in list(desired.items()):
        if any(used.get(node, 0) + count > capacity[node] for node, count in allocation.shares):
            del desired[name]
            continue
        for node, count in allocation.shares:
            used[node] = used.get(node, 0) + count
    names = {job.name for job in (*now.jobs, *then.jobs)}
    held = {job.name: job.allocation for job in now.jobs}
    actual = {name: running(held[name]) if held.get(name) else WAITING for name in names}
    for _ in range(50):
        changes = reconcile(desired, actual, now.nodes)
        for change in changes:
            old = actual[change.job]
            if isinstance(change, Stop):
                actual[change.job] = WAITING
            else:
                actual[change.job] = running(change.allocation, old.allocation)
        occupied: dict[str, int] = {}
        for is_now in actual.values():
            both = is_now.allocation.as_mapping()
            for node, count in is_now.leaving.shares:
                both[node] = max(both.get(node, 0), count)
            for node, count in both.items():
                occupied[node] = occupied.get(node, 0) + count
        assert all(occupied.get(node, 0) <= capacity[node] for node in occupied)
        actual = {name: Actual(is_now.state, is_now.allocation) for name, is_now in actual.items()}
        if not changes:
            break
    assert {name: is_now.allocation for name, is_now in actual.items() if is_now.allocation} == desired


def test_values_are_checked_where_they_are_born():
    with pytest.raises(ValueError, match="min <= max"):
        JobSpec(name="a", min_replicas=3, max_replicas=2)
    with pytest.raises(ValueError, match="named twice"):
        Allocation.of(("n0", 1), ("n0", 2))
    with pytest.raises(ValueError, match="not in the snapshot"):
        Snapshot(now=0, nodes=(), jobs=(make_job("a", allocation=ONE),))


def test_a_plan_for_a_node_that_vanished_waits_for_the_next_decision():
    only = make_nodes(1)
    assert reconcile({"a": BOTH}, {"a": running(ONE)}, only) == []
