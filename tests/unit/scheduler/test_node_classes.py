"""Constraints, CPUs and memory: every policy keeps to them, and says why a job has no node."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from pollux.policy import PolicySettings, make_policy, policy_names
from pollux.policy.base import Policy
from pollux.scheduler.deadlines import Deadlines
from pollux.scheduler.node_classes import by_class, no_node_reason
from pollux.scheduler.nodes import SlotRules
from pollux.scheduler.planner import Planner
from pollux.testing.examples import examples
from pollux.testing.snapshots import make_job, snapshots
from pollux.types import Allocation, Constraint, JobSpec, Node, Plan, Snapshot

ZONE_A, NOT_A = Constraint("zone", ("a",)), Constraint("zone", ("a",), is_not=True)
LIVE = [name for name in policy_names() if not make_policy(name).needs_oracle and not make_policy(name).shares_slots]


def nodes_in(*zones: str, num_slots: int = 4) -> tuple[Node, ...]:
    return tuple(
        Node(name=f"n{number}", num_slots=num_slots, labels=(("zone", zone),), cpus=8.0, memory_bytes=64 << 30)
        for number, zone in enumerate(zones)
    )


def decided(policy: Policy, snapshot: Snapshot) -> Plan:
    planner = Planner(policy, SlotRules(), None, Deadlines(is_active=False), is_strict=True)
    plan, error = planner.checked(snapshot, None, {job.name: {} for job in snapshot.jobs})
    assert plan is not None, error
    return plan


def zones_of(plan: Plan, job: str, nodes: tuple[Node, ...]) -> set[str]:
    by_name = {node.name: dict(node.labels)["zone"] for node in nodes}
    return {by_name[share.node] for share in plan.allocation_of(job).shares}


@pytest.mark.parametrize("name", LIVE)
def test_every_policy_places_jobs_where_their_constraints_admit(name: str) -> None:
    nodes = nodes_in("a", "b", "b")
    jobs = (make_job("in-a", constraints=(ZONE_A,)), make_job("not-a", constraints=(NOT_A,)), make_job("any"))
    plan = decided(make_policy(name), Snapshot(now=0.0, nodes=nodes, jobs=jobs))
    assert zones_of(plan, "in-a", nodes) == {"a"}
    assert zones_of(plan, "not-a", nodes) == {"b"}
    assert plan.allocation_of("any")


def test_without_wishes_the_policy_sees_the_very_snapshot() -> None:
    snapshot = Snapshot(now=0.0, nodes=nodes_in("a", "b"), jobs=(make_job("any"),))
    seen: list[Snapshot] = []
    by_class(snapshot, lambda shown: seen.append(shown) or Plan(allocations={}))  # type: ignore[func-returns-value]
    assert seen[0] is snapshot


def test_a_job_that_spans_classes_keeps_the_larger_part() -> None:
    nodes = nodes_in("a", "b", "b")
    wide = dataclasses.replace(make_job("wide"), allocation=Allocation.of(("n0", 1), ("n1", 4), ("n2", 1)))
    snapshot = Snapshot(now=9.0, nodes=nodes, jobs=(wide, make_job("in-a", constraints=(ZONE_A,))))
    seen: list[Snapshot] = []
    by_class(snapshot, lambda shown: seen.append(shown) or Plan(allocations={}))  # type: ignore[func-returns-value]
    assert seen[0].jobs[0].allocation == Allocation.of(("n1", 4), ("n2", 1))


def test_a_job_that_must_not_be_moved_stays_across_classes() -> None:
    nodes = nodes_in("a", "b")
    fixed = dataclasses.replace(make_job("fixed"), allocation=Allocation.of(("n0", 3), ("n1", 3)), is_pinned=True)
    snapshot = Snapshot(now=9.0, nodes=nodes, jobs=(fixed, make_job("in-a", constraints=(ZONE_A,))))
    plan = decided(make_policy("pollux"), snapshot)
    assert plan.allocation_of("fixed") == fixed.allocation
    assert plan.allocation_of("in-a") == Allocation.of(("n0", 1))


def test_a_job_larger_than_every_class_is_not_kept_waiting() -> None:
    nodes = nodes_in("a", "b")
    large = make_job("large", min_replicas=6, max_replicas=6, requested_replicas=6)
    plan = decided(
        make_policy("fifo"), Snapshot(now=0.0, nodes=nodes, jobs=(large, make_job("in-a", constraints=(ZONE_A,))))
    )
    assert plan.allocation_of("large").num_replicas == 6
    assert zones_of(plan, "in-a", nodes) <= {"a"}


@pytest.mark.parametrize("name", LIVE)
def test_cpus_and_memory_bound_what_a_node_takes(name: str) -> None:
    nodes = nodes_in("a", "a")
    jobs = (make_job("cpus", cpus=4.0), make_job("memory", memory_bytes=32 << 30), make_job("both", cpus=3.0))
    plan = decided(make_policy(name), Snapshot(now=0.0, nodes=nodes, jobs=jobs))
    for node in ("n0", "n1"):
        held = {job.name: plan.allocation_of(job.name).as_mapping().get(node, 0) for job in jobs}
        assert 4 * held["cpus"] + 3 * held["both"] <= 8
        assert 32 * held["memory"] <= 64
    assert sum(bool(plan.allocation_of(job.name)) for job in jobs) >= 2


def test_reasons_name_what_is_missing_and_what_is_there() -> None:
    nodes = nodes_in("a", "c")
    in_b = JobSpec(name="job", constraints=(Constraint("zone", ("b",)),))
    assert no_node_reason(in_b, nodes) == "no node has zone=b; zone here: a, c"
    gpu_disk = JobSpec(name="job", constraints=(Constraint("disk", ("ssd",)),))
    assert no_node_reason(gpu_disk, nodes) == "no node has disk=ssd; no node has a label disk"
    wide = JobSpec(name="job", cpus=16.0, memory_bytes=8 << 30)
    assert (
        no_node_reason(wide, nodes) == "no node has 16 CPUs and 8 GiB for a replica; the largest has 8 CPUs and 64 GiB"
    )
    assert no_node_reason(JobSpec(name="job", cpus=8.0), nodes) == ""


WISHES = st.sampled_from(
    [
        {},
        {"constraints": (ZONE_A,)},
        {"constraints": (NOT_A,)},
        {"cpus": 3.0},
        {"cpus": 9.0},
        {"memory_bytes": 1 << 30},
    ]
)


@examples(60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(snapshots(mixed=True), st.lists(WISHES, min_size=8, max_size=8), st.lists(st.sampled_from("ab"), min_size=9))
def test_no_plan_breaks_a_wish(snapshot: Snapshot, wishes: list[dict[str, object]], zones: list[str]) -> None:
    """The planner verifies strictly: a plan that breaks one is raised."""
    nodes = tuple(
        dataclasses.replace(node, labels=(("zone", zones[index % len(zones)]),), cpus=6.0, memory_bytes=2 << 30)
        for index, node in enumerate(snapshot.nodes)
    )
    jobs = tuple(
        dataclasses.replace(job, spec=dataclasses.replace(job.spec, **wishes[index % len(wishes)]))  # type: ignore[arg-type]
        for index, job in enumerate(snapshot.jobs)
    )
    for name in ("pollux", "fifo", "sia"):
        decided(make_policy(name, PolicySettings()), dataclasses.replace(snapshot, nodes=nodes, jobs=jobs))
