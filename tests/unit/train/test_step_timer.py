"""Step times: what is slept is what is measured, and only what a step takes is measured."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

pytest.importorskip("torch")

import torch

from pollux.model.profile import Configuration, Timing
from pollux.train.step_timer import FIRST_WARM_UP_STEPS, FIRST_WINDOW, TIMED_EVERY, WARM_UP_STEPS, WINDOW, StepTimer

HERE = Configuration(1, 2, 32)
GRAD_S, REST_S = 0.012, 0.006


class Clock:
    """Time passes when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr("pollux.train.step_timer.time.perf_counter", lambda: self.now_s)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def timer() -> StepTimer:
    return StepTimer(torch.device("cpu"))


def step(timer, sleep, grad_s=GRAD_S, rest_s=REST_S, num_passes=1, configuration=HERE, is_split=False):
    for index in range(num_passes):
        is_last = index == num_passes - 1
        timer.begin(configuration, is_only=num_passes == 1, is_last=is_last, is_split=is_split)
        sleep(grad_s)
        timer.ready()
        sleep(rest_s if is_last else 0.0)


def test_times_of_a_loop_that_sleeps(timer):
    """Against a stopwatch of the test's own: a busy machine sleeps longer than it was asked to."""
    marks = []
    for _ in range(FIRST_WARM_UP_STEPS + FIRST_WINDOW + 1):
        marks.append(time.perf_counter())
        timer.begin(HERE, is_only=True, is_last=True)
        time.sleep(GRAD_S)
        timer.ready()
        marks.append(time.perf_counter())
        time.sleep(REST_S)
    counted = slice(FIRST_WARM_UP_STEPS, FIRST_WARM_UP_STEPS + FIRST_WINDOW)
    starts, readies = marks[0::2], marks[1::2]
    # The first value of a configuration is that of the fastest of its few steps.
    grad_s = min([ready - start for start, ready in zip(starts, readies, strict=True)][counted])
    step_s = min([later - start for start, later in pairwise(starts)][counted])
    ((configuration, timing),) = timer.take()
    assert configuration == HERE
    assert GRAD_S <= timing.grad_s == pytest.approx(grad_s, rel=0.2)
    assert GRAD_S + REST_S <= timing.step_s == pytest.approx(step_s, rel=0.2)
    assert timer.step_s is not None and timer.step_s >= GRAD_S + REST_S


@pytest.mark.parametrize("num_passes", [1, 2, 4])
def test_passes_and_steps_are_told_apart(timer, clock, num_passes):
    for _ in range(FIRST_WARM_UP_STEPS + WINDOW + 1):
        step(timer, clock.sleep, num_passes=num_passes)
    timings = dict(timer.take())
    assert timings[HERE] == (pytest.approx(GRAD_S), pytest.approx(GRAD_S + REST_S), WINDOW)


def test_warm_up_steps_do_not_count_in_any_configuration(timer, clock):
    for configuration, num_warm_up in ((HERE, FIRST_WARM_UP_STEPS), (Configuration(1, 2, 64), WARM_UP_STEPS)):
        for _ in range(num_warm_up):
            step(timer, clock.sleep, grad_s=9.0, configuration=configuration)
        for _ in range(FIRST_WINDOW):
            step(timer, clock.sleep, configuration=configuration)
    step(timer, clock.sleep, configuration=HERE)  # ends the step before
    timings = dict(timer.take())
    assert [timing.num_steps for timing in timings.values()] == [FIRST_WINDOW, FIRST_WINDOW]
    assert all(timing.step_s == pytest.approx(GRAD_S + REST_S) for timing in timings.values())


def test_the_first_word_comes_early_and_the_next_ones_take_longer(timer, clock):
    for _ in range(FIRST_WARM_UP_STEPS + FIRST_WINDOW):
        step(timer, clock.sleep)
        assert timer.take() == []
    sizes = []
    for _ in range(TIMED_EVERY * (2 * WINDOW + 1)):  # a known configuration is looked at now and then
        step(timer, clock.sleep)
        sizes += [timing.num_steps for _, timing in timer.take()]
    assert sizes == [FIRST_WINDOW, WINDOW, WINDOW]


