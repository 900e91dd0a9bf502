"""A run's own idea of its goodput: what is measured becomes a profile, a fit, and another batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from pollux.errors import InvalidValueError
from pollux.model.profile import Configuration, Timing
from pollux.train import adaptation
from pollux.train import tuner as tuner_module
from pollux.train.batch_changes import STEPS_BETWEEN, STEPS_TO_REVERSE
from pollux.train.batching import AdaptiveBatch, BatchChoice, FixedBatch, make_limits
from pollux.train.exploration import MAX_PROBE_STEPS
from pollux.train.moments import NoiseStats
from pollux.train.tuner import KNOWN_SIZES, STEPS_TO_EXPLORE_AGAIN, Tuner
from pollux.types import BatchConfig, ThroughputParams

SEEN = 1e6  # examples: no bound on the batch any more
STEP = 5000  # and no bound on how soon it may change
CPU = torch.device("cpu")


def noise(phi: float, low: float | None = None, high: float | None = None) -> NoiseStats:
    return NoiseStats(sqr=1.0, var=phi, low=low, high=high)


MUCH = noise(1e6)


@pytest.fixture
def exploring(monkeypatch: pytest.MonkeyPatch) -> Tuner:
    monkeypatch.setattr(tuner_module, "ADAPT_INTERVAL_S", 0.0)
    monkeypatch.setattr(tuner_module, "ADAPT_SHARE", math.inf)
    tuner = Tuner(make_limits(64, 1024, (8, 256)), AdaptiveBatch(), CPU)
    tuner.enter(1, 2)
    return tuner


@pytest.fixture
def tuner(exploring: Tuner) -> Tuner:
    """One whose exploration is over."""
    exploring.explorer.stop()
    return exploring


def feed(tuner: Tuner, **timings: tuple[float, float]) -> None:
    """As if the timer had measured these, by device batch."""
    taken = [(tuner.configuration(int(name[1:])), Timing(*timing, 10)) for name, timing in timings.items()]
    tuner.timer.take = lambda: taken  # type: ignore[method-assign]
    tuner.observe()
    tuner.timer.take = list  # type: ignore[method-assign]


def reconsider(
    tuner: Tuner, stats: NoiseStats | None, current: BatchChoice, advice: Any = None, step: int = STEP, **options: Any
) -> BatchChoice | None:
    return tuner.reconsider(stats, SEEN, step, current, advice, **options)


def test_nothing_measured_nothing_changed(tuner):
    choice = tuner.choose(None, SEEN, STEP, None)
    assert choice == BatchChoice(config=BatchConfig(32, 0), total=64)
    assert reconsider(tuner, None, choice) is None
    assert reconsider(tuner, noise(1e5), choice) is None
    assert tuner.throughput(choice) is None


def test_a_larger_batch_by_one_doubling_once_it_is_seen_to_pay(tuner):
    first = tuner.choose(None, SEEN, STEP, None)
    # Passes cost nearly the same whatever is in them, and nearly all examples are useful.
    feed(tuner, m32=(0.10, 0.11), m64=(0.101, 0.111))
    totals, current = [], first
    while (better := reconsider(tuner, MUCH, current)) is not None:
        current = better
        totals.append(current.total)
    assert totals == [128, 256, 512]  # beyond, two passes a step would be needed, which gains nothing
    assert tuner.throughput(first) == pytest.approx(64 / 0.11)


def test_changes_are_kept_apart(tuner):
    first = tuner.choose(None, SEEN, STEP, None)
    feed(tuner, m32=(0.10, 0.11), m64=(0.101, 0.111))
    tuner.change_limiter.note(STEP, 32, 64)
    assert reconsider(tuner, MUCH, first, step=STEP + STEPS_BETWEEN - 1) is None
    assert reconsider(tuner, MUCH, first, step=STEP + STEPS_BETWEEN) is not None
    tuner.change_limiter.note(STEP, 128, 64)
    assert reconsider(tuner, MUCH, first, step=STEP + STEPS_TO_REVERSE - 1) is None
    assert reconsider(tuner, MUCH, first, step=STEP + STEPS_TO_REVERSE) is not None


def test_a_batch_is_reconsidered_now_and_then_only(tuner, monkeypatch):
    for name in ("FIRST_INTERVAL_S", "ADAPT_INTERVAL_S"):
        monkeypatch.setattr(tuner_module, name, 1000.0)
    first = tuner.choose(None, SEEN, STEP, None)
    assert reconsider(tuner, MUCH, first) is None
    feed(tuner, m32=(0.10, 0.11), m64=(0.101, 0.111))
    assert reconsider(tuner, MUCH, first) is None


def test_a_young_run_is_reconsidered_more_often(monkeypatch):
    """Steps of 3 ms: in 0.2 s a batch that is to grow 32 times has made sixty of them."""
    now, chosen_at = [100.0], []
    monkeypatch.setattr(tuner_module.time, "monotonic", lambda: now[0])
    tuner = Tuner(make_limits(64, 1024, (8, 256)), AdaptiveBatch(), CPU)
    tuner.explorer.stop()
    choose = tuner.choose
    tuner.choose = lambda *args: (chosen_at.append(now[0] - 100.0), choose(*args))[1]  # type: ignore
    current = BatchChoice(config=BatchConfig(64, 0), total=64)
    while now[0] < 160.0:
        tuner.reconsider(MUCH, SEEN, STEP, current, None)
        now[0] += 0.003
    assert len([at for at in chosen_at if at < 1]) >= 25
    assert 40 <= len([at for at in chosen_at if at >= 50]) <= 50


def test_a_slow_first_choice_does_not_keep_the_batch_from_growing(monkeypatch):
    """It imports and fits, which takes longer than a few hundred later choices together."""
    now = [0.0]
    monkeypatch.setattr(tuner_module.time, "monotonic", lambda: now[0])
    tuner = Tuner(make_limits(64, 1024, (8, 256)), AdaptiveBatch(), CPU)
    tuner.explorer.stop()
    choose, costs_s, chosen_at = tuner.choose, iter([0.1] + [0.005] * 10_000), []

    def slow_choice(*args: Any) -> BatchChoice:
        chosen_at.append(now[0])
        now[0] += next(costs_s)
        return choose(*args)

    tuner.choose = slow_choice  # type: ignore[method-assign]
    current = BatchChoice(config=BatchConfig(64, 0), total=64)
    while now[0] < 600:
        tuner.reconsider(MUCH, SEEN, STEP, current, None)
        now[0] += 0.01
    assert len([at for at in chosen_at if at < 5]) >= 20
    late = len([at for at in chosen_at if at > 300])
    assert 50 < late <= 300 * tuner_module.ADAPT_SHARE / 0.005 + 1  # no more than its share in the long run


def test_without_noise_m0_is_best(tuner):
    feed(tuner, m32=(0.10, 0.11), m64=(0.2, 0.21))
    first = tuner.choose(None, SEEN, STEP, None)
    assert reconsider(tuner, noise(0.0), first) is None


@pytest.mark.parametrize(
    ("advice", "is_taken"),
    [
        (BatchConfig(64, 1), True),
        (BatchConfig(32, 0), False),  # the present one
        (BatchConfig(4, 0), False),  # below the device's bound
        (BatchConfig(257, 0), False),
        (BatchConfig(256, 2), False),  # beyond the maximum
        (BatchConfig(16, 0), False),  # below M0
        (BatchConfig(64, -1), False),
    ],
)
def test_advice_goes_first_if_it_keeps_to_the_bounds(tuner, advice, is_taken):
    present = tuner.choose(None, SEEN, STEP, None)
    answer = reconsider(tuner, None, present, advice)
    assert answer == (BatchChoice(config=advice, total=advice.total(2)) if is_taken else None)


def test_halving_is_remembered_and_ends_at_the_least(tuner):
    tuner.halve(100)
    assert tuner.limits.device_max == 50
    tuner.halve(100)  # another replica says the same
    assert tuner.limits.device_max == 50
    assert tuner.choose(MUCH, SEEN, STEP, None).config.device_batch <= 50
    tuner.halve(50)
    tuner.halve(25)
    assert tuner.limits.device_max == 12
    with pytest.raises(InvalidValueError, match=r"out of memory with 12 .* allows no fewer than 8: lower it, or use"):
        tuner.halve(12)


def test_a_bound_holds_for_who_asks_for_the_same(tuner):
    tuner.halve(256)
    state = tuner.state_dict()
    same = Tuner(make_limits(64, 1024, (8, 256)), AdaptiveBatch(), CPU)
    same.load_state_dict(state)
    assert same.limits.device_max == 128
    another = Tuner(make_limits(64, 1024, (8, 200)), AdaptiveBatch(), CPU)
    another.load_state_dict(state)
    assert another.limits.device_max == 200
    smaller = Tuner(make_limits(64, 1024, (8, 100)), AdaptiveBatch(), CPU)
    smaller.load_state_dict(state)
    assert smaller.limits.device_max == 100


def test_a_limit_is_learnt_for_one_type_of_device_and_told_as_such():
    limits = make_limits(128, 4096, (4, 200))
    small = Tuner(limits, AdaptiveBatch(), CPU)
    small.accelerator = "1g.18gb"
    small.halve(100)
    assert small.limits.device_max == 50
    assert small.told_limits.on("1g.18gb").device_max == 50 and small.told_limits.on("7g.141gb").device_max == 200
    large = Tuner(limits, AdaptiveBatch(), CPU)
    large.accelerator = "7g.141gb"
    large.load_state_dict(small.state_dict())  # it moved to a larger one
    assert large.limits.device_max == 200
    for one in (small, large):  # while both are members, all use one limit
        one.share_limits([("1g.18gb", 50), ("7g.141gb", 200)])
        assert one.limits.device_max == 50
    large.share_limits([("7g.141gb", 200)])
    assert large.limits.device_max == 200
    assert large.told_limits.on("1g.18gb").device_max == 50  # known, should it go back


def test_a_profile_survives_and_is_fitted_anew(tuner):
    feed(tuner, m32=(0.10, 0.11), m64=(0.101, 0.111))
    restored = Tuner(make_limits(64, 1024, (8, 256)), AdaptiveBatch(), CPU)
    restored.load_state_dict(tuner.state_dict())
    restored.enter(1, 2)
    assert list(restored.profile) == list(tuner.profile)
    assert restored.choose(MUCH, SEEN, STEP, 64) == tuner.choose(MUCH, SEEN, STEP, 64)
    assert restored.fit is not None


def test_timings_are_reported_once(tuner):
    feed(tuner, m32=(0.10, 0.11))
    assert tuner.take_timings() == ((Configuration(1, 2, 32), Timing(0.10, 0.11, 10)),)
    assert tuner.take_timings() == ()


def test_what_was_measured_elsewhere_does_not_count_as_measured_here(tuner):
    feed(tuner, m32=(0.10, 0.11))
    tuner.enter(1, 4)
    assert tuner.throughput(BatchChoice(config=BatchConfig(32, 0), total=128)) is None
    assert tuner.choose(noise(0.0), SEEN, STEP, None).total == 64


def test_a_batch_that_cannot_be_divided_is_refused():
    tuner = Tuner(make_limits(3, None, None), FixedBatch(), CPU)
    tuner.enter(1, 4)
    with pytest.raises(InvalidValueError, match="a batch of 3 cannot be divided among 4 replicas; ask for at most 3"):
        tuner.choose(None, SEEN, STEP, None)


# --- exploring -----------------------------------------------------------------------------------------------------


def explore(tuner: Tuner, step_s: Callable[[int], float], steps_until_timed: int = 5, **options: Any) -> list[int]:
    """Totals of a tuner's first steps, each device batch being timed after some of them, until exploring is over."""
    totals: list[int] = []
    current, since = tuner.choose(None, 0, 0, None), 0
    while not tuner.explorer.is_done:
        totals.append(current.total)
        since += 1
        if since == steps_until_timed:
            device_batch = current.config.device_batch
            feed(tuner, **{f"m{device_batch}": (step_s(device_batch) / 2, step_s(device_batch))})
        better = reconsider(tuner, None, current, step=len(totals), **options)
        if better is not None:
            current, since = better, 0
        assert len(totals) < 500, "exploring does not end"
    assert current.total == 64  # it ends where it began
    return totals


