"""What every policy must do, ours or a stranger's: run over all registered names.

Making up snapshots takes longer than deciding on them, so each is given to all policies in turn.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from pollux.policy import Policy, PolicySettings, make_policy, policy_names
from pollux.scheduler.reconcile import verify_plan
from pollux.types import Plan, Snapshot
from tests.oracles import SLOTS
from tests.snapshots import make_job, make_mixed, make_nodes, snapshots

CASES = st.one_of(snapshots(), snapshots(mixed=True))


@functools.cache
def _instances(number: int) -> list[Policy]:
    """One of each, made once: to look for installed ones takes longer than to decide."""
    return [make_policy(name) for name in policy_names()]


def fresh_policies(number: int = 0) -> Iterator[Policy]:
    for policy in _instances(number):
        note(f"policy {policy.name}")  # the last one printed is the one that failed
        policy.reset()
        yield policy


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


@settings(max_examples=150)
@given(CASES)
def test_plans_can_be_carried_out(snapshot):
    """No node over capacity, bounds and types kept, nodes known, pinned and non-preemptible jobs untouched."""
    for policy in fresh_policies():
        verify_plan(snapshot, policy.decide(snapshot), SLOTS)


@settings(max_examples=100)
@given(CASES)
def test_deciding_again_on_an_applied_plan_moves_nothing(snapshot):
    for policy in fresh_policies():
        applied = apply(snapshot, policy.decide(snapshot))
        again = policy.decide(applied)
        assert {job.name: again.allocation_of(job.name) for job in applied.jobs} == {
            job.name: job.allocation for job in applied.jobs
        }, policy.name


@settings(max_examples=40)
@given(CASES)
def test_same_snapshot_same_plan(snapshot):
    for first, second in zip(fresh_policies(0), fresh_policies(1), strict=True):
        assert first.decide(snapshot).allocations == second.decide(snapshot).allocations, first.name


@settings(max_examples=40)
@given(CASES, CASES)
def test_other_snapshots_before_do_no_harm_and_are_forgotten(before, snapshot):
    """Whatever a policy remembers of jobs and nodes that are gone, its plans can be carried out; reset clears it."""
    for policy in fresh_policies():
        expected = policy.decide(snapshot).allocations
        policy.reset()
        policy.decide(before)
        verify_plan(snapshot, policy.decide(snapshot), SLOTS)
        policy.reset()
        assert policy.decide(snapshot).allocations == expected, policy.name


@pytest.mark.parametrize("name", policy_names())
class TestEvery:
    def test_an_idle_cluster_and_an_empty_one(self, name):
        assert not any(make_policy(name).decide(Snapshot(now=0, nodes=make_nodes(2), jobs=())).allocations.values())
        plan = make_policy(name).decide(Snapshot(now=0, nodes=(), jobs=(make_job("a", requested_replicas=1),)))
        assert not any(plan.allocations.values())

    def test_a_lone_job_gets_something(self, name):
        jobs = (make_job("a", requested_replicas=2, requested_batch_size=512),)
        plan = make_policy(name, PolicySettings()).decide(Snapshot(now=0, nodes=make_nodes(2), jobs=jobs))
        assert plan.allocation_of("a").num_replicas >= 1

    def test_restricted_jobs_get_the_type_that_they_may_use(self, name):
        jobs = (
            make_job("picky", requested_replicas=2, accelerators=frozenset({"big"}), max_replicas=2),
            make_job("other", requested_replicas=2, accelerators=frozenset({"small"}), max_replicas=2),
            make_job("third", requested_replicas=2, max_replicas=2),
        )
        plan = make_policy(name).decide(Snapshot(now=0, nodes=make_mixed(big=2, small=4), jobs=jobs))
        assert plan.allocation_of("picky").as_mapping().keys() == {"big"}
        assert plan.allocation_of("other").as_mapping().keys() == {"small"}
