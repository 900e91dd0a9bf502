"""Progress is counted in learning: exactly as many passes as asked for at M0, never fewer with larger batches."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.model import efficiency
from pollux.train.progress import Progress, gain_of

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


@given(
    num_epochs=st.integers(0, 8),
    length=st.integers(1, 300),
    initial=st.integers(1, 64),
    phis=st.lists(noise_scales, min_size=1),
)
def test_at_the_tuned_batch_passes_steps_and_schedules_are_those_of_plain_torch(num_epochs, length, initial, phis):
    progress = Progress()
    in_loop = between = 0
    while not progress.is_done(num_epochs, by_passes=False):
        phi = phis[progress.num_passes % len(phis)]
        num_steps = progress.num_steps
        assert add_pass(progress, length, [initial], initial, phi) == progress.num_steps - num_steps
        in_loop += progress.num_steps - num_steps
        between += progress.due_between_passes()
        progress.end_pass()
        assert between == progress.num_passes
    assert progress.num_passes == num_epochs
    assert in_loop == num_epochs * math.ceil(length / initial)
    assert progress.num_examples == num_epochs * length == progress.num_useful


@given(
    num_epochs=st.integers(1, 6),
    length=st.integers(1, 300),
    initial=st.integers(1, 32),
    scales=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    phi=noise_scales,
)
def test_larger_batches_never_make_fewer_passes(num_epochs, length, initial, scales, phi):
    progress = Progress()
    in_loop = between = 0
    while not progress.is_done(num_epochs, by_passes=False):
        in_loop += add_pass(progress, length, [initial * scale for scale in scales], initial, phi)
        between += progress.due_between_passes()
        progress.end_pass()
        assert 0 < progress.epochs <= progress.num_passes
        assert progress.num_passes < 100 * num_epochs
    assert progress.num_passes >= num_epochs
    # Whole passes: at most half of one, as they usually are, too much or too little.
    assert abs(progress.epochs - num_epochs) <= 0.5 * progress.epochs / progress.num_passes + 1e-6
    assert between == round(progress.epochs)
    assert in_loop == int(progress.iterations + 1e-6)
    assert in_loop >= progress.num_steps
    assert progress.remaining_passes(num_epochs, False) <= 0.5 + 1e-6


@given(num_epochs=st.integers(0, 6), scale=st.integers(1, 8), phi=noise_scales)
def test_by_passes_it_is_exactly_the_number_asked_for(num_epochs, scale, phi):
    progress = Progress()
    while not progress.is_done(num_epochs, by_passes=True):
        assert progress.remaining_passes(num_epochs, True) == num_epochs - progress.num_passes
        add_pass(progress, 50, [4 * scale], 4, phi)
        progress.end_pass()
    assert progress.num_passes == num_epochs
    assert progress.remaining_passes(num_epochs, True) == 0


@pytest.mark.parametrize("num_trained", [0, 1, 2])
def test_a_loop_that_has_ceased_to_train_ends_like_any_other(num_trained):
    progress = Progress()
    while not progress.is_done(3, by_passes=False):
        if progress.num_passes < num_trained:
            add_pass(progress, 20, [8], 4, 10.0)
        progress.end_pass()
        assert progress.num_passes <= 3
    assert progress.num_passes == 3
    assert progress.epochs < num_trained or progress.epochs == num_trained == 0


def test_an_empty_pass_between_others_taught_nothing():
    progress = Progress()
    for length in (20, 0, 20):
        add_pass(progress, length, [4], 4, 10.0)
        progress.end_pass()
    assert progress.epochs == 2.0
    assert not progress.is_done(3, by_passes=False)


def test_a_smaller_last_batch_is_worth_its_examples():
    progress = Progress()
    progress.add_step(3, gain_of(100.0, 8, 3), 8)
    assert progress.num_useful == 3.0
    assert progress.iterations == 1.0  # as one call of the scheduler


@given(phi=noise_scales, scales=st.lists(st.integers(1, 5), min_size=1, max_size=4), cut=st.integers(0, 5))
def test_saved_and_loaded_it_goes_on_as_if_it_had_not(phi, scales, cut):
    progress, num_calls, calls = Progress(), 0, []
    for index in range(6):
        if index == cut:
            state, progress = progress.state_dict(), Progress()
            progress.load_state_dict(state)
        num_calls += add_pass(progress, 20, [4 * scale for scale in scales], 4, phi)
        calls.append((num_calls, progress.due_between_passes()))
        progress.end_pass()
    whole, whole_calls, expected = Progress(), 0, []
    for _ in range(6):
        whole_calls += add_pass(whole, 20, [4 * scale for scale in scales], 4, phi)
        expected.append((whole_calls, whole.due_between_passes()))
        whole.end_pass()
    assert (progress, calls) == (whole, expected)
