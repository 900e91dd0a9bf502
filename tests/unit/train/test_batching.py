"""Which batch to train with: exactly the total asked for, within the bounds, and kept where a change gains little."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from pollux.errors import InvalidValueError, UnknownNameError
from pollux.model.goodput import goodput
from pollux.train.batching import (
    AdaptiveBatch,
    BatchChoice,
    BatchSituation,
    FixedBatch,
    LinearBatch,
    batch_policy,
    make_limits,
    shape_of,
)
from pollux.train.position import divide
from pollux.types import BatchConfig, BatchLimits, ThroughputParams

PARAMS = ThroughputParams(0.05, 0.001, 0.02, 0.001, 0.01, 0.001, 1.5)


@st.composite
def situations(draw: st.DrawFn) -> BatchSituation:
    initial = draw(st.integers(1, 300))
    device_min = draw(st.integers(1, initial))
    limits = BatchLimits(
        initial=initial,
        maximum=draw(st.integers(initial, 3000)),
        device_min=device_min,
        device_max=draw(st.integers(device_min, 500)),
    )
    return BatchSituation(limits=limits, num_nodes=1, num_replicas=draw(st.integers(1, 16)))


def check_steps(choice: BatchChoice, situation: BatchSituation) -> None:
    """A step divided by this choice has the total, in passes that fit."""
    shapes = [shape_of(choice, situation.num_replicas, rank) for rank in range(situation.num_replicas)]
    steps = [divide(0, 10**6, shape) for shape in shapes]
    assert all(step is not None and step.count == choice.total for step in steps)
    shares = [step.own_count for step in steps if step is not None]
    assert sum(shares) == choice.total and max(shares) - min(shares) <= 1
    for step in steps:
        assert step is not None and step.num_passes == choice.config.accum_steps + 1
        assert all(len(own) <= situation.limits.device_max for own in step.passes)
        assert all(len(own) <= choice.config.device_batch for own in step.passes)


@given(situations())
def test_a_fixed_batch_is_exact_for_any_number_of_replicas(situation):
    total = situation.limits.initial
    if total < situation.num_replicas:
        with pytest.raises(InvalidValueError, match=f"a batch of {total} cannot be divided among"):
            FixedBatch().choose(situation)
        return
    choice = FixedBatch().choose(situation)
    assert choice.total == total
    check_steps(choice, situation)


@given(situations(), st.data())
def test_another_total_may_be_named(situation, data):
    total = data.draw(st.integers(situation.num_replicas, max(situation.limits.maximum, situation.num_replicas)))
    if total > situation.limits.maximum:
        with pytest.raises(InvalidValueError, match=f"fixed batch size {total}; it must lie in 1.."):
            FixedBatch(total).choose(situation)
        return
    choice = FixedBatch(total).choose(situation)
    assert choice.total == total
    check_steps(choice, situation)


@given(situations())
def test_a_linear_batch_is_m0_per_replica_up_to_the_maximum(situation):
    limits, replicas = situation.limits, situation.num_replicas
    if limits.maximum < replicas:
        with pytest.raises(InvalidValueError, match="cannot be divided"):
            LinearBatch().choose(situation)
        return
    choice = LinearBatch().choose(situation)
    assert choice.total == min(limits.initial * replicas, limits.maximum)
    check_steps(choice, situation)


def adaptive(
    phi: float | None,
    params: ThroughputParams | None = PARAMS,
    current: BatchConfig | None = None,
    replicas: int = 2,
    seen: float = 1e9,
) -> tuple[BatchChoice, BatchLimits]:
    limits = make_limits(64, 4096, (8, 256))
    situation = BatchSituation(
        limits=limits,
        num_nodes=1,
        num_replicas=replicas,
        current=current,
        params=params,
        noise_scale=phi,
        num_examples=seen,
    )
    return AdaptiveBatch().choose(situation), limits


@pytest.mark.parametrize(("phi", "params"), [(None, None), (1e4, None), (None, PARAMS)])
@pytest.mark.parametrize(("replicas", "total"), [(1, 64), (2, 64), (3, 64), (8, 64), (16, 128)])
def test_an_adaptive_batch_is_m0_until_something_is_known(phi, params, replicas, total):
    choice, limits = adaptive(phi, params, replicas=replicas)
    assert choice.total == total
    assert choice.config.device_batch <= limits.device_max


@given(st.floats(0, 1e7), st.integers(1, 64))
def test_an_adaptive_batch_stays_within_the_bounds(phi, replicas):
    choice, limits = adaptive(phi, replicas=replicas)
    assert limits.initial <= choice.total <= limits.maximum
    assert limits.device_min <= choice.config.device_batch <= limits.device_max
    assert choice.total == choice.config.total(replicas)


@pytest.mark.parametrize(("seen", "most"), [(0, 64), (64 * 16, 64), (300 * 16, 300), (10**6, 4096)])
def test_an_adaptive_batch_is_a_small_part_of_what_was_seen(seen, most):
    """The noise scale may fall by orders of magnitude in the first steps; the rate follows the batch."""
    choice, limits = adaptive(1e7, replicas=1, seen=seen)
    assert limits.initial <= choice.total <= most
    assert choice.total > 0.8 * most


def test_an_adaptive_batch_gives_every_replica_its_least_however_little_was_seen():
    choice, limits = adaptive(1e7, replicas=16, seen=0)
    assert choice.total == 16 * limits.device_min


def test_an_adaptive_batch_grows_with_the_noise():
    totals = [adaptive(phi)[0].total for phi in (1.0, 1e3, 1e4, 1e6)]
    assert totals == sorted(totals) and totals[0] < totals[-1] == 4096


def test_an_adaptive_batch_keeps_to_what_it_has_within_five_percent():
    """Of all batches that could be the present one, exactly those that are 5 % worse than the best are left."""
    phi, replicas = 3000.0, 2
    best, limits = adaptive(phi)

    def value(config: BatchConfig) -> float:
        return float(goodput(PARAMS, phi, limits.initial, 1, replicas, *config))

    kept = 0
    for device_batch in range(limits.device_min, limits.device_max + 1, 4):
        for accum_steps in range(4):
            current = BatchConfig(device_batch, accum_steps)
            if not limits.initial <= current.total(replicas) <= limits.maximum:
                continue
            choice, _ = adaptive(phi, current=current)
            is_close = value(best.config) <= value(current) * 1.05
            assert choice.config == (current if is_close else best.config)
            kept += is_close
    assert 3 < kept < 100  # both kinds were there


def test_a_policy_of_ones_own_is_taken_as_it_is():
    class Odd:
        def choose(self, situation: BatchSituation) -> BatchChoice:
            return BatchChoice(config=BatchConfig(3, 1), total=5)

    odd = Odd()
    assert batch_policy(odd) is odd


@pytest.mark.parametrize("name", ["adaptive", "fixed", "linear"])
def test_policies_by_name(name):
    assert type(batch_policy(name)).__name__ == f"{name.capitalize()}Batch"


def test_an_unknown_policy_is_told_the_known_ones():
    with pytest.raises(UnknownNameError, match="Did you mean 'adaptive'"):
        batch_policy("adaptiv")
    for wrong in (FixedBatch, 7, object()):
        with pytest.raises(InvalidValueError, match=r"is no batch policy; pass one of adaptive, fixed, linear, or an"):
            batch_policy(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((32, None, None), (32, 32, 1, 32)),
        ((32, 128, None), (32, 128, 1, 32)),
        ((32, 128, 16), (32, 128, 1, 16)),
        ((32, 128, (4, 64)), (32, 128, 4, 64)),
        ((32, None, 64), (32, 32, 1, 64)),
    ],
)
def test_limits_as_asked_for(arguments, expected):
    limits = make_limits(*arguments)
    assert (limits.initial, limits.maximum, limits.device_min, limits.device_max) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, None, None), "batch_size 0; it must be at least 1"),
        ((-4, 8, 2), "batch_size -4; it must be at least 1"),
        ((32, 16, None), "max_batch_size 16 is below batch_size 32; it must be at least that"),
        ((32, None, (8, 4)), r"device_batch_size \(8, 4\); it needs 1 <= smallest <= largest"),
        ((32, None, 0), r"device_batch_size \(1, 0\); it needs 1 <= smallest <= largest"),
        ((32, 64, (0, 4)), r"device_batch_size \(0, 4\); it needs 1 <= smallest <= largest"),
        ((32, 64, (65, 70)), "device_batch_size of at least 65 exceeds max_batch_size 64"),
    ],
)
def test_bounds_that_contradict_each_other_are_refused(arguments, message):
    with pytest.raises(InvalidValueError, match=message):
        make_limits(*arguments)
