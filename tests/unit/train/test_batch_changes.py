"""How fast a batch may change: changes are kept apart, reversals far apart, and what hurt waits ever longer."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.train.batch_changes import (
    SAMPLES,
    STEPS_BETWEEN,
    STEPS_TO_DOUBT,
    STEPS_TO_REVERSE,
    WATCH_STEPS,
    ChangeLimiter,
    GrowthGuard,
    ScheduleWatch,
)

WISHES = st.lists(st.tuples(st.integers(1, 700), st.sampled_from(["grow", "shrink", "back"])), max_size=80)


def follow(limiter: ChangeLimiter, wishes: list[tuple[int, str]], start: int = 0) -> list[tuple[int, int, bool]]:
    """(step, direction, was taken back) of the changes that the limiter allows."""
    step, total, before, changes = start, 2**20, None, []
    for wait, wish in wishes:
        step += wait
        if wish == "grow" and limiter.may_grow(step):
            limiter.note(step, total, 2 * total)
            before, total = total, 2 * total
            changes.append((step, 1, False))
        elif wish == "shrink" and limiter.may_shrink(step):
            limiter.note(step, total, total // 2)
            before, total = None, total // 2
            changes.append((step, -1, False))
        elif wish == "back" and before is not None:
            limiter.take_back(step, total, before)
            before, total = None, before
            changes.append((step, -1, True))
    return changes


def is_reversal(earlier: tuple[int, int, bool], later: tuple[int, int, bool]) -> bool:
    return earlier[1] != later[1]


@given(WISHES)
def test_changes_are_apart_and_reversals_of_the_policy_far_apart(wishes):
    """Only what hurts is undone sooner than that."""
    limiter = ChangeLimiter()
    changes = follow(limiter, wishes)
    pairs = list(itertools.pairwise(changes))
    reversals = [later for earlier, later in pairs if is_reversal(earlier, later)]
    assert limiter.num_reversals == len(reversals)
    for earlier, later in pairs:
        if not later[2]:
            may_be_soon = STEPS_TO_DOUBT if later[1] < 0 else STEPS_TO_REVERSE
            assert later[0] - earlier[0] >= (may_be_soon if is_reversal(earlier, later) else STEPS_BETWEEN)
    for earlier, later in itertools.pairwise(reversals):
        assert later[2] or later[0] - earlier[0] >= STEPS_TO_REVERSE


def test_a_growth_on_an_early_noise_scale_is_soon_reversed_once():
    """The noise scale fell from 400 to 60 within a hundred steps, and a batch of 512 stayed for a thousand."""
    limiter = ChangeLimiter()
    for step in (48, 88, 106, 117):
        limiter.note(step, 64, 128)
    assert not limiter.may_shrink(117 + STEPS_TO_DOUBT - 1)
    assert limiter.may_shrink(117 + STEPS_TO_DOUBT)
    limiter.note(170, 128, 64)
    assert limiter.may_shrink(170 + STEPS_BETWEEN)  # in the same direction
    assert not limiter.may_grow(1169) and limiter.may_grow(1170)
    limiter.note(1170, 64, 128)
    assert not limiter.may_shrink(2169) and limiter.may_shrink(2170)


@given(WISHES)
def test_at_most_one_reversal_in_a_thousand_steps_but_for_what_hurts(wishes):
    """A growth that hurts is undone at once, which is one reversal more; those growths become ever rarer."""
    limiter = ChangeLimiter()
    changes = follow(limiter, wishes)
    num_taken_back = sum(change[2] for change in changes)
    length = changes[-1][0] - changes[0][0] if changes else 0
    assert limiter.num_taken_back == num_taken_back
    assert limiter.num_reversals <= 1 + length / STEPS_TO_REVERSE + num_taken_back
    if num_taken_back > 1:
        assert length >= STEPS_TO_REVERSE * (2 ** (num_taken_back - 1) - 1)


@given(st.integers(0, 10**6), st.integers(1, 8))
def test_a_growth_that_hurt_waits_twice_as_long_each_time(start, num_times):
    limiter, step, waits = ChangeLimiter(), start, []
    for _ in range(num_times):
        limiter.note(step, 64, 128)
        limiter.take_back(step + 5, 128, 64)
        low, high = step + 5, step + 10**7
        while low < high:  # the first step at which it may grow again
            middle = (low + high) // 2
            low, high = (low, middle) if limiter.may_grow(middle) else (middle + 1, high)
        waits.append(low - step - 5)
        step = low
    assert waits == [STEPS_TO_REVERSE * 2 ** (index + 1) for index in range(num_times)]


def test_a_new_run_may_change_at_once():
    assert ChangeLimiter().may_grow(0) and ChangeLimiter().may_shrink(0)


@given(WISHES, WISHES)
def test_a_pace_goes_on_after_a_checkpoint(before, after):
    limiter = ChangeLimiter()
    follow(limiter, before)
    restored = ChangeLimiter()
    restored.load_state_dict(limiter.state_dict())
    assert restored == limiter
    start = sum(wait for wait, _ in before)
    assert follow(restored, after, start) == follow(limiter, after, start)


# --- the user's schedule -------------------------------------------------------------------------------------------


def watched(rates: list[float]) -> ScheduleWatch:
    watch = ScheduleWatch()
    for rate in rates:
        watch.add(rate)
    return watch


def test_a_schedule_that_warms_up_is_seen():
    warm_up = [0.01 * step for step in range(1, 101)]
    assert watched(warm_up).is_rising
    assert not watched([*warm_up, *[1.0] * ScheduleWatch.WINDOW]).is_rising
    cosine = [math.cos(math.pi / 2 * step / 100) for step in range(51)]
    watch = watched([*warm_up, *cosine])
    assert not watch.is_rising and watch.share_of_peak == pytest.approx(math.cos(math.pi / 4))


@pytest.mark.parametrize("rates", [[], [0.1], [0.1] * 50, [0.0] * 50])
def test_a_constant_rate_is_at_its_peak(rates):
    watch = watched(rates)
    assert not watch.is_rising and watch.share_of_peak == 1.0


@given(st.lists(st.floats(0, 10), max_size=50), st.lists(st.floats(0, 10), max_size=50))
def test_a_schedule_goes_on_after_a_checkpoint(before, after):
    watch = watched(before)
    restored = ScheduleWatch()
    restored.load_state_dict(watch.state_dict())
    for rate in after:
        watch.add(rate)
        restored.add(rate)
        assert (watch.is_rising, watch.share_of_peak) == (restored.is_rising, restored.share_of_peak)
        assert 0 <= watch.share_of_peak <= 1


# --- growths that hurt ---------------------------------------------------------------------------------------------


def grown(before: float = 1.0) -> GrowthGuard:
    """At step 100 from 64 to 256, with the rate's factor 2, after a while of this output error."""
    guard = GrowthGuard()
    add(guard, before)
    guard.begin(100, 64, 2.0)
    return guard


