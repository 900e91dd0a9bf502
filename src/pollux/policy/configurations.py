"""Which replica counts one accelerator type offers, and how chosen counts are placed on its nodes.

Used by :mod:`pollux.policy.sia`, whose configurations are 1, 2, 4, ... replicas on one node, or whole nodes. Such sizes
divide each other, so counting blocks says exactly what fits: s replicas need a block of s slots, a node of c slots has
c // s of them, and if there are enough for every s, then placing large jobs first finds them all. Nodes are chosen so
that few jobs move.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pollux.policy.dense import Rooms
from pollux.types import Allocation, Node, NodeShare


@dataclass(frozen=True, slots=True)
class Layout:
    """The nodes of one type, without the slots of jobs that must not be moved."""

    accelerator: str
    free: Mapping[str, int]  # slots by node
    node_slots: int  # of a whole node: the largest there is
    num_whole: int  # nodes of that size, whether or not they are free
    counts: tuple[int, ...] = field(init=False)  # replicas that may be asked for, rising; perhaps more than are free
    units: tuple[int, ...] = field(init=False)  # sizes of blocks of which there may be too few
    blocks: tuple[int, ...] = field(init=False)  # how many there are of each

    def __post_init__(self) -> None:
        powers = [1 << power for power in range(self.node_slots.bit_length())]
        whole = [self.node_slots * number for number in range(1, self.num_whole + 1)]
        object.__setattr__(self, "counts", tuple(sorted({*powers, *whole})))
        total = sum(self.free.values())
        available = {unit: sum(slots // unit for slots in self.free.values()) for unit in {*powers, self.node_slots}}
        # Where blocks of a size leave nothing over there are enough of them as long as there are enough slots.
        units = sorted(unit for unit, number in available.items() if unit == 1 or unit * number < total)
        object.__setattr__(self, "units", tuple(units))
        object.__setattr__(self, "blocks", tuple(available[unit] for unit in units))

    @classmethod
    def of(cls, nodes: Sequence[Node], fixed: Iterable[Allocation]) -> dict[str, Layout]:
        """By accelerator type."""
        free = {node.name: node.num_slots for node in nodes}
        for allocation in fixed:
            for node, count in allocation.shares:
                free[node] -= count
        layouts = {}
        for accelerator in dict.fromkeys(node.accelerator for node in nodes):
            members = [node for node in nodes if node.accelerator == accelerator]
            largest = max(node.num_slots for node in members)
            num_whole = sum(node.num_slots == largest for node in members)
            left = {node.name: free[node.name] for node in members}
            layouts[accelerator] = cls(accelerator, left, largest, num_whole)
        return layouts

    def reserved(self, count: int) -> int:
        """Slots that are reserved for so many replicas: a block on one node, or whole nodes."""
        if count > self.node_slots:
            return math.ceil(count / self.node_slots) * self.node_slots
        return min(1 << (count - 1).bit_length(), self.node_slots)

    def needs(self, count: int) -> tuple[int, ...]:
        """Blocks of each of ``units`` that so many replicas take."""
        slots = self.reserved(count)
        if slots < self.node_slots:
            return tuple(slots // unit for unit in self.units)
        return tuple(slots // self.node_slots * (self.node_slots // unit) for unit in self.units)

    def is_regular(self, allocation: Allocation) -> bool:
        """Whether this is how as many replicas would be placed here."""
        shares = allocation.shares
        if any(node not in self.free for node, _ in shares):
            return False
        slots = self.reserved(allocation.num_replicas)
        if slots <= self.node_slots:
            return len(shares) == 1 and slots <= self.free[shares[0].node]
        is_whole = all(self.free[node] == self.node_slots for node, _ in shares)
        return is_whole and len(shares) == slots // self.node_slots

    def spans(self, count: int) -> bool:
        return count > self.node_slots


@dataclass(slots=True)
class Placer:
    """Places counts on the nodes of one type. A job that keeps its count stays, unless a larger job needs its block."""

    layout: Layout
    held: Mapping[str, Allocation]  # by job, what it holds now, wherever that is
    _rooms: Rooms = field(init=False)  # slots that are not reserved
    _residents: dict[str, dict[str, int]] = field(init=False)  # by node, reserved slots of jobs on it
    _placed: dict[str, Allocation] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._rooms = Rooms(self.layout.free)
        self._residents = {node: {} for node in self.layout.free}

    def place(self, wanted: Mapping[str, int]) -> dict[str, Allocation]:
        """Allocations by job; there must be blocks enough for all ``wanted`` counts."""
        queue: list[tuple[int, int, str]] = []  # largest first, then in the order of ``wanted``
        rank = {name: position for position, name in enumerate(wanted)}
        for name in sorted(wanted, key=lambda name: -self.layout.reserved(wanted[name])):
            allocation = self.held[name]
            if allocation.num_replicas == wanted[name] and self._can_stay(allocation):
                for node, _ in allocation.shares:
                    self._set_apart(name, node, self._block(wanted[name]))
                self._placed[name] = allocation
            else:
                heapq.heappush(queue, (-self.layout.reserved(wanted[name]), rank[name], name))
        while queue:
            _, _, name = heapq.heappop(queue)
            self._placed[name], evicted = self._find(name, wanted[name])
            for other in evicted:
                heapq.heappush(queue, (-self.layout.reserved(wanted[other]), rank[other], other))
        return self._placed

    def _block(self, count: int) -> int:
        """Slots that are reserved for so many replicas on each of their nodes."""
        return min(self.layout.reserved(count), self.layout.node_slots)

    def _can_stay(self, allocation: Allocation) -> bool:
        block, free = self._block(allocation.num_replicas), self._rooms.free
        return self.layout.is_regular(allocation) and all(free[node] >= block for node, _ in allocation.shares)

    def _set_apart(self, name: str, node: str, block: int) -> None:
        self._rooms.change(node, -block)
        self._residents[node][name] = block

    def _find(self, name: str, count: int) -> tuple[Allocation, list[str]]:
        """Nodes for a job, its own first, and the smaller jobs that must leave them."""
        block = self._block(count)
        home = self.held[name].as_mapping()
        shares: list[NodeShare] = []
        evicted: list[str] = []
        while count > 0:
            node = self._rooms.tightest(block, home) or self._rooms.tightest(block)
            if node is None:
                node = self._least_short(block, home)
                evicted += self._clear(node, block)
            self._set_apart(name, node, block)
            shares.append(NodeShare(node, min(count, block)))
            count -= min(count, block)
        return Allocation(tuple(shares)), evicted

    def _least_short(self, block: int, home: Container[str]) -> str:
        """A node that has a block once smaller jobs have left it, few of them."""
        nodes = [node for node in self._residents if self._could_have(node, block)]
        return min(nodes, key=lambda node: (block - self._rooms.free[node], node not in home))

    def _could_have(self, node: str, block: int) -> bool:
        smaller = sum(slots for slots in self._residents[node].values() if slots < block)
        return self._rooms.free[node] + smaller >= block

    def _clear(self, node: str, block: int) -> list[str]:
        """Send the smallest jobs away until there is a block."""
        evicted = []
        for name, slots in sorted(self._residents[node].items(), key=lambda item: item[1]):
            if self._rooms.free[node] >= block:
                break
            del self._residents[node][name], self._placed[name]
            self._rooms.change(node, slots)
            evicted.append(name)
        return evicted
