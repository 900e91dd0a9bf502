"""Who counts for more where jobs tell how much is left of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.policy import PolicySettings
from pollux.policy.lengths import Lengths
from pollux.policy.pollux import PolluxPolicy
from pollux.policy.speedups import SpeedupTable
from pollux.policy.weights import job_weights, remaining_seconds
from pollux.testing.snapshots import PARAMS, make_job, make_mixed, make_nodes
from pollux.types import Allocation, FloatArray, JobSpec, JobView, Snapshot

REMAINING = PolicySettings(weights="remaining")


def jobs(*left: float | None, weight: float = 1.0) -> list[JobView]:
    return [
        JobView(spec=JobSpec(name=f"j{index}", weight=weight), age_s=0.0, remaining_examples=examples)
        for index, examples in enumerate(left)
    ]


def weigh(present: list[JobView], goodputs: FloatArray, rules: PolicySettings, learnt: FloatArray | None = None):
    return job_weights(present, remaining_seconds(present, goodputs, rules, learnt), rules.p)


def test_all_count_the_same_unless_asked():
    assert weigh(jobs(10, 1000, weight=2.0), np.ones(2), PolicySettings()).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("p", [-1.0, 0.0, 0.5])
def test_slots_go_by_the_optimal_rule_for_a_speedup_of_the_square_root(p):
    """The i-th longest of n jobs gets (2i - 1)/n² of them: the fitness makes k proportional to w^(1/(1 - p/2))."""
    weights = weigh(jobs(400, 100, 300, 200), np.ones(4), PolicySettings(weights="remaining", p=p))
    slots = weights ** (1 / (1 - p / 2))
    assert slots / slots.sum() == pytest.approx(np.array([1, 7, 3, 5]) / 16)


def test_time_counts_not_examples():
    slow, fast = weigh(jobs(100, 1000), np.array([1.0, 100.0]), REMAINING)
    assert fast > slow


def test_a_job_of_unknown_length_or_speed_counts_as_a_typical_one():
    weights = weigh(jobs(1, None, 5, 100, 7), np.array([1.0, 1.0, 1.0, 1.0, np.nan]), REMAINING)
    assert weights[0] > weights[[1, 2, 4]].max() and weights[[1, 2, 4]].min() > weights[3]


def test_where_nobody_tells_all_count_the_same():
    assert weigh(jobs(None, None), np.ones(2), REMAINING).tolist() == [1.0, 1.0]
    assert weigh(jobs(5, 6), np.full(2, np.nan), REMAINING).tolist() == [1.0, 1.0]


def test_where_one_declares_nothing_others_have_shown_how_long_it_is():
    """Declared lengths first, or not at all if asked."""
    present, learnt = jobs(100, None, 50), np.array([10.0, 200.0, 20.0])
    unmeasured = weigh(present, np.ones(3), REMAINING, learnt)
    assert np.argsort(unmeasured).tolist() == [0, 1, 2]  # it may declare something yet, and counts as a typical one
    present[1] = replace(present[1], params={"gpu": PARAMS})
    assert np.argsort(weigh(present, np.ones(3), REMAINING, learnt)).tolist() == [1, 0, 2]
    assert np.argsort(weigh(present, np.ones(3), PolicySettings(weights="learnt"), learnt)).tolist() == [1, 2, 0]
    assert weigh(present, np.ones(3), PolicySettings(), learnt).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("num_resizes", [1, 20])
def test_a_long_job_moves_for_less_than_one_that_has_moved_often(num_resizes):
    """However much is left of both: how often a job has moved says for how long it will stay."""
    job = make_job("a", allocation=Allocation.of(("n0", 1)), remaining_examples=1e12, num_resizes=num_resizes)
    plan = PolluxPolicy(REMAINING).decide(Snapshot(now=0, nodes=make_nodes(1, 4), jobs=(job,)))
    assert plan.explanation is not None
    (decision,) = plan.explanation.jobs
    assert decision.after.num_replicas > 1
    assert decision.move_factor == pytest.approx((1000 - 30 * num_resizes) / 1030, rel=1e-3)


class TestLengths:
    @staticmethod
    def job(name: str, application: str, service_s: float, done: float | None = None, held_s: float = 0.0) -> JobView:
        return JobView(
            spec=JobSpec(name=name, application=application),
            age_s=0.0,
            attained_slot_s=service_s,
            attained_s=held_s,
            done_examples=done,
            num_resizes=0 if service_s else None,
        )

    def test_what_ended_jobs_took_is_what_others_of_the_application_will_take(self):
        lengths = Lengths()
        lengths.look(0, [self.job("a", "x", 100.0), self.job("b", "x", 300.0)])
        lengths.look(60, [])
        assert lengths.left_slot_s([self.job("c", "x", 0.0), self.job("d", "x", 40.0)]).tolist() == [200.0, 160.0]
        assert lengths.left_slot_s([self.job("c", "x", 200.0)]).tolist() == [100.0]  # the shorter one is out of it

    def test_useful_examples_count_however_many_slots_they_took(self):
        lengths = Lengths()
        lengths.look(0, [self.job("a", "x", 100.0, 1000.0), self.job("b", "x", 900.0, 1000.0)])
        lengths.look(60, [])
        now = [
            self.job("c", "x", 800.0, 400.0),
            self.job("d", "x", 0.0),
            self.job("e", "x", 5.0),
            self.job("f", "y", 0),
        ]
        left = lengths.left_examples(now)
        assert left[:2].tolist() == [600.0, 1000.0]
        assert np.isnan(left[2:]).all()  # one does not tell, of the other's kind none has ended

    def test_a_job_went_on_until_it_was_seen_to_be_gone(self):
        """It was through at some time between two rounds; otherwise the next one would outlast it each time."""
        lengths = Lengths()
        lengths.look(0, [self.job("a", "x", 400.0, 1000.0, held_s=100.0)])
        lengths.look(0, [self.job("a", "x", 400.0, None, held_s=100.0)])  # it has reported its end, not its examples
        lengths.look(20, [])
        assert lengths.left_examples([self.job("c", "x", 0.0)]).tolist() == [1200.0]

    def test_a_job_that_did_more_than_all_is_nearly_through(self):
        """It needs as much again as it is ahead, in steps of two, and at least a sixteenth of what it did."""
        lengths = Lengths()
        lengths.look(0, [self.job("a", "x", 100.0, 1000.0)])
        lengths.look(60, [])
        now = [self.job("c", "x", 100.0, 1024.0), self.job("d", "x", 100.0, 1500.0)]
        assert lengths.left_examples(now).tolist() == [64.0, 512.0]

    def test_a_newcomer_is_as_long_as_the_job_of_its_kind_that_still_runs(self):
        lengths = Lengths()
        lengths.look(0, [self.job("a", "x", 100.0), self.job("b", "x", 8000.0)])
        now = [self.job("c", "y", 5000.0), self.job("d", "y", 0.0), self.job("e", "z", 0.0)]
        lengths.look(60, now)
        assert lengths.left_slot_s(now).tolist() == [3000.0, 8000.0, 4050.0]

    def test_a_job_that_outlasts_all_is_half_done_in_steps_of_two(self):
        lengths = Lengths()
        lengths.look(0, [self.job("a", "x", 100.0)])
        lengths.look(60, [])
        found = lengths.left_slot_s([self.job("c", "x", 130.0), self.job("d", "y", 250.0)])
        assert found.tolist() == [256.0, 256.0]

    def test_a_newcomer_of_no_known_application_is_as_long_as_the_jobs_of_all(self):
        """It is not the shortest of all: what is not known must not go first."""
        lengths = Lengths()
        lengths.look(0, [self.job("a", "x", 100.0), self.job("b", "", 300.0)])
        lengths.look(60, [])
        found = lengths.left_slot_s([self.job("c", "y", 0.0), self.job("d", "", 0.0), self.job("e", "x", 0.0)])
        assert found.tolist() == [200.0, 200.0, 100.0]

    def test_nothing_is_expected_before_a_job_has_ended(self):
        lengths = Lengths()
        now = [self.job("a", "x", 100.0), self.job("b", "", 0.0)]
        lengths.look(0, now)
        assert np.isnan(lengths.left_slot_s(now)).all() and np.isnan(lengths.left_examples(now)).all()

    def test_little_is_remembered(self):
        lengths = Lengths()
        for index in range(3000):
            lengths.look(index, [self.job(f"a{index}", f"x{index}", 5.0), self.job(f"b{index}", "x", 7.0)])
        assert len(lengths._ended) <= 1024
        assert max(map(len, lengths._ended.values())) <= 64

    def test_the_policy_learns_whom_to_favour(self):
        """Two applications, one of which has been seen to be short: the next job of it gets more."""
        policy = PolluxPolicy(PolicySettings(weights="learnt"))
        nodes = make_nodes(1, 8)
        ended = [
            make_job("s0", application="short", attained_slot_s=60.0),
            make_job("l0", application="long", attained_slot_s=1e5),
        ]
        policy.decide(Snapshot(now=0, nodes=nodes, jobs=tuple(ended)))
        fresh = [make_job("s1", application="short"), make_job("l1", application="long")]
        plan = policy.decide(Snapshot(now=60, nodes=nodes, jobs=tuple(fresh)))
        assert plan.allocation_of("s1").num_replicas > plan.allocation_of("l1").num_replicas


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=40), st.floats(-10, 1))
def test_weights_are_positive_finite_and_fall_with_what_is_left(left, p):
    if 0 < abs(p) < 0.01:
        p = 0.0
    weights = weigh(jobs(*left), np.ones(len(left)), PolicySettings(weights="remaining", p=p))
    assert np.isfinite(weights).all() and (weights > 0).all()
    order = np.argsort(left, kind="stable")
    for one, other in pairwise(order):
        assert left[one] == left[other] or weights[one] > weights[other]


@pytest.mark.parametrize(
    ("nodes", "done", "is_known"),
    [
        (make_nodes(2), None, True),
        (make_mixed(big=4, small=4), None, False),  # a slot-second is worth more on one type than on the other
        (make_mixed(big=4, small=4), 1.0, True),  # a useful example is not
    ],
)
def test_auto_learns_from_ended_jobs(nodes, done, is_known):
    """Jobs that declare nothing: short applications weigh more, where what was done can be compared."""
    seen: list[FloatArray] = []

    class Watched(PolluxPolicy):
        def _learnt_s(self, snapshot: Snapshot, tables: Sequence[SpeedupTable]) -> FloatArray | None:
            found = super()._learnt_s(snapshot, tables)
            seen.append(weigh(list(snapshot.jobs), np.full(2, np.nan), self._settings, found))
            return found

    policy = Watched(PolicySettings(weights="auto"))
    ended = [
        make_job(name, application=name, attained_slot_s=served, done_examples=done and served)
        for name, served in (("s", 60.0), ("l", 6e4))
    ]
    policy.decide(Snapshot(now=0.0, nodes=nodes, jobs=tuple(ended)))
    now = [make_job(f"{name}2", application=name, done_examples=done and 0.0) for name in "sl"]
    policy.decide(Snapshot(now=60.0, nodes=nodes, jobs=tuple(now)))
    short, long = seen[-1]
    assert short > long if is_known else short == long == 1.0


def test_auto_takes_what_was_declared_first():
    rules = PolicySettings(weights="auto")
    given = jobs(10, 1000)
    assert weigh(given, np.ones(2), rules).tolist() == weigh(given, np.ones(2), REMAINING).tolist()
