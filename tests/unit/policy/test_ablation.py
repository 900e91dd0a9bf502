"""Pollux with a part left out decides as if jobs could not do that."""

from __future__ import annotations

import pytest

from pollux.model.efficiency import MAX_NOISE_SCALE
from pollux.policy import PolicySettings, make_policy
from pollux.policy.ablation import ablated
from pollux.testing.snapshots import make_job, make_nodes
from pollux.types import JobView, Snapshot


def snapshot(*jobs: JobView) -> Snapshot:
    return Snapshot(now=0.0, nodes=make_nodes(4), jobs=jobs)


def test_nothing_left_out_is_the_same_snapshot():
    whole = snapshot(make_job("a"))
    assert ablated(whole, PolicySettings()) is whole


def test_replicas_as_asked():
    jobs = [make_job(name, requested_replicas=count, max_profiled_replicas=8) for name, count in (("a", 2), ("b", 3))]
    plan = make_policy("pollux", PolicySettings(is_elastic=False)).decide(snapshot(*jobs))
    assert [plan.allocation_of(name).num_replicas for name in "ab"] == [2, 3]
    free = make_policy("pollux").decide(snapshot(*jobs))
    assert sum(free.allocation_of(name).num_replicas for name in "ab") > 5


def test_a_job_with_one_batch_size_gets_no_more_replicas_than_that_feeds():
    job = make_job("a", requested_batch_size=256, max_profiled_replicas=16, noise_scale=1e9)
    (fixed,) = ablated(snapshot(job), PolicySettings(adapts_batch=False)).jobs
    assert fixed.spec.batch is not None
    assert (fixed.spec.batch.minimum, fixed.spec.batch.maximum) == (256, 256)
    assert fixed.spec.max_replicas <= fixed.spec.batch.max_replicas
    policy = make_policy("pollux", PolicySettings(adapts_batch=False))
    assert not policy.adapts_batch and make_policy("pollux").adapts_batch
    assert policy.decide(snapshot(job)).allocation_of("a").num_replicas >= 1


def test_a_command_without_batch_sizes_stays_as_it_is():
    command = make_job("a", batch=None)
    (same,) = ablated(snapshot(command), PolicySettings(adapts_batch=False)).jobs
    assert same.spec == command.spec


@pytest.mark.parametrize("noise_scale", [10.0, None])
def test_by_throughput_every_example_counts_the_same(noise_scale: float | None):
    job = make_job("a", noise_scale=noise_scale)
    (plain,) = ablated(snapshot(job), PolicySettings(counts_efficiency=False)).jobs
    assert plain.noise_scale == (None if noise_scale is None else MAX_NOISE_SCALE)


def test_a_job_whose_examples_are_soon_useless_takes_more_by_throughput():
    """One of two jobs has a tiny noise scale: by goodput it gets less than the other, by throughput as much."""
    jobs = [
        make_job(name, noise_scale=phi, max_profiled_replicas=16, requested_replicas=4)
        for name, phi in (("noisy", 1e6), ("plain", 1.0))
    ]
    by_goodput = make_policy("pollux").decide(snapshot(*jobs))
    by_throughput = make_policy("pollux", PolicySettings(counts_efficiency=False)).decide(snapshot(*jobs))
    assert by_goodput.allocation_of("plain").num_replicas < by_throughput.allocation_of("plain").num_replicas
