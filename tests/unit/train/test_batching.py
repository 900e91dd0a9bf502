"""Which batch to train with: exactly the total asked for, within the bounds, and kept where a change gains little."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from pollux.errors import InvalidValueError, UnknownNameError
from pollux.model.efficiency import SAME_RATE
from pollux.model.goodput import goodput
from pollux.model.profile import Timing
from pollux.train.batching import (
    AdaptiveBatch,
    BatchChoice,
    BatchSituation,
    FixedBatch,
    LinearBatch,
    RampBatch,
    SeesawBatch,
    batch_policy,
    make_limits,
    shape_of,
)
from pollux.train.position import divide
from pollux.types import BatchConfig, BatchLimits, ThroughputParams

PARAMS = ThroughputParams(0.05, 0.001, 0.02, 0.001, 0.01, 0.001, 1.5)
LAUNCH_BOUND = ThroughputParams(0.05, 1e-7, 0.02, 1e-9, 0.01, 1e-9, 1.5)
WIDE = BatchLimits(initial=64, maximum=4096, device_min=8, device_max=4096)  # any batch fits in one pass


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
    total: int | None = None,
    replicas: int = 2,
    seen: float = 1e9,
    limits: BatchLimits | None = None,
    **options: Any,
) -> tuple[BatchChoice, BatchLimits]:
    limits = limits or make_limits(64, 4096, (8, 256))
    situation = BatchSituation(
        limits=limits,
        num_nodes=1,
        num_replicas=replicas,
        total=total,
        params=params,
        noise_scale=phi,
        num_examples=seen,
        **options,
    )
    return AdaptiveBatch().choose(situation), limits


def settled(phi: float, total: int | None = None, **options: Any) -> int:
    """Where the batch ends up with this noise scale, one decision after the other."""
    for _ in range(40):
        choice, _ = adaptive(phi, total=total, **options)
        if choice.total == total:
            return total
        total = choice.total
    raise AssertionError("the batch never settles")


@pytest.mark.parametrize(("phi", "params"), [(None, None), (1e4, None), (None, PARAMS)])
@pytest.mark.parametrize(("replicas", "total"), [(1, 64), (2, 64), (3, 64), (8, 64), (16, 128)])
def test_an_adaptive_batch_is_m0_until_something_is_known(phi, params, replicas, total):
    choice, limits = adaptive(phi, params, replicas=replicas)
    assert choice.total == total
    assert choice.config.device_batch <= limits.device_max


@pytest.mark.parametrize(("phi", "params"), [(None, None), (1e4, None), (None, PARAMS)])
@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_a_batch_that_was_chosen_before_stays_when_replicas_come_and_go(phi, params, replicas):
    assert adaptive(phi, params, total=512, replicas=replicas)[0].total == 512


@given(st.floats(0, 1e7), st.integers(1, 64), st.none() | st.integers(1, 5000))
def test_an_adaptive_batch_stays_within_the_bounds(phi, replicas, total):
    choice, limits = adaptive(phi, replicas=replicas, total=total)
    assert limits.initial <= choice.total <= limits.maximum
    assert choice.config.device_batch <= limits.device_max
    assert choice.total >= limits.device_min * replicas
    shapes = [shape_of(choice, replicas, rank) for rank in range(replicas)]
    assert {shape.total for shape in shapes} == {choice.total}


@given(st.floats(0, 1e7), st.integers(1, 64), st.integers(64, 4096))
def test_an_adaptive_batch_moves_by_a_doubling_at_most(phi, replicas, total):
    choice, limits = adaptive(phi, replicas=replicas, total=total)
    least = max(limits.initial, limits.device_min * replicas)
    assert total / 2 <= choice.total <= 2 * max(total, least)
    if choice.total not in (total, least, limits.maximum):
        assert math.log2(choice.total / limits.initial) == round(math.log2(choice.total / limits.initial))


@pytest.mark.parametrize(("seen", "most"), [(0, 64), (64 * 16, 64), (300 * 16, 256), (10**6, 4096)])
def test_an_adaptive_batch_is_a_small_part_of_what_was_seen(seen, most):
    """The noise scale may fall by orders of magnitude in the first steps; the rate follows the batch."""
    assert settled(1e7, params=LAUNCH_BOUND, limits=WIDE, replicas=1, seen=seen) == most


def test_an_adaptive_batch_gives_every_replica_its_least_however_little_was_seen():
    choice, limits = adaptive(1e7, replicas=16, seen=0)
    assert choice.total == 16 * limits.device_min


def test_an_adaptive_batch_grows_with_the_noise():
    totals = [settled(phi, params=LAUNCH_BOUND, limits=WIDE) for phi in (1.0, 1e3, 1e4, 1e6)]
    assert totals == sorted(totals) and totals[0] < totals[-1] == 4096


@pytest.mark.parametrize("phi", [1.0, 300.0, 3000.0, 3e4, 1e6])
@pytest.mark.parametrize("start", [64, 512, 4096])
def test_where_an_adaptive_batch_ends_no_neighbour_is_better_by_more_than_five_percent(phi, start):
    end, limits = settled(phi, total=start), make_limits(64, 4096, (8, 256))

    def value(total: int) -> float:
        situation = BatchSituation(limits=limits, num_nodes=1, num_replicas=2)
        config = FixedBatch(total).choose(situation).config
        return float(goodput(PARAMS, phi, limits.initial, 1, 2, *config))

    for neighbour in (end // 2, end * 2):
        if limits.initial <= neighbour <= limits.maximum:
            assert value(neighbour) <= value(end) * 1.051  # of a device batch that is rounded


def test_growth_needs_the_lower_bound_and_a_shrink_the_upper_one():
    assert adaptive(1e5, total=256)[0].total == 512
    assert adaptive(1e5, total=256, noise_low=10.0, noise_high=1e7)[0].total == 256  # φ may be small
    assert adaptive(1e5, total=256, noise_low=5e4, noise_high=1e7)[0].total == 512
    assert adaptive(1.0, total=256)[0].total == 128
    assert adaptive(1.0, total=256, noise_low=0.0, noise_high=1e5)[0].total == 256  # φ may be large
    assert adaptive(1.0, total=256, noise_low=0.0, noise_high=10.0)[0].total == 128


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6), st.sampled_from([64 * 2**i for i in range(7)]))
def test_wider_bounds_never_cause_a_change(phi, below, above, total):
    """Whatever changes the batch at wide bounds changes it at narrow ones, in the same direction."""
    wide, _ = adaptive(phi, total=total, limits=WIDE, noise_low=max(phi - below, 0), noise_high=phi + above)
    narrow, _ = adaptive(phi, total=total, limits=WIDE)
    assert wide.total == total or wide.total == narrow.total


def test_a_batch_that_may_not_change_yet_does_not():
    assert adaptive(1e5, total=256, may_grow=False)[0].total == 256
    assert adaptive(1.0, total=256, may_shrink=False)[0].total == 256
    assert adaptive(1e5, total=256, may_shrink=False)[0].total == 512
    assert adaptive(1.0, total=256, may_grow=False)[0].total == 128


def slice_of_a_card(*step_ms: float) -> dict[str, Any]:
    """One replica from a batch of 32, with the step times of 32, 64, ... as measured on a seventh of an H200."""
    timings = {32 * 2**i: Timing(0.9 * ms / 1000, ms / 1000, 8) for i, ms in enumerate(step_ms)}
    slope = (step_ms[-1] - step_ms[0]) / 1000 / (max(timings) - 32)
    params = ThroughputParams(step_ms[0] / 1000 - 32 * slope, slope, 1e-6, 1e-9, 1e-6, 1e-9, 1.5)
    return {"params": params, "measured": timings, "replicas": 1, "limits": make_limits(32, 1024, (1, 1024))}


def test_a_rate_that_stays_is_no_reason_for_a_batch_that_takes_its_time():
    """An LSTM: φ is 450, but batches of 128 taught 1.6 times as much as those of 32, and took 2.35 times as long."""
    lstm = slice_of_a_card(11.5, 16.3, 27.0, 52.0)
    assert settled(450.0, total=32, earned=1.0, **lstm) >= 128
    assert settled(450.0, total=32, earned=SAME_RATE, **lstm) <= 64


def test_a_rate_that_stays_does_not_forbid_a_batch_that_costs_little():
    """ResNet-18: batches of 128 taught 2.9 times as much as those of 32, and took 1.7 times as long."""
    resnet = slice_of_a_card(10.0, 12.5, 17.0, 27.0)
    assert settled(600.0, total=32, earned=SAME_RATE, **resnet) >= 128


def test_a_rate_that_is_still_rising_is_no_reason_to_shrink():
    for earned in (0.0, SAME_RATE):
        assert adaptive(1e4, LAUNCH_BOUND, total=512, limits=WIDE, may_grow=False, earned=earned)[0].total == 512


def test_growth_during_the_users_warm_up_needs_overwhelming_evidence():
    assert adaptive(1e6, LAUNCH_BOUND, total=64, is_rate_rising=True)[0].total == 128
    assert adaptive(20.0, LAUNCH_BOUND, total=64)[0].total == 128  # by 14 %
    assert adaptive(20.0, LAUNCH_BOUND, total=64, is_rate_rising=True)[0].total == 64  # a φ of 5 would gain 4 %
    assert adaptive(1.0, total=256, is_rate_rising=True)[0].total == 128  # a shrink does not


@pytest.mark.parametrize("is_rate_rising", [False, True])
def test_one_step_time_that_was_measured_too_long_does_not_hide_larger_batches(is_rate_rising):
    """A vision transformer beside others on a card: 64 was timed in a bad moment."""
    vit = slice_of_a_card(12.4, 24.8, 12.3, 17.6)
    assert adaptive(1e6, total=32, is_rate_rising=is_rate_rising, **vit)[0].total == 64


def test_a_batch_that_an_epoch_does_not_allow_is_no_reason_to_grow():
    """64 is slow, 128 is fast, but an epoch has 110 examples: the batch would stay at 64."""
    slow = slice_of_a_card(12.4, 30.0, 12.3, 17.6)
    assert adaptive(1e6, total=32, epoch_length=110, **slow)[0].total == 32


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_was_measured_here_counts_more_than_the_model(replicas):
    """θ says that a doubling costs twice the time; the timings of this allocation say that it is free."""
    linear = ThroughputParams(1e-5, 0.001, 1e-6, 1e-9, 1e-6, 1e-9, 1.5)
    limits = make_limits(64, 128, (1, 128))
    options = {"params": linear, "total": 64, "replicas": replicas, "limits": limits}
    assert adaptive(1e6, **options)[0].total == 64
    measured = {size // replicas: Timing(0.05, 0.06, 10) for size in (64, 128)}
    assert adaptive(1e6, measured=measured, **options)[0].total == 128


# --- totals that the user gives ------------------------------------------------------------------------------------


def ramped(policy: Any, seen: float, maximum: int = 1024, replicas: int = 1, **options: Any) -> int:
    situation = BatchSituation(
        limits=make_limits(64, maximum, (1, 64)), num_nodes=1, num_replicas=replicas, num_examples=seen, **options
    )
    choice = policy.choose(situation)
    check_steps(choice, situation)
    return int(choice.total)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(("seen", "total"), [(0, 64), (999, 64), (1000, 100), (4999.5, 100), (5000, 512), (1e12, 512)])
def test_a_ramp_is_followed_exactly(seen, total, replicas):
    assert ramped(RampBatch(((0, 64), (1000, 100), (5000, 512))), seen, replicas=replicas) == total


def test_a_ramp_may_shrink_and_may_be_counted_in_tokens():
    ramp = RampBatch(((0, 512), (10, 64)))
    assert (ramped(ramp, 9), ramped(ramp, 10)) == (512, 64)
    tokens = RampBatch(((0, 64), (1024 * 1000, 128)), examples_per_unit=1 / 1024)
    assert (ramped(tokens, 999), ramped(tokens, 1000)) == (64, 128)


@pytest.mark.parametrize(
    "steps",
    [
        (),
        ((5, 64),),
        ((0, 64), (0, 128)),
        ((0, 64), (100, 128), (50, 256)),
        ((0, 0),),
        ((0, 64), (10, -1)),
        ((0, 64), (math.nan, 128)),
    ],
)
def test_a_bad_ramp_is_refused(steps):
    with pytest.raises(InvalidValueError, match=r"it needs \(\(0, batch\), \(examples, batch\)"):
        RampBatch(steps)


@pytest.mark.parametrize("unit", [0.0, -1.0, math.nan, math.inf])
def test_a_bad_unit_of_a_ramp_is_refused(unit):
    with pytest.raises(InvalidValueError):
        RampBatch(((0, 64),), examples_per_unit=unit)


def test_a_ramp_beyond_the_maximum_is_refused_before_the_loop():
    """Not after days of training, when the ramp gets there."""
    with pytest.raises(InvalidValueError, match="a batch of 128; max_batch_size is 100"):
        ramped(RampBatch(((0, 64), (1000, 128))), 0, maximum=100)


def test_seesaw_grows_by_what_the_schedule_lowers_the_rate():
    seesaw = SeesawBatch()
    assert ramped(seesaw, 0, is_rate_rising=True, rate_share=0.01) == 64
    shares = [1.0, 0.9, 0.51, 0.5, 0.26, 0.25, 0.1, 1e-3, 0.0]
    totals = [ramped(seesaw, 0, rate_share=share) for share in shares]
    assert totals == [64, 64, 64, 128, 128, 256, 512, 1024, 1024]
    assert ramped(seesaw, 0, rate_share=1.0, total=256) == 256  # a warm restart does not shrink it
    assert ramped(seesaw, 0, maximum=100, rate_share=0.1) == 100


@pytest.mark.parametrize("policy", [RampBatch(((0, 64),)), SeesawBatch()], ids=["ramp", "seesaw"])
def test_loss_neutral_policies_count_examples(policy):
    assert policy.counts_examples
    assert not hasattr(AdaptiveBatch(), "counts_examples")


def test_a_policy_of_ones_own_is_taken_as_it_is():
    class Odd:
        def choose(self, situation: BatchSituation) -> BatchChoice:
            return BatchChoice(config=BatchConfig(3, 1), total=5)

    odd = Odd()
    assert batch_policy(odd) is odd


@pytest.mark.parametrize("name", ["adaptive", "fixed", "linear", "seesaw"])
def test_policies_by_name(name):
    assert type(batch_policy(name)).__name__ == f"{name.capitalize()}Batch"


def test_an_unknown_policy_is_told_the_known_ones():
    with pytest.raises(UnknownNameError, match="Did you mean 'adaptive'"):
        batch_policy("adaptiv")
    for wrong in (FixedBatch, 7, object()):
        with pytest.raises(InvalidValueError, match="is not a batch policy; pass one of adaptive, fixed, linear,"):
            batch_policy(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((32, None, None), (32, 32, 1, 32)),
        ((32, 128, None), (32, 128, 1, 128)),
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


def test_a_device_batch_above_the_users_batch_is_refused_at_once():
    """One replica could never train with M0; it failed in mid-training before, with advice that did not help."""
    with pytest.raises(InvalidValueError, match=r"at least 64 exceeds batch_size 32.*lower the smallest"):
        make_limits(32, 512, (64, 128))
    assert make_limits(64, 512, (64, 128)).device_min == 64