def test_larger_device_batches_are_timed_as_long_as_a_doubling_pays(exploring):
    totals = explore(exploring, lambda batch: 0.01 + 1e-6 * batch)
    assert list(dict.fromkeys(totals)) == [64, 128, 256, 512]  # two replicas, at most 256 on a device
    assert len(totals) <= 50


def test_a_doubling_that_pays_less_than_a_fifth_is_the_last(exploring):
    """m = 32, 64, 128: 3,200, 4,923 and 5,424 examples per second and device."""
    totals = explore(exploring, lambda batch: {32: 0.010, 64: 0.013, 128: 0.0236, 256: 0.047}[batch])
    assert list(dict.fromkeys(totals)) == [64, 128, 256]
    assert explore_again_is_over(exploring)


def explore_again_is_over(tuner: Tuner) -> bool:
    current = tuner.choose(None, SEEN, STEP, None)
    return tuner.explorer.is_done and reconsider(tuner, None, current) is None


def test_a_compute_bound_job_tries_one_doubling(exploring):
    totals = explore(exploring, lambda batch: 0.001 * batch)
    assert list(dict.fromkeys(totals)) == [64, 128]


def test_a_batch_that_is_never_timed_ends_exploring(exploring):
    totals = explore(exploring, lambda batch: 0.01, steps_until_timed=10**6)
    assert set(totals) == {64} and len(totals) <= MAX_PROBE_STEPS + 2


