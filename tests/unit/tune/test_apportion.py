"""Slots go to what buys most chance per unit of training: new trials first, then the best ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pollux.tune.apportion import Candidate, Prospect, apportion

MANY = 1000


def trial(number, chance=0.0, progress=0.1, *, is_proven=True, has_slots=True, speedups=()):
    known = {"is_proven": is_proven, "has_slots": has_slots, "speedups": speedups}
    return Candidate(number=number, chance=chance, progress=progress, **known)


def prospect(num_left=100, num_seen=0, cost=0.1):
    return Prospect(num_left=num_left, num_seen=num_seen, cost=cost)


def test_a_study_begins_with_a_trial_for_each_slot():
    assert apportion([], prospect(), 8, MANY).num_new == 8


def test_no_more_trials_begin_than_are_left():
    assert apportion([], prospect(num_left=3), 8, MANY).num_new == 3


def test_a_trial_that_has_passed_no_rung_keeps_its_slot():
    found = apportion([trial(0, is_proven=False), trial(1, 1.0, 0.9)], prospect(num_seen=50), 4, MANY)
    assert found.slots[0] == 1 and found.slots[1] == 3 and found.num_new == 0


def test_the_better_of_two_has_more_slots():
    found = apportion([trial(0, 0.75), trial(1, 0.25)], prospect(num_left=0, num_seen=9), 8, MANY)
    assert found.slots == {0: 6, 1: 2}


def test_slots_that_add_nothing_to_the_best_trial_go_to_others():
    trials = [trial(0, 0.9, speedups=(1.0, 1.02, 1.02, 1.02)), trial(1, 0.1, has_slots=False)]
    found = apportion(trials, prospect(num_seen=50), 4, MANY)
    assert found.slots == {0: 1, 1: 1} and found.num_new == 2
    assert apportion(trials, prospect(num_seen=50, num_left=0), 4, MANY).slots[0] == 1


def test_no_trial_has_more_for_scaling_well():
    """Its chance counts, and each slot that others could have less and less."""
    found = apportion(
        [trial(0, 0.5, speedups=(1.0, 2.0, 3.0, 4.0)), trial(1, 0.5)], prospect(num_left=0, num_seen=9), 4, MANY
    )
    assert found.slots == {0: 2, 1: 2}


def test_a_trial_without_any_chance_waits_for_new_ones_and_goes_on_when_none_is_left():
    loser = [trial(0, 0.0)]
    assert apportion(loser, prospect(num_seen=20), 2, MANY).slots == {0: 0}
    assert apportion(loser, prospect(num_seen=20, num_left=0), 2, MANY).slots == {0: 2}


def test_the_best_trial_has_more_of_a_study_of_which_more_was_seen():
    def slots(num_seen):
        return apportion([trial(0, 0.5)], prospect(num_seen=num_seen), 64, MANY).slots[0]

    assert slots(0) < slots(5) < slots(20)


def test_a_trial_with_slots_keeps_one_although_a_new_one_offers_a_little_more():
    offered = prospect(num_seen=9).offer
    chance = offered * 0.9 / (1 - 1 / 10) / 1.2  # 1.2 times less than a new one offers, over 0.9 of its work
    assert apportion([trial(0, chance, 0.1, has_slots=True)], prospect(num_seen=9), 1, MANY).slots == {0: 1}
    assert apportion([trial(0, chance, 0.1, has_slots=False)], prospect(num_seen=9), 1, MANY).slots == {0: 0}


def test_no_trial_has_more_than_it_may():
    found = apportion([trial(0, 1.0, 0.9)], prospect(num_seen=50, num_left=0), 8, 2)
    assert found.slots == {0: 2}


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.booleans(), st.booleans()), max_size=12),
    st.integers(0, 20),
    st.integers(1, 16),
    st.integers(1, 8),
)
def test_no_slot_is_given_twice_and_none_is_left_that_a_trial_could_use(drawn, num_left, num_slots, most):
    trials = [
        trial(number, chance, progress, is_proven=is_proven, has_slots=has_slots)
        for number, (chance, progress, is_proven, has_slots) in enumerate(drawn)
    ]
    found = apportion(trials, prospect(num_left=num_left, num_seen=len(trials)), num_slots, most)
    used = sum(found.slots.values()) + found.num_new
    assert used <= num_slots and found.num_new <= num_left and max(found.slots.values(), default=0) <= most
    assert used == num_slots or (found.num_new == num_left and all(one == most for one in found.slots.values()))
