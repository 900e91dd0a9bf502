from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.errors import InvalidValueError
from pollux.model.efficiency import noise_scale
from pollux.model.goodput import (
    BatchTuner,
    GoodputModel,
    GoodputTables,
    best_batch,
    candidate_batches,
    corrected_times,
    fixed_batch,
    goodput,
    total_of,
)
from pollux.model.profile import Timing
from pollux.testing.snapshots import LIMITS, PARAMS, params
from pollux.types import BatchConfig, BatchLimits, ThroughputParams

AS_THE_ARTIFACT = dataclasses.replace(LIMITS, accumulates_alone=True)


@st.composite
def limits(draw: st.DrawFn) -> BatchLimits:
    initial = draw(st.integers(1, 512))
    device_min = draw(st.integers(1, 64))
    accumulates_alone = draw(st.booleans())
    least = 2 * device_min if accumulates_alone and device_min > initial else device_min
    return BatchLimits(
        initial=initial,
        maximum=max(initial * draw(st.integers(1, 64)), least),
        device_min=device_min,
        device_max=device_min * draw(st.integers(2, 32)),
        accumulates_alone=accumulates_alone,
    )


def test_limits_that_leave_one_replica_no_batch_are_refused():
    bounds = {"initial": 1, "maximum": 3, "device_min": 2, "device_max": 4}
    assert best_batch(PARAMS, 1.0, BatchLimits(**bounds), 1, 1)[1] > 0
    with pytest.raises(InvalidValueError, match="one replica has no batch"):
        BatchLimits(**bounds, accumulates_alone=True)


@given(limits(), st.integers(1, 64))
def test_candidates_respect_every_bound(bounds, replicas):
    device, accum, allowed = candidate_batches(replicas, bounds)
    total = total_of(replicas, device, accum, bounds)
    assert np.all(device[allowed] >= bounds.device_min)
    assert np.all(device[allowed] <= bounds.device_max)
    assert np.all(total[allowed] <= bounds.maximum)
    assert np.all(total[allowed] >= bounds.minimum)
    if replicas == 1 and bounds.accumulates_alone:
        assert np.all((accum >= 1) | (total <= bounds.initial) | ~allowed)
    else:
        one_pass = replicas * bounds.device_max
        assert np.all((accum > 0) | (total <= one_pass) | ~allowed)
        # One pass as long as it fits; a total that is rounded down at the maximum was split before it was rounded.
        assert np.all((accum == 0) | (total + replicas * (accum + 1) > one_pass) | ~allowed)


@pytest.mark.parametrize(
    ("total", "replicas", "expected"),
    [
        (128, 1, BatchConfig(128, 0)),
        (256, 1, BatchConfig(256, 0)),
        (1024, 1, BatchConfig(512, 1)),
        (2048, 6, BatchConfig(342, 0)),  # rounded up: 2052 in all
        (4096, 2, BatchConfig(512, 3)),
        (4096, 3, BatchConfig(455, 2)),  # rounded down: 4095 in all
    ],
)
def test_a_fixed_batch_is_split_evenly(total, replicas, expected):
    assert fixed_batch(total, replicas, LIMITS) == expected


@pytest.mark.parametrize(
    ("total", "replicas", "expected"),
    [(128, 1, BatchConfig(128, 0)), (256, 1, BatchConfig(128, 1)), (256, 2, BatchConfig(128, 0))],
)
def test_the_artifacts_jobs_accumulate_on_one_replica(total, replicas, expected):
    assert fixed_batch(total, replicas, AS_THE_ARTIFACT) == expected
    device, accum, allowed = candidate_batches(1, AS_THE_ARTIFACT)
    assert np.all(((accum >= 1) | (device <= LIMITS.initial))[allowed]) and allowed.sum() >= 40
    tuner = BatchTuner(PARAMS, AS_THE_ARTIFACT, 1, 1)
    in_one_pass = BatchConfig(400, 0)
    assert tuner.best(1e6, in_one_pass, threshold=10.0)[0] != in_one_pass
    assert BatchTuner(PARAMS, LIMITS, 1, 1).best(1e6, in_one_pass, threshold=10.0)[0] == in_one_pass


def test_limits_on_a_type_say_how_passes_are_made():
    limits = dataclasses.replace(AS_THE_ARTIFACT, device_max_on=(("small", 64),))
    assert limits.on("small").accumulates_alone and limits.on("other").accumulates_alone
    assert not dataclasses.replace(LIMITS, device_max_on=(("small", 64),)).on("small").accumulates_alone


@pytest.mark.parametrize(("replicas", "expected"), [(40, 2), (3, 22), (64, 1), (1, 64)])
def test_a_batch_that_does_not_divide_is_not_made_smaller_than_its_minimum(replicas, expected):
    """M0 is all that is allowed: some replicas get an example less than others, no batch is below M0."""
    limits = BatchLimits(initial=64, maximum=64, device_max=64)
    config = BatchConfig(expected, 0)
    assert fixed_batch(64, replicas, limits) == config
    found, value = best_batch(PARAMS, 300.0, limits, 1, replicas)
    assert found == config and total_of(replicas, *found, limits) == 64
    assert value == pytest.approx(64 / float(goodput_time(replicas, expected)))  # an efficiency of 1
    assert best_batch(PARAMS, 300.0, limits, 1, replicas, current=config)[0] == config
    table = GoodputTables().best([GoodputModel(PARAMS, 300.0, limits)], [replicas])[0]
    assert table[0, replicas] == pytest.approx(value)


