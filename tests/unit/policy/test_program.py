from __future__ import annotations

import itertools

import numpy as np
import pytest

from pollux.policy import program
from pollux.policy.program import NOTHING, solve_program


def total(values: np.ndarray, chosen: np.ndarray) -> float:
    return sum(values[job, option] for job, option in enumerate(chosen.tolist()) if option != NOTHING)


def random_program(rng: np.random.Generator, num_jobs: int, capacity: list[int]) -> tuple[np.ndarray, ...]:
    """Options of 1, 2, 4 slots of each type with falling returns; some are forbidden."""
    sizes = [1, 2, 4]
    needs = np.zeros((len(sizes) * len(capacity), len(capacity)), dtype=np.int64)
    for kind in range(len(capacity)):
        for number, size in enumerate(sizes):
            needs[kind * len(sizes) + number, kind] = size
    returns = needs.sum(axis=1) ** 0.6
    values = returns * rng.uniform(0.2, 1.0, size=(num_jobs, 1)) * rng.uniform(0.5, 1.0, size=(num_jobs, len(needs)))
    values[rng.random(values.shape) < 0.2] = -np.inf
    return values, needs, np.array(capacity, dtype=np.int64)


def best_by_trying_all(values: np.ndarray, needs: np.ndarray, capacity: np.ndarray) -> float:
    best = 0.0
    choices = [[NOTHING, *np.flatnonzero(row > 0).tolist()] for row in values]
    for chosen in itertools.product(*choices):
        picks = np.array(chosen)
        if (needs[picks[picks != NOTHING]].sum(axis=0) <= capacity).all():
            best = max(best, total(values, picks))
    return best


@pytest.mark.parametrize("seed", range(5))
def test_small_programs_are_solved_exactly(seed):
    values, needs, capacity = random_program(np.random.default_rng(seed), 4, [4, 3])
    chosen = solve_program(values, needs, capacity)
    assert total(values, chosen) == pytest.approx(best_by_trying_all(values, needs, capacity))


def test_with_enough_for_everybody_each_has_its_best():
    values, needs, capacity = random_program(np.random.default_rng(1), 5, [100, 100])
    assert solve_program(values, needs, capacity).tolist() == values.argmax(axis=1).tolist()


@pytest.mark.parametrize("capacity", [[20, 16, 24], [60], [7, 30, 11]])
def test_prices_come_near_to_the_exact_answer(monkeypatch, capacity):
    """Large programs go by prices; made to believe that this one is large, the answer must hardly be worse."""
    values, needs, limits = random_program(np.random.default_rng(2), 60, capacity)
    exact = total(values, solve_program(values, needs, limits))
    monkeypatch.setattr(program, "_MAX_STATES", 60)
    chosen = solve_program(values, needs, limits)
    assert (needs[chosen[chosen != NOTHING]].sum(axis=0) <= limits).all()
    assert 0.98 * exact <= total(values, chosen) <= exact + 1e-9


def test_nobody_and_nothing():
    needs = np.array([[1], [2]])
    assert solve_program(np.zeros((0, 2)), needs, np.array([4])).tolist() == []
    assert solve_program(np.full((2, 2), -np.inf), needs, np.array([4])).tolist() == [NOTHING, NOTHING]
    assert solve_program(np.ones((2, 2)), needs, np.array([0])).tolist() == [NOTHING, NOTHING]
