from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.errors import InvalidValueError
from pollux.model.efficiency import noise_scale
from pollux.model.goodput import (
    GoodputModel,
    GoodputTables,
    best_batch,
    candidate_batches,
    corrected_times,
    fixed_batch,
    goodput,
)
from pollux.model.profile import Timing
from pollux.types import BatchConfig, BatchLimits, ThroughputParams
from tests.snapshots import LIMITS, PARAMS, params


@st.composite
def limits(draw: st.DrawFn) -> BatchLimits:
    initial = draw(st.integers(1, 512))
    device_min = draw(st.integers(1, 64))
    return BatchLimits(
        initial=initial,
        maximum=max(initial * draw(st.integers(1, 64)), device_min),
        device_min=device_min,
        device_max=device_min * draw(st.integers(2, 32)),
    )


@given(limits(), st.integers(1, 64))
def test_candidates_respect_every_bound(bounds, replicas):
    device, accum, allowed = candidate_batches(replicas, bounds)
    total = replicas * device * (accum + 1)
    assert np.all(device[allowed] >= bounds.device_min)
    assert np.all(device[allowed] <= bounds.device_max)
    assert np.all(total[allowed] <= bounds.maximum)
    if replicas == 1:
        assert np.all((accum >= 1) | (total <= bounds.initial) | ~allowed)


@pytest.mark.parametrize(
    ("total", "replicas", "expected"),
    [
        (128, 1, BatchConfig(128, 0)),
        (256, 1, BatchConfig(128, 1)),  # one replica above M0 accumulates
        (2048, 6, BatchConfig(342, 0)),  # rounded up: 2052 in all
        (4096, 2, BatchConfig(512, 3)),
    ],
)
def test_a_fixed_batch_is_split_evenly(total, replicas, expected):
    assert fixed_batch(total, replicas, LIMITS) == expected


@given(params, st.floats(0, 1e6), st.integers(1, 16))
def test_best_batch_is_the_best_candidate(theta, phi, replicas):
    nodes = 1 if replicas <= 4 else 2
    config, value = best_batch(theta, phi, LIMITS, nodes, replicas)
    device, accum, allowed = candidate_batches(replicas, LIMITS)
    every = [
        float(goodput(theta, phi, LIMITS.initial, nodes, replicas, m, s))
        for m, s, ok in zip(device.tolist(), accum.tolist(), allowed.tolist(), strict=True)
        if ok
    ]
    assert value == pytest.approx(max(every))
    assert value == pytest.approx(float(goodput(theta, phi, LIMITS.initial, nodes, replicas, *config)))


def test_the_current_batch_is_kept_for_small_gains():
    best, value = best_batch(PARAMS, 1000.0, LIMITS, 1, 4)
    near = BatchConfig(best.device_batch - 10, best.accum_steps)
    assert best_batch(PARAMS, 1000.0, LIMITS, 1, 4, current=near)[0] == near
    far = BatchConfig(LIMITS.device_min * 2, 0)
    assert best_batch(PARAMS, 1000.0, LIMITS, 1, 4, current=far) == (best, value)
    too_large = BatchConfig(LIMITS.device_max + 1, 0)
    assert best_batch(PARAMS, 1000.0, LIMITS, 1, 4, current=too_large)[0] == best


def test_more_noise_means_larger_batches():
    totals = [best_batch(PARAMS, phi, LIMITS, 1, 4)[0].total(4) for phi in (10.0, 1e3, 1e5)]
    assert totals == sorted(totals)
    assert totals[0] < totals[-1]


def test_too_many_replicas_for_the_batch_is_an_error():
    with pytest.raises(InvalidValueError, match="exceed"):
        best_batch(PARAMS, 1.0, BatchLimits(initial=8, maximum=64, device_min=16, device_max=64), 2, 8)


def test_measured_times_correct_the_prediction():
    batches = np.array([32, 64, 128, 256])
    plain_pass, plain_step = corrected_times(PARAMS, 1, 4, batches, {})
    seen = {64: Timing(float(plain_pass[1]) * 1.2, float(plain_step[1]) * 0.8)}
    passes, steps = corrected_times(PARAMS, 1, 4, batches, seen)
    assert passes == pytest.approx(plain_pass * 1.2)
    assert steps == pytest.approx(plain_step * 0.8)
    seen[256] = Timing(float(plain_pass[3]), float(plain_step[3]))
    passes, steps = corrected_times(PARAMS, 1, 4, batches, seen)
    assert passes[3] == pytest.approx(plain_pass[3])
    assert plain_step[2] * 0.8 < steps[2] < plain_step[2]  # in between the two corrections


def test_tables_agree_with_best_batch_and_remember():
    tables = GoodputTables()
    model = GoodputModel(PARAMS, 1000.0, LIMITS)
    for _ in range(2):
        (table,) = tables.best([model], [8])
        assert table.shape == (2, 9)
        assert table[0, 0] == table[1, 0] == table[1, 1] == 0.0
        for replicas in range(1, 9):
            assert table[0, replicas] == pytest.approx(best_batch(PARAMS, 1000.0, LIMITS, 1, replicas)[1])
        assert table[1, 8] == pytest.approx(best_batch(PARAMS, 1000.0, LIMITS, 2, 8)[1])


@pytest.mark.parametrize(("maximum", "device_min"), [(4000, 128), (288, 16), (1200, 64), (9000, 100)])
def test_tables_are_right_up_to_a_jobs_own_limit(maximum, device_min):
    """Wide tables show some counts only; none of the lines between them may lead to a count that is not allowed."""
    limits = BatchLimits(initial=128, maximum=maximum, device_min=device_min, device_max=512)
    most = limits.max_replicas
    table = GoodputTables().best([GoodputModel(PARAMS, 1e6, limits)], [2 * most])[0]
    for count in range(most - 4, most + 1):
        direct = best_batch(PARAMS, 1e6, limits, 2, count)[1]
        assert float(table[1, count]) == pytest.approx(direct, rel=0.1)
    assert float(table[1, most]) == pytest.approx(best_batch(PARAMS, 1e6, limits, 2, most)[1], rel=1e-4)
    assert not table[:, most + 1 :].any()


def test_goodputs_are_the_published_ones(instances):
    """Where K·m·(s+1) can reach the maximum exactly, the artifact's own tables are met to 1e-6."""
    data = json.loads((instances / "ga_steady_g64_j40.json").read_text())
    checked = 0
    for job in data["jobs"]:
        if job["perf_params"] is None or job["application"] not in ("imagenet", "deepspeech2"):
            continue
        bounds = BatchLimits(
            initial=job["init_batch_size"],
            maximum=job["max_batch_size"],
            device_min=job["min_local_bsz"],
            device_max=job["max_local_bsz"],
        )
        phi = float(noise_scale(job["init_batch_size"], *job["grad_params"]))
        (table,) = GoodputTables().best([GoodputModel(ThroughputParams(*job["perf_params"]), phi, bounds)], [4])
        published = np.array(job["goodput_1node"][:5])
        assert table[0, : len(published)] == pytest.approx(published, rel=1e-6)
        checked += 1
    assert checked > 0
