"""How many replicas each job should get, and a bound on how good any allocation can be. The solvers call it.

Forgetting where replicas sit leaves a multiple-choice knapsack: per job one option (a replica count)
with a cost, at most ``capacity`` replicas together, least total cost. Every allocation of the real
problem is one of its answers, so its least cost bounds the real one from below.

Small problems are solved exactly by dynamic programming; large ones by Lagrange's multiplier on the
capacity, whose dual value is the bound (at most one job's worth of slots from exact) and whose minimisers,
topped up greedily, are the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pollux.types import FloatArray, IntArray

_EXACT_LIMIT = 1_000_000  # table cells x options up to which dynamic programming is faster than prices
_ROUNDING = 64 * float(np.finfo(float).eps)  # relative, of a sum of many numbers
_CROSSINGS = 40  # prices of the first kind that are tried: mostly ten are enough
_BESIDE = 4e-13  # of the best price: where answers on either side of it are looked for
_DUAL_STEPS = 60  # halvings of the price's interval: all that a double's mantissa has, and a few to spare


@dataclass(frozen=True, slots=True)
class KnapsackSolution:
    counts: IntArray  # (num_jobs,) replicas
    lower_bound: float  # no feasible choice costs less
    is_exact: bool
    price: float  # what one more slot would save, at the margin


def solve_knapsack(costs: FloatArray, capacity: int) -> KnapsackSolution:
    """Choose one column per row of ``costs`` (num_jobs, max_count + 1) with columns adding up to <= capacity.

    Infinite entries are forbidden; each row's least finite column must fit together with the others'.
    """
    num_jobs, num_options = costs.shape
    if num_jobs == 0:
        return KnapsackSolution(np.zeros(0, dtype=np.int64), 0.0, True, 0.0)
    if num_jobs * (capacity + 1) * num_options <= _EXACT_LIMIT:
        return _solve_exactly(costs, capacity)
    return _solve_by_price(costs, capacity)


def dual_bound(paid: FloatArray, worth: float) -> float:
    """What jobs pay at some prices less what all slots are worth: no allocation costs less, whatever the prices.

    Jobs that wait can cost so much that the two nearly cancel; what rounding may have added is taken off.
    """
    return float(paid.sum()) - worth - _ROUNDING * (float(np.abs(paid).sum()) + worth)


def _solve_exactly(costs: FloatArray, capacity: int) -> KnapsackSolution:
    num_jobs, num_options = costs.shape
    if num_options > capacity + 1:
        costs, num_options = costs[:, : capacity + 1], capacity + 1
    # best[c]: least cost of the jobs so far with c slots; padded in front so that a shift is a slice.
    padded = np.full(capacity + num_options, np.inf)
    padded[num_options - 1 :] = 0.0
    windows = np.lib.stride_tricks.sliding_window_view(padded, capacity + 1)[::-1]  # [r, c] -> best[c - r]
    choices = np.empty((num_jobs, capacity + 1), dtype=np.int16 if num_options < 2**15 else np.int64)
    columns = np.arange(capacity + 1)
    for job in range(num_jobs):
        row = costs[job]
        options = np.flatnonzero(np.isfinite(row))
        candidates = windows[options] + row[options, None]  # (num_finite, capacity + 1)
        pick = candidates.argmin(axis=0)
        choices[job] = options[pick]
        padded[num_options - 1 :] = candidates[pick, columns]
    best = padded[num_options - 1 :]
    counts = np.zeros(num_jobs, dtype=np.int64)
    left = capacity
    for job in range(num_jobs - 1, -1, -1):
        counts[job] = choices[job, left]
        left -= int(counts[job])
    price = float(best[capacity - 1] - best[capacity]) if capacity >= 1 else 0.0
    return KnapsackSolution(counts, float(best[capacity]), True, price if np.isfinite(price) else 0.0)


def _solve_by_price(costs: FloatArray, capacity: int) -> KnapsackSolution:
    num_jobs, num_options = costs.shape
    rows = np.arange(num_jobs)
    sizes = np.arange(num_options, dtype=float)

    def respond(price: float, least: IntArray | None = None, most: IntArray | None = None) -> tuple[IntArray, float]:
        """What jobs take at this price, and a bound. ``least`` and ``most``: what they take at a higher and a lower."""
        if least is None or most is None:
            priced = costs + price * sizes
            counts = priced.argmin(axis=1)
            return counts, dual_bound(priced[rows, counts], price * capacity)
        counts = least.copy()
        open_rows = np.flatnonzero(most > least)  # the others take the same at all prices in between
        first, end = int(least[open_rows].min()), int(most[open_rows].max()) + 1
        counts[open_rows] = first + (costs[open_rows, first:end] + price * sizes[first:end]).argmin(axis=1)
        return counts, dual_bound(costs[rows, counts] + price * sizes[counts], price * capacity)

    generous, bound = respond(0.0)
    if generous.sum() <= capacity:
        return KnapsackSolution(generous, bound, True, 0.0)
    with np.errstate(invalid="ignore"):
        spread = np.where(np.isfinite(costs), costs, -np.inf).max() - costs.min()
    low, high = 0.0, float(spread) + 1.0
    frugal, value = respond(high)
    while frugal.sum() > capacity and high < 1e300:
        high *= 2.0
        frugal, value = respond(high)
    bound = max(bound, value)

    def ask(price: float) -> None:
        nonlocal bound, low, high, generous, frugal
        counts, value = respond(price, frugal, generous)
        bound = max(bound, value)
        if counts.sum() > capacity:
            low, generous = price, counts
        else:
            high, frugal = price, counts

    # At the price at which both answers are worth the same, a third is better than both, or this is the best price.
    for _ in range(_CROSSINGS):
        least, most = float(costs[rows, frugal].sum()), float(costs[rows, generous].sum())
        price = (least - most) / float(generous.sum() - frugal.sum())
        if not low < price < high:
            break
        worth = least + price * float(frugal.sum())
        counts, value = respond(price, frugal, generous)
        bound = max(bound, value)
        if float((costs[rows, counts] + price * sizes[counts]).sum()) >= worth - _ROUNDING * abs(worth):
            for beside in (price * (1 - _BESIDE), price * (1 + _BESIDE)):
                if low < beside < high:
                    ask(beside)
            break
        if counts.sum() > capacity:
            low, generous = price, counts
        else:
            high, frugal = price, counts
    for _ in range(_DUAL_STEPS):
        if high - low <= 1e-12 * high or np.array_equal(generous, frugal):
            break
        ask((low + high) / 2 if low == 0.0 or high / low < 4.0 else (low * high) ** 0.5)
    # Between the last price that asks too much and the first that does not: take what still fits.
    counts = frugal.copy()
    left = capacity - int(counts.sum())
    wants = np.flatnonzero(generous > frugal)
    saved = costs[wants, frugal[wants]] - costs[wants, generous[wants]]
    extra = generous[wants] - frugal[wants]
    for index in np.argsort(-saved / extra, kind="stable"):
        if extra[index] <= left:
            counts[wants[index]] = generous[wants[index]]
            left -= int(extra[index])
    return KnapsackSolution(counts, bound, False, high)
