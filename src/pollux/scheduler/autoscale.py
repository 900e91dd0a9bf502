"""How many nodes the cluster should have: a pure decision from a snapshot.

utility(A) = Σ_j speedup of A_j over one replica / slots of the cluster: 1 if every slot helped as much as a
first replica does, towards 0 as slots are wasted. It falls as the cluster grows, so bisection finds the
size whose best plan comes closest to the middle of the wanted band. Inside the band nothing changes
(hysteresis), and after a change the next one waits a while.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pollux.errors import InvalidValueError
from pollux.model.goodput import GoodputModel, GoodputTables
from pollux.types import Allocation, Node, Plan, Snapshot, slots_in_use


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleConfig:
    """The band of utility to stay in, the sizes allowed, and optionally a budget."""

    min_nodes: int
    max_nodes: int
    low: float = 0.55
    high: float = 0.75
    budget_slots: float | None = None  # GPU-hours per hour, averaged over ``budget_window_s``
    budget_window_s: float = 3600.0
    settle_s: float = 300.0  # least time between two changes

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise InvalidValueError(f"nodes {self.min_nodes}..{self.max_nodes}; 1 <= min <= max is needed")
        if not 0 < self.low < self.high <= 1:
            raise InvalidValueError(f"utility band {self.low}..{self.high}; 0 < low < high <= 1 is needed")
        if self.budget_slots is not None and not (math.isfinite(self.budget_slots) and self.budget_slots > 0):
            raise InvalidValueError(f"budget of {self.budget_slots} GPU-hours per hour; it must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeDecision:
    """How many nodes to have, and why."""

    num_nodes: int
    utility: float  # of the cluster as it is
    expected_utility: float  # of the size decided on
    reason: str


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
        model = GoodputModel.of(job, type_of[allocation.shares[0].node])
        if model is None:
            total += count
            continue
        (table,) = tables.best([model], [count])
        alone = table[0, 1]
        total += float(table[int(allocation.num_nodes > 1), count] / alone) if alone > 0 else count
    return total / snapshot.num_slots


def decide_size(
    snapshot: Snapshot,
    config: AutoscaleConfig,
    template: Node,
    decide: Callable[[Snapshot], Plan],
    *,
    since_change_s: float = math.inf,
    spent_slot_s: float = 0.0,
) -> SizeDecision:
    """The number of nodes like ``template`` to have next; ``decide`` is the policy, asked "what if".

    ``since_change_s``: how long ago the size last changed. ``spent_slot_s``: slot-seconds used during the
    last ``budget_window_s``.
    """
    tables = GoodputTables()
    known: dict[int, float] = {}

    def utility_at(num_nodes: int) -> float:
        if num_nodes not in known:
            what_if = Snapshot.of(snapshot.now, _sized(snapshot.nodes, num_nodes, template), snapshot.jobs)
            known[num_nodes] = utility(what_if, decide(what_if), tables)
        return known[num_nodes]

    now = len(snapshot.nodes)
    low, high = config.min_nodes, config.max_nodes
    if config.budget_slots is not None:
        left_slot_s = config.budget_slots * 2 * config.budget_window_s - spent_slot_s
        affordable = int(left_slot_s / config.budget_window_s / template.num_slots)
        high = max(low, min(high, affordable))
    current = utility_at(now) if now else 0.0
    if not snapshot.jobs:
        return SizeDecision(num_nodes=low, utility=current, expected_utility=0.0, reason="no jobs")
    if now > high or now < low:
        size = min(max(now, low), high)
        reason = "outside the nodes allowed" if now < low or now > config.max_nodes else "over budget"
        return SizeDecision(num_nodes=size, utility=current, expected_utility=utility_at(size), reason=reason)
    if config.low <= current <= config.high:
        return SizeDecision(num_nodes=now, utility=current, expected_utility=current, reason="inside the band")
    if since_change_s < config.settle_s:
        return SizeDecision(num_nodes=now, utility=current, expected_utility=current, reason="changed recently")
    middle = (config.low + config.high) / 2
    first, last = low, high
    while last - first > 1:  # utility falls with size: bracket the middle of the band
        size = (first + last) // 2
        if utility_at(size) >= middle:
            first = size
        else:
            last = size
    size = min((first, last), key=lambda candidate: (abs(utility_at(candidate) - middle), candidate))
    reason = "utility above the band" if current > config.high else "utility below the band"
    return SizeDecision(num_nodes=size, utility=current, expected_utility=utility_at(size), reason=reason)


def nodes_to_have(
    nodes: Sequence[Node], held: Sequence[Allocation], num_nodes: int, template: Node
) -> tuple[Node, ...]:
    """Which nodes to keep and add: those with the most replicas stay; new ones get unused names."""
    used = slots_in_use(held)
    by_use = sorted(nodes, key=lambda node: -used.get(node.name, 0))
    kept = {node.name for node in by_use[:num_nodes]}
    return _sized([node for node in nodes if node.name in kept], num_nodes, template)


def _sized(nodes: Sequence[Node], num_nodes: int, template: Node) -> tuple[Node, ...]:
    sized = list(nodes[:num_nodes])
    names = {node.name for node in nodes}
    number = 0
    while len(sized) < num_nodes:
        name = f"node{number}"
        if name not in names:
            sized.append(dataclasses.replace(template, name=name))
            names.add(name)
        number += 1
    return tuple(sized)
