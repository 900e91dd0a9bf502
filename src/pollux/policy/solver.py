"""Finds the allocation of least cost, with a proof of how much better any other could be.

The Pollux policy calls it. Counts come from a knapsack, then a placement keeps jobs where they are if possible, then a
local search over pairs of nodes goes on while the distance to the bound is large. The solution is a fixed point: with
the solution as the current allocation, the solver stays. (If B beats A once A is in place, B beats A from the original
allocation too: moves away from A only get dearer and moves back to what was are no longer free. So any such
B replaces A before it is returned.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pollux.policy.knapsack import KnapsackSolution, solve_knapsack
from pollux.policy.placement import Placement, PlacementProblem, Shares, place
from pollux.policy.search import improve
from pollux.types import FloatArray, IntArray

# Average JCTs below: means over the OSDI'21 workloads 6, 1 and 3 in the artifact's configuration; 2,103 s as it is.

# Gain, in mean costs of a running job, below which jobs are not moved and nothing is searched for: 2,128 s with 0.01
# (more moves for little), 2,111 s with 0.02, 2,128 s with 0.1, 2,126 s with 0.2.
WORTH_IT = 0.05
MANY_JOBS = 400  # with more jobs a solution is not refined, and ``_NEAR_ENOUGH`` is enough: time counts more there
_NEAR_ENOUGH = 5e-3  # of the bound
_MAX_REFINEMENTS = 4  # times that a solution is solved again from its own result: 2,118 s with none, 1 is as good as 8
_SEARCH_ROUNDS = 20  # of local search at most; the search mostly ends by itself within 5


@dataclass(frozen=True, slots=True)
class Solution:
    shares: list[Shares]
    cost: float
    lower_bound: float
    method: str


def solve(
    problem: PlacementProblem,
    rng: np.random.Generator,
    knapsack: KnapsackSolution | None = None,
    near_enough: float = 0.0,
) -> Solution:
    """The best allocation found and a bound on all of them. ``knapsack``: how many replicas for each, if known.

    ``near_enough``: a gain of this part of the cost is not worth searching for.
    """
    costs = problem.count_costs()
    knapsack = knapsack or solve_knapsack(costs, int(problem.capacity.sum()))
    bound = knapsack.lower_bound
    tolerance = _tolerance(problem, costs, knapsack.counts)
    best = place(problem, knapsack.counts)
    method = "knapsack" if knapsack.is_exact else "price"
    slack = max(tolerance, (near_enough if problem.num_jobs <= MANY_JOBS else _NEAR_ENOUGH) * abs(bound))
    if best.total_cost - bound > slack:
        method += "+search"
        wanted = costs[np.arange(len(knapsack.counts)), knapsack.counts]
        best = _search(problem, best, bound + slack, rng, wanted)
        for _ in range(_MAX_REFINEMENTS if problem.num_jobs <= MANY_JOBS else 0):
            if best.shares == problem.current:
                break
            settled = problem.after(best.copy_shares())
            again = solve_knapsack(settled.count_costs(), int(problem.capacity.sum()))
            rival = _search(settled, place(settled, again.counts), again.lower_bound + slack, rng, is_refined=True)
            if not _is_better(rival.total_cost, float(settled.keep_cost.sum())):
                break
            moved = _as_placement(problem, rival.shares)
            if not _is_better(moved.total_cost, best.total_cost):
                break
            best = moved
    stay = float(problem.keep_cost.sum())
    if stay <= best.total_cost + tolerance:
        best, method = _where_they_are(problem), "stay"
    return Solution(best.shares, best.total_cost, min(bound, best.total_cost), method)


def _tolerance(problem: PlacementProblem, costs: FloatArray, counts: IntArray) -> float:
    """A gain that is not worth a move: a share of what a running job costs on average.

    Jobs that have to wait cost hundreds of times more and would make everything else look like nothing.
    """
    running = np.flatnonzero(counts > 0)
    return WORTH_IT * float(np.abs(costs[running, counts[running]]).mean()) if running.size else 0.0


def _search(
    problem: PlacementProblem,
    first: Placement,
    target: float,
    rng: np.random.Generator,
    wanted: FloatArray | None = None,
    is_refined: bool = False,
) -> Placement:
    """A local optimum of cost ``target`` or less, or the best of four.

    They start from ``first``, from whole nodes for spanning jobs, the same with large jobs displacing small
    ones, and from where jobs are. With many jobs the better one of the first two is improved, and no other; where the
    jobs sit as a search has left them (``is_refined``) the best one: that is nearly always to stay.
    """
    slots_per_node = int(problem.capacity.max())
    whole = solve_knapsack(problem.count_costs(slots_per_node), int(problem.capacity.sum()))
    starts = [place(problem, whole.counts), first]
    has_few = problem.num_jobs <= MANY_JOBS
    if has_few:
        stay = [_where_they_are(problem)] if np.isfinite(problem.keep_cost).all() else []
        displaced = [] if is_refined else [place(problem, whole.counts, displaces=True)]
        starts = [*stay, starts[0], *displaced, first]
    starts.sort(key=lambda start: start.total_cost)
    best = starts[0]
    tried: list[list[Shares]] = []
    for start in starts if has_few and not is_refined else starts[:1]:
        if start.shares in tried:
            continue
        tried.append(start.copy_shares())
        improve(start, rng, target=target, max_rounds=_SEARCH_ROUNDS, wanted=wanted)
        if start.total_cost < best.total_cost:
            best = start
        if best.total_cost <= target:
            break
    return best


def _where_they_are(problem: PlacementProblem) -> Placement:
    placement = Placement(problem)
    placement.keep(range(problem.num_jobs))
    return placement


def _as_placement(problem: PlacementProblem, shares: Sequence[Shares]) -> Placement:
    placement = Placement(problem)
    for job, held in enumerate(shares):
        if held:
            placement.assign(job, dict(held))
    return placement


def _is_better(cost: float, than: float) -> bool:
    return cost < than - 1e-9 * max(1.0, abs(than))
