"""Generated workloads: deterministic, sized as asked, by the published shape and mix."""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.errors import InvalidValueError, UnknownNameError
from pollux.model.goodput import fixed_batch
from pollux.policy import make_policy
from pollux.simulator.builtin import ProfiledApplication, load_builtin
from pollux.simulator.config import SimulationConfig
from pollux.simulator.generate import (
    ARRIVALS_BY_HOUR,
    BUILTIN_WORKLOADS,
    DEFAULT_MIX,
    START_HOUR,
    builtin_workload,
    generate_workload,
    training_s,
    tuned_configurations,
)
from pollux.simulator.osdi21 import load_traces
from pollux.simulator.run import simulate
from pollux.simulator.workload import load_workload, workload_csv
from pollux.types import BatchLimits, ThroughputParams

APPLICATIONS = load_builtin()
PUBLISHED = ("workloads", "workloads-0.5", "workloads-1.5", "workloads-2.0")


def scalable(sync_s: float, *, name: str = "app", maximum: int = 6400) -> ProfiledApplication:
    """Large batches are free; a step takes 1 s per 100 examples plus ``sync_s`` to synchronise."""
    return ProfiledApplication(
        name=name,
        limits=BatchLimits(initial=100, maximum=maximum, device_min=10, device_max=100),
        max_replicas=64,
        params={"gpu": ThroughputParams(1e-8, 0.01, sync_s, 1e-8, sync_s, 1e-8, 1.0)},
        epoch_ends=[1000.0],
        noise_scales=[1e12],
    )


class TestProperties:
    @given(
        num_jobs=st.integers(1, 60),
        hours=st.floats(0.1, 50),
        load=st.floats(0.1, 4),
        seed=st.integers(0, 2**32),
        max_replicas=st.integers(1, 64),
    )
    def test_any_workload(self, num_jobs: int, hours: float, load: float, seed: int, max_replicas: int) -> None:
        workload = generate_workload(
            APPLICATIONS, num_jobs=num_jobs, hours=hours, load=load, seed=seed, max_replicas=max_replicas
        )
        assert len(workload.jobs) == max(1, round(num_jobs * load))
        times = [job.submitted_at for job in workload.jobs]
        assert times == sorted(times)
        for index, job in enumerate(workload.jobs):
            assert job.submitted_at == int(job.submitted_at)
            assert 0 <= job.submitted_at <= hours * 3600
            assert job.name == f"{job.application}-{index}"
            limits = APPLICATIONS[job.application].limits
            assert job.requested_replicas is not None and job.requested_batch_size is not None
            assert 1 <= job.requested_replicas <= min(max_replicas, job.max_replicas)
            assert limits.minimum <= job.requested_batch_size <= limits.maximum
            config = fixed_batch(job.requested_batch_size, job.requested_replicas, limits)
            assert limits.device_min <= config.device_batch <= limits.device_max

    @given(
        mix=st.dictionaries(st.sampled_from(sorted(APPLICATIONS)), st.floats(0.01, 10), min_size=1),
        num_jobs=st.integers(1, 200),
    )
    def test_mix_is_met_to_the_nearest_job(self, mix: dict[str, float], num_jobs: int) -> None:
        workload = generate_workload(APPLICATIONS, num_jobs=num_jobs, mix=mix)
        counts = Counter(job.application for job in workload.jobs)
        assert sum(counts.values()) == num_jobs
        for name, share in mix.items():
            assert abs(counts[name] - share / sum(mix.values()) * num_jobs) < 1 + 1e-6

    def test_seed_names_a_workload(self) -> None:
        first, again, other = (generate_workload(APPLICATIONS, seed=seed) for seed in (1, 1, 2))
        assert first == again
        assert [job.submitted_at for job in first.jobs] != [job.submitted_at for job in other.jobs]
        assert [job.application for job in first.jobs] != [job.application for job in other.jobs]

    def test_what_is_written_reads_back(self, tmp_path: Path) -> None:
        workload = generate_workload(APPLICATIONS, num_jobs=40)
        path = tmp_path / "generated.csv"
        path.write_text(workload_csv(workload.jobs))
        assert load_workload(path, APPLICATIONS) == workload


