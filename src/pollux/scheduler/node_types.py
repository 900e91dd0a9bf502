"""Types of nodes that auto-scaling may add, and their prices: which of them is worth most. Pure; the sizer calls it.

A cluster can offer several worker groups. What a node of a type is worth is what it adds to the jobs' goodput for each
unit of money. Goodputs of different jobs are compared as multiples of one replica of that job, on the type where that
is slowest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pollux.errors import InvalidValueError
from pollux.model.goodput import GoodputModel, GoodputTables
from pollux.types import Node, Plan, Snapshot

GROUP = "group"  # the label of nodes that names their worker group
_NODE_TYPE = re.compile(
    r"(?P<accelerator>[^=,]+)=(?P<slots>[0-9]{1,4})@(?P<price>[0-9]{1,9}(\.[0-9]{1,9})?)(/(?P<group>[\w.-]+))?"
)
_NEEDED = "TYPE=SLOTS@PRICE is needed, as in A100=8@12.5 or A100=8@12.5/big"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeType:
    """Nodes that can be added. ``group``: how the engine calls them; "" if only their size tells."""

    accelerator: str
    num_slots: int
    price: float  # for an hour
    group: str = ""

    def __post_init__(self) -> None:
        if not self.accelerator or self.num_slots < 1:
            raise InvalidValueError(f"node type {self}; a name and at least one slot are needed")
        if not (math.isfinite(self.price) and self.price > 0):
            raise InvalidValueError(f"price {self.price} of a node of type {self.accelerator}; it must be positive")

    @classmethod
    def parse(cls, text: str) -> NodeType:
        """Raises InvalidValueError."""
        found = _NODE_TYPE.fullmatch(text.strip())
        if found is None:
            raise InvalidValueError(f"node type {text!r}; {_NEEDED}")
        return cls(
            accelerator=found["accelerator"].strip(),
            num_slots=int(found["slots"]),
            price=float(found["price"]),
            group=found["group"] or "",
        )

    def __str__(self) -> str:
        return f"{self.accelerator}={self.num_slots}@{self.price:g}{'/' if self.group else ''}{self.group}"

    @property
    def node(self) -> Node:
        """What a new one looks like."""
        labels = ((GROUP, self.group),) if self.group else ()
        return Node(name="new", num_slots=self.num_slots, accelerator=self.accelerator, labels=labels)


def check_node_types(types: Sequence[NodeType]) -> None:
    """Raises InvalidValueError: two are of one accelerator type, so that prices of nodes could not be told apart."""
    names = [one.accelerator for one in types]
    for name in names:
        if names.count(name) > 1:
            raise InvalidValueError(f"node type {name!r} is given twice; each accelerator type has one size and price")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Of nodes for an hour. ``any``: of all whose type has none of its own; None: not known."""

    any: float | None = None
    by_type: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of_types(cls, types: Sequence[NodeType], other: float | None = None) -> Prices:
        return cls(any=other, by_type={one.accelerator: one.price for one in types})

    def of(self, accelerator: str) -> float | None:
        return self.by_type.get(accelerator, self.any)

    def cost(self, node_s: Mapping[str, float]) -> float | None:
        """Of so many node-seconds by type; None if no price is known. A type without a price costs nothing."""
        if self.any is None and not self.by_type:
            return None
        return sum((self.of(accelerator) or 0.0) * used_s for accelerator, used_s in node_s.items()) / 3600.0


def value_of(snapshot: Snapshot, plan: Plan, tables: GoodputTables, types: Sequence[str]) -> float:
    """Σ goodput over that of one replica, where that is slowest. A job not measured on a type counts its replicas.

    ``types``: all that are compared, so that values of two clusters can be.
    """
    total = 0.0
    type_of = {node.name: node.accelerator for node in snapshot.nodes}
    for job in snapshot.jobs:
        allocation = plan.allocation_of(job.name)
        if not (count := allocation.num_replicas):
            continue
        models = {name: GoodputModel.of(job, name, phi=job.noise_scale_low) for name in types}
        model = models.get(type_of[allocation.shares[0].node])
        known = [one for one in models.values() if one is not None]
        slowest = min((float(tables.best([one], [1])[0][0, 1]) for one in known), default=0.0)
        if model is None or slowest <= 0:
            total += count
            continue
        (table,) = tables.best([model], [count])
        total += float(table[int(allocation.num_nodes > 1), count]) / slowest
    return total


def most_worth(types: Sequence[NodeType], value: float, value_with: Callable[[NodeType], float]) -> NodeType:
    """The type of which one more node adds most to ``value`` for its price; of equals, the cheapest slots."""
    return max(types, key=lambda one: ((value_with(one) - value) / one.price, one.num_slots / one.price))
