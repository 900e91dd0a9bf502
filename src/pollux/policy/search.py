"""Improve an allocation on the true objective by three kinds of moves. The solver calls it.

:func:`redivide` takes pairs of nodes and divides their slots anew among the jobs on them, by dynamic programming, many
pairs at once. :func:`take_over` lets one job take slots on a node from another, which is how jobs that span
nodes grow and shrink at each other's expense. :func:`admit` makes room for idle jobs that fit nowhere.
All only ever lower the total cost.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from pollux.policy.placement import NodeFinder, Placement, Shares, best_fit
from pollux.types import FloatArray, IntArray

_IMPROVEMENT = 1e-9  # relative: less is rounding, not improvement
# Nodes up to which every pair is tried; beyond, the number of pairs would take most of a decision
_ALL_PAIRS_LIMIT = 24
_MANY_NODES = 1000  # beyond, nodes are looked at only if their jobs have less than they should
_WORTH_A_ROUND = 1e-4  # with so many nodes a round of search that gains less is the last
# The next three bound the time of a search where the cluster is larger or the jobs are more varied than in the OSDI'21
# workloads: there neither none nor four times as much changes a single completion time.
_MAX_ITEMS = 12  # jobs per pair that are re-divided; further ones stay
_MAX_ADMITTED = 4  # idle jobs that room is made for, per round of search
_CACHED = 1 << 15  # numbers that a processor works on without waiting for memory
_MAX_WAITING_ITEMS = 2  # idle jobs that each pair is offered


def improve(
    placement: Placement, rng: np.random.Generator, *, target: float, max_rounds: int, wanted: FloatArray | None = None
) -> None:
    """Alternate all kinds of moves until none finds anything, the cost is ``target``, or ``max_rounds`` are over.

    ``wanted``: (num_jobs,) what jobs would cost if there were no nodes. With many nodes those are looked at whose jobs
    are far from it.
    """
    is_small = placement.problem.num_nodes <= _ALL_PAIRS_LIMIT
    search: _PairSearch | None = None
    least = _WORTH_A_ROUND if placement.problem.num_nodes > _MANY_NODES else _IMPROVEMENT
    for _ in range(max_rounds):
        before = placement.total_cost
        if is_small:
            take_over(placement)
            admit(placement)
            if placement.total_cost <= target:
                return
        search = search or _PairSearch(placement)
        search.redivide(rng, wanted)
        reached = placement.total_cost
        if reached <= target or not reached < before - least * abs(before):
            return


def take_over(placement: Placement) -> None:
    """Let jobs take slots on a node from each other while that lowers the cost."""
    problem = placement.problem
    # One row per job; looking past the last column finds "forbidden".
    width = int(problem.capacity.max(initial=0))
    padding = np.full((problem.num_jobs, 2, width), np.inf)
    costs = np.concatenate([problem.moved_cost, padding], axis=2)
    costs[problem.is_fixed] = np.inf
    is_pending = True
    while is_pending:
        is_pending = False
        for node in range(problem.num_nodes):
            for loser in (None, *sorted(placement.residents[node])):
                if loser is None or (not problem.is_fixed[loser] and loser in placement.residents[node]):
                    is_pending |= _take_from(placement, node, loser, costs, width)


def _take_from(placement: Placement, node: int, loser: int | None, costs: FloatArray, width: int) -> bool:
    """Give free slots on ``node``, and some of ``loser``'s, to the job that gains most; true if the cost fell."""
    held, free = 0 if loser is None else placement.shares[loser][node], placement.free[node]
    room = held + free
    if room == 0:
        return False
    extra = np.arange(1, room + 1)  # what the taker gets on top of what it has here
    left = np.minimum(held, room - extra)
    loses: FloatArray | float = 0.0
    if loser is not None:
        with np.errstate(invalid="ignore"):  # what it holds may be forbidden by now, and what it would have left too
            loses = placement.costs_by_share(loser, node, width)[left] - placement.cost[loser]
    others_held = placement.num_held.copy()
    for resident in placement.residents[node]:
        others_held[resident] -= 1
    jobs = np.arange(len(others_held))
    spans = np.minimum(others_held, 1)
    gains = costs[jobs[:, None], spans[:, None], placement.count[:, None] + extra]
    with np.errstate(invalid="ignore"):
        delta = gains - placement.cost[:, None] + loses  # (num_jobs, room)
    delta[np.isnan(delta)] = np.inf  # from forbidden to forbidden: nothing is gained
    if loser is not None:
        delta[loser] = np.inf
    threshold = -_IMPROVEMENT * max(1.0, abs(float(placement.cost.max())))
    while True:
        taker, choice = divmod(int(delta.argmin()), room)
        if not delta[taker, choice] < threshold:
            return False
        if _may_share(placement, node, taker, loser, int(left[choice])):
            break
        delta[taker, choice] = np.inf
    if loser is not None:
        shrunk = {other: count for other, count in placement.shares[loser].items() if other != node}
        if left[choice]:
            shrunk[node] = int(left[choice])
        placement.assign(loser, shrunk)
    own = placement.shares[taker].get(node, 0)
    placement.assign(taker, {**placement.shares[taker], node: own + int(extra[choice])})
    return True


