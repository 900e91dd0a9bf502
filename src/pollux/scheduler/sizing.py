"""Auto-scaling as the loop does it: decide on a size, choose which nodes to give back, tell the pool.

:mod:`pollux.scheduler.autoscale` decides from numbers; this gets it the numbers, by asking the policy what it would do
with fewer or more nodes, and remembers what was decided. Nodes to be given back are used no longer, so jobs leave them
with the next plans; the pool takes them once no replica is on them. One that is needed again before that is kept.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from pollux.errors import PolluxError
from pollux.model.goodput import GoodputTables
from pollux.scheduler.autoscale import AutoscaleConfig, Outcome, SizeDecision, Spending, decide_size, utility
from pollux.scheduler.node_types import Prices, most_worth, value_of
from pollux.scheduler.nodes import SlotRules, placeable
from pollux.scheduler.ports import NodePool
from pollux.types import JobView, Node, Plan, Snapshot, slots_in_use

NONE_COMES_S = 600.0  # for so long nodes of a type that were asked for may be missing; then another has its turn,
REFUSED_S = 3600.0  # for so long

logger = logging.getLogger(__name__)


class Sizer:
    """Keeps a cluster's number of nodes right. The size is what is wanted, whether or not it is there yet."""

    def __init__(self, config: AutoscaleConfig, pool: NodePool, rules: SlotRules | None = None) -> None:
        self._config, self._pool, self._rules = config, pool, rules or SlotRules()
        self._type = min(config.types, key=lambda one: one.price / one.num_slots, default=None)  # that is added
        self._asked_at = 0.0  # since when nodes of it are missing
        self._refused: dict[str, float] = {}  # types of which no node came, by accelerator -> until when
        least = min((one.num_slots for one in config.types), default=self._template.num_slots)
        config.check_template(least)
        self._num_wanted: int | None = None
        self._num_more = 0  # of these, asked for and not there yet
        self._settled_at = 0.0  # since when the size has not changed and could have been smaller
        self._releasing: frozenset[str] = frozenset()
        self._plans: list[tuple[Snapshot, Plan]] = []  # of the last update's what-ifs
        self._tables = GoodputTables()
        self._spending: Spending | None = None
        if config.budget_slots is not None:
            min_slots = config.min_nodes * least
            self._spending = Spending(config.budget_slots, config.budget_window_s, min_slots)
        self._said_error = ""  # why there was no decision, as logged
        self.last: SizeDecision | None = None
        self.changed = ""  # what the last update changed, in words

    @property
    def _template(self) -> Node:
        return self._pool.template if self._type is None else self._type.node

    @property
    def releasing(self) -> frozenset[str]:
        """Nodes that jobs are to leave, to be given back then."""
        return self._releasing

    @property
    def num_wanted(self) -> int | None:
        """How many nodes there should be; None before the first decision."""
        return self._num_wanted

    def plan_for(self, snapshot: Snapshot) -> Plan | None:
        """The plan that was made for this very snapshot when the size was decided on: it need not be made twice."""
        return next((plan for known, plan in self._plans if known == snapshot), None)

    def account(self, since: float, now: float, num_slots: int) -> None:
        """So many slots were up; calls follow each other without gaps.

        Nodes that were asked for are paid for too: clouds charge from the start of a machine, not from its first use.
        """
        if self._spending is not None:
            self._spending.account(since, now, num_slots + self._num_more * self._template.num_slots)

    def update(
        self,
        now: float,
        nodes: Sequence[Node],
        views: Sequence[JobView],
        draining: Collection[str],
        decide: Callable[[Snapshot], Plan],
    ) -> None:
        """Decide anew and tell the pool. ``nodes`` are up; those the operator drains do not count."""
        up = [node for node in nodes if node.name not in draining]
        worth = self._choose_type(now, up, nodes, views, draining, decide)
        candidates = self._by_worth(up, views, worth)
        if self._num_wanted is None:
            self._num_wanted, self._settled_at = len(candidates), now
        before, self.changed = self._num_wanted, ""
        self._plans.clear()
        outlook = _Outlook(now, nodes, candidates, views, draining, self._template, self._rules)
        problem = ""
        try:
            self._decide(now, outlook, decide)
        except PolluxError as error:
            problem = str(error)
            if problem != self._said_error:  # once, not with every round that goes the same way
                logger.error("no decision on the number of nodes, it stays at %d: %s", self._num_wanted, error)
        self._said_error = problem
        self._release(candidates, draining, shrinks=self._num_wanted < before)
        bound = _bound(views)
        keeping = [node.name for node in nodes if node.name not in self._releasing or node.name in bound]
        num_kept = sum(node.name not in self._releasing for node in candidates)
        self._num_more = max(self._num_wanted - num_kept, 0)
        if self._type is None:
            self._pool.scale_to(keeping, self._num_more)
        else:
            self._asked_at = self._asked_at if self._num_more else now
            self._pool.scale_to(keeping, self._num_more, self._template)

    def _decide(self, now: float, outlook: _Outlook, decide: Callable[[Snapshot], Plan]) -> None:
        assert self._num_wanted is not None
        max_affordable = savings = None
        if self._spending is not None:
            max_affordable = outlook.num_affordable(self._spending.affordable_slots(), self._config.max_nodes)
            savings = self._spending.savings
        decision = decide_size(
            self._config,
            self._num_wanted,
            lambda size: self._outcome(outlook, size, decide),
            max_affordable=max_affordable,
            savings=savings,
            settled_s=now - self._settled_at,
        )
        if decision.num_nodes != self._num_wanted:
            self.changed = f"{self._num_wanted} -> {decision.num_nodes} nodes: {decision.reason}"
            logger.info("%s", self.changed)
        if decision.num_nodes != self._num_wanted or not decision.could_shrink:
            self._settled_at = now
        self._num_wanted, self.last = decision.num_nodes, decision

    def _outcome(self, outlook: _Outlook, size: int, decide: Callable[[Snapshot], Plan]) -> Outcome:
        if size == 0:  # a snapshot without nodes has no jobs: those that could ever start wait
            return Outcome(utility=0.0, num_waiting=len(outlook.snapshot(self._config.max_nodes).jobs))
        snapshot = outlook.snapshot(size)
        plan = decide(snapshot)
        self._plans.append((snapshot, plan))
        used = slots_in_use(list(plan.allocations.values()))
        num_slots = sum(node.num_slots for node in snapshot.nodes if node.name in used)
        of_all = utility(snapshot, plan, self._tables)
        return Outcome(
            utility=of_all * snapshot.num_slots / num_slots if num_slots else 0.0,
            num_idle=sum(node.name not in used for node in snapshot.nodes),
            num_waiting=sum(not plan.allocation_of(job.name) for job in snapshot.jobs),
        )

    def _release(self, candidates: Sequence[Node], draining: Collection[str], *, shrinks: bool) -> None:
        assert self._num_wanted is not None
        releasing = {node.name for node in candidates[self._num_wanted :]}
        # What the operator drains is the operator's, until the cluster is to be smaller anyway.
        drained = set(draining) if shrinks else self._releasing.intersection(draining)
        self._releasing = frozenset(releasing | drained)

    def _choose_type(
        self,
        now: float,
        up: Sequence[Node],
        nodes: Sequence[Node],
        views: Sequence[JobView],
        draining: Collection[str],
        decide: Callable[[Snapshot], Plan],
    ) -> Mapping[str, tuple[float, float]]:
        """Choose the type of node to add next. What a node of each type that is up adds, for its price; and its slots.

        A choice stays while nodes of it are on their way. If none comes for long, the others have their turn.
        """
        config, prices = self._config, Prices.of_types(self._config.types)
        if len(config.types) < 2:
            return {}
        if self._num_more and self._type is not None:
            if now - self._asked_at <= NONE_COMES_S:
                return {}
            self._refused[self._type.accelerator] = now + REFUSED_S
            logger.warning("no node of type %s has come for %.0f s", self._type.accelerator, now - self._asked_at)
            self._asked_at = now
        kinds = sorted({node.accelerator for node in up} | {one.accelerator for one in config.types})

        def value(size: int, order: Sequence[Node], template: Node) -> float:
            snapshot = _Outlook(now, nodes, order, views, draining, template, self._rules).snapshot(size)
            return value_of(snapshot, decide(snapshot), self._tables, kinds) if snapshot.nodes else 0.0

        try:
            here = value(len(up), up, self._template)
            open_ = [one for one in config.types if self._refused.get(one.accelerator, now) <= now] or config.types
            self._type = most_worth(open_, here, lambda one: value(len(up) + 1, up, one.node))
            worth = {}
            for kind in sorted({node.accelerator for node in up}) if len(up) > 1 else ():
                last = max((node for node in up if node.accelerator == kind), key=lambda node: node.name)
                without = value(len(up) - 1, [*(node for node in up if node is not last), last], self._template)
                price = prices.of(kind) or 1.0
                worth[kind] = (here - without) / price, last.num_slots / price
        except PolluxError as error:
            logger.warning("the type of nodes to add stays: %s", error)
            return {}
        return worth

    def _by_worth(
        self, nodes: Sequence[Node], views: Sequence[JobView], worth: Mapping[str, tuple[float, float]]
    ) -> list[Node]:
        """Which to keep first: those with jobs that must not be moved, those that are not on the way out, those whose
        type is worth most for its price, those in use most.
        """
        bound, used = _bound(views), slots_in_use([view.allocation for view in views])
        return sorted(
            nodes,
            key=lambda node: (
                node.name not in bound,
                node.name in self._releasing,
                *(-one for one in worth.get(node.accelerator, (0.0, 0.0))),
                -used.get(node.name, 0),
            ),
        )


