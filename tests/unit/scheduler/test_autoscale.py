from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.errors import InvalidValueError
from pollux.model.goodput import GoodputTables
from pollux.policy import make_policy
from pollux.scheduler.autoscale import AutoscaleConfig, Outcome, SizeDecision, Spending, band, decide_size, utility
from pollux.testing.snapshots import make_job, make_nodes
from pollux.types import Allocation, Snapshot

BAND = AutoscaleConfig(min_nodes=1, max_nodes=16)
WIDE = AutoscaleConfig(min_nodes=1, max_nodes=1000)


class Curve:
    """Utility by size, and how often it was asked for."""

    def __init__(self, of_size: object, num_idle: object = lambda size: 0) -> None:
        self._of_size, self._num_idle = of_size, num_idle
        self.asked: list[int] = []

    def __call__(self, size: int) -> Outcome:
        self.asked.append(size)
        return Outcome(self._of_size(size), self._num_idle(size))  # type: ignore[operator]


def falling(scale: float) -> Curve:
    return Curve(lambda size: scale / (scale + size))


def size(now: int, curve: Curve, config: AutoscaleConfig = BAND, **rest: float) -> SizeDecision:
    return decide_size(config, now, curve, **rest)  # type: ignore[arg-type]


def test_the_size_found_is_the_nearest_to_the_middle_of_the_band():
    for scale in (2.0, 7.0, 20.0, 300.0):
        decision = size(1, falling(scale), WIDE)
        best = min(range(1, 1001), key=lambda size: abs(scale / (scale + size) - 0.65))
        assert decision.num_nodes == best
        assert decision.reason == "utility above the band" or decision.num_nodes == 1


def test_growing_is_at_once_and_shrinking_waits():
    assert size(1, falling(20.0), settled_s=0.0).num_nodes > 1
    assert size(16, falling(2.0), settled_s=10.0).num_nodes == 16
    assert size(16, falling(2.0), settled_s=10.0).could_shrink
    assert size(16, falling(2.0), settled_s=300.0).num_nodes == 1


def test_inside_the_band_nothing_changes_and_nothing_else_is_asked():
    curve = falling(20.0)
    found = size(1, curve).num_nodes
    curve.asked.clear()
    again = size(found, curve)
    assert (again.num_nodes, again.reason, again.could_shrink) == (found, "inside the band", False)
    assert curve.asked == [found]


def test_of_many_sizes_few_are_asked_for():
    curve = falling(200.0)
    size(1, curve, WIDE)
    assert len(curve.asked) == len(set(curve.asked)) <= 20


def test_a_policy_that_gives_all_or_nothing_does_not_mislead_the_search():
    """Four jobs of 12 slots on nodes of 4: only every third size is of more use than the one before."""
    curve = Curve(lambda size: 0.7 if size >= 3 else 0.0, lambda size: size - min(size // 3, 4) * 3)
    for most in (16, 64):
        assert size(3, curve, AutoscaleConfig(min_nodes=1, max_nodes=most, low=0.5, high=0.65)).num_nodes == 12
        assert size(most, curve, AutoscaleConfig(min_nodes=1, max_nodes=most, low=0.5, high=0.8)).num_nodes == 12


def test_while_jobs_wait_as_many_nodes_are_asked_for_as_are_of_use():
    """Utility is flat, more or less, up to 100 nodes."""
    flat = Curve(lambda size: 0.96 + 0.01 * (size % 3) if size <= 100 else 96 / size)
    assert 100 <= size(2, flat, WIDE).num_nodes <= 150
    assert size(2, flat, BAND).num_nodes == 16


def test_nodes_that_nobody_would_use_are_not_asked_for_and_given_back():
    curve = Curve(lambda size: 0.8 if size == 1 else 0.7, num_idle=lambda size: max(size - 2, 0))
    config = AutoscaleConfig(min_nodes=1, max_nodes=16)
    assert size(1, curve, config).num_nodes == 2
    inside = size(4, curve, config)
    assert (inside.num_nodes, inside.reason) == (2, "nodes that no job would use")
    assert size(4, curve, config, settled_s=0.0).num_nodes == 4


def test_limits_and_budget_hold():
    plenty = falling(1e9)
    assert size(1, plenty, AutoscaleConfig(min_nodes=1, max_nodes=3)).num_nodes == 3
    outside = size(9, plenty, AutoscaleConfig(min_nodes=1, max_nodes=3), settled_s=0.0)
    assert (outside.num_nodes, outside.reason) == (3, "outside the nodes allowed")
    assert size(0, plenty, settled_s=0.0).num_nodes == 1
    poor = size(6, plenty, max_affordable=4, settled_s=0.0)
    assert (poor.num_nodes, poor.reason) == (4, "over budget")
    assert size(6, plenty, max_affordable=0, settled_s=0.0).num_nodes == 1
    assert size(1, plenty, max_affordable=4).num_nodes == 4


def test_a_budget_slides_half_a_band():
    config = AutoscaleConfig(min_nodes=1, max_nodes=16, low=0.4, high=0.8, budget_slots=8.0)
    assert band(config) == (0.4, 0.8)
    assert band(config, 1.0) == pytest.approx((0.4, 0.6))
    assert band(config, 0.0) == pytest.approx((0.6, 0.8))
    assert size(1, falling(10.0), config, savings=1.0).num_nodes > size(1, falling(10.0), config, savings=0.0).num_nodes


curves = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3)), min_size=40, max_size=40).map(
    lambda values: Curve(lambda size: values[size][0], lambda size: min(values[size][1], size))
)


