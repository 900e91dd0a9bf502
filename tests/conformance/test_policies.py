"""What every policy must do, ours or a stranger's: run over all registered names."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings

from pollux.policy import PolicySettings, make_policy, policy_names
from pollux.scheduler.reconcile import verify_plan
from pollux.types import Plan, Snapshot
from tests.snapshots import make_job, make_nodes, snapshots

pytestmark = pytest.mark.parametrize("name", policy_names())


def apply(snapshot: Snapshot, plan: Plan) -> Snapshot:
    """The snapshot after the plan was carried out, with nothing else changed."""
    return dataclasses.replace(
        snapshot,
        jobs=tuple(
            dataclasses.replace(
                job,
                allocation=plan.allocation_of(job.name),
                num_restarts=job.num_restarts
                if plan.allocation_of(job.name) == job.allocation
                else (0 if job.num_restarts is None else job.num_restarts + 1),
            )
            for job in snapshot.jobs
        ),
    )


@settings(max_examples=80)
@given(snapshots())
def test_plans_can_be_carried_out(name, snapshot):
    """No node over capacity, bounds kept, nodes known, pinned and non-preemptible jobs untouched."""
    verify_plan(snapshot, make_policy(name).decide(snapshot))


@settings(max_examples=40)
@given(snapshots())
def test_deciding_again_on_an_applied_plan_moves_nothing(name, snapshot):
    policy = make_policy(name)
    applied = apply(snapshot, policy.decide(snapshot))
    again = policy.decide(applied)
    assert {job.name: again.allocation_of(job.name) for job in applied.jobs} == {
        job.name: job.allocation for job in applied.jobs
    }


@settings(max_examples=20)
@given(snapshots())
def test_same_snapshot_same_plan(name, snapshot):
    first, second = make_policy(name), make_policy(name)
    assert first.decide(snapshot).allocations == second.decide(snapshot).allocations


def test_an_idle_cluster_and_an_empty_one(name):
    assert not any(make_policy(name).decide(Snapshot(now=0, nodes=make_nodes(2), jobs=())).allocations.values())
    plan = make_policy(name).decide(Snapshot(now=0, nodes=(), jobs=(make_job("a", requested_replicas=1),)))
    assert not any(plan.allocations.values())


def test_a_lone_job_gets_something(name):
    jobs = (make_job("a", requested_replicas=2, requested_batch_size=512),)
    plan = make_policy(name, PolicySettings()).decide(Snapshot(now=0, nodes=make_nodes(2), jobs=jobs))
    assert plan.allocation_of("a").num_replicas >= 1
