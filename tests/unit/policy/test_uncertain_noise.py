"""A job whose noise scale is uncertain is given what the lower end of it is worth."""

from __future__ import annotations

import dataclasses

import pytest

from pollux.model.goodput import GoodputTables
from pollux.policy import PolicySettings, make_policy
from pollux.policy.speedups import Speedups, SpeedupTable, speedup_tables
from pollux.scheduler.autoscale import utility
from pollux.testing.snapshots import make_job, make_nodes
from pollux.types import Allocation, JobView, Plan, Snapshot, ThroughputParams

PARAMS = ThroughputParams(0.02, 0.0006, 0.1, 0.001, 0.05, 0.01, 1.5)  # more replicas pay with larger batches alone
NODES = make_nodes(4)


def job(name: str, noise_scale: float, error: float | None = None) -> JobView:
    held = Allocation.of(("n0" if name == "a" else "n1", 1))
    told = {"params": {"gpu": PARAMS}, "noise_scale": noise_scale, "noise_scale_error": error}
    return make_job(name, allocation=held, age_s=1e6, max_profiled_replicas=16, **told)


def gained(table: SpeedupTable) -> float:
    """By four replicas on one node over one."""
    return float(table.speedups[0, 0, 4] / table.speedups[0, 0, 1])


def snapshot(*jobs: JobView) -> Snapshot:
    return Snapshot(now=0.0, nodes=NODES, jobs=jobs)


@pytest.mark.parametrize(
    ("noise_scale", "error", "low"),
    [(100.0, 30.0, 70.0), (100.0, 130.0, 0.0), (100.0, None, 100.0), (100.0, 0.0, 100.0), (None, None, None)],
)
def test_the_lower_end(noise_scale, error, low):
    assert dataclasses.replace(job("a", 1.0), noise_scale=noise_scale, noise_scale_error=error).noise_scale_low == low


def test_speedups_are_those_of_the_lower_end():
    (uncertain,) = speedup_tables(snapshot(job("a", 5000.0, 4900.0)))
    (certain,) = speedup_tables(snapshot(job("a", 100.0)))
    (hoped,) = speedup_tables(snapshot(job("a", 5000.0)))
    assert uncertain.speedups == pytest.approx(certain.speedups)
    assert gained(uncertain) < gained(hoped)


def test_tables_that_are_kept_follow_the_error():
    tables = Speedups(PolicySettings())
    (before,) = tables.tables(snapshot(job("a", 5000.0)))
    (after,) = tables.tables(snapshot(job("a", 5000.0, 4900.0)))
    assert gained(after) < gained(before)


@pytest.mark.parametrize("policy", ["pollux", "sia"])
def test_nobody_takes_slots_on_a_guess(policy):
    def replicas(*jobs: JobView) -> list[int]:
        plan = make_policy(policy, PolicySettings()).decide(snapshot(*jobs))
        return [plan.allocation_of(one.name).num_replicas for one in jobs]

    assert replicas(job("a", 50_000.0, 49_900.0), job("b", 3000.0)) == replicas(job("a", 100.0), job("b", 3000.0))
    guessed, sure = replicas(job("a", 50_000.0, 49_900.0), job("b", 3000.0))
    hoped, left = replicas(job("a", 50_000.0), job("b", 3000.0))
    assert guessed < hoped or sure > left


def test_a_settled_plan_is_looked_at_again_when_the_noise_becomes_certain():
    policy = make_policy("pollux", PolicySettings())
    unsure = (job("a", 50_000.0, 49_900.0), job("b", 3000.0))
    plan = policy.decide(snapshot(*unsure))

    def carried_out(*jobs: JobView) -> Snapshot:
        held = [dataclasses.replace(one, allocation=plan.allocation_of(one.name)) for one in jobs]
        return snapshot(*held)

    kept = policy.decide(carried_out(*unsure))
    assert kept.explanation is not None and kept.explanation.method == "unchanged"
    sure = policy.decide(carried_out(job("a", 50_000.0, 100.0), job("b", 3000.0)))
    assert sure.explanation is not None and sure.explanation.method != "unchanged"


def test_no_nodes_are_asked_for_on_a_guess():
    plan = Plan(allocations={"a": Allocation.of(("n0", 4), ("n1", 4))})
    uncertain, certain, hoped = (
        utility(snapshot(one), plan, GoodputTables())
        for one in (job("a", 5000.0, 4900.0), job("a", 100.0), job("a", 5000.0))
    )
    assert uncertain == pytest.approx(certain) and uncertain < hoped
