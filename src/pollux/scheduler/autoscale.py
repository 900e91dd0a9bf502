"""How many nodes the cluster should have: a pure decision, and the budget it may have to keep to.

utility(A) = Σ_j speedup of A_j over one replica / slots of the cluster: 1 if every slot helped as much as a
first replica does, towards 0 as slots are wasted (OSDI'21, section 4.3). Outside the wanted band the size is
searched whose best plan comes closest to the band's middle; inside it nothing changes. A plan that leaves whole
nodes empty would do as well without them: they do not count, are never asked for, and are given back in any case.

Growing and shrinking are not alike. Jobs wait for nodes that are asked for late, and a node given back too early
has to be started again: the cluster grows as soon as utility is above the band, and shrinks once it has been
below the band for ``settle_s``.

A budget is a number of slots that may be up on average over ``budget_window_s``, whatever part of the window one
looks at: see :class:`Spending`. It bounds the size, and it says which half of the band to stay in: with money
unspent the lower half (more slots, each of less use), with none the upper half. Quiet times save so for busy ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pollux.errors import InvalidValueError
from pollux.model.goodput import GoodputModel, GoodputTables
from pollux.scheduler.node_types import NodeType, check_node_types
from pollux.types import Plan, Snapshot

DEFAULT_BAND = (0.55, 0.75)  # of utility; the cluster aims at the middle; a setting
DEFAULT_WINDOW_S = 24 * 3600.0  # budgets are mostly given per day; a setting

_FEW_SIZES = 8  # of which all are looked at
_NEIGHBOURS = 2  # on both sides of where bisection ends
_BURST = 48  # savings are spent over this part of the window at the soonest: half an hour of a day,
_LEAST_BURST_S = 900.0  # and long enough for nodes to come, be used and go
_ROUNDING = 1e-9  # sums of floats that should be equal differ by less


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleConfig:
    """The band of utility to stay in, the sizes allowed, and optionally a budget."""

    min_nodes: int
    max_nodes: int
    low: float = DEFAULT_BAND[0]
    high: float = DEFAULT_BAND[1]
    budget_slots: float | None = None  # slot-hours per hour, on average over any ``budget_window_s``
    budget_window_s: float = DEFAULT_WINDOW_S
    settle_s: float = 300.0  # how long utility must have been below the band, and the size unchanged, to shrink
    types: tuple[NodeType, ...] = ()  # that can be added; the one whose goodput costs least is. Empty: the pool's only

    def __post_init__(self) -> None:
        check_node_types(self.types)
        if not 0 <= self.min_nodes <= self.max_nodes or self.max_nodes < 1:
            needed = "0 <= min <= max is needed, and a max of at least 1"
            raise InvalidValueError(f"nodes {self.min_nodes}..{self.max_nodes}; {needed}")
        if not 0 < self.low < self.high <= 1:
            raise InvalidValueError(f"utility band {self.low}..{self.high}; 0 < low < high <= 1 is needed")
        if self.budget_slots is not None and not (math.isfinite(self.budget_slots) and self.budget_slots > 0):
            raise InvalidValueError(f"budget of {self.budget_slots} slot-hours per hour; it must be positive")
        if not (math.isfinite(self.budget_window_s) and self.budget_window_s > 0):
            raise InvalidValueError(f"budget window of {self.budget_window_s} s; it must be positive")
        if not (math.isfinite(self.settle_s) and self.settle_s >= 0):
            raise InvalidValueError(f"{self.settle_s} s to settle; a number >= 0 is needed")

    def check_template(self, slots_per_node: int) -> None:
        """Raises:
        InvalidValueError: the budget does not pay for the fewest nodes.
        """
        if self.budget_slots is not None and self.budget_slots < self.min_nodes * slots_per_node:
            raise InvalidValueError(
                f"budget of {self.budget_slots:g} slot-hours per hour; the fewest nodes allowed ({self.min_nodes} of "
                f"{slots_per_node} slots) cost {self.min_nodes * slots_per_node}: raise the budget or allow fewer"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeDecision:
    """How many nodes to have, and why."""

    num_nodes: int
    utility: float  # of the size wanted so far
    expected_utility: float  # of the size decided on
    could_shrink: bool  # the size wanted so far is larger than it need be
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the policy would make of a number of nodes."""

    utility: float  # of the nodes in use
    num_idle: int = 0  # the others: the plan would be the same without them
    num_waiting: int = 0  # jobs that get nothing


