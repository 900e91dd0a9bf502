"""Progress is counted in learning: as many epochs as asked for, of one pass at M0, of more with larger batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.model import efficiency
from pollux.train.progress import Goal, Progress, gain_of

noise_scales = st.none() | st.floats(0.0, 1e6)


def add_pass(progress: Progress, length: int, batches: list[int], initial: int, phi: float | None) -> int:
    """A pass over ``length`` examples with these batches in turn. How often an LR scheduler in the loop was stepped."""
    done, index, num_calls = 0, 0, 0
    while done < length:
        count = min(batches[index % len(batches)], length - done)
        gain = gain_of(phi, initial, count)
        num_calls += progress.due_in_loop(gain)
        progress.add_step(count, gain, initial)
        done, index = done + count, index + 1
    return num_calls


@given(st.floats(0, 1e6), st.integers(1, 512), st.integers(1, 4096))
def test_gain_is_that_of_the_model(phi, initial, total):
    assert gain_of(phi, initial, total) == pytest.approx(float(efficiency.gain(phi, initial, total)))
    assert gain_of(None, initial, total) == 1.0


def train_epoch(progress: Progress, goal: Goal, one_pass: Callable[[], object]) -> int:
    """One epoch of the user's loop. How many passes it had."""
    before = progress.num_passes
    one_pass()
    while progress.needs_pass(goal):
        progress.end_pass()
        one_pass()
    progress.end_pass()
    progress.end_epoch()
    return progress.num_passes - before


@given(
    num_epochs=st.integers(0, 8),
    length=st.integers(1, 300),
    initial=st.integers(1, 64),
    phis=st.lists(noise_scales, min_size=1),
)
def test_at_the_tuned_batch_passes_steps_and_schedules_are_those_of_plain_torch(num_epochs, length, initial, phis):
    progress, goal = Progress(), Goal(num_epochs, "epochs")
    while not progress.is_done(goal):
        phi = phis[progress.num_passes % len(phis)]
        num_steps, epoch = progress.num_steps, progress.num_epochs
        assert progress.last_trained_epoch == epoch - 1
        assert add_pass(progress, length, [initial], initial, phi) == progress.num_steps - num_steps
        assert progress.last_trained_epoch == epoch
        assert not progress.needs_pass(goal)
        progress.end_pass()
        progress.end_epoch()
    assert progress.num_passes == progress.num_epochs == num_epochs
    assert progress.num_steps == progress.step_number == num_epochs * math.ceil(length / initial)
    assert progress.num_examples == num_epochs * length == progress.num_useful


@given(
    num_epochs=st.integers(1, 6),
    length=st.integers(1, 300),
    initial=st.integers(1, 32),
    scales=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    phi=noise_scales,
)
def test_larger_batches_make_more_passes_in_as_many_epochs(num_epochs, length, initial, scales, phi):
    progress, goal, in_loop = Progress(), Goal(num_epochs, "epochs"), []
    batches = [initial * scale for scale in scales]
    while not progress.is_done(goal):
        train_epoch(progress, goal, lambda: in_loop.append(add_pass(progress, length, batches, initial, phi)))
        assert 0 < progress.epochs <= progress.num_passes < 100 * num_epochs
        # Whole passes: at most half of one, as they usually are, too much or too little.
        mean = progress.epochs / progress.num_passes
        assert abs(progress.epochs - progress.num_epochs) <= 0.5 * mean + 1e-6
    assert progress.num_epochs == num_epochs <= progress.num_passes
    assert sum(in_loop) == progress.step_number >= progress.num_steps


@given(num_epochs=st.integers(0, 6), scale=st.integers(1, 8), phi=noise_scales)
def test_by_passes_every_epoch_is_one(num_epochs, scale, phi):
    progress, goal = Progress(), Goal(num_epochs, "passes")
    while not progress.is_done(goal):
        assert train_epoch(progress, goal, lambda: add_pass(progress, 50, [4 * scale], 4, phi)) == 1
    assert progress.num_passes == num_epochs


@pytest.mark.parametrize("num_trained", [0, 1, 2])
def test_a_loop_that_has_ceased_to_train_ends_like_any_other(num_trained):
    progress, goal = Progress(), Goal(3, "epochs")
    while not progress.is_done(goal):
        is_idle = progress.num_epochs >= num_trained
        length = 0 if is_idle else 20
        num_passes = train_epoch(progress, goal, partial(add_pass, progress, length, [8], 4, 10.0))
        assert num_passes == 1 or not is_idle
        assert progress.last_trained_epoch == progress.num_epochs - 1
    assert progress.num_epochs == 3


@pytest.mark.parametrize("phi", [None, 0.0, 12.0, 1e6])
def test_a_goal_in_steps_counts_progress_or_steps(phi):
    for unit, count in (("progress_steps", 40), ("steps", 40)):
        progress, goal, seen = Progress(), Goal(count, unit), []
        fired = 0
        while not progress.is_done(goal):
            seen.append(progress.step_number)
            fired += progress.has_passed_multiple(10)
            share = progress.share_done(goal, None)
            progress.add_step(16, gain_of(phi, 4, 16), 4)
            assert share < progress.share_done(goal, None) <= 1.0
        assert seen == sorted(set(seen)) and seen[0] == 0
        if unit == "progress_steps":
            assert fired == 4 and progress.iterations == pytest.approx(40, abs=4)
            assert progress.remaining_useful(goal, None, 4) == 0.0
        else:
            assert progress.num_steps == 40


def test_a_smaller_last_batch_is_worth_its_examples():
    progress = Progress()
    progress.add_step(3, gain_of(100.0, 8, 3), 8)
    assert progress.num_useful == 3.0
    assert progress.iterations == 1.0  # as one call of the scheduler


@given(phi=noise_scales, scales=st.lists(st.integers(1, 5), min_size=1, max_size=4), cut=st.integers(0, 5))
def test_saved_and_loaded_it_goes_on_as_if_it_had_not(phi, scales, cut):
    def train(is_cut: bool) -> tuple[Progress, list[int]]:
        progress, calls = Progress(), []
        for index in range(6):
            if is_cut and index == cut:
                state, progress = progress.state_dict(), Progress()
                progress.load_state_dict(state)
            calls.append(add_pass(progress, 20, [4 * scale for scale in scales], 4, phi))
            progress.end_pass()
            progress.end_epoch()
        return progress, calls

    assert train(True) == train(False)
