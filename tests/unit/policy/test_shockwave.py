from __future__ import annotations

import dataclasses
import itertools
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.policy import PolicySettings, make_policy
from pollux.policy.shockwave import Line, NodeTypes, ShockwavePolicy, deal, late_weight, plan_rounds, share_done
from pollux.testing.snapshots import make_job, make_mixed, make_nodes
from pollux.types import Allocation, JobView, Node, Plan, Snapshot


def snapshot(*jobs: JobView, now: float = 0.0, nodes: tuple[Node, ...] | None = None) -> Snapshot:
    return Snapshot(now=now, nodes=nodes or make_nodes(1), jobs=jobs)


def job(name: str, *, left: float = 1e6, done: float = 0.0, **view: object) -> JobView:
    fields = {"requested_replicas": 4, "remaining_examples": left, "done_examples": done} | view
    return make_job(name, **fields)


class TestDeal:
    def test_rounds_go_to_whom_they_bring_most_by_slot(self):
        gains = {"a": np.array([4.0, 2.0, 1.0]), "b": np.array([3.0, 0.5, 0.1])}
        assert deal(gains, {"a": 1, "b": 1}, 1, {}) == {"a": 2, "b": 1}

    def test_nobody_gets_rounds_that_bring_nothing(self):
        assert deal({"a": np.array([1.0, 0.0, 0.0])}, {"a": 1}, 4, {}) == {"a": 1}

    def test_who_does_not_fit_is_passed_over(self):
        gains = {"large": np.array([9.0, 9.0]), "small": np.array([1.0, 1.0])}
        assert deal(gains, {"large": 5, "small": 4}, 4, {}) == {"large": 0, "small": 2}

    def test_rounds_that_are_needed_come_first(self):
        gains = {"a": np.array([4.0, 2.0, 1.0]), "b": np.array([3.0, 0.5, 0.1])}
        assert deal(gains, {"a": 1, "b": 1}, 1, {"b": 2}) == {"a": 1, "b": 2}


class TestProgram:
    def test_the_longest_job_runs_in_every_round(self):
        """A second of makespan outweighs all welfare: the job with most left has the window, others share the rest."""
        gains = {"long": np.full(3, 1e-5), "short": np.full(3, 1e-2), "other": np.full(3, 1e-3)}
        left_s = {"long": 9000.0, "short": 300.0, "other": 300.0}
        found = plan_rounds(gains, left_s, dict.fromkeys(gains, 1), 2, 120.0)
        assert found == {"long": 3, "short": 3, "other": 0}

    def test_what_the_window_cannot_reach_is_not_asked_for(self):
        """Two jobs of the same length and one slot: the longest time left falls by one of three rounds only."""
        gains = {name: np.array([3e-3, 2e-3, 1e-3]) for name in "ab"}
        found = plan_rounds(gains, {"a": 9000.0, "b": 9000.0}, {"a": 1, "b": 1}, 1, 120.0)
        assert sorted(found.values()) == [1, 2]

    def test_a_job_larger_than_the_cluster_holds_up_no_other(self):
        gains = {"large": np.full(2, 1.0), "small": np.full(2, 1e-3)}
        found = plan_rounds(gains, {"large": 9000.0, "small": 900.0}, {"large": 8, "small": 4}, 4, 60.0)
        assert found == {"large": 0, "small": 2}

    @given(st.data())
    def test_no_other_plan_is_better(self, data):
        """Against all plans of three jobs on one slot, whose gains fall."""
        names = ("a", "b", "c")
        falls = st.lists(st.floats(1e-4, 1e-1), min_size=3, max_size=3).map(lambda found: sorted(found, reverse=True))
        gains = {name: np.array(data.draw(falls)) for name in names}
        left_s = {name: data.draw(st.floats(60.0, 2000.0)) for name in names}

        def worth(rounds: dict[str, int]) -> float:
            longest = max(left_s[name] - 60.0 * rounds[name] for name in names)
            return sum(gains[name][: rounds[name]].sum() for name in names) - 1e-3 * max(longest, 0.0)

        everything = (dict(zip(names, counts, strict=True)) for counts in itertools.product(range(4), repeat=3))
        best = max(worth(rounds) for rounds in everything if sum(rounds.values()) <= 3)
        # Targets are whole rounds below the longest time left: the best may lie within one of them.
        assert worth(plan_rounds(gains, left_s, dict.fromkeys(names, 1), 1, 60.0)) >= best - 1e-3 * 60.0 - 1e-9

    def test_only_late_jobs_weigh_more(self):
        assert late_weight(0.3, ends_soon=True) == late_weight(1.0, ends_soon=False) == 1.0
        assert late_weight(2.0, ends_soon=False) == pytest.approx(32.0)
        assert late_weight(1.1, ends_soon=True) == pytest.approx(1.1**100)
        assert late_weight(50.0, ends_soon=True) == pytest.approx(1e9)


def remaining_s(policy: ShockwavePolicy, one: JobView) -> float:
    (outlook,) = policy.outlooks([one], NodeTypes(snapshot(one)))
    return outlook.remaining_s


