"""The obvious solver: try every allocation of every job. For a handful of jobs on a few slots."""

from __future__ import annotations

import itertools
import math

from pollux.policy.placement import PlacementProblem, Shares


def least_cost(problem: PlacementProblem) -> float:
    """The cost of the best feasible allocation."""
    rows: list[list[tuple[Shares, float]]] = []
    for job in range(problem.num_jobs):
        options = []
        for counts in itertools.product(*(range(int(slots) + 1) for slots in problem.capacity)):
            shares = {node: count for node, count in enumerate(counts) if count}
            cost = problem.cost_of(job, shares)
            if math.isfinite(cost):
                options.append((shares, cost))
        rows.append(options)
    free = [int(slots) for slots in problem.capacity]
    spans = [0] * problem.num_nodes
    cheapest_rest = [0.0] * (problem.num_jobs + 1)
    for job in range(problem.num_jobs - 1, -1, -1):
        cheapest_rest[job] = cheapest_rest[job + 1] + min(cost for _, cost in rows[job])
    best = math.inf

    def visit(job: int, cost: float) -> None:
        nonlocal best
        if cost + cheapest_rest[job] >= best:
            return
        if job == problem.num_jobs:
            best = cost
            return
        for shares, own in rows[job]:
            spanning = len(shares) > 1
            if any(count > free[node] for node, count in shares.items()):
                continue
            if spanning and problem.exclusive_spans and any(spans[node] for node in shares):
                continue
            for node, count in shares.items():
                free[node] -= count
                spans[node] += spanning
            visit(job + 1, cost + own)
            for node, count in shares.items():
                free[node] += count
                spans[node] -= spanning

    visit(0, 0.0)
    return best
