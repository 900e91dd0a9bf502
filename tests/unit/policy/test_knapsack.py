from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.policy import knapsack
from pollux.policy.knapsack import solve_knapsack


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    num_jobs, num_options = draw(st.integers(1, 4)), draw(st.integers(2, 5))
    value = st.floats(-10, 100) | st.just(np.inf)
    costs = np.array(
        draw(
            st.lists(st.lists(value, min_size=num_options, max_size=num_options), min_size=num_jobs, max_size=num_jobs)
        )
    )
    costs[:, 0] = np.where(np.isfinite(costs[:, 0]), costs[:, 0], 50.0)  # nobody must take anything
    return costs, draw(st.integers(0, 8))


def by_trying_everything(costs: np.ndarray, capacity: int) -> float:
    rows = range(len(costs))
    return min(
        sum(costs[row, option] for row, option in zip(rows, options, strict=True))
        for options in itertools.product(range(costs.shape[1]), repeat=len(costs))
        if sum(options) <= capacity
    )


@given(problems())
def test_dynamic_programming_is_exact(problem):
    costs, capacity = problem
    solution = solve_knapsack(costs, capacity)
    chosen = costs[np.arange(len(costs)), solution.counts].sum()
    assert solution.is_exact
    assert solution.counts.sum() <= capacity
    assert chosen == pytest.approx(by_trying_everything(costs, capacity))
    assert solution.lower_bound == pytest.approx(chosen)


@given(problems())
def test_prices_give_a_bound_and_a_feasible_choice(problem):
    costs, capacity = problem
    solution = knapsack._solve_by_price(costs, capacity)
    best = by_trying_everything(costs, capacity)
    chosen = costs[np.arange(len(costs)), solution.counts].sum()
    assert solution.counts.sum() <= capacity
    assert solution.lower_bound <= best + 1e-6 * max(1.0, abs(best))
    assert chosen >= best - 1e-6 * max(1.0, abs(best))


def test_prices_are_tight_where_there_are_many_jobs():
    rng = np.random.default_rng(0)
    speed = np.cumsum(rng.uniform(0.2, 1.0, (400, 17)) * 0.9 ** np.arange(17), axis=1)
    costs = 1.0 / (speed + 0.01)
    exact = knapsack._solve_exactly(costs, 700)
    priced = knapsack._solve_by_price(costs, 700)
    chosen = costs[np.arange(400), priced.counts].sum()
    assert priced.lower_bound <= exact.lower_bound + 1e-9
    assert chosen <= exact.lower_bound * 1.001
    assert priced.lower_bound >= exact.lower_bound * 0.999


def test_no_jobs():
    assert solve_knapsack(np.zeros((0, 5)), 10).counts.size == 0