@given(
    curve=curves,
    limits=st.tuples(st.integers(1, 12), st.integers(0, 20)),
    now=st.integers(0, 39),
    affordable=st.none() | st.integers(0, 40),
    savings=st.none() | st.floats(0, 1),
    settled_s=st.floats(0, 1000),
)
def test_any_decision_is_within_bounds_and_settled_inside_the_band(curve, limits, now, affordable, savings, settled_s):
    config = AutoscaleConfig(min_nodes=limits[0], max_nodes=limits[0] + limits[1])
    decision = decide_size(config, now, curve, max_affordable=affordable, savings=savings, settled_s=settled_s)
    assert config.min_nodes <= decision.num_nodes <= config.max_nodes
    assert affordable is None or decision.num_nodes <= max(affordable, config.min_nodes)
    low, high = band(config, savings)
    again = decide_size(
        config, decision.num_nodes, curve, max_affordable=affordable, savings=savings, settled_s=settled_s
    )
    if low <= decision.expected_utility <= high and not curve(decision.num_nodes).num_idle:
        assert again.num_nodes == decision.num_nodes
    # However often it is asked, it comes to rest: no two sizes send it to each other.
    seen = [decision.num_nodes, again.num_nodes]
    for _ in range(40):
        step = decide_size(config, seen[-1], curve, max_affordable=affordable, savings=savings, settled_s=math.inf)
        seen.append(step.num_nodes)
    assert seen[-1] == seen[-2]


def test_utility_is_one_for_single_replicas_and_counts_idle_slots():
    jobs = tuple(make_job(f"j{i}") for i in range(2))
    snapshot = Snapshot(now=0, nodes=make_nodes(1), jobs=jobs)
    plan = make_policy("equal").decide(snapshot)
    assert 0.3 < utility(snapshot, plan, GoodputTables()) < 1.0
    alone = {"j0": Allocation.of(("n0", 1)), "j1": Allocation.of(("n0", 1))}
    assert utility(snapshot, type(plan)(allocations=alone), GoodputTables()) == 0.5


# Money ----------------------------------------------------------------------------------------


def test_nobody_starts_with_savings():
    spending = Spending(16.0, 3600.0, min_slots=4)
    assert spending.affordable_slots() == 16.0
    spending.account(0.0, 60.0, 16)
    assert spending.affordable_slots() == pytest.approx(16.0)
    assert spending.savings == pytest.approx(0.0)


def test_what_is_saved_can_be_spent_and_is_gone_then():
    spending = Spending(16.0, 24 * 3600.0, min_slots=4)
    spending.account(0.0, 3600.0, 4)  # 12 slot-hours saved
    assert spending.affordable_slots() == pytest.approx(16 + 24)  # for half an hour
    assert spending.savings == 1.0
    spending.account(3600.0, 1.5 * 3600.0, 40)
    assert spending.affordable_slots() == pytest.approx(16.0)


def test_savings_do_not_outlive_the_window():
    spending = Spending(8.0, 3600.0, min_slots=4)
    spending.account(0.0, 3600.0, 4)
    rich = spending.affordable_slots()
    spending.account(3600.0, 100 * 3600.0, 4)
    assert spending.affordable_slots() == pytest.approx(rich)


def test_overspending_is_paid_back():
    spending = Spending(8.0, 3600.0, min_slots=4)
    spending.account(0.0, 600.0, 40)
    assert spending.affordable_slots() == 4.0
    spending.account(600.0, 3600.0 + 600.0, 4)
    assert spending.affordable_slots() > 8.0


@given(st.lists(st.tuples(st.integers(1, 900), st.floats(0, 1), st.integers(0, 60)), min_size=1, max_size=60))
def test_no_window_is_overspent_by_who_keeps_to_what_is_affordable(steps):
    """Whatever is asked for, as long as no more is up than was affordable when it was decided."""
    window_s, rate, least = 7200.0, 20.0, 4
    spending = Spending(rate, window_s, min_slots=least)
    pieces: list[tuple[float, float, float]] = [(-window_s, 0.0, rate)]
    now = 0.0
    for step_s, greed, most in steps:
        step_s = min(step_s, int(window_s / 48))  # decisions are more frequent than savings are planned for
        slots = max(least, min(most, math.floor(spending.affordable_slots() * greed + 1e-9)))
        spending.account(now, now + step_s, slots)
        pieces.append((now, now + step_s, slots))
        now += step_s
        opens = now - window_s
        used = sum(slots * (end - max(begin, opens)) for begin, end, slots in pieces if end > opens)
        assert used <= rate * window_s * (1 + 1e-9)


@pytest.mark.parametrize(
    "bad",
    [
        {"min_nodes": -1, "max_nodes": 2},
        {"min_nodes": 0, "max_nodes": 0},
        {"min_nodes": 3, "max_nodes": 2},
        {"min_nodes": 1, "max_nodes": 2, "low": 0.9},
        {"min_nodes": 1, "max_nodes": 2, "low": 0.0},
        {"min_nodes": 1, "max_nodes": 2, "budget_slots": -1.0},
        {"min_nodes": 1, "max_nodes": 2, "budget_slots": 4.0, "budget_window_s": 0.0},
        {"min_nodes": 1, "max_nodes": 2, "settle_s": -1.0},
    ],
)
def test_impossible_configurations_are_refused(bad):
    with pytest.raises(InvalidValueError):
        AutoscaleConfig(**bad)


def test_a_budget_must_pay_for_the_fewest_nodes():
    config = AutoscaleConfig(min_nodes=3, max_nodes=9, budget_slots=11.0)
    config.check_template(3)
    with pytest.raises(InvalidValueError, match=r"3 of 4 slots.*cost 12"):
        config.check_template(4)