@pytest.mark.parametrize(("epoch_length", "largest"), [(1, 64), (255, 64), (512, 128), (1024, 256), (10**6, 512)])
def test_a_probe_is_at_most_a_quarter_of_an_epoch(exploring, epoch_length, largest):
    totals = explore(exploring, lambda batch: 0.01, epoch_length=epoch_length)
    assert max(totals) == largest


def test_who_knows_the_curve_does_not_explore(exploring):
    feed(exploring, m32=(0.1, 0.11), m64=(0.1, 0.11), m128=(0.1, 0.11))
    assert KNOWN_SIZES == 3
    restored = Tuner(make_limits(64, 1024, (8, 256)), AdaptiveBatch(), CPU)
    restored.load_state_dict(exploring.state_dict())
    assert restored.explorer.is_done
    advised = Tuner(make_limits(64, 1024, (8, 256)), AdaptiveBatch(), CPU)
    params = ThroughputParams(0.05, 0.001, 0.02, 0.001, 0.01, 0.001, 1.5)
    reconsider(advised, None, advised.choose(None, 0, 0, None), params, step=0)
    assert advised.explorer.is_done
    assert Tuner(make_limits(64, 1024, (8, 256)), FixedBatch(), CPU).explorer.is_done


def test_advice_that_rests_on_our_own_timings_does_not_end_exploring(exploring):
    feed(exploring, m32=(0.1, 0.11))
    assert exploring.take_timings()
    params = ThroughputParams(0.05, 0.001, 0.02, 0.001, 0.01, 0.001, 1.5)
    assert reconsider(exploring, None, exploring.choose(None, 0, 0, None), params, step=3) is not None
    assert not exploring.explorer.is_done