def add(guard: GrowthGuard, error: float, count: int = GrowthGuard.KEPT, spread: float = 0.01) -> None:
    for index in range(count):
        guard.add("output_error", error * (1 + spread * (-1) ** index))


def test_harm_counts_as_the_growths_after_the_batch_has_shrunk_by_half():
    guard = grown()
    add(guard, 1.0, 4)
    guard.follow(300, 128, least=32)
    assert guard.verdict(301) is None
    add(guard, 1.2, SAMPLES)
    assert "rose from 1 to 1.2" in str(guard.verdict(400))
    assert (guard.back_to, guard.rate) == (64, 2.0)


def test_a_batch_that_shrank_to_where_it_was_goes_back_to_the_smallest_one():
    guard = grown()
    guard.follow(300, 64, least=32)
    add(guard, 1.2, SAMPLES)
    assert guard.verdict(400) is not None
    assert (guard.back_to, guard.rate) == (32, 1.0)


def test_at_the_smallest_batch_nothing_is_left_to_be_undone():
    guard = grown()
    guard.follow(300, 32, least=32)
    add(guard, 9.0)
    assert guard.verdict(400) is None


@pytest.mark.parametrize(("after", "goes_on_back"), [(1.2, True), (1.0, False)])
def test_training_that_stays_worse_after_an_undoing_goes_back_to_the_smallest_batch(after, goes_on_back):
    guard = grown()
    add(guard, 5.0)
    assert guard.verdict(300) is not None
    guard.undone(300, 64, least=32)
    assert guard.verdict(301) is None
    add(guard, after)
    assert (guard.verdict(900) is not None) == goes_on_back
    assert (guard.back_to, guard.rate) == (32, 1.0)
    guard.undone(900, 32, least=32)
    add(guard, after)
    assert guard.verdict(1500) is None


def test_values_that_were_not_finite_count_once():
    """The batch before the growth has its own chance: the step after an undoing brings no new sample."""
    guard = grown()
    for _ in range(3):
        guard.add("sqr", math.inf)
    assert "not finite" in str(guard.verdict(110))
    guard.undone(110, 128, least=32)
    assert guard.verdict(111) is None
    for _ in range(3):
        guard.add("sqr", math.inf)
    assert guard.verdict(120) is not None


def test_a_growth_is_watched_on_after_a_checkpoint():
    guard, restored = grown(), GrowthGuard()
    add(guard, 1.0, 3)
    restored.load_state_dict(guard.state_dict())
    for each in (guard, restored):
        add(each, 1.2)
    assert restored.verdict(400) == guard.verdict(400) is not None
    assert (restored.back_to, restored.rate) == (64, 2.0)


def test_a_replica_that_becomes_rank_0_watches_on_by_what_rank_0_had_seen():
    """Rank 0 alone measures outputs; the growth's samples come with the change."""
    first, second = GrowthGuard(), GrowthGuard()
    add(first, 1.0)
    second.begin(100, 64, 2.0, first.recent())
    add(second, 1.2)
    assert second.verdict(400) is not None


def test_harm_is_seen_late_if_training_has_clearly_become_worse():
    late = 101 + WATCH_STEPS
    guard = grown()
    add(guard, 1.2)
    assert guard.verdict(late - 1) is not None and guard.verdict(late) is None
    add(guard, 3.0)
    assert guard.verdict(late) is not None


@pytest.mark.parametrize("seed", range(5))
def test_chance_alone_is_no_harm_however_long_a_growth_is_watched(seed):
    guard, values = GrowthGuard(), np.random.default_rng(seed).lognormal(0.0, 0.5, 20_000)
    for step, value in enumerate(values):
        if step == GrowthGuard.KEPT:
            guard.begin(-WATCH_STEPS, 64, 2.0)
        guard.add("output_error", value)
        assert guard.verdict(step) is None


def test_a_resize_ends_the_wait_for_a_reversal_but_not_that_after_harm():
    """A shrink that one replica's step times asked for says nothing of two replicas."""
    limiter = ChangeLimiter()
    limiter.note(100, 32, 64)
    limiter.note(160, 64, 32)
    assert not limiter.may_grow(200)
    limiter.moved()
    assert limiter.may_grow(200) and limiter.may_shrink(200) and not limiter.may_grow(165)
    limiter.take_back(300, 64, 32)
    limiter.moved()
    assert not limiter.may_grow(300 + STEPS_TO_REVERSE)