class TestArrivals:
    def test_follow_the_time_of_day(self) -> None:
        """20 000 arrivals: every hour within five standard deviations of its share."""
        num_jobs = 20_000
        workload = generate_workload(APPLICATIONS, num_jobs=num_jobs, hours=8, mix={"ncf": 1})
        counts = np.bincount([int(job.submitted_at) // 3600 for job in workload.jobs], minlength=8)
        rates = np.array([ARRIVALS_BY_HOUR[START_HOUR + hour] for hour in range(8)])
        expected = num_jobs * rates / rates.sum()
        assert np.all(np.abs(counts - expected) < 5 * np.sqrt(expected))
        assert counts.argmax() == 5 and counts.argmin() == 2

    def test_days_repeat(self) -> None:
        workload = generate_workload(APPLICATIONS, num_jobs=20_000, hours=48, mix={"ncf": 1})
        days = Counter(int(job.submitted_at) // 86400 for job in workload.jobs)
        assert abs(days[0] - days[1]) < 5 * np.sqrt(20_000)

    def test_shape_and_mix_are_those_of_the_published_workloads(self, osdi21: Path) -> None:
        jobs = [
            row
            for folder in PUBLISHED
            for path in sorted((osdi21 / folder).glob("*.csv"))
            for row in csv.DictReader(path.read_text().splitlines())
        ]
        hours = np.bincount([int(float(job["time"])) // 3600 for job in jobs], minlength=8)
        rates = np.array(ARRIVALS_BY_HOUR[START_HOUR : START_HOUR + 8])
        assert np.corrcoef(hours, rates)[0, 1] > 0.85
        shares = Counter(job["application"] for job in jobs)
        for name, share in DEFAULT_MIX.items():
            assert shares[name] / len(jobs) == pytest.approx(share, abs=0.001)


class TestTuned:
    def test_fifty_to_eighty_percent_of_linear(self) -> None:
        """A step of 6400 examples takes 64/K + 0.6 s: 82 % of linear on 24 GPUs, 77 % on 32, 62 % on 64."""
        chosen = tuned_configurations(scalable(0.6))
        assert [(tuned.num_replicas, tuned.batch_size) for tuned in chosen] == [(32, 6400), (48, 6400), (64, 6400)]

    def test_with_the_batch_size_that_is_best_for_each_number_of_gpus(self) -> None:
        app = APPLICATIONS["cifar10"]
        alone_s = min(training_s(app, 1, 128 << power) for power in range(6))
        for tuned in tuned_configurations(app):
            speedup = alone_s / training_s(app, tuned.num_replicas, tuned.batch_size)
            assert 0.5 <= speedup / tuned.num_replicas <= 0.8
            times = {size: training_s(app, tuned.num_replicas, size) for size in (512, 1024, 2048, 4096)}
            assert min(times, key=lambda size: times[size]) == tuned.batch_size

    def test_scales_too_well_for_the_cluster(self) -> None:
        assert [tuned.num_replicas for tuned in tuned_configurations(scalable(1e-6), max_replicas=16)] == [16]

    def test_does_not_scale(self) -> None:
        # One step, one batch size, no accumulation to hide behind: 100 s of synchronisation never pays.
        assert [tuned.num_replicas for tuned in tuned_configurations(scalable(100.0, maximum=100))] == [1]

    def test_one_gpu_is_all_that_ncf_may_have(self) -> None:
        (tuned,) = tuned_configurations(APPLICATIONS["ncf"])
        assert (tuned.num_replicas, tuned.batch_size) == (1, 32768)

    def test_published_configurations_qualify(self, osdi21: Path) -> None:
        """All that the artifact's workloads ask for is found from the traces by the same rule."""
        applications = load_traces(osdi21 / "traces")
        allowed = {
            (name, tuned.num_replicas, tuned.batch_size)
            for name, application in applications.items()
            for tuned in tuned_configurations(application)
        }
        asked = {
            (row["application"], int(row["num_replicas"]), int(row["batch_size"]))
            for row in csv.DictReader((osdi21 / "workloads" / "workload-6.csv").read_text().splitlines())
        }
        assert asked <= allowed


class TestBuiltin:
    @pytest.mark.parametrize("name", sorted(BUILTIN_WORKLOADS))
    def test_fits_the_cluster_it_is_meant_for(self, name: str) -> None:
        recipe = BUILTIN_WORKLOADS[name]
        workload = builtin_workload(name, APPLICATIONS)
        assert workload.name == name
        assert len(workload.jobs) == recipe.num_jobs * recipe.load
        num_gpus = recipe.num_nodes * recipe.gpus_per_node
        assert all((job.requested_replicas or 0) <= num_gpus for job in workload.jobs)

    def test_small_runs_to_its_end(self) -> None:
        recipe = BUILTIN_WORKLOADS["small"]
        config = SimulationConfig(num_nodes=recipe.num_nodes, gpus_per_node=recipe.gpus_per_node)
        run = simulate(builtin_workload("small", APPLICATIONS), APPLICATIONS, make_policy("tiresias"), config)
        assert all(job.finished_at is not None for job in run.store.jobs.values())
        assert run.ended_at < 8 * 3600

    def test_unknown(self) -> None:
        with pytest.raises(UnknownNameError, match=r"Did you mean 'small'.*day, heavy, small"):
            builtin_workload("smal", APPLICATIONS)


class TestRejects:
    @pytest.mark.parametrize(
        "values",
        [
            {"num_jobs": 0},
            {"hours": 0.0},
            {"hours": float("nan")},
            {"load": -1.0},
            {"load": float("inf")},
            {"seed": -1},
            {"max_replicas": 0},
            {"gpus_per_node": 0},
            {"mix": {}},
            {"mix": {"ncf": 0.0}},
            {"mix": {"ncf": -1.0}},
            {"mix": {"ncf": float("nan")}},
        ],
    )
    def test_numbers_out_of_range(self, values: dict[str, Any]) -> None:
        with pytest.raises(InvalidValueError):
            generate_workload(APPLICATIONS, **values)

    def test_unknown_application(self) -> None:
        with pytest.raises(UnknownNameError, match=re.escape("unknown application 'cifar'. Did you mean 'cifar10'?")):
            generate_workload(APPLICATIONS, mix={"cifar": 1.0})

    def test_more_gpus_than_a_job_may_ask_for(self) -> None:
        large = scalable(0.6, name="large")
        large.min_replicas = 5
        assert tuned_configurations(large, max_replicas=5)[0].num_replicas == 5  # few ask for five, but it must
        with pytest.raises(
            InvalidValueError, match=r"large needs at least 5 GPUs.* more than 4; allow more \(--gpus 5"
        ):
            generate_workload({"large": large}, max_replicas=4)
        narrow = scalable(0.6, maximum=150)
        narrow.min_replicas = 15
        with pytest.raises(
            InvalidValueError, match="needs 15 GPUs with at least 10 examples each; no batch size of 100"
        ):
            generate_workload({"app": narrow})

    def test_no_applications(self) -> None:
        with pytest.raises(InvalidValueError, match="no applications"):
            generate_workload({})

    def test_default_mix_makes_do_with_what_is_there(self) -> None:
        mine = {"mine": scalable(0.1, name="mine"), "yours": scalable(0.1, name="yours")}
        assert Counter(job.application for job in generate_workload(mine, num_jobs=10).jobs) == {"mine": 5, "yours": 5}
        some = {name: APPLICATIONS[name] for name in ("ncf", "bert")}
        assert {job.application for job in generate_workload(some).jobs} == {"ncf", "bert"}