def test_a_disturbed_step_is_left_out(timer, clock):
    for _ in range(FIRST_WARM_UP_STEPS):
        step(timer, clock.sleep)
    for _ in range(FIRST_WINDOW):
        step(timer, clock.sleep)
        step(timer, clock.sleep)
        timer.disturb()  # a checkpoint, say
        clock.sleep(5.0)
    step(timer, clock.sleep)
    ((_, timing),) = timer.take()
    assert timing == Timing(pytest.approx(GRAD_S), pytest.approx(GRAD_S + REST_S), FIRST_WINDOW)


def test_what_the_machine_did_on_the_side_does_not_move_the_median(timer, clock):
    for index in range(FIRST_WARM_UP_STEPS + WINDOW + 1):
        step(timer, clock.sleep, rest_s=3.0 if index % 4 == 3 else REST_S)
    ((_, timing),) = timer.take()
    assert timing.step_s == pytest.approx(GRAD_S + REST_S)


def test_after_a_reset_it_warms_up_again(timer, clock):
    for _ in range(FIRST_WARM_UP_STEPS):
        step(timer, clock.sleep)
    timer.reset()
    for _ in range(WARM_UP_STEPS):
        step(timer, clock.sleep, grad_s=9.0)
    for _ in range(FIRST_WINDOW + 1):
        step(timer, clock.sleep)
    ((_, timing),) = timer.take()
    assert timing.step_s == pytest.approx(GRAD_S + REST_S)


def test_a_gradient_is_never_slower_than_its_step(timer, clock):
    for index in range(FIRST_WARM_UP_STEPS + FIRST_WINDOW + 1):
        step(timer, clock.sleep, grad_s=1.0 if index % 2 else 0.01, rest_s=0.0, num_passes=1 + index % 2)
    assert all(timing.grad_s <= timing.step_s for _, timing in timer.take())


def test_ready_outside_a_pass_says_nothing(timer, clock):
    timer.ready()
    timer.disturb()
    assert timer.take() == [] and timer.step_s is None


def test_split_steps_are_timed_apart(timer, clock):
    """They take longer than the steps that a goodput model has to predict; what they cost is known all the same."""
    for _ in range(FIRST_WARM_UP_STEPS):
        step(timer, clock.sleep)
    for _ in range(FIRST_WINDOW):
        step(timer, clock.sleep)
        step(timer, clock.sleep, grad_s=0.8 * GRAD_S, num_passes=2, is_split=True)
    step(timer, clock.sleep)
    timings = dict(timer.take())
    assert timings[HERE] == (pytest.approx(GRAD_S), pytest.approx(GRAD_S + REST_S), FIRST_WINDOW)
    assert timer.step_s == pytest.approx(GRAD_S + REST_S)
    assert timer.split_s == pytest.approx(1.6 * GRAD_S + REST_S)


def test_half_of_a_split_step_says_nothing(timer, clock):
    for _ in range(FIRST_WARM_UP_STEPS):
        step(timer, clock.sleep)
    timer.begin(HERE, is_only=False, is_last=False, is_split=True)
    clock.sleep(GRAD_S)
    timer.disturb()  # the step is begun again
    step(timer, clock.sleep)
    assert timer.split_s is None


@pytest.mark.parametrize("num_passes", [1, 2])
def test_a_known_configuration_is_followed(timer, clock, num_passes):
    """Steps that become slower are seen, though not every step is timed any more."""
    for _ in range(FIRST_WARM_UP_STEPS + FIRST_WINDOW + 1):
        step(timer, clock.sleep, num_passes=num_passes)
    timer.take()
    timings = []
    for _ in range(TIMED_EVERY * (3 * WINDOW + 1)):
        step(timer, clock.sleep, grad_s=2 * GRAD_S, num_passes=num_passes)
        timings += timer.take()
    assert timings[-1] == (HERE, Timing(pytest.approx(2 * GRAD_S), pytest.approx(2 * GRAD_S + REST_S), WINDOW))
    assert timer.step_s == pytest.approx(2 * GRAD_S + REST_S, rel=0.1)
