"""A job reports its own speed. What it says cannot make it worth more than a job that scales perfectly."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pollux.policy import make_policy
from pollux.policy.speedups import speedup_tables
from pollux.testing.snapshots import make_job, make_nodes
from pollux.types import BatchLimits, JobSpec, JobView, ShapeFactor, Snapshot, ThroughputParams

NODES = make_nodes(1)
PARAMS = ThroughputParams(0.01, 0.001, 0.001, 1e-6, 0.01, 1e-6, 1.5)
# "Useless below 4": step times of 1, 2 and 3 replicas are 10^12 times the model's, those of 4 a hundredth of it.
LIE = (*(ShapeFactor(False, count, 1e-12) for count in (1, 2, 3)), ShapeFactor(False, 4, 100.0))


def job(name: str, factors: tuple[ShapeFactor, ...] = ()) -> JobView:
    told = {"params": {"gpu": PARAMS}, "shape_factors": {"gpu": factors} if factors else {}, "noise_scale": 1000.0}
    return make_job(name, age_s=1e6, max_profiled_replicas=4, **told)


def snapshot(*jobs: JobView) -> Snapshot:
    return Snapshot(now=60.0, jobs=jobs, nodes=NODES)


def test_no_speedup_is_far_above_linear():
    honest, liar = speedup_tables(snapshot(job("honest"), job("liar", LIE)))
    one = liar.speedups[0, 0, 1]
    assert liar.speedups[0, 0, 4] <= 1.5 * 4 * one * (1 + 1e-9)
    assert np.nanmax(liar.speedups) < 10.0, "it was shown as 200T"
    assert 1.0 < honest.speedups[0, 0, 4] / honest.speedups[0, 0, 1] <= 4.0


@pytest.mark.parametrize("num_honest", [1, 2, 3])
def test_a_liar_gets_no_more_than_its_share(num_honest):
    jobs = (*(job(f"honest-{number}") for number in range(num_honest)), job("liar", LIE))
    plan = make_policy("pollux").decide(snapshot(*jobs))
    assert plan.allocations["liar"].num_replicas <= -(-4 // len(jobs))


@pytest.mark.parametrize("total", [4, 5, 7, 512])
@pytest.mark.parametrize("alone", [False, True])
def test_batch_limits_that_a_job_reports_do_not_make_few_replicas_impossible(total, alone):
    """Batches that only fit 4 devices are accumulated on one: a job cannot say that it needs 4."""
    limits = BatchLimits(
        initial=1, minimum=total, maximum=total, device_max=max(total // 4, 1), accumulates_alone=alone
    )
    liar = dataclasses.replace(job("liar"), spec=JobSpec(name="liar", batch=limits))
    table = speedup_tables(snapshot(job("honest"), liar))[1]
    assert table.speedups[0, 0, 1] > 0 or not table.speedups.any()
    assert np.nanmax(table.speedups) <= 1.5 * 4
    plan = make_policy("pollux").decide(snapshot(job("honest"), liar))
    assert plan.allocations["honest"].num_replicas >= 2
