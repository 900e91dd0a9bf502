"""Several accelerator types: chooses a type for each job, then solves each type on its own.

The Pollux policy calls it. Prices (:mod:`pollux.policy.market`) bound what is possible and order the jobs: those that
would lose most on another type choose first. Once every job has a type, the types are independent, and
:func:`~pollux.policy.solver.solve` does the rest. With few jobs prices are inexact, so jobs that would gain on another
type are then tried there one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pollux.policy.knapsack import KnapsackSolution, solve_knapsack
from pollux.policy.market import WARM_EVALUATIONS, Market, Response
from pollux.policy.placement import PlacementProblem, Shares
from pollux.policy.solver import MANY_JOBS, WORTH_IT, Solution, solve
from pollux.types import FloatArray, IntArray

# These trade the time of a decision for cost. On Sia's Philly workload (64 GPUs of three types) other values give
# average JCTs from 1,642 to 1,692 s, in no order; the chosen ones give 1,689 s. So results hardly depend on them.
_FEW_JOBS = 200  # up to so many jobs, changes of type are tried one by one: with more, prices are exact enough
_MAX_TRIES = 12  # changes of type that are tried; each solves two knapsacks
_SMALL_GAP = 0.01  # of the bound; a plan nearer to it is not improved by changes of type
# Of the bound; a plan nearer to it is not searched node by node. The fitness lost is below this by proof.
_NEAR_ENOUGH = 0.005
_MAX_REFINEMENTS = 3  # times that a plan is solved again from its own result; mostly the first one changes nothing
_FEW_EVALUATIONS = 5  # of prices during refinement: they were right a moment ago


@dataclass(frozen=True, slots=True)
class MixedSolution:
    solution: Solution  # with node indices of ``nodes``
    memory: Memory  # for the next round


@dataclass(frozen=True, slots=True)
class Memory:
    """What one round leaves to the next."""

    prices: FloatArray  # nearly right
    gap: float  # cost over the bound that could not be closed, and need not be tried again


def solve_mixed(
    problems: Sequence[PlacementProblem],
    nodes: Sequence[Sequence[int]],
    memory: Memory | None,
    rng: np.random.Generator,
) -> MixedSolution:
    """The best allocation found over all types and a bound on all of them.

    ``problems``: one for each type, with the same jobs; ``nodes``: what their nodes are called in the answer;
    ``memory``: of the last round, if it was one with these types.
    """
    found, memory, bound = _solve_once(problems, memory, rng)
    for _ in range(_MAX_REFINEMENTS if problems[0].num_jobs <= MANY_JOBS else 0):
        # As in the solver of one type: a change that the next round would make is made now, if it is better.
        if found.is_final:
            break
        settled = [problem.after(found.shares_on(kind, problem.num_jobs)) for kind, problem in enumerate(problems)]
        again, memory, _ = _solve_once(settled, memory, rng, evaluations=_FEW_EVALUATIONS)
        if again.is_stay:
            break
        rival = _Assigned(again.kinds, again.parts, _cost(problems, again))
        if not rival.cost < found.cost - 1e-9 * max(1.0, abs(found.cost)):
            break
        found = rival
    shares: list[Shares] = [{} for _ in range(problems[0].num_jobs)]
    for kind, members in enumerate(nodes):
        for job, held in enumerate(found.shares_on(kind, len(shares))):
            if held:
                shares[job] = {members[node]: count for node, count in held.items()}
    method = "stay" if found.is_stay else "prices"
    return MixedSolution(Solution(shares, found.cost, min(bound, found.cost), method), memory)


@dataclass(frozen=True, slots=True)
class _Assigned:
    """Jobs on types, and where they sit there."""

    kinds: IntArray  # (num_jobs,)
    parts: Sequence[Sequence[Shares]]  # per type, per job of that type in order
    cost: float
    is_stay: bool = False
    is_near: bool = False  # so near the bound that nothing else could be worth a move

    @property
    def is_final(self) -> bool:
        return self.is_stay or self.is_near

    def shares_on(self, kind: int, num_jobs: int) -> list[Shares]:
        shares: list[Shares] = [{} for _ in range(num_jobs)]
        for job, held in zip(np.flatnonzero(self.kinds == kind).tolist(), self.parts[kind], strict=True):
            shares[job] = dict(held)
        return shares


def _solve_once(
    problems: Sequence[PlacementProblem],
    memory: Memory | None,
    rng: np.random.Generator,
    evaluations: int = WARM_EVALUATIONS,
) -> tuple[_Assigned, Memory, float]:
    home = homes(problems)
    costs = [problem.count_costs() for problem in problems]
    fixed = problems[0].is_fixed
    for kind, table in enumerate(costs):
        # A job that must not be moved cannot go to another type, nor be idle.
        table[fixed & (home != kind), 1:] = np.inf
        if kind:
            table[:, 0] = np.where(home == 0, costs[0][:, 0], table[:, 0])
    idle = np.where(fixed & (home >= 0), np.inf, np.minimum.reduce([table[:, 0] for table in costs]))
    for table in costs:
        table[:, 0] = idle
    capacity = [int(problem.capacity.sum()) for problem in problems]
    market = Market(costs, capacity)
    prices, response = market.clear(memory.prices if memory else None, evaluations)
    bound = response.bound
    keep = keep_costs(problems, home)
    stay_cost = float(keep.sum())
    held = np.abs(keep[home >= 0])
    unclosed = min(memory.gap, _SMALL_GAP * abs(bound)) if memory else 0.0
    may_stay = np.isfinite(stay_cost)  # every job may keep what it holds
    if may_stay and stay_cost - bound <= unclosed + WORTH_IT * (float(held.mean()) if held.size else 0.0):
        return _stay(problems, home, stay_cost), Memory(prices, unclosed), bound  # nothing could be worth a move

    kinds = _by_regret(market, response, home, keeps_home=True)
    knapsacks, cost = _count(costs, capacity, kinds)
    tolerance = _tolerance(costs, kinds, knapsacks)
    if cost - bound > tolerance:
        free = _by_regret(market, response, home, keeps_home=False)
        rivals, rival = _count(costs, capacity, free)
        if rival < cost - tolerance:
            kinds, knapsacks, cost = free, rivals, rival
    if len(home) <= _FEW_JOBS and cost - bound > _SMALL_GAP * abs(bound):
        kinds, knapsacks, cost = _change_sides(costs, capacity, kinds, knapsacks, cost, bound, tolerance, fixed)

    parts = []
    total = 0.0
    for kind, problem in enumerate(problems):
        rows = np.flatnonzero(kinds == kind)
        part = solve(problem.of_jobs(rows), rng, knapsacks[kind], _NEAR_ENOUGH)
        parts.append(part.shares)
        total += part.cost
    found = _Assigned(kinds, parts, total, is_near=total - bound <= max(tolerance, _NEAR_ENOUGH * abs(bound)))
    if stay_cost <= total + tolerance:
        return _stay(problems, home, stay_cost), Memory(prices, stay_cost - bound), bound
    return found, Memory(prices, total - bound), bound


def homes(problems: Sequence[PlacementProblem]) -> IntArray:
    """(num_jobs,) the type each job sits on, -1: none."""
    home = np.full(problems[0].num_jobs, -1)
    for kind, problem in enumerate(problems):
        home[[bool(shares) for shares in problem.current]] = kind
    return home


def keep_costs(problems: Sequence[PlacementProblem], home: IntArray) -> FloatArray:
    """(num_jobs,) costs if every job keeps what it holds. ``home``: see :func:`homes`."""
    keep = problems[0].keep_cost.copy()
    for kind, problem in enumerate(problems):
        keep[home == kind] = problem.keep_cost[home == kind]
    return keep


def _by_regret(market: Market, response: Response, home: IntArray, *, keeps_home: bool) -> IntArray:
    """(num_jobs,) a type for every job. Jobs that would lose most on another type choose first, while there is room.

    ``keeps_home``: running jobs stay on their type.
    """
    values, counts = response.values, response.best_counts
    ranked = np.sort(values, axis=1)
    with np.errstate(invalid="ignore"):
        regret = np.nan_to_num(ranked[:, 1] - ranked[:, 0], nan=0.0, posinf=np.inf)
    kinds = np.full(len(home), -1)
    left = market.capacity.copy()
    if keeps_home:
        kinds[home >= 0] = home[home >= 0]
        np.subtract.at(left, kinds[home >= 0], counts[home >= 0, home[home >= 0]])
    # Jobs for which waiting is cheaper come last: they take what is left.
    order = np.lexsort((-regret, response.kinds < 0))
    order = order[kinds[order] < 0]
    ways = np.argsort(values[order], axis=1, kind="stable").tolist()
    room = left.tolist()
    vacant = [int(slots) - int((kinds == kind).sum()) for kind, slots in enumerate(market.capacity)]
    is_open, wanted = np.isfinite(values[order]).tolist(), counts[order].tolist()
    for job, own, way, opens in zip(order.tolist(), wanted, ways, is_open, strict=True):
        likes = [kind for kind in way if opens[kind]] or way[:1]
        chosen = next((kind for kind in likes if own[kind] <= room[kind]), None)
        if chosen is None:  # no type has enough for it: one with free slots, else the one with the fewest jobs
            chosen = next((kind for kind in likes if room[kind] >= 1), None)
        if chosen is None:
            chosen = max(likes, key=vacant.__getitem__)
        kinds[job] = chosen
        vacant[chosen] -= 1
        room[chosen] -= min(own[chosen], room[chosen])
    return kinds


def _count(
    costs: Sequence[FloatArray], capacity: Sequence[int], kinds: IntArray
) -> tuple[list[KnapsackSolution], float]:
    """How many slots each job gets on its type, and the cost before jobs are placed on nodes."""
    knapsacks = []
    total = 0.0
    for kind, table in enumerate(costs):
        rows = np.flatnonzero(kinds == kind)
        found = solve_knapsack(table[rows], capacity[kind])
        knapsacks.append(found)
        total += float(table[rows, found.counts].sum())
    return knapsacks, total


def _change_sides(
    costs: Sequence[FloatArray],
    capacity: Sequence[int],
    kinds: IntArray,
    knapsacks: list[KnapsackSolution],
    cost: float,
    bound: float,
    tolerance: float,
    fixed: np.typing.NDArray[np.bool_],
) -> tuple[IntArray, list[KnapsackSolution], float]:
    """Move jobs to another type one at a time while that lowers the cost; the most promising are tried."""
    refused: set[tuple[int, int]] = set()
    for _ in range(_MAX_TRIES):
        if cost - bound <= _SMALL_GAP * abs(bound):
            break
        promise = _promises(costs, kinds, knapsacks)
        promise[fixed] = -np.inf
        for job, kind in refused:
            promise[job, kind] = -np.inf
        job, kind = (int(index) for index in np.unravel_index(int(promise.argmax()), promise.shape))
        if not promise[job, kind] > tolerance:
            break
        tried = kinds.copy()
        tried[job] = kind
        both = list(knapsacks)
        rival = cost
        for side in (int(kinds[job]), kind):
            before = np.flatnonzero(kinds == side)
            after = np.flatnonzero(tried == side)
            both[side] = solve_knapsack(costs[side][after], capacity[side])
            rival += float(costs[side][after, both[side].counts].sum())
            rival -= float(costs[side][before, knapsacks[side].counts].sum())
        if rival < cost - tolerance:
            kinds, knapsacks, cost = tried, both, rival
            refused.clear()
        else:
            refused.add((job, kind))
    return kinds, knapsacks, cost


def _promises(costs: Sequence[FloatArray], kinds: IntArray, knapsacks: Sequence[KnapsackSolution]) -> FloatArray:
    """(num_jobs, num_types) what a job would save by going there, slots being worth what they are at the margin."""
    now = np.empty(len(kinds))
    there = np.empty((len(kinds), len(costs)))
    for kind, (table, knapsack) in enumerate(zip(costs, knapsacks, strict=True)):
        rows = np.flatnonzero(kinds == kind)
        now[rows] = table[rows, knapsack.counts] + knapsack.price * knapsack.counts
        there[:, kind] = (table + knapsack.price * np.arange(table.shape[1])).min(axis=1)
    promise: FloatArray = now[:, None] - there
    promise[np.arange(len(kinds)), kinds] = -np.inf
    return promise


def _tolerance(costs: Sequence[FloatArray], kinds: IntArray, knapsacks: Sequence[KnapsackSolution]) -> float:
    """A gain that is not worth a move, as in the solver of one type."""
    paid = []
    for kind, (table, knapsack) in enumerate(zip(costs, knapsacks, strict=True)):
        rows = np.flatnonzero(kinds == kind)
        if len(rows) != len(knapsack.counts):
            continue
        running = knapsack.counts > 0
        paid.append(np.abs(table[rows[running], knapsack.counts[running]]))
    joined = np.concatenate(paid) if paid else np.zeros(0)
    return WORTH_IT * float(joined.mean()) if joined.size else 0.0


def _stay(problems: Sequence[PlacementProblem], home: IntArray, cost: float) -> _Assigned:
    kinds = np.where(home < 0, 0, home)
    parts = [
        [problem.current[row] for row in np.flatnonzero(kinds == kind).tolist()]
        for kind, problem in enumerate(problems)
    ]
    return _Assigned(kinds, parts, cost, is_stay=True)


def _cost(problems: Sequence[PlacementProblem], found: _Assigned) -> float:
    total = 0.0
    for kind, problem in enumerate(problems):
        for job, shares in zip(np.flatnonzero(found.kinds == kind).tolist(), found.parts[kind], strict=True):
            total += problem.cost_of(job, shares)
    return total