def goodput_time(replicas: int, device_batch: int) -> float:
    return float(corrected_times(PARAMS, 1, replicas, np.array([device_batch]), {})[1][0])


@given(params, st.floats(0, 1e6), st.integers(1, 16), st.integers(1, 8000))
def test_a_limit_leaves_out_larger_totals_only(theta, phi, replicas, limit):
    nodes = 1 if replicas <= 4 else 2
    tuner = BatchTuner(theta, LIMITS, nodes, replicas)
    config, value = tuner.best(phi, limit=limit)
    device, accum, allowed = candidate_batches(replicas, LIMITS)
    every = [BatchConfig(*pair) for pair in zip(device[allowed].tolist(), accum[allowed].tolist(), strict=True)]
    least = min(candidate.total(replicas) for candidate in every)
    within = [candidate for candidate in every if candidate.total(replicas) <= max(limit, least)]
    assert config in within
    assert value == tuner.value(config, phi) == max(tuner.value(candidate, phi) for candidate in within)


def test_a_batch_above_the_limit_is_not_kept():
    tuner = BatchTuner(PARAMS, LIMITS, 1, 4)
    best, value = tuner.best(1000.0)
    assert tuner.best(1000.0, best, limit=best.total(4)) == (best, value)
    smaller, _ = tuner.best(1000.0, best, limit=best.total(4) // 2)
    assert smaller.total(4) <= best.total(4) // 2
    assert tuner.best(1000.0, best, limit=1)[0].total(4) == LIMITS.initial


def test_the_value_of_one_configuration_is_its_goodput():
    tuner = BatchTuner(PARAMS, LIMITS, 2, 8)
    for config in (BatchConfig(16, 0), BatchConfig(100, 0), BatchConfig(256, 1)):
        expected = float(goodput(PARAMS, 700.0, LIMITS.initial, 2, 8, *config))
        assert tuner.value(config, 700.0) == pytest.approx(expected)


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


@given(params, st.floats(1, 1e5), limits(), st.integers(1, 64))
@settings(max_examples=60)
def test_best_batch_is_within_five_percent_of_every_batch_there_is(theta, phi, bounds, replicas):
    """By brute force over all m and s: kinks at the device's limit lie between the totals of a grid.

    With passes that are convex in m, more and smaller ones may be faster; jobs do not train so.
    """
    theta = theta._replace(delta=1.0)
    nodes = 1 if replicas <= 4 else 2
    if replicas > bounds.max_replicas:
        return
    _, found = best_batch(theta, phi, bounds, nodes, replicas)
    device = np.arange(bounds.device_min, bounds.device_max + 1)
    for accum in range(min(bounds.maximum // (replicas * bounds.device_min) + 1, 100)):
        total = replicas * device * (accum + 1)
        allowed = (total >= bounds.minimum) & (total <= bounds.maximum)
        if bounds.accumulates_alone and replicas == 1 and accum == 0:
            allowed &= total <= bounds.initial
        values = goodput(theta, phi, bounds.initial, nodes, replicas, device, accum)
        assert found > 0.95 * np.max(values, where=allowed, initial=0.0)


def test_a_device_that_takes_any_batch_takes_it_in_one_pass():
    limits = BatchLimits(initial=1, maximum=4096, device_max=1 << 30)
    assert fixed_batch(1, 1, limits) == BatchConfig(1, 0)
    assert fixed_batch(4096, 1, limits) == BatchConfig(4096, 0)
    assert best_batch(PARAMS, 1.0, limits, 1, 1)[1] > 0


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


def test_tables_from_memory_are_those_that_were_computed(monkeypatch):
    monkeypatch.setattr("pollux.model.goodput._MAX_TABLES", 2)
    tables = GoodputTables()
    models = [GoodputModel(PARAMS, phi, LIMITS) for phi in (10.0, 300.0, 5000.0)]
    # Narrower and wider ones of the same model, more than are kept, and some twice in one question.
    for asked, widths in (([0], [8]), ([1, 0], [5, 7]), ([2, 2, 1], [8, 6, 30]), ([0, 1], [3, 30])):
        found = tables.best([models[index] for index in asked], widths)
        for index, width, table in zip(asked, widths, found, strict=True):
            (fresh,) = GoodputTables().best([models[index]], [width])
            np.testing.assert_array_equal(table, fresh)
            assert not table.flags.writeable
        assert len(tables._tables) <= 2


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


def test_goodputs_are_those_that_were_published_or_better(instances):
    """The artifact's tables are of a coarser grid: at most 3 % below ours, and never above by more than its spacing."""
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
            accumulates_alone=True,
        )
        phi = float(noise_scale(job["init_batch_size"], *job["grad_params"]))
        (table,) = GoodputTables().best([GoodputModel(ThroughputParams(*job["perf_params"]), phi, bounds)], [4])
        published = np.array(job["goodput_1node"][:5])
        ratio = table[0, 1 : len(published)] / published[1:]
        assert np.all((ratio > 1 - 1e-4) & (ratio < 1.03)), ratio
        checked += 1
    assert checked > 0