def utility(snapshot: Snapshot, plan: Plan, tables: GoodputTables) -> float:
    """Σ speedup over one replica, per slot. A job not measured yet counts as scaling perfectly."""
    if snapshot.num_slots == 0:
        return 0.0
    total = 0.0
    type_of = {node.name: node.accelerator for node in snapshot.nodes}
    for job in snapshot.jobs:
        allocation = plan.allocation_of(job.name)
        count = allocation.num_replicas
        if count <= 1:
            total += count
            continue
        model = GoodputModel.of(job, type_of[allocation.shares[0].node], phi=job.noise_scale_low)
        if model is None:
            total += count
            continue
        (table,) = tables.best([model], [count])
        alone = table[0, 1]
        total += float(table[int(allocation.num_nodes > 1), count] / alone) if alone > 0 else count
    return total / snapshot.num_slots


def decide_size(
    config: AutoscaleConfig,
    num_nodes: int,
    outcome_of: Callable[[int], Outcome],
    *,
    max_affordable: int | None = None,
    savings: float | None = None,
    settled_s: float = math.inf,
) -> SizeDecision:
    """The number of nodes to want next, where ``num_nodes`` were wanted so far.

    ``outcome_of(size)`` is that of the policy's plan, were there so many nodes; it is asked seldom, as each answer
    costs a decision. ``max_affordable`` and ``savings`` (0: all spent, 1: plenty) are the budget's, if there is one.
    ``settled_s``: how long the size has not changed, and could have been smaller (:attr:`SizeDecision.could_shrink`).
    """
    known: dict[int, Outcome] = {}

    def at(size: int) -> Outcome:
        if size not in known:
            known[size] = outcome_of(size)
        return known[size]

    fewest, most = config.min_nodes, config.max_nodes
    if max_affordable is not None:
        most = max(fewest, min(most, max_affordable))
    low, high = band(config, savings)
    current = at(num_nodes)
    could_shrink = num_nodes > fewest and (current.utility < low or current.num_idle > 0)
    size, reason = num_nodes, "inside the band"
    if not fewest <= num_nodes <= most:
        size = min(max(num_nodes, fewest), most)
        is_poor = fewest <= num_nodes <= config.max_nodes
        reason = "over budget" if is_poor else "outside the nodes allowed"
    elif num_nodes == 0 and current.num_waiting and most and at(most).num_waiting < current.num_waiting:
        size, reason = _for_the_first(most, (low + high) / 2, at), "jobs wait, and there is no node"
    elif current.utility > high and not current.num_idle:
        reason = "utility above the band"
        if num_nodes < most:
            size = max(num_nodes, _nearest(fewest, most, (low + high) / 2, at))
    elif current.num_waiting and (longer := _for_who_waits(num_nodes, most, at)) > num_nodes:
        size, reason = longer, "jobs wait that do not fit"
    elif could_shrink and settled_s < config.settle_s:
        reason = "could be smaller, but not for long enough yet"
    elif current.utility < low:
        reason = "utility below the band"
        if num_nodes > fewest:
            size = min(num_nodes, _nearest(fewest, most, (low + high) / 2, at))
    elif could_shrink:
        size, reason = max(fewest, num_nodes - current.num_idle), "nodes that no job would use"
    if size < num_nodes and reason not in ("over budget", "outside the nodes allowed"):
        while at(size).num_waiting > current.num_waiting:  # no job may wait for slots that were there
            size += (num_nodes - size + 1) // 2
    return SizeDecision(
        num_nodes=size,
        utility=current.utility,
        expected_utility=at(size).utility,
        could_shrink=could_shrink,
        reason=reason,
    )


def band(config: AutoscaleConfig, savings: float | None = None) -> tuple[float, float]:
    """The utilities to stay between: all of the band, or with a budget a half of it, lower the more was saved."""
    if savings is None:
        return config.low, config.high
    width = (config.high - config.low) / 2
    low = config.low + width * (1 - min(max(savings, 0.0), 1.0))
    return low, low + width