def admit(placement: Placement) -> None:
    """Make room for idle jobs that fit nowhere: empty nodes for them, and place the evicted jobs elsewhere."""
    problem = placement.problem
    idle = np.flatnonzero((placement.count == 0) & ~problem.is_fixed)
    if not idle.size:
        return
    gains = placement.cost[idle] - problem.moved_cost[idle].min(axis=(1, 2))
    for job in idle[np.argsort(-gains, kind="stable")][:_MAX_ADMITTED].tolist():
        width = int(problem.capacity.max())
        costs = problem.moved_cost[job]
        single = int(np.argmin(costs[0, : width + 1]))
        choices = [{node} for node in range(problem.num_nodes) if problem.capacity[node] >= single > 0]
        spanning = int(np.argmin(costs[1]))
        if spanning > width:
            roomiest = sorted(range(problem.num_nodes), key=lambda node: (-_movable_slots(placement, node), node))
            taken: set[int] = set()
            while roomiest and sum(int(problem.capacity[node]) for node in taken) < spanning:
                taken.add(roomiest.pop(0))
            choices.append(taken)
        for nodes in choices:
            if _admit_on(placement, job, nodes):
                break


def _movable_slots(placement: Placement, node: int) -> int:
    is_fixed = placement.problem.is_fixed
    held = sum(placement.shares[job][node] for job in placement.residents[node] if not is_fixed[job])
    return placement.free[node] + held


def _admit_on(placement: Placement, job: int, nodes: set[int]) -> bool:
    """Empty ``nodes``, place ``job``, then the evicted jobs, largest first; undo it all unless the cost fell."""
    before = placement.total_cost
    evicted = {other for node in nodes for other in placement.residents[node] if not placement.problem.is_fixed[other]}
    old = {other: placement.shares[other] for other in evicted}
    for other in evicted:
        placement.assign(other, {})
    finder = NodeFinder(placement)
    for one in (job, *sorted(evicted, key=lambda other: (-sum(old[other].values()), other))):
        most = placement.problem.max_count if one == job else sum(old[one].values())
        shares = best_fit(placement, finder, one, most)
        placement.assign(one, shares)
        finder.update(shares)
    if placement.total_cost < before - _IMPROVEMENT * max(1.0, abs(before)):
        return True
    for one in (job, *evicted):
        placement.assign(one, {})
    for other, shares in old.items():
        placement.assign(other, shares)
    return False


def _may_share(placement: Placement, node: int, taker: int, loser: int | None, left: int) -> bool:
    """Whether the rule of one spanning job per node would hold after the take-over."""
    if not placement.problem.exclusive_spans:
        return True
    shares = placement.shares[taker]
    others = [other for other in shares if other != node]
    if not others:
        return True
    loser_spans = loser is not None and len(placement.shares[loser]) > 1
    blocking = placement.spanners[node] - (len(shares) > 1 and node in shares) - (loser_spans and left == 0)
    if blocking > 0:
        return False
    return len(shares) > 1 or placement.spanners[others[0]] == 0


