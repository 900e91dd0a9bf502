"""Pollux on the published workloads: never worse than the artifact's genetic algorithm."""

from __future__ import annotations

import pytest

from pollux.errors import SimulationError
from pollux.policy import PolicySettings, make_policy
from pollux.simulator.builtin import load_builtin
from pollux.simulator.config import SimulationConfig
from pollux.simulator.generate import builtin_workload
from pollux.simulator.result import summarise
from pollux.simulator.run import SimulationRun, simulate
from pollux.simulator.source import load_source
from pollux.simulator.workload import Workload, job_spec
from tests.long import long

ON_OUR_PHYSICS = SimulationConfig(resize_s=5.0, decides_on_events=True, remembers_profiles=True)


def average_jct(run: SimulationRun) -> float:
    return summarise(run).jct_s.mean


@pytest.mark.golden
@pytest.mark.parametrize(
    ("workload", "weights", "config", "most"),
    [
        pytest.param("workloads/workload-1", "equal", SimulationConfig(), 1990, marks=long),
        pytest.param("workloads/workload-3", "equal", SimulationConfig(), 2140, marks=long),
        pytest.param("workloads/workload-6", "equal", SimulationConfig(), 2350, marks=long),
        ("workloads-0.5/workload-6", "equal", SimulationConfig(), 1210),
        pytest.param("workloads-1.5/workload-6", "equal", SimulationConfig(), 3380, marks=long),
        pytest.param("workloads-2.0/workload-6", "equal", SimulationConfig(), 4950, marks=long),
        pytest.param("workloads/workload-6", "remaining", SimulationConfig(), 2140, marks=long),
        pytest.param("workloads/workload-6", "remaining", ON_OUR_PHYSICS, 1780, marks=long),
    ],
)
def test_average_jct_on_published_workloads(osdi21, workload, weights, config, most):
    jobs, applications = load_source(str(osdi21 / f"{workload}.csv"), str(osdi21 / "traces"))
    settings = PolicySettings(weights=weights, resize_s=config.resize_s)
    assert average_jct(simulate(jobs, applications, make_policy("pollux", settings), config)) <= most


@pytest.fixture(scope="module")
def small() -> tuple[Workload, dict]:
    applications = load_builtin()
    return builtin_workload("small", applications), applications


CLUSTER = {"num_nodes": 4, "gpus_per_node": 4}


def run(small: tuple[Workload, dict], policy: str = "pollux", **config: object) -> SimulationRun:
    return simulate(*small, make_policy(policy), SimulationConfig(**(CLUSTER | config)))  # type: ignore[arg-type]


def test_every_policy_finishes_every_job(small):
    for policy in ("equal", "fifo", "optimus", "pollux", "srtf", "tiresias"):
        finished = run(small, policy)
        assert len(finished.store.jobs) == len(small[0].jobs)
        assert all(record.finished_at is not None for record in finished.store.jobs.values())


def test_simulations_repeat_exactly(small):
    first, second = run(small), run(small)
    assert {name: record.finished_at for name, record in first.store.jobs.items()} == {
        name: record.finished_at for name, record in second.store.jobs.items()
    }


@long
def test_what_makes_moves_cheap_or_knowledge_early_helps(small):
    plain = average_jct(run(small))
    assert average_jct(run(small, resize_s=5.0)) < plain
    assert average_jct(run(small, remembers_profiles=True)) < plain
    assert average_jct(run(small, decides_on_events=True)) < plain * 1.02


def test_interference_costs_those_who_do_not_avoid_it(small):
    careless = PolicySettings(avoid_interference=False)
    config = SimulationConfig(num_nodes=4, gpus_per_node=4, interference=0.5)
    slowed = average_jct(simulate(*small, make_policy("pollux", careless), config))
    spared = average_jct(simulate(*small, make_policy("pollux"), config))
    assert spared <= slowed


def test_an_autoscaled_cluster_grows_shrinks_and_costs_less(small):
    scaled = run(small, min_nodes=1, max_nodes=8)
    sizes = {sample.num_slots // 4 for sample in scaled.samples}
    assert min(sizes) == 1
    assert 1 < max(sizes) <= 8
    fixed = run(small, num_nodes=8)
    assert scaled.node_s < fixed.node_s
    assert all(sum(sample.replicas.values()) <= sample.num_slots for sample in scaled.samples)


@long
def test_an_autoscaled_cluster_is_up_to_the_last_job(small):
    scaled = run(small, min_nodes=1, max_nodes=8, decides_on_events=True)
    assert all(record.finished_at is not None for record in scaled.store.jobs.values())


def test_a_job_that_never_fits_is_an_error_not_a_hang():
    applications = load_builtin()
    job = job_spec(applications["cifar10"], name="huge", time_s=0, num_replicas=99, batch_size=4096)
    with pytest.raises(SimulationError, match=r"huge.*more GPUs than the cluster has"):
        simulate(Workload("w", (job,)), applications, make_policy("tiresias"), SimulationConfig(**CLUSTER))