def _nearest(fewest: int, most: int, middle: float, at: Callable[[int], Outcome]) -> int:
    """The size from ``fewest`` to ``most`` whose utility is nearest to ``middle``, where it falls below that for good.

    Utility falls with size, but not everywhere: while jobs wait every further node is of as much use as the last, and
    a policy that gives a job all it asks for or nothing makes it jump. So bisection finds the region and all sizes near
    it are looked at; of a few sizes all are. The largest one that is worth the middle counts, and those beyond it.
    Where one is now makes no difference: no two sizes can send a cluster to each other.
    """
    first, last = fewest, most
    if most - fewest > _FEW_SIZES:
        while last - first > 1:
            size = (first + last) // 2
            does_not_fit = at(size).num_waiting and at(size).num_idle
            if at(size).utility >= middle or does_not_fit:
                first = size
            else:
                last = size
        first, last = max(fewest, first - _NEIGHBOURS), min(most, last + _NEIGHBOURS)
    enough = max((size for size in range(first, last + 1) if at(size).utility >= middle), default=first)
    size = min(range(enough, last + 1), key=lambda size: (abs(at(size).utility - middle), size))
    while size > fewest and at(size).num_idle:  # and the same plan on fewer
        size = max(fewest, size - at(size).num_idle)
    return size


def _for_the_first(most: int, middle: float, at: Callable[[int], Outcome]) -> int:
    """From no node: the size that is nearest to the middle, or the fewest nodes with which any job starts."""
    size = _nearest(1, most, middle, at)
    while size < most and at(size).num_waiting >= at(0).num_waiting:
        size += 1
    return size


def _for_who_waits(num_nodes: int, most: int, at: Callable[[int], Outcome]) -> int:
    """The fewest nodes with which a job starts that waits with ``num_nodes``; ``num_nodes`` if none would help.

    For policies that give a job all that it asks for or nothing: it may ask for more than there is.
    """
    waiting = at(num_nodes).num_waiting
    if not at(num_nodes).num_idle or at(most).num_waiting >= waiting:
        return num_nodes
    without, enough = num_nodes, most
    while enough - without > 1:
        size = (without + enough) // 2
        if at(size).num_waiting < waiting:
            enough = size
        else:
            without = size
    return enough


class Spending:
    """Slot-seconds used over the budget's window, and what may be used next.

    In every window of ``window_s`` at most ``budget_slots`` x ``window_s`` are used. Time before the first account
    counts as having spent the budget: no cluster starts with savings, neither at first nor after a restart.
    """

    def __init__(self, budget_slots: float, window_s: float, min_slots: int) -> None:
        self._rate, self._window_s, self._min_rate = budget_slots, window_s, float(min_slots)
        self._horizon_s = min(max(window_s / _BURST, _LEAST_BURST_S), window_s)
        self._pieces: deque[tuple[float, float, float]] = deque()  # (from, until, slots), without gaps
        self._used_slot_s = 0.0  # in all pieces

    def account(self, since: float, now: float, num_slots: int) -> None:
        """``num_slots`` were up from ``since`` to ``now``; calls follow each other without gaps."""
        if now <= since:
            return
        if not self._pieces:
            self._pieces.append((since - self._window_s, since, self._rate))
            self._used_slot_s = self._rate * self._window_s
        begin, _, slots = self._pieces[-1]
        if slots == num_slots:  # one piece for as long as nothing changes
            self._pieces[-1] = (begin, now, slots)
        else:
            self._pieces.append((since, now, float(num_slots)))
        self._used_slot_s += num_slots * (now - since)
        while self._pieces[0][1] <= now - self._window_s:
            begin, end, slots = self._pieces.popleft()
            self._used_slot_s -= slots * (end - begin)

    def affordable_slots(self) -> float:
        """How many slots may be up for a while, with the fewest after that, so that no window is overspent."""
        if not self._pieces:
            return self._rate
        now, horizon_s = self._pieces[-1][1], self._horizon_s
        opens = now - self._window_s
        left = self._rate * self._window_s - self._used_slot_s + self._pieces[0][2] * (opens - self._pieces[0][0])
        if left < -_ROUNDING * self._rate * self._window_s:
            return self._min_rate
        # The window that ends in D seconds has lost what was used in its first D, and has paid for the fewest nodes
        # in its last D; what is left pays for more, for D or until the horizon. Linear between the moments at which
        # the rate of use changed, so these are the ones to look at.
        extra = math.inf
        for begin, end, slots in self._pieces:
            begin = max(begin, opens)
            for until in sorted({min(end, max(begin, opens + horizon_s)), end}):
                left += (slots - self._min_rate) * (until - begin)
                begin = until
                if until > opens:
                    extra = min(extra, left / min(until - opens, horizon_s))
        return self._min_rate + max(extra, 0.0)

    @property
    def savings(self) -> float:
        """0: what is spent next must stay within the budget's rate; 1: twice as much may be spent for a while."""
        return min(max(self.affordable_slots() / self._rate - 1.0, 0.0), 1.0)
