"""The lower bound on the average JCT: below every schedule that brute force finds, and below every simulated policy."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.evaluation.jct_bound import BoundedJob, Bounds, bound_of
from pollux.evaluation.rate_curves import CurveLibrary, RateCurves
from pollux.policy import make_policy
from pollux.simulator.application import dense_placement
from pollux.simulator.builtin import load_builtin
from pollux.simulator.config import SimulationConfig, sia_config
from pollux.simulator.engine import SimulatedEngine
from pollux.simulator.generate import generate_workload
from pollux.simulator.result import summarise
from pollux.simulator.run import simulate
from pollux.simulator.source import load_source
from tests.conftest import SHARED
from tests.long import first_of


def curves(rates: list[list[float]], work: list[float]) -> RateCurves:
    """Of 1, 2, ... GPUs of one type; a row for each epoch."""
    table = np.array(rates)
    return RateCurves(np.array(work), np.arange(1.0, table.shape[1] + 1), np.zeros(table.shape[1], dtype=int), table)


# Brute force ----------------------------------------------------------------------------------


def best_sum_of_jcts(jobs: list[BoundedJob], num_gpus: int) -> float:
    """Of all schedules that change allocations when a job comes, ends an epoch or ends, and at no other time."""

    def step(now: float, left: tuple[tuple[float, ...], ...], so_far: float) -> float:
        active = [i for i, job in enumerate(jobs) if job.released_at <= now and any(left[i])]
        arrivals = [job.released_at for job in jobs if job.released_at > now]
        if not active:
            return so_far if not arrivals else step(min(arrivals), left, so_far)
        best = math.inf
        for counts in itertools.product(range(num_gpus + 1), repeat=len(active)):
            if not 0 < sum(counts) <= num_gpus:
                continue
            epochs = [next(e for e, work in enumerate(left[i]) if work) for i in active]
            rates = [
                jobs[i].curves.rates[e][count - 1] if count else 0.0
                for i, e, count in zip(active, epochs, counts, strict=True)
            ]
            ends = [left[i][e] / rate for i, e, rate in zip(active, epochs, rates, strict=True) if rate]
            passed = min([*ends, *(at - now for at in arrivals)])
            after = [list(work) for work in left]
            for i, e, rate in zip(active, epochs, rates, strict=True):
                after[i][e] = max(left[i][e] - rate * passed, 0.0)
                after[i][e] = 0.0 if after[i][e] < 1e-9 else after[i][e]
            best = min(best, step(now + passed, tuple(map(tuple, after)), so_far + passed * len(active)))
        return best

    return step(0.0, tuple(tuple(job.curves.work.tolist()) for job in jobs), 0.0)


@st.composite
def few_jobs(draw: st.DrawFn) -> tuple[list[BoundedJob], int]:
    num_gpus = draw(st.integers(1, 3))
    jobs = []
    for _ in range(draw(st.integers(1, 3))):
        num_epochs = draw(st.integers(1, 2)) if not jobs else 1
        rates = [[draw(st.integers(1, 8)) / 2 for _ in range(num_gpus)] for _ in range(num_epochs)]
        work = [float(draw(st.integers(1, 6))) for _ in range(num_epochs)]
        jobs.append(BoundedJob(float(draw(st.integers(0, 3))), curves(rates, work)))
    return jobs, num_gpus


@given(few_jobs())
@settings(max_examples=40, deadline=None)
def test_no_schedule_is_below_the_bound(case: tuple[list[BoundedJob], int]) -> None:
    jobs, num_gpus = case
    found = bound_of(jobs, np.array([float(num_gpus)]), num_steps=15)
    best = best_sum_of_jcts(jobs, num_gpus) / len(jobs)
    assert found.avg_jct_s <= best + 1e-9
    for each in (found.alone_s, found.queue_s, found.priced_s):
        assert each <= best + 1e-9


def test_of_one_job_it_is_its_run_time_on_the_best_number_of_gpus() -> None:
    jobs = [BoundedJob(7.0, curves([[1.0, 1.5, 1.2], [2.0, 3.0, 5.0]], [30.0, 100.0]))]
    assert bound_of(jobs, np.array([3.0])).avg_jct_s == pytest.approx(30 / 1.5 + 100 / 5)


def test_of_jobs_that_need_one_gpu_it_is_shortest_first() -> None:
    jobs = [BoundedJob(at, curves([[1.0]], [work])) for at, work in ((0.0, 50.0), (10.0, 5.0), (10.0, 20.0))]
    assert bound_of(jobs, np.array([1.0])).avg_jct_s == pytest.approx((5 + 25 + 75) / 3)


def test_prices_find_what_neither_simple_bound_sees() -> None:
    """Four equal jobs that scale to half their GPUs' worth: alone they need 1, as one machine 2.5 on average."""
    scaling = [1.0, 1.6, 2.0, 2.2]
    jobs = [BoundedJob(0.0, curves([scaling], [10.0])) for _ in range(4)]
    found = bound_of(jobs, np.array([4.0]))
    best = best_sum_of_jcts(jobs, 4) / 4
    assert max(found.alone_s, found.queue_s) < 0.75 * best
    assert 0.85 * best < found.priced_s <= best