def _bound(views: Sequence[JobView]) -> set[str]:
    """Nodes with jobs on them that must not be moved, and would be lost if the node were taken."""
    return {node for view in views if not view.spec.is_preemptible for node, _ in view.allocation.shares}


class _Outlook:
    """The cluster as it would be with another number of nodes; jobs that wait are part of it."""

    def __init__(
        self,
        now: float,
        nodes: Sequence[Node],
        candidates: Sequence[Node],
        views: Sequence[JobView],
        draining: Collection[str],
        template: Node,
        rules: SlotRules,
    ) -> None:
        self._now, self._nodes, self._candidates, self._views = now, nodes, candidates, views
        self._draining, self._template, self._rules = frozenset(draining), template, rules

    def snapshot(self, size: int) -> Snapshot:
        """With the first ``size`` candidates, or all of them and new nodes besides."""
        leaving = self._draining | {node.name for node in self._candidates[size:]}
        nodes, views = self._rules.usable(leaving, self._nodes, self._views)
        nodes += self._new_nodes(size - len(self._candidates))
        return placeable(self._rules.snapshot(self._now, nodes, views))

    def num_affordable(self, num_slots: float, most: int) -> int:
        """How many nodes have no more slots than that, besides those drained, which are paid for too."""
        held = {node.name for node in self._candidates}
        num_slots -= sum(node.num_slots for node in self._nodes if node.name not in held)
        sizes = [node.num_slots for node in self._candidates[:most]]
        sizes += [self._template.num_slots] * (most - len(sizes))
        count = 0
        for size in sizes:
            num_slots -= size
            if num_slots < -1e-6:
                break
            count += 1
        return count

    def _new_nodes(self, num_nodes: int) -> list[Node]:
        taken = {node.name for node in self._nodes}
        names = (f"new{number}" for number in range(len(taken) + max(num_nodes, 0)))
        free = (name for name in names if name not in taken)
        return [dataclasses.replace(self._template, name=name) for name, _ in zip(free, range(num_nodes), strict=False)]