def test_a_curve_that_has_changed_is_explored_again_but_not_soon(exploring):
    explore(exploring, lambda batch: 0.01 + 1e-6 * batch)
    current = exploring.choose(None, SEEN, STEP, 64)
    for _ in range(20):
        feed(exploring, m32=(0.05, 0.1))  # ten times as slow
    assert reconsider(exploring, None, current, step=STEPS_TO_EXPLORE_AGAIN - 1) is None
    assert exploring.explorer.is_done
    reconsider(exploring, None, current, step=STEPS_TO_EXPLORE_AGAIN)
    assert not exploring.explorer.is_done
    assert "step times have changed" in exploring.take_notes()[-1]


def test_a_median_that_is_a_little_above_the_fastest_step_is_no_reason_to_explore_again(exploring):
    explore(exploring, lambda batch: 0.01 + 1e-6 * batch)
    current = exploring.choose(None, SEEN, STEP, 64)
    for _ in range(20):
        feed(exploring, m32=(0.006, 0.012))
    assert reconsider(exploring, None, current, step=STEPS_TO_EXPLORE_AGAIN) is None
    assert exploring.explorer.is_done


def test_a_probe_that_would_not_fit_is_not_tried(exploring, monkeypatch):
    monkeypatch.setattr(exploring.memory, "fits", lambda device_batch: device_batch <= 64)
    totals = explore(exploring, lambda batch: 0.01)
    assert max(totals) == 128 and exploring.limits.device_max == 127
    (note,) = exploring.take_notes()
    assert "a device batch of 128 would not fit into memory" in note