class _PairSearch:
    """Exact re-division of many node pairs at once.

    Per pair, its movable jobs choose among: nothing, 1..c slots of the first node, 1..c slots of the second.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self._seen = [-1] * placement.problem.num_nodes  # changes of each node when it was last looked at
        problem = placement.problem
        self.width = int(problem.capacity.max(initial=0))
        width = self.width
        self.single_cost = np.full((problem.num_jobs, width + 1), np.inf)
        shown = min(width, problem.max_count)
        self.single_cost[:, : shown + 1] = problem.moved_cost[:, 0, : shown + 1]
        self.home = np.full(problem.num_jobs, -1)  # node of a current single-node allocation
        self.home_count = np.zeros(problem.num_jobs, dtype=np.int64)
        for job, shares in enumerate(problem.current):
            if len(shares) == 1:
                ((self.home[job], self.home_count[job]),) = shares.items()
        # predecessor[u, (ca, cb)]: the state before an item took option u; the last state is "impossible".
        side = width + 1
        states = np.arange(side * side)
        state_a, state_b = states // side, states % side
        self.option_a = np.array([0, *range(1, side), *([0] * width)])
        self.option_b = np.array([0, *([0] * width), *range(1, side)])
        before_a = state_a[None] - self.option_a[:, None]
        before_b = state_b[None] - self.option_b[:, None]
        impossible = side * side
        self.predecessor = np.where((before_a >= 0) & (before_b >= 0), before_a * side + before_b, impossible)

    def redivide(self, rng: np.random.Generator, wanted: FloatArray | None = None) -> None:
        """Few nodes: every pair, until none gets better. Many: a random matching; ``wanted``: see :func:`improve`."""
        num_nodes = self.placement.problem.num_nodes
        if num_nodes > _ALL_PAIRS_LIMIT:
            order = rng.permutation(num_nodes)
            half = num_nodes // 2
            others = order[half : 2 * half]
            if num_nodes > _MANY_NODES and wanted is not None:
                short = self._short(wanted)[order]
                order = order[np.argsort(-short, kind="stable")]  # the worst first, the rest at random behind them
                half = min(half, max(_MANY_NODES // 2, int((short > 0).sum())))
                others = order[half:]
                free = np.array(self.placement.free)[others]
                others = others[np.argsort(-free, kind="stable")][:half]  # those that have something to give first
            self.solve(list(zip(order[:half].tolist(), others.tolist(), strict=True)))
            return
        pairs = [(a, b) for a in range(num_nodes) for b in range(a + 1, num_nodes)] or [(0, 0)]
        changes = self.placement.changes
        while self._seen != changes:
            dirty = {node for node in range(num_nodes) if self._seen[node] != changes[node]}
            self._seen = list(changes)
            self.solve([pair for pair in pairs if pair[0] in dirty or pair[1] in dirty])

    def _short(self, wanted: FloatArray) -> FloatArray:
        """(num_nodes,) by how much jobs on each node cost more than they would if there were no nodes."""
        short = np.maximum(self.placement.cost - wanted, 0.0)
        short[short < _IMPROVEMENT * np.abs(wanted)] = 0.0
        found = np.zeros(self.placement.problem.num_nodes)
        for job in np.flatnonzero(short).tolist():
            for node in self.placement.shares[job]:
                found[node] += short[job]
        return found

    def solve(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Solve every pair, apply the improvements that do not touch each other."""
        placement, width = self.placement, self.width
        idle = np.flatnonzero((placement.count == 0) & ~placement.problem.is_fixed).tolist()
        # Pairs that have a job in common cannot both be changed. So with a matching each idle job has a pair to itself.
        shares_idle = placement.problem.num_nodes > _ALL_PAIRS_LIMIT
        waiting = [] if shares_idle else idle[:_MAX_WAITING_ITEMS]
        is_shared = [False] * placement.problem.num_nodes
        for job in np.flatnonzero(placement.num_held == 1).tolist():
            is_shared[next(iter(placement.shares[job]))] = True
        # Pairs with spanning jobs only have nothing to re-divide; take_over handles those.
        pairs = [(a, b) for a, b in pairs if waiting or is_shared[a] or is_shared[b]]
        items_of, rooms = [], []
        for row, (a, b) in enumerate(pairs):
            items, room_a, room_b = self._items(a, b)
            items_of.append((items + (idle[row : row + 1] if shares_idle else waiting))[:_MAX_ITEMS])
            rooms.append((room_a, room_b))
        num_items = max((len(items) for items in items_of), default=0)
        if num_items == 0:
            return
        jobs = np.full((len(pairs), num_items), -1)
        for row, items in enumerate(items_of):
            jobs[row, : len(items)] = items
        costs = self._costs(jobs, pairs)  # (num_pairs, num_items, num_options)
        side = width + 1
        best = np.zeros((len(pairs), side * side + 1))
        best[:, -1] = np.inf
        choices = np.empty((num_items, len(pairs), side * side), dtype=np.int8 if 2 * side < 128 else np.int16)
        piece = max(1, _CACHED // self.predecessor.size)
        for item, first in itertools.product(range(num_items), range(0, len(pairs), piece)):
            rows = slice(first, first + piece)
            candidates = best[rows, self.predecessor] + costs[rows, item, :, None]
            pick = candidates.argmin(axis=1)
            choices[item, rows] = pick
            best[rows, :-1] = np.take_along_axis(candidates, pick[:, None], axis=1)[:, 0]
        final = np.array([room_a * side + room_b for room_a, room_b in rooms])
        reached = best[np.arange(len(pairs)), final]
        held = np.array([sum(placement.cost[job] for job in items) for items in items_of])
        saved = held - reached
        touched: set[int] = set()
        moved: set[int] = set()
        threshold = _IMPROVEMENT * max(1.0, float(np.abs(held).max()))
        for row in np.argsort(-saved, kind="stable"):
            if not saved[row] > threshold:
                break
            a, b = pairs[row]
            items = items_of[row]
            if a in touched or b in touched or not moved.isdisjoint(items):
                continue
            self._apply(items, (a, b), choices[:, row], int(final[row]))
            touched.update((a, b))
            moved.update(items)

    def _items(self, a: int, b: int) -> tuple[list[int], int, int]:
        """Jobs of the pair that may be re-divided, and the slots that are theirs or free."""
        placement = self.placement
        room = {a: placement.free[a], b: placement.free[b]}
        items = []
        for node in (a, b) if a != b else (a,):
            for job in placement.residents[node]:
                shares = placement.shares[job]
                if placement.problem.is_fixed[job] or (len(shares) > 1 and a in shares and b in shares):
                    continue
                room[node] += shares[node]
                items.append(job)
        items.sort()
        if len(items) > _MAX_ITEMS:  # leave the rest where they are
            for job in items[_MAX_ITEMS:]:
                for node in (a, b):
                    room[node] -= placement.shares[job].get(node, 0)
            del items[_MAX_ITEMS:]
        return items, room[a], room[b] if a != b else 0

    def _costs(self, jobs: IntArray, pairs: Sequence[tuple[int, int]]) -> FloatArray:
        width = self.width
        costs = np.zeros((*jobs.shape, 2 * width + 1))
        real = jobs >= 0
        single = self.single_cost[jobs]  # (num_pairs, num_items, width + 1)
        costs[..., 0] = single[..., 0]
        costs[..., 1 : width + 1] = single[..., 1:]
        costs[..., width + 1 :] = single[..., 1:]
        costs[~real] = np.inf
        costs[~real, 0] = 0.0
        ends = np.array(pairs)
        keep = self.placement.problem.keep_cost
        for end, offset in ((0, 0), (1, width)):
            rows, columns = np.nonzero(real & (self.home[jobs] == ends[:, end, None]))
            stay = jobs[rows, columns]
            costs[rows, columns, self.home_count[stay] + offset] = keep[stay]
        spanning = real & (self.placement.num_held[jobs] > 1)
        costs[spanning] = np.inf
        for row, column in np.argwhere(spanning).tolist():
            # A spanning job may change its share on the one node of the pair that it touches.
            job, pair = int(jobs[row, column]), pairs[row]
            end = 0 if pair[0] in self.placement.shares[job] else 1
            by_share = self.placement.costs_by_share(job, pair[end], width)
            costs[row, column, 0] = by_share[0]
            costs[row, column, end * width + 1 : (end + 1) * width + 1] = by_share[1:]
        if any(a == b for a, b in pairs):
            costs[..., width + 1 :] = np.inf
        return costs

    def _apply(self, items: Sequence[int], pair: tuple[int, int], choices: IntArray, state: int) -> None:
        placement = self.placement
        new: dict[int, Shares] = {}
        for item in range(len(choices) - 1, -1, -1):
            option = int(choices[item, state])
            state = int(self.predecessor[option, state])
            if item >= len(items):
                continue
            job = items[item]
            shares = {node: count for node, count in placement.shares[job].items() if node not in pair}
            for node, count in zip(pair, (self.option_a[option], self.option_b[option]), strict=True):
                if count:
                    shares[node] = int(count)
            current = placement.problem.current[job]
            new[job] = current if shares == current else shares
        for job in items:
            placement.assign(job, {})
        for job, shares in new.items():
            placement.assign(job, dict(shares))