# Simulations ----------------------------------------------------------------------------------

SMALL = SimulationConfig(num_nodes=2)
WORLDS = {
    "artifact": SMALL,
    "events, no delays": dataclasses.replace(SMALL, resize_s=0.0, decides_on_events=True),
    "epochs not rounded": dataclasses.replace(SMALL, rounds_epochs=False, resize_s=1.0, decides_on_events=True),
    "by throughput": dataclasses.replace(SMALL, counts_efficiency=False),
    "two types": dataclasses.replace(sia_config(), cluster=sia_config().cluster[:2]),
}


@pytest.mark.parametrize("world", first_of([name for name in WORLDS if name != "two types"]))
def test_no_simulated_policy_is_below_the_bound(world: str) -> None:
    applications = load_builtin()
    mix = {"cifar10": 0.6, "ncf": 0.2, "deepspeech2": 0.2}
    workload = generate_workload(applications, num_jobs=8, hours=0.4, seed=3, mix=mix, max_replicas=8)
    bounds = Bounds(applications)
    for name in ("pollux", "srtf", "optimus", "tiresias", "equal", "sia", "gandiva", "lucid"):
        policy = make_policy(name)
        run = simulate(workload, applications, policy, WORLDS[world])
        bound = bounds.of(workload, WORLDS[world], shares_slots=policy.shares_slots)
        assert 0 < bound.avg_jct_s <= summarise(run).avg_jct_s, name


def test_no_job_is_faster_than_its_curve() -> None:
    """By the engine's own rates, over placements, batches and epochs of the measured traces."""
    if not (SHARED / "osdi21" / "traces").is_dir():
        pytest.skip("the traces of OSDI'21 are not in ../shared")
    workload, applications = load_source(
        str(SHARED / "osdi21" / "workloads" / "workload-6.csv"), str(SHARED / "osdi21" / "traces")
    )
    config = SimulationConfig(num_nodes=4, rounds_epochs=False)
    library = CurveLibrary(applications, config)
    generator = np.random.default_rng(0)
    engine = SimulatedEngine(config.nodes(), applications, config, adapts_batch=False)
    for name in ("bert", "yolov3", "deepspeech2"):
        spec = next(job for job in workload.jobs if job.application == name)
        best = library.of(spec)
        for _ in range(60):
            count = int(generator.integers(1, min(16, spec.max_replicas) + 1))
            placement = list(dense_placement(count, int(generator.integers(1, 5))))[:4]
            job = engine.job_for(spec)
            job.placement = tuple(generator.permutation(placement).tolist())
            job.epoch = int(generator.integers(0, job.application.num_epochs))
            job.choose_batch()
            fastest = best.rates.max(axis=0)[np.flatnonzero(best.gpus == sum(placement))[0]]
            assert job.current_rate() <= fastest * (1 + 1e-12)


def test_every_placement_is_like_one_that_is_searched() -> None:
    if not (SHARED / "osdi21" / "traces").is_dir():
        pytest.skip("the traces of OSDI'21 are not in ../shared")
    _, applications = load_source("builtin:small", str(SHARED / "osdi21" / "traces"))
    application = applications["bert"]
    for num_replicas in (1, 3, 6, 9):
        searched = list(application.placements("gpu", num_replicas, 4, 5))
        known = {application.step_time("gpu", placement, 8) for placement in searched}
        for placement in itertools.product(range(5), repeat=5):
            used = tuple(count for count in placement if count)
            if sum(used) == num_replicas:
                assert application.step_time("gpu", used, 8) in known


def test_a_bound_on_two_types_is_below_what_is_simulated_there() -> None:
    if not (SHARED / "sia" / "traces").is_dir():
        pytest.skip("the traces of Sia are not in ../shared")
    workload, applications = load_source(
        str(SHARED / "sia" / "workloads" / "philly" / "workload-1.csv"), str(SHARED / "sia" / "traces")
    )
    few = dataclasses.replace(workload, jobs=tuple(job for job in workload.jobs if job.application == "bert")[:3])
    config = WORLDS["two types"]
    run = simulate(few, applications, make_policy("sia"), config)
    bound = Bounds(applications).of(few, config)
    assert 0 < bound.avg_jct_s <= summarise(run).avg_jct_s
