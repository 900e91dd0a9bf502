"""Divides slots among jobs that have more: shrinks before it stops. :mod:`pollux.scheduler.quotas` calls it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from pollux.types import Allocation, NodeShare


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a job has in a plan. ``order``: smaller is kept longer; a bound job is kept as it is."""

    job: str
    count: int
    least: int
    is_bound: bool
    order: tuple[int, bool, int]
    weight: float = 1.0


def allot(demands: Sequence[Demand], budget: int) -> dict[str, int]:
    """Slots for each job, together no more than ``budget`` (bound jobs aside), each no more than it has.

    Every job keeps its least number, in order; those for which that is too much get nothing. What is left goes one by
    one to the job that has least for its weight.
    """
    given: dict[str, int] = {}
    for demand in sorted(demands, key=lambda one: (not one.is_bound, one.order)):
        keeps = demand.is_bound or demand.least <= budget
        given[demand.job] = demand.least if keeps and demand.count else 0
        budget -= given[demand.job]
    growing = [(given[one.job] / one.weight, one.order, one) for one in demands if 0 < given[one.job] < one.count]
    heap = [(level, order, index) for index, (level, order, _) in enumerate(growing)]
    heapq.heapify(heap)
    while heap and budget > 0:
        _, order, index = heapq.heappop(heap)
        demand = growing[index][2]
        given[demand.job] += 1
        budget -= 1
        if given[demand.job] < demand.count:
            heapq.heappush(heap, (given[demand.job] / demand.weight, order, index))
    return given


def first_of(allocation: Allocation, count: int) -> Allocation:
    """The first ``count`` replicas, so that those that stay keep their rank."""
    shares = []
    for node, num_replicas in allocation.shares:
        if count > 0:
            shares.append(NodeShare(node, min(num_replicas, count)))
        count -= num_replicas
    return Allocation(tuple(shares))
