"""Which trials do not take the slots that the study offers them."""

from __future__ import annotations

import math

from pollux.tune.unused import OFFERED_AGAIN_S, UNUSED_S, UnusedSlots


def test_a_trial_that_stays_small_beside_free_slots_is_offered_no_more_for_a_while():
    unused = UnusedSlots()
    unused.look(0.0, 4, {1: 3, 2: 1}, {1: 1, 2: 1})
    assert unused.most(1) == math.inf
    unused.look(UNUSED_S, 4, {1: 3, 2: 1}, {1: 1, 2: 1})
    assert unused.most(1) == 1 and unused.most(2) == math.inf
    unused.look(UNUSED_S + OFFERED_AGAIN_S, 4, {1: 1, 2: 1}, {1: 1, 2: 1})
    assert unused.most(1) == math.inf


def test_slots_that_others_hold_or_wait_for_are_not_unused():
    unused = UnusedSlots()
    for now in (0.0, UNUSED_S, 2 * UNUSED_S):
        unused.look(now, 4, {1: 3, 2: 1}, {1: 1, 2: 3})  # none is free
        assert unused.most(1) == math.inf
    for now in (10.0, 10.0 + UNUSED_S, 10.0 + 2 * UNUSED_S):
        unused.look(now, 2, {1: 2, 2: 1}, {1: 1})  # trial 2 starts in the one that is free
        assert unused.most(1) == math.inf


def test_a_trial_that_grows_after_all_is_offered_more():
    unused = UnusedSlots()
    unused.look(0.0, 4, {1: 4}, {1: 1})
    unused.look(UNUSED_S, 4, {1: 4}, {1: 1})
    assert unused.most(1) == 1
    unused.look(UNUSED_S + 1, 4, {1: 1}, {1: 2})
    assert unused.most(1) == math.inf