def test_a_growth_that_would_not_fit_accumulates_instead(tuner, monkeypatch):
    monkeypatch.setattr(tuner.memory, "fits", lambda device_batch: device_batch <= 32)
    feed(tuner, m32=(0.10, 0.11), m64=(0.101, 0.111))
    choice = tuner.choose(MUCH, SEEN, STEP, 64)
    assert choice.config.device_batch <= 63
    assert "a device batch of 64 would not fit into memory: 63 is the limit" in tuner.take_notes()[0]


def test_notes_are_told_once_and_do_not_pile_up(tuner):
    for index in range(100):
        tuner.note(f"note {index}")
    notes = tuner.take_notes()
    assert len(notes) == tuner_module.MAX_NOTES and notes[-1] == "note 99"
    assert tuner.take_notes() == ()


def test_a_resize_while_exploring_goes_back_to_what_exploring_began_at(exploring):
    first = exploring.choose(None, 0, 0, None)
    feed(exploring, m32=(0.005, 0.01))
    probe = reconsider(exploring, None, first, step=5)
    assert probe is not None and probe.total == 128
    exploring.enter(1, 4)
    assert exploring.choose(None, SEEN, 6, probe.total).total == 64


def test_a_resize_while_exploring_again_keeps_the_batch_that_was_chosen(exploring):
    explore(exploring, lambda batch: 0.01 + 1e-6 * batch)
    current = BatchChoice(config=BatchConfig(128, 0), total=256)
    for _ in range(20):
        feed(exploring, m32=(0.05, 0.1), m128=(0.05, 0.1))
    smaller = reconsider(exploring, None, current, step=STEPS_TO_EXPLORE_AGAIN)
    assert smaller is not None and smaller.total == 128  # a shrink must not rest on what was forgotten
    feed(exploring, m64=(0.04, 0.08))
    again = reconsider(exploring, None, smaller, step=STEPS_TO_EXPLORE_AGAIN + 5)
    assert again is not None and again.total == 256
    feed(exploring, m128=(0.05, 0.1))
    probe = reconsider(exploring, None, current, step=STEPS_TO_EXPLORE_AGAIN + 10)
    assert probe is not None and probe.total == 512
    exploring.enter(1, 4)
    assert exploring.choose(None, SEEN, STEP, probe.total).total == 256