class TestMemory:
    @given(st.lists(st.tuples(st.floats(0, 1), st.floats(-10, 10)), max_size=30))
    def test_a_line_needs_no_points(self, points):
        """It is that of least squares through all of them, as long as each lies to the right of the last."""
        line, kept = Line(), []
        for x, y in points:
            line.add(x, y)
            kept += [(x, y)] if not kept or x > kept[-1][0] else []
        if len(kept) < 3 or kept[-1][0] - kept[0][0] < 0.05:
            assert line.slope is None
        else:
            assert line.slope == pytest.approx(np.polyfit(*np.array(kept).T, 1)[0], rel=1e-6, abs=1e-6)

    def test_it_does_not_grow_with_rounds_or_with_jobs_that_are_over(self, monkeypatch):
        monkeypatch.setattr("pollux.policy.shockwave._MAX_KNOWN", 3)
        policy = ShockwavePolicy(PolicySettings())

        def size_after(rounds: range) -> int:
            for number in rounds:
                done = 0.25 * (number % 4 + 1)
                passing = job(f"j{number // 4}", left=1 - done, done=done, application=f"app{number // 8}")
                staying = job("staying", left=1e6, done=10.0 * number, application="")
                policy.decide(snapshot(passing, staying, now=60.0 * number))
            return len(pickle.dumps([policy._seen, policy._slopes, policy._families]))

        before = size_after(range(100))
        assert size_after(range(100, 200)) < 1.1 * before
        assert set(policy._slopes) == {"app22", "app23", "app24"}


class TestOutlook:
    def test_share_of_work_done(self):
        assert share_done(job("a", left=3.0, done=1.0)) == 0.25
        assert share_done(make_job("a")) is None

    def test_a_noise_scale_that_grows_shortens_what_is_left(self):
        """Seen rising tenfold over the first half, it is expected to go on rising: larger batches, less time."""
        policy = ShockwavePolicy(PolicySettings())
        steady, growing = [], []
        for done in (0.1, 0.2, 0.3, 0.4, 0.5):
            work = {"left": 1e6 * (1 - done), "done": 1e6 * done, "noise_scale": 300.0}
            steady.append(job("steady", **work))
            growing.append(job("growing", **(work | {"noise_scale": 300.0 * 10 ** (2 * (done - 0.5))})))
        for number, views in enumerate(zip(steady, growing, strict=True)):
            policy.decide(snapshot(*views, now=60.0 * number))
        assert remaining_s(policy, growing[-1]) < 0.9 * remaining_s(policy, steady[-1])

    def test_what_jobs_that_are_over_have_shown_holds_for_the_next(self):
        policy = ShockwavePolicy(PolicySettings())
        for number, done in enumerate((0.1, 0.5, 0.9)):
            grown = job("first", left=1 - done, done=done, noise_scale=100.0 * math.exp(4 * done))
            policy.decide(snapshot(grown, now=60.0 * number))
        fresh = job("second", left=1e6)
        before = remaining_s(ShockwavePolicy(PolicySettings()), fresh)
        policy.decide(snapshot(fresh, now=240.0))
        assert remaining_s(policy, fresh) < before
        policy.reset()
        assert remaining_s(policy, fresh) == pytest.approx(before)

    def test_nothing_known_is_no_obstacle(self):
        unknown = make_job("a", measured=False, requested_replicas=2)
        assert remaining_s(ShockwavePolicy(PolicySettings()), unknown) > 0


class Rounds:
    """The policy, round by round, on jobs that make no progress."""

    def __init__(self) -> None:
        self.policy, self.number = make_policy("shockwave"), 0

    def next(self, *jobs: JobView) -> tuple[Plan, list[JobView]]:
        plan = self.policy.decide(snapshot(*jobs, now=60.0 * self.number))
        self.number += 1
        return plan, [dataclasses.replace(each, allocation=plan.allocation_of(each.name)) for each in jobs]


def test_jobs_run_their_rounds_without_a_break():
    rounds, jobs, ran = Rounds(), [job(name, left=1e8) for name in "ab"], []
    for _ in range(20):
        plan, jobs = rounds.next(*jobs)
        ran += [name for name in "ab" if plan.allocation_of(name)]
    assert set(ran) == {"a", "b"}
    assert sum(before != after for before, after in itertools.pairwise(ran)) == 1


def test_who_has_waited_too_long_comes_first():
    late = job("late", left=1e8, age_s=500_000.0, attained_s=10.0)
    assert Rounds().next(job("new", left=1e8, age_s=10.0), late)[0].allocations.keys() == {"late"}


def test_slots_that_nobody_planned_for_are_used():
    jobs = [job("a", requested_replicas=3), job("b", requested_replicas=1, left=1.0, done=1e9)]
    assert Rounds().next(*jobs)[0].allocations.keys() == {"a", "b"}


def test_a_plan_is_kept_until_somebody_comes_or_goes(monkeypatch):
    planned = []
    plan = ShockwavePolicy._plan
    monkeypatch.setattr(ShockwavePolicy, "_plan", lambda self, here: planned.append(here) or plan(self, here))
    rounds, jobs = Rounds(), [job(name) for name in "ab"]
    for _ in range(5):
        _, jobs = rounds.next(*jobs)
    assert len(planned) == 1
    rounds.next(*jobs, job("c"))
    assert len(planned) == 2


def test_several_types():
    jobs = (job("a", accelerators=frozenset({"small"})), job("b"))
    plan = make_policy("shockwave").decide(snapshot(*jobs, nodes=make_mixed(big=4, small=4)))
    assert plan.allocations == {"a": Allocation.of(("small", 4)), "b": Allocation.of(("big", 4))}
