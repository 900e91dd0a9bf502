"""Clusters of several types and what published simulators do to jobs: delays, slowdowns, free moves, first profiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import pytest

from pollux.errors import InvalidValueError
from pollux.policy import make_policy
from pollux.scheduler.node_types import NodeType
from pollux.simulator.builtin import ProfiledApplication, profiles_json
from pollux.simulator.config import SimulationConfig, sia_config
from pollux.simulator.fairness import SoloTimes
from pollux.simulator.physics import OSDI21, SIA, NodeGroup, Physics
from pollux.simulator.result import summarise
from pollux.simulator.run import SimulationRun, simulate
from pollux.simulator.workload import Workload, job_spec
from pollux.types import Allocation, BatchLimits, Node, Plan, Snapshot, ThroughputParams

LIMITS = BatchLimits(initial=100, maximum=1600, device_min=10, device_max=100, device_max_on=(("fast", 200),))
SLOW = NodeGroup(accelerator="slow", num_nodes=2, slots_per_node=2)
FAST = NodeGroup(accelerator="fast", num_nodes=1, slots_per_node=4)


def theta(pass_s: float) -> ThroughputParams:
    return ThroughputParams(pass_s, 1e-9, 0, 0, 0, 0, 1)


def application(name: str = "app", **types: float) -> ProfiledApplication:
    """1000 steps, of 0.1 s on slow slots and half of that on fast ones, whatever the batch; large ones are no use."""
    params = {kind: theta(pass_s) for kind, pass_s in (types or {"slow": 0.1, "fast": 0.05}).items()}
    return ProfiledApplication(
        name=name, limits=LIMITS, max_replicas=4, params=params, epoch_ends=[1000.0], noise_scales=[0.0]
    )


class Script:
    """Gives the only job what was written down for each time; what was given last stays."""

    name = "script"
    adapts_batch = False
    needs_oracle = False
    shares_slots = False

    def __init__(self, allocations: Mapping[float, Allocation]) -> None:
        self._allocations = allocations
        self.seen: list[Snapshot] = []

    def reset(self) -> None:
        self.seen.clear()

    def decide(self, snapshot: Snapshot) -> Plan:
        self.seen.append(snapshot)
        job = snapshot.jobs[0]
        wanted = self._allocations.get(snapshot.now, job.allocation)
        return Plan(allocations={job.name: job.allocation if job.is_fixed else wanted})


def run(policy: Script, *, physics: Physics = OSDI21, groups: Sequence[NodeGroup] = (SLOW, FAST)) -> SimulationRun:
    kind = application()
    job = job_spec(kind, name="a", time_s=0.0, num_replicas=1, batch_size=100)
    config = SimulationConfig(cluster=tuple(groups), physics=physics, resize_s=10.0)
    return simulate(Workload("one", (job,)), {"app": kind}, policy, config)


def end_s(found: SimulationRun) -> float:
    """After the first decision."""
    finished_at = found.store.jobs["a"].finished_at
    assert finished_at is not None
    return finished_at - 60


# Clusters -------------------------------------------------------------------------------------


def test_nodes_of_several_types() -> None:
    config = SimulationConfig(cluster=(SLOW, FAST))
    assert config.nodes() == (
        Node(name="slow-0", num_slots=2, accelerator="slow"),
        Node(name="slow-1", num_slots=2, accelerator="slow"),
        Node(name="fast-0", num_slots=4, accelerator="fast"),
    )
    assert config.cluster_text == "slow:2x2,fast:1x4"
    assert SimulationConfig().cluster_text == "gpu:16x4"


def test_one_type_may_be_scaled() -> None:
    config = SimulationConfig(cluster=(SLOW,), min_nodes=1, max_nodes=3)
    assert [node.name for node in config.nodes()] == ["slow-0"]
    assert [node.name for node in config.full.nodes()] == ["slow-0", "slow-1", "slow-2"]
    assert config.cluster_text == "slow:1..3x2"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"cluster": (SLOW, SLOW)}, "named twice in the cluster: slow, slow"),
        ({"cluster": (SLOW, FAST), "min_nodes": 1, "max_nodes": 2}, "one type; the cluster has slow, fast: name those"),
    ],
)
def test_clusters_that_cannot_be(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(InvalidValueError, match=problem):
        SimulationConfig(**fields)  # type: ignore[arg-type]


def test_the_artifacts_cluster() -> None:
    assert sia_config().cluster_text == "aws:6x4,dgx-ext:2x8,rtx:3x8"
    assert sum(node.num_slots for node in sia_config(scale=4).nodes()) == 256


def test_hours_are_told_by_type() -> None:
    policy = Script({60: Allocation.of(("slow-0", 1)), 120: Allocation.of(("fast-0", 2))})
    result = summarise(run(policy))
    assert result.cluster == result.to_json()["cluster"] == "slow:2x2,fast:1x4"
    assert result.gpu_hours_by_type["slow"] == pytest.approx(60 / 3600)
    assert sum(result.gpu_hours_by_type.values()) == pytest.approx(result.gpu_hours)
    assert result.slot_hours == pytest.approx(result.node_hours * 8 / 3)


# Prices of types ------------------------------------------------------------------------------


def scaled(fast_price: float) -> SimulationRun:
    """Jobs that need more than the one slow node that there is; fast slots do twice as much. The first is measured."""
    kind = application()
    jobs = [
        job_spec(kind, name=f"job{number}", time_s=300.0 * bool(number), num_replicas=1, batch_size=100)
        for number in range(12)
    ]
    types = (
        NodeType(accelerator="slow", num_slots=2, price=1.0),
        NodeType(accelerator="fast", num_slots=2, price=fast_price),
    )
    group = NodeGroup(accelerator="slow", num_nodes=1, slots_per_node=2)
    sizes = {"min_nodes": 1, "max_nodes": 4, "node_types": types}
    config = SimulationConfig(cluster=(group,), resize_s=5.0, remembers_profiles=True, **sizes)  # type: ignore[arg-type]
    return simulate(Workload("many", tuple(jobs)), {"app": kind}, make_policy("pollux"), config)


@pytest.mark.parametrize(("price", "used"), [(1.5, "fast"), (3.0, "slow")])
def test_auto_scaling_adds_the_type_whose_goodput_costs_least(price: float, used: str) -> None:
    result = summarise(scaled(price))
    hours = result.gpu_hours_by_type
    assert (hours.get("fast", 0.0) > 0) == (used == "fast"), hours
    paid = {"slow": 1.0, "fast": price}
    assert result.cost == pytest.approx(sum(result.cost_by_type.values())) and result.cost > 0
    assert result.cost_by_type.keys() <= paid.keys()


def test_types_have_prices_of_their_own() -> None:
    one = NodeType(accelerator="slow", num_slots=2, price=1.0)
    with pytest.raises(InvalidValueError, match="no node price"):
        SimulationConfig(min_nodes=1, max_nodes=2, node_types=(one,), node_price=1.0)


# Physics --------------------------------------------------------------------------------------


def test_each_type_has_its_speed_and_moving_between_them_costs_a_resize() -> None:
    assert end_s(run(Script({60: Allocation.of(("slow-0", 1))}))) == 110
    assert end_s(run(Script({60: Allocation.of(("fast-0", 1))}))) == 60
    moved = run(Script({60: Allocation.of(("slow-0", 1)), 120: Allocation.of(("fast-0", 1))}))
    assert end_s(moved) == 60 + 10 + 25  # half of the steps were done in the first minute


def test_delays_and_slowdowns_by_application() -> None:
    physics = Physics(name="test", resize_s=(("app", 40.0), ("other", 1.0)), slowdowns=(("app", 1.5),))
    policy = Script({60: Allocation.of(("slow-0", 1)), 120: Allocation.of(("slow-0", 2))})
    found = run(policy, physics=physics)
    assert end_s(found) == 60 + 40 + 130  # 150 s of training, of which 20 before the resize
    alone = SoloTimes(found.applications, [SLOW], resize_s=10.0)
    assert alone.jct_s("app", 1.0) == pytest.approx(40 + 150)


def test_others_are_as_the_simulation_says() -> None:
    physics = Physics(name="test", resize_s=(("other", 1.0),))
    assert end_s(run(Script({60: Allocation.of(("slow-0", 1))}), physics=physics)) == 110


@pytest.mark.parametrize(
    ("moves_are_free", "target", "delay_s"),
    [
        (True, Allocation.of(("slow-1", 2)), 0),
        (False, Allocation.of(("slow-1", 2)), 10),
        (True, Allocation.of(("slow-0", 1), ("slow-1", 1)), 10),  # another shape
        (True, Allocation.of(("fast-0", 2)), 10),  # another type
    ],
)
def test_moves_that_keep_shape_and_type(moves_are_free: bool, target: Allocation, delay_s: float) -> None:
    physics = Physics(name="test", moves_are_free=moves_are_free)
    found = run(Script({60: Allocation.of(("slow-0", 2)), 120: target}), physics=physics)
    rest_s = 25 if target.shares[0].node == "fast-0" else 50
    assert end_s(found) == 60 + delay_s + rest_s


def test_who_is_being_resized_is_left_alone() -> None:
    allocations = {60: Allocation.of(("slow-0", 1)), 120: Allocation.of(("fast-0", 1))}
    delays = Physics(name="test", resize_s=(("app", 100.0),))
    free, pinned = Script(allocations), Script(allocations)
    assert end_s(run(free, physics=delays)) == 60 + 100 + 50
    assert not any(job.is_pinned for snapshot in free.seen for job in snapshot.jobs)
    assert end_s(run(pinned, physics=dataclasses.replace(delays, pins_resizing=True))) == 100 + 100
    assert [snapshot.jobs[0].is_pinned for snapshot in pinned.seen] == [False, True, False, False]


def test_the_artifacts_figures() -> None:
    assert dict(SIA.resize_s)["imagenet"] == 250
    assert dict(SIA.slowdowns)["cifar10"] == 1.8
    with pytest.raises(InvalidValueError, match="slowdown of app: 0"):
        Physics(name="test", slowdowns=(("app", 0.0),))


# What is known before a job starts -------------------------------------------------------------


def test_jobs_are_tried_on_every_type_before_they_start() -> None:
    kind = application()
    job = job_spec(kind, name="a", time_s=0.0, num_replicas=1, batch_size=100)

    def known(**changes: object) -> Mapping[str, ThroughputParams]:
        policy = Script({60: Allocation.of(("slow-0", 1))})
        policy.adapts_batch = True
        config = SimulationConfig(cluster=(SLOW, FAST), **changes)  # type: ignore[arg-type]
        simulate(Workload("one", (job,)), {"app": kind}, policy, config)
        return policy.seen[0].jobs[0].params

    params = known()
    assert params["slow"].alpha_g == pytest.approx(0.1, rel=0.05)
    assert params["fast"].alpha_g == pytest.approx(0.05, rel=0.05)
    assert known(profiles_types=False) == {}


def test_jobs_stay_on_types_they_were_measured_on() -> None:
    kinds = {"app": application(), "picky": application("picky", fast=0.05)}
    jobs = tuple(
        job_spec(kinds[kind], name=f"{kind}-{n}", time_s=0.0, num_replicas=2, batch_size=100)
        for n, kind in enumerate(("app", "picky", "picky", "app", "picky"))
    )
    for name in ("fifo", "srtf", "optimus", "pollux"):
        found = simulate(Workload("five", jobs), kinds, make_policy(name), SimulationConfig(cluster=(SLOW, FAST)))
        assert not [round_.error for round_ in found.store.rounds if round_.error]
        used = {sample.types.get(job) for sample in found.samples for job in sample.types if job.startswith("picky")}
        assert used == {"fast"}
        assert min(job.rho for job in summarise(found).jobs) > 0


def test_fairness_is_the_mean_over_types_by_their_slots() -> None:
    kinds = {"app": application(), "picky": application("picky", fast=0.05)}
    both = SoloTimes(kinds, [SLOW, dataclasses.replace(FAST, num_nodes=3)], resize_s=10.0)
    assert both.jct_s("app", 1.0) == pytest.approx(10 + (4 * 100 + 12 * 50) / 16, rel=1e-4)
    assert both.jct_s("picky", 1.0) == pytest.approx(10 + 50, rel=1e-4)


def test_profiles_of_several_types_are_written_and_read() -> None:
    table = profiles_json({"app": application()}, "a test")
    assert set(table["applications"]["app"]["accelerators"]) == {"slow", "fast"}
    assert table["applications"]["app"]["limits"]["device_max_on"] == (("fast", 200),)