def test_a_probe_that_ran_out_of_memory_is_told_and_ends_exploring(exploring):
    first = exploring.choose(None, 0, 0, None)
    feed(exploring, m32=(0.005, 0.01))
    assert reconsider(exploring, None, first, step=5) is not None
    exploring.halve(64)
    assert exploring.choose(None, SEEN, 6, 128).total == 64
    assert reconsider(exploring, None, first, step=6) is None
    assert exploring.explorer.is_done
    assert exploring.take_notes() == ("64 examples on a device did not fit into memory: 32 is the limit from now on",)


def test_a_curve_that_has_become_stale_is_really_timed_anew(monkeypatch):
    """Explorer, timer and profile together: what was reported before does not slow the second look down."""
    for name in ("FIRST_INTERVAL_S", "ADAPT_INTERVAL_S"):
        monkeypatch.setattr(tuner_module, name, 1e9)
    clock = [0.0]
    monkeypatch.setattr("pollux.train.step_timer.time.perf_counter", lambda: clock[0])
    tuner = Tuner(make_limits(16, 128, (1, 128)), AdaptiveBatch(), CPU)
    current, tried, speed = tuner.choose(None, 0, 0, None), [], 1.0
    for step in range(2500):
        if step == 2100:
            speed = 3.0
        tuner.timer.begin(tuner.configuration(current.config.device_batch), is_only=True, is_last=True)
        clock[0] += 0.5 * speed
        tuner.timer.ready()
        clock[0] += 0.5 * speed
        tuner.observe()
        choice = tuner.reconsider(None, 16.0 * step, step, current, None)
        if choice is not None:
            tried.append((step, choice.config.device_batch))
            current = choice
    first = [batch for step, batch in tried if step < 100]
    again = [batch for step, batch in tried if step > 2100]
    assert first == [32, 64, 128, 16]
    assert again == [32, 64, 128, 16]
    times = {c.device_batch: t.step_s for c, t in tuner.profile.timings("cpu").items()}
    assert all(time == pytest.approx(3.0, rel=0.1) for time in times.values())


def test_a_change_of_the_batch_is_told_with_its_reasons():
    """A noise scale above the batch is no reason to shrink: the step times are, so they are told as well."""
    known = SimpleNamespace(noise_scale=190.0, noise_scale_low=55.1, noise_scale_high=410.0)
    grown = adaptation._evidence(known, True, [640.2, 871.0])
    assert grown == " (640 -> 871 examples/s, noise scale 190, at least 55.1)"
    shrunk = adaptation._evidence(known, False, [640.2, 12345.0])
    assert shrunk == " (640 -> 12300 examples/s, noise scale 190, at most 410)"
    known.noise_scale_high = 1e15
    assert adaptation._evidence(known, False, []) == " (noise scale 190, with no known upper bound)"
    assert adaptation._evidence(None, False, []) == ""


def test_the_speed_at_a_batch_is_what_was_measured_there():
    tuner = Tuner(make_limits(32, 512, (1, 512)), AdaptiveBatch(), torch.device("cpu"))
    tuner.enter(1, 1)
    assert tuner.examples_per_s(32, 64) == []
    for batch, seconds in ((32, 0.05), (64, 0.1)):
        tuner.profile.add("cpu", Configuration(1, 1, batch), Timing(seconds, seconds, 10))
    tuner._is_stale = True
    tuner.situation(None, 1000.0, 10, 32)
    assert tuner.examples_per_s(32, 64) == pytest.approx([640.0, 640.0], rel=0.01)


def test_other_replicas_may_change_the_batch_in_either_direction_at_once():
    tuner = Tuner(make_limits(32, 512, (1, 512)), AdaptiveBatch(), torch.device("cpu"))
    tuner.enter(1, 1)
    tuner.change_limiter.note(100, 64, 32)
    tuner.enter(1, 1)  # re-formed with the same replicas
    assert not tuner.change_limiter.may_grow(200)
    tuner.enter(1, 2)
    assert tuner.change_limiter.may_grow(200)
