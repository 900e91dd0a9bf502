"""A run's own idea of its goodput: what is measured becomes a profile, a fit, and another batch."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from pollux.errors import InvalidValueError
from pollux.model.profile import Configuration, Timing
from pollux.train import tuning
from pollux.train.batching import AdaptiveBatch, BatchChoice, FixedBatch, make_limits
from pollux.train.tuning import Tuner
from pollux.types import BatchConfig

SEEN = 1e6  # examples: no bound on the batch any more
CPU = torch.device("cpu")


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Tuner:
    monkeypatch.setattr(tuning, "ADAPT_INTERVAL_S", 0.0)
    tuner = Tuner(make_limits(64, 1024, (8, 256)), AdaptiveBatch(), CPU)
    tuner.enter(1, 2)
    return tuner


def feed(tuner: Tuner, **timings: tuple[float, float]) -> None:
    """As if the timer had measured these, by device batch."""
    taken = [(tuner.configuration(int(name[1:])), Timing(*timing, 10)) for name, timing in timings.items()]
    tuner.timer.take = lambda: taken  # type: ignore[method-assign]
    tuner.observe()
    tuner.timer.take = list  # type: ignore[method-assign]


def test_nothing_measured_nothing_changed(tuner):
    choice = tuner.choose(None, SEEN, None)
    assert choice == BatchChoice(config=BatchConfig(32, 0), total=64)
    assert tuner.reconsider(None, SEEN, choice, None) is None
    assert tuner.reconsider(1e5, SEEN, choice, None) is None
    assert tuner.throughput(choice) is None


def test_a_larger_batch_once_it_is_seen_to_pay(tuner):
    first = tuner.choose(None, SEEN, None)
    # Passes cost nearly the same whatever is in them, and nearly all examples are useful.
    feed(tuner, m32=(0.10, 0.11), m64=(0.101, 0.111))
    better = tuner.reconsider(1e6, SEEN, first, None)
    assert better is not None and better.total == 1024
    assert tuner.reconsider(1e6, SEEN, better, None) is None
    assert tuner.throughput(first) == pytest.approx(64 / 0.11)


def test_a_batch_is_reconsidered_now_and_then_only(tuner, monkeypatch):
    monkeypatch.setattr(tuning, "ADAPT_INTERVAL_S", 1000.0)
    first = tuner.choose(None, SEEN, None)
    assert tuner.reconsider(1e6, SEEN, first, None) is None
    feed(tuner, m32=(0.10, 0.11), m64=(0.101, 0.111))
    assert tuner.reconsider(1e6, SEEN, first, None) is None


def test_without_noise_m0_is_best(tuner):
    feed(tuner, m32=(0.10, 0.11), m64=(0.2, 0.21))
    first = tuner.choose(None, SEEN, None)
    assert tuner.reconsider(0.0, SEEN, first, None) is None


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
    present = tuner.choose(None, SEEN, None)
    answer = tuner.reconsider(None, SEEN, present, advice)
    assert answer == (BatchChoice(config=advice, total=advice.total(2)) if is_taken else None)


def test_halving_is_remembered_and_ends_at_the_least(tuner):
    tuner.halve(100)
    assert tuner.limits.device_max == 50
    tuner.halve(100)  # another replica says the same
    assert tuner.limits.device_max == 50
    assert tuner.choose(1e6, SEEN, None).config.device_batch <= 50
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


def test_a_profile_survives_and_is_fitted_anew(tuner):
    feed(tuner, m32=(0.10, 0.11), m64=(0.101, 0.111))
    restored = Tuner(make_limits(64, 1024, (8, 256)), AdaptiveBatch(), CPU)
    restored.load_state_dict(tuner.state_dict())
    restored.enter(1, 2)
    assert list(restored.profile) == list(tuner.profile)
    assert restored.choose(1e6, SEEN, None) == tuner.choose(1e6, SEEN, None)
    assert restored.fit is not None


def test_timings_are_reported_once(tuner):
    feed(tuner, m32=(0.10, 0.11))
    assert tuner.take_timings() == ((Configuration(1, 2, 32), Timing(0.10, 0.11, 10)),)
    assert tuner.take_timings() == ()


def test_what_was_measured_elsewhere_does_not_count_as_measured_here(tuner):
    feed(tuner, m32=(0.10, 0.11))
    tuner.enter(1, 4)
    assert tuner.throughput(BatchChoice(config=BatchConfig(32, 0), total=128)) is None
    assert tuner.choose(0.0, SEEN, None).total == 64


def test_a_batch_that_cannot_be_divided_is_refused():
    tuner = Tuner(make_limits(3, None, None), FixedBatch(), CPU)
    tuner.enter(1, 4)
    with pytest.raises(InvalidValueError, match="a batch of 3 cannot be divided among 4 replicas; ask for at most 3"):
        tuner.choose(None, SEEN, None)
