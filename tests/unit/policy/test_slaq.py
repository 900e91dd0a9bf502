from __future__ import annotations

import dataclasses

import pytest

from pollux.policy import make_policy
from pollux.policy.slaq import EPOCH_S, FINAL_LOSS, _Curve
from pollux.testing.snapshots import make_job, make_nodes
from pollux.types import Plan, Snapshot
from tests.oracles import Perfect


def job(name: str, *, done: float, left: float, **fields: object):
    view = {"oracle": Perfect(left), "done_examples": 128 * done, "remaining_examples": 128 * left}
    return make_job(name, requested_batch_size=4096, **(view | fields))


def counts(plan: Plan) -> dict[str, int]:
    return {name: allocation.num_replicas for name, allocation in plan.allocations.items()}


def test_the_curve_falls_from_one_to_what_is_left_at_the_end():
    assert _Curve(0.0, 1000.0).loss_after(0.0) == 1.0
    assert _Curve(0.0, 1000.0).loss_after(1000.0) == pytest.approx(FINAL_LOSS)
    assert _Curve(400.0, 600.0).loss_after(9999.0) == pytest.approx(FINAL_LOSS)  # it ends there
    first, second = (_Curve(0.0, 1000.0).loss_after(steps) for steps in (100.0, 200.0))
    assert 1 - first > first - second > 0


def test_young_jobs_whose_loss_still_falls_get_the_slots():
    jobs = (job("late", done=90_000, left=10_000), job("young", done=0, left=100_000))
    found = counts(make_policy("slaq").decide(Snapshot(now=0, nodes=make_nodes(2), jobs=jobs)))
    assert found == {"late": 1, "young": 7}


def test_a_job_about_to_end_gets_no_more_than_it_can_use():
    """600 steps at one a second and replica: two replicas do it within the epoch."""
    jobs = (job("short", done=0, left=2 * EPOCH_S), job("long", done=0, left=1e9))
    found = counts(make_policy("slaq").decide(Snapshot(now=0, nodes=make_nodes(2), jobs=jobs)))
    assert found == {"short": 2, "long": 6}


def test_everybody_gets_one_first_and_unknown_lengths_no_more():
    unknown = make_job("unknown", measured=False, requested_batch_size=4096)
    jobs = (unknown, *(job(f"j{i}", done=0, left=1e4) for i in range(9)))
    found = counts(make_policy("slaq").decide(Snapshot(now=0, nodes=make_nodes(2), jobs=jobs)))
    assert found == {"unknown": 1} | {f"j{i}": 1 for i in range(7)}


def test_within_an_epoch_nobody_is_changed_and_newcomers_get_what_is_free():
    policy = make_policy("slaq")
    nodes = make_nodes(2)
    first = job("first", done=0, left=1e5, max_replicas=6)
    started = policy.decide(Snapshot(now=0, nodes=nodes, jobs=(first,))).allocation_of("first")
    assert started.num_replicas == 6
    old = dataclasses.replace(first, allocation=started)
    jobs = (old, *(job(f"new{i}", done=0, left=1e4) for i in range(3)))
    found = policy.decide(Snapshot(now=EPOCH_S / 2, nodes=nodes, jobs=jobs))
    assert found.allocation_of("first") == started
    assert counts(found) == {"first": 6, "new0": 1, "new1": 1}
    assert counts(policy.decide(Snapshot(now=EPOCH_S, nodes=nodes, jobs=jobs)))["new2"] >= 1


def test_measured_metrics_go_before_the_assumed_curve():
    """Half done, one job has reached its best metric already; the other's still falls."""
    reached = job("reached", done=50_000, left=50_000, oracle=Perfect(50_000, losses=(1.0, 0.2, 0.0, 0.0, 0.0, 0.0)))
    slow = tuple(1.0 - part / 1000 for part in range(1000))
    falling = job("falling", done=50_000, left=50_000, oracle=Perfect(50_000, losses=slow))
    found = counts(make_policy("slaq").decide(Snapshot(now=0, nodes=make_nodes(2), jobs=(reached, falling))))
    assert found == {"reached": 1, "falling": 7}
