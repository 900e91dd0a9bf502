from __future__ import annotations

import pytest

from pollux.errors import InvalidValueError
from pollux.model.goodput import GoodputTables
from pollux.policy import make_policy
from pollux.scheduler.autoscale import AutoscaleConfig, SizeDecision, decide_size, nodes_to_have, utility
from pollux.types import Allocation, Node, Snapshot
from tests.snapshots import PARAMS, make_job, make_nodes

TEMPLATE = Node(name="any", num_slots=4)
BAND = AutoscaleConfig(min_nodes=1, max_nodes=16)


def size(num_nodes: int, phi: float, config: AutoscaleConfig = BAND, num_jobs: int = 1, **rest: float) -> SizeDecision:
    jobs = tuple(
        make_job(f"j{i}", noise_scale=phi, max_profiled_replicas=64, params={"gpu": PARAMS}) for i in range(num_jobs)
    )
    snapshot = Snapshot(now=0, nodes=make_nodes(num_nodes), jobs=jobs)
    return decide_size(snapshot, config, TEMPLATE, make_policy("pollux").decide, **rest)


def test_a_job_that_scales_gets_more_nodes_than_one_that_does_not():
    assert size(4, 1e6).num_nodes > size(4, 100.0).num_nodes


def test_the_size_found_is_the_nearest_to_the_middle_of_the_band():
    decision = size(1, 3e4)
    assert decision.utility > BAND.high
    distances = {}
    for num_nodes in range(1, 17):
        snapshot = Snapshot(
            now=0,
            nodes=make_nodes(num_nodes),
            jobs=(make_job("j0", noise_scale=3e4, max_profiled_replicas=64, params={"gpu": PARAMS}),),
        )
        plan = make_policy("pollux").decide(snapshot)
        distances[num_nodes] = abs(utility(snapshot, plan, GoodputTables()) - 0.65)
    assert distances[decision.num_nodes] == pytest.approx(min(distances.values()))


def test_inside_the_band_nothing_changes():
    found = size(1, 3e4).num_nodes
    assert size(found, 3e4).num_nodes == found
    assert size(found, 3e4).reason == "inside the band"


def test_a_recent_change_is_left_alone():
    assert size(1, 1e6, since_change_s=10.0).num_nodes == 1


def test_no_jobs_need_the_fewest_nodes():
    assert size(8, 1.0, num_jobs=0).num_nodes == 1


def test_more_jobs_need_more_nodes():
    assert size(2, 1e3, num_jobs=8).num_nodes > size(2, 1e3, num_jobs=1).num_nodes


def test_limits_and_budget_hold():
    assert size(1, 1e9, AutoscaleConfig(min_nodes=1, max_nodes=3)).num_nodes <= 3
    assert size(9, 1e9, AutoscaleConfig(min_nodes=1, max_nodes=3)).num_nodes == 3
    frugal = AutoscaleConfig(min_nodes=1, max_nodes=16, budget_slots=8.0)
    spent = size(1, 1e9, frugal, spent_slot_s=2 * 8.0 * 3600 - 4 * 4 * 3600)
    assert spent.num_nodes <= 4
    assert size(6, 1e9, frugal, spent_slot_s=1e9).num_nodes == 1


def test_utility_is_one_for_single_replicas_and_counts_idle_slots():
    jobs = tuple(make_job(f"j{i}") for i in range(2))
    snapshot = Snapshot(now=0, nodes=make_nodes(1), jobs=jobs)
    plan = make_policy("equal").decide(snapshot)
    assert 0.3 < utility(snapshot, plan, GoodputTables()) < 1.0
    alone = {"j0": Allocation.of(("n0", 1)), "j1": Allocation.of(("n0", 1))}
    assert utility(snapshot, type(plan)(allocations=alone), GoodputTables()) == 0.5


def test_busy_nodes_stay_and_new_ones_get_fresh_names():
    nodes = make_nodes(4)
    held = [Allocation.of(("n3", 4)), Allocation.of(("n1", 1))]
    assert [node.name for node in nodes_to_have(nodes, held, 2, TEMPLATE)] == ["n1", "n3"]
    grown = nodes_to_have(nodes, held, 6, TEMPLATE)
    assert len({node.name for node in grown}) == 6
    assert {node.name for node in nodes} <= {node.name for node in grown}


@pytest.mark.parametrize(
    "bad",
    [
        {"min_nodes": 0, "max_nodes": 2},
        {"min_nodes": 3, "max_nodes": 2},
        {"min_nodes": 1, "max_nodes": 2, "low": 0.9},
        {"min_nodes": 1, "max_nodes": 2, "budget_slots": -1.0},
    ],
)
def test_impossible_configurations_are_refused(bad):
    with pytest.raises(InvalidValueError):
        AutoscaleConfig(**bad)
