"""Turns replica counts into an allocation: which replicas sit on which nodes. The solver calls it.

Works on indices (job 0.., node 0..) and costs; the policy translates. A job's cost depends on its own
allocation only: on its replica count, on whether it spans nodes, and on whether it is exactly what the job holds now
(moving is dearer than staying). Jobs meet in the nodes' capacity, and in the rule that at most one job that spans nodes
may touch a node.

:func:`place` builds an allocation that keeps what need not move; :mod:`pollux.policy.search` improves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from pollux.types import FloatArray, IntArray

Shares = dict[int, int]  # node -> replicas of one job there


class SettledCosts:
    """Costs of what jobs hold already, as a table (num_jobs, 2, max_count + 1) that is computed where it is read."""

    def __init__(
        self, speedups: FloatArray, rows: IntArray, cost: Callable[[FloatArray, IntArray], FloatArray]
    ) -> None:
        """``cost``: of speedups, and of which jobs they are; ``rows``: the jobs of this table."""
        self._speedups, self._rows, self._cost = speedups, rows, cost

    def at(self, jobs: IntArray, spans: IntArray, counts: IntArray) -> FloatArray:
        rows = self._rows[jobs]
        return self._cost(self._speedups[rows, spans, counts], rows)

    def of_jobs(self, rows: IntArray) -> SettledCosts:
        return SettledCosts(self._speedups, self._rows[rows], self._cost)


@dataclass(frozen=True, slots=True)
class PlacementProblem:
    """Jobs, nodes and what every allocation would cost."""

    capacity: IntArray  # (num_nodes,) slots
    settled_cost: SettledCosts  # (num_jobs, 2, max_count + 1): [on one node, spanning], for what a job holds already
    moved_cost: FloatArray  # the same for what it would have to move to; inf: forbidden; [:, :, 0]: idle
    current: Sequence[Shares]  # per job, what it holds now
    is_fixed: npt.NDArray[np.bool_]  # (num_jobs,) must keep exactly what it holds
    exclusive_spans: bool = True  # at most one spanning job per node
    must_change: npt.NDArray[np.bool_] | None = None  # (num_jobs,) may not keep what it holds; None: all may
    keep_cost: FloatArray = field(init=False)  # (num_jobs,) of exactly the current allocation
    held_counts: IntArray = field(init=False)  # (num_jobs,) replicas of the current allocation

    def __post_init__(self) -> None:
        spans = np.array([len(shares) > 1 for shares in self.current], dtype=np.int64)
        counts = np.array([sum(shares.values()) for shares in self.current], dtype=np.int64)
        object.__setattr__(self, "held_counts", counts)
        keep_cost = self.settled_cost.at(np.arange(len(counts)), spans, counts)
        if self.must_change is not None:
            keep_cost[self.must_change & (counts > 0)] = np.inf
        object.__setattr__(self, "keep_cost", keep_cost)

    def after(self, current: Sequence[Shares]) -> PlacementProblem:
        """The same problem once ``current``, a solution of it, is in place."""
        return replace(self, current=current, must_change=None)

    def of_jobs(self, rows: IntArray) -> PlacementProblem:
        """The same problem for some of the jobs."""
        return replace(
            self,
            settled_cost=self.settled_cost.of_jobs(rows),
            moved_cost=self.moved_cost[rows],
            current=[self.current[row] for row in rows.tolist()],
            is_fixed=self.is_fixed[rows],
            must_change=None if self.must_change is None else self.must_change[rows],
        )

    @property
    def num_jobs(self) -> int:
        return len(self.current)

    @property
    def num_nodes(self) -> int:
        return len(self.capacity)

    @property
    def max_count(self) -> int:
        return int(self.moved_cost.shape[2]) - 1

    def count_costs(self, whole_nodes_from: int | None = None) -> FloatArray:
        """(num_jobs, max_count + 1): the least any placement of that many replicas could cost.

        With ``whole_nodes_from`` = g, jobs may span nodes with multiples of g replicas only: dearer
        on paper, but always placeable, since spanning jobs then never meet on a node.
        """
        spanning = self.moved_cost[:, 1]
        if whole_nodes_from is not None:
            is_whole = np.arange(self.max_count + 1) % whole_nodes_from == 0
            spanning = np.where(is_whole, spanning, np.inf)
        costs = np.minimum(self.moved_cost[:, 0], spanning)
        costs[self.is_fixed] = np.inf
        jobs, counts = np.arange(self.num_jobs), self.held_counts
        costs[jobs, counts] = np.minimum(costs[jobs, counts], self.keep_cost)
        return costs

    def idle_costs(self) -> FloatArray:
        """(num_jobs,): :meth:`cost_of` of nothing."""
        is_idle = self.held_counts == 0
        moved = np.where(self.is_fixed, np.inf, self.moved_cost[:, 0, 0])
        found: FloatArray = np.where(is_idle, self.keep_cost, moved)
        return found

    def cost_of(self, job: int, shares: Shares) -> float:
        if shares == self.current[job]:
            return float(self.keep_cost[job])
        count = sum(shares.values())
        if self.is_fixed[job] or count > self.max_count:
            return math.inf
        return float(self.moved_cost[job, int(len(shares) > 1), count])


@dataclass
class Placement:
    """A mutable allocation of all jobs, with its free slots, costs and spanning jobs kept up to date."""

    problem: PlacementProblem
    shares: list[Shares] = field(init=False)
    cost: FloatArray = field(init=False)  # (num_jobs,)
    free: list[int] = field(init=False)
    count: IntArray = field(init=False)  # (num_jobs,) replicas
    num_held: IntArray = field(init=False)  # (num_jobs,) nodes
    residents: list[set[int]] = field(init=False)  # per node, the jobs on it
    spanners: list[int] = field(init=False)  # per node, how many spanning jobs touch it
    changes: list[int] = field(init=False)  # per node, how often it was changed
    _by_share: dict[int, dict[int, FloatArray]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        problem = self.problem
        self.shares = [{} for _ in range(problem.num_jobs)]
        self.cost = problem.idle_costs()
        self.free = [int(slots) for slots in problem.capacity]
        self.count = np.zeros(problem.num_jobs, dtype=np.int64)
        self.num_held = np.zeros(problem.num_jobs, dtype=np.int64)
        self.residents = [set() for _ in range(problem.num_nodes)]
        self.spanners = [0] * problem.num_nodes
        self.changes = [0] * problem.num_nodes

    @property
    def total_cost(self) -> float:
        return float(self.cost.sum())

    def assign(self, job: int, shares: Shares) -> None:
        old = self.shares[job]
        spanned, spans = len(old) > 1, len(shares) > 1
        for node, count in old.items():
            self.free[node] += count
            self.residents[node].discard(job)
            self.spanners[node] -= spanned
            self.changes[node] += 1
        for node, count in shares.items():
            self.free[node] -= count
            self.residents[node].add(job)
            self.spanners[node] += spans
            self.changes[node] += 1
        self.shares[job] = shares
        self.cost[job] = self.problem.cost_of(job, shares)
        self.count[job] = sum(shares.values())
        self.num_held[job] = len(shares)
        self._by_share.pop(job, None)

    def keep(self, jobs: Sequence[int]) -> None:
        """Idle jobs that get exactly what they hold now; the same as :meth:`assign` for each, in less time."""
        for job in jobs:
            shares = self.shares[job] = dict(self.problem.current[job])
            spans = len(shares) > 1
            for node, count in shares.items():
                self.free[node] -= count
                self.residents[node].add(job)
                self.spanners[node] += spans
                self.changes[node] += 1
            self._by_share.pop(job, None)
        rows = np.array(jobs, dtype=np.int64)
        self.cost[rows] = self.problem.keep_cost[rows]
        self.count[rows] = self.problem.held_counts[rows]
        self.num_held[rows] = [len(self.shares[job]) for job in jobs]

    def costs_by_share(self, job: int, node: int, most: int) -> FloatArray:
        """(most + 1,): what ``job`` would cost with 0..most replicas on ``node`` and the rest as it is."""
        remembered = self._by_share.setdefault(job, {})
        if node in remembered:
            return remembered[node]
        shares, problem = self.shares[job], self.problem
        num_others = len(shares) - (node in shares)
        elsewhere = sum(shares.values()) - shares.get(node, 0)
        costs = np.full(most + 1, np.inf)
        row = problem.moved_cost[job, min(num_others, 1)]
        shown = row[elsewhere : elsewhere + most + 1]
        costs[: len(shown)] = shown
        costs[0] = problem.moved_cost[job, int(num_others > 1), elsewhere]
        current = problem.current[job]
        if len(current) - (node in current) == num_others and all(
            current.get(other) == count for other, count in shares.items() if other != node
        ):
            costs[current.get(node, 0)] = problem.keep_cost[job]
        remembered[node] = costs
        return costs

    def may_span(self, node: int, job: int) -> bool:
        """Whether ``job``, spanning, may touch ``node``."""
        if not self.problem.exclusive_spans:
            return True
        others = self.spanners[node] - (len(self.shares[job]) > 1 and node in self.shares[job])
        return others == 0

    def copy_shares(self) -> list[Shares]:
        return [dict(shares) for shares in self.shares]


def place(problem: PlacementProblem, counts: IntArray, *, displaces: bool = False) -> Placement:
    """An allocation with about ``counts`` replicas per job, large jobs first.

    Jobs whose count is what they hold stay put; with ``displaces`` only if no larger job needs their slots.
    """
    placement = Placement(problem)
    is_settled = (counts == problem.held_counts) & (counts > 0) & np.isfinite(problem.keep_cost)
    stays = problem.is_fixed if displaces else problem.is_fixed | is_settled
    placement.keep(np.flatnonzero(stays).tolist())
    movers = np.flatnonzero((counts > 0) & ~stays).tolist()
    finder = NodeFinder(placement)
    movers.sort(key=lambda job: (-int(counts[job]), job))
    for job in movers:
        shares = problem.current[job]
        if not (problem.held_counts[job] == counts[job] and _can_return(placement, job)):
            shares = best_fit(placement, finder, job, int(counts[job]))
        if shares:
            placement.assign(job, dict(shares))
            finder.update(shares)
    return placement


def _can_return(placement: Placement, job: int) -> bool:
    """Whether the slots that ``job`` holds now are still free for it."""
    shares = placement.problem.current[job]
    spans = len(shares) > 1
    return math.isfinite(placement.problem.keep_cost[job]) and all(
        count <= placement.free[node] and (not spans or placement.may_span(node, job)) for node, count in shares.items()
    )


class NodeFinder:
    """Nodes by free slots, so that the best fit is found without looking at all of them."""

    def __init__(self, placement: Placement) -> None:
        self._free = placement.free
        most = max((int(slots) for slots in placement.problem.capacity), default=0)
        self._buckets: list[dict[int, None]] = [{} for _ in range(most + 1)]  # dicts: ordered sets
        self._bucket_of = list(self._free)
        for node, free in enumerate(self._free):
            self._buckets[free][node] = None

    def update(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            del self._buckets[self._bucket_of[node]][node]
            self._bucket_of[node] = self._free[node]
            self._buckets[self._free[node]][node] = None

    def tightest(self, count: int) -> int | None:
        """The node with the fewest free slots that still has ``count``."""
        for bucket in self._buckets[count:]:
            if bucket:
                return next(iter(bucket))
        return None

    def roomiest_first(self) -> Iterable[int]:
        for bucket in reversed(self._buckets[1:]):
            yield from bucket

    @property
    def most_free(self) -> int:
        return next((free for free in range(len(self._buckets) - 1, 0, -1) if self._buckets[free]), 0)


def best_fit(placement: Placement, finder: NodeFinder, job: int, count: int) -> Shares:
    """The cheapest way to give ``job`` up to ``count`` of the free slots; on its own nodes where that is as cheap."""
    problem = placement.problem
    costs = problem.moved_cost[job]
    best: Shares = {}
    best_cost = float(placement.cost[job])
    single = min(count, finder.most_free)
    if single > 0:
        size = int(np.argmin(costs[0, : single + 1]))
        if size > 0 and costs[0, size] < best_cost:
            home = [node for node in problem.current[job] if placement.free[node] >= size]
            node = home[0] if home else finder.tightest(size)
            if node is not None:
                best, best_cost = {node: size}, float(costs[0, size])
    if count > 1 and problem.num_nodes > 1 and costs[1, 2 : count + 1].min(initial=np.inf) < best_cost:
        spread = _spread(placement, finder, job, count)
        size = sum(spread.values())
        if len(spread) > 1 and costs[1, size] < best_cost:
            best = spread
    return best


def _spread(placement: Placement, finder: NodeFinder, job: int, count: int) -> Shares:
    """Up to ``count`` free slots over few nodes, whole nodes first, the last piece where it fits tightest."""
    spread: Shares = {}
    left = count
    for node in finder.roomiest_first():
        if left == 0:
            break
        if not placement.may_span(node, job):
            continue
        if placement.free[node] > left and spread:
            tightest = _tightest_spannable(placement, finder, job, left, spread)
            node = node if tightest is None else tightest
        take = min(placement.free[node], left)
        spread[node] = take
        left -= take
    return spread


def _tightest_spannable(placement: Placement, finder: NodeFinder, job: int, count: int, taken: Shares) -> int | None:
    for bucket in finder._buckets[count:]:
        for node in bucket:
            if node not in taken and placement.may_span(node, job):
                return node
    return None
