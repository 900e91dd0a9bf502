"""What the slots of GPUs are called: the number of each by UUID, the accelerator types, the nodes. Plain data.

:class:`~pollux.engines.processes.layout.SlotBook` keeps it in a file, so that names stay the same after restarts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from pollux.api.codec import read_integer, read_list, read_mapping, read_text
from pollux.errors import InvalidValueError

SAME_MEMORY = 0.05  # cards of one type tell sizes that differ by less
MOST_GONE = 256  # UUIDs of devices that are gone; slices are cut anew for years

Grid = tuple[str, tuple[int, int]]  # "2x4", and what it means


@dataclass(slots=True, kw_only=True)
class SlotNames:
    host: str
    numbers: dict[str, int] = field(default_factory=dict)  # by key: a UUID, with #share where several share a device
    kinds: dict[str, tuple[str, int | None]] = field(default_factory=dict)  # accelerator -> model, memory
    nodes: dict[str, str] = field(default_factory=dict)  # accelerator -> node
    grid: str | None = None  # that the places are of
    places: dict[str, str] = field(default_factory=dict)  # key -> virtual node

    @classmethod
    def of(cls, value: object, host: str) -> Self:
        """As :meth:`to_dict` gave it. What cannot be read, or is of a machine of another name, counts as missing."""
        try:
            row = read_mapping(value, "slots")
            if read_text(row["host"], "host") != host:
                return cls(host=host)
            kinds = {name: _read_kind(kind, name) for name, kind in read_mapping(row["kinds"], "kinds").items()}
            grid = row["grid"]
            return cls(
                host=host,
                numbers={key: read_integer(one, key) for key, one in read_mapping(row["numbers"], "numbers").items()},
                kinds=kinds,
                nodes={name: read_text(node, name) for name, node in read_mapping(row["nodes"], "nodes").items()},
                grid=None if grid is None else read_text(grid, "grid"),
                places={key: read_text(node, key) for key, node in read_mapping(row["places"], "places").items()},
            )
        except (InvalidValueError, KeyError):
            return cls(host=host)

    def to_dict(self) -> dict[str, Any]:
        kinds = {name: list(kind) for name, kind in self.kinds.items()}
        plain = {"numbers": dict(self.numbers), "nodes": dict(self.nodes), "places": dict(self.places)}
        return {"host": self.host, "grid": self.grid, "kinds": kinds, **plain}

    def number_of(self, key: str, preferred: int) -> int:
        """Its number from before; else the preferred one, or the next that no other device ever had."""
        if key not in self.numbers:
            taken = set(self.numbers.values())
            self.numbers[key] = preferred if preferred not in taken else max(taken) + 1
        return self.numbers[key]

    def kind_of(self, model: str, memory_bytes: int | None) -> str:
        """The accelerator type: the model's name, with the memory where another of the name has another size."""
        for name, (known, size) in self.kinds.items():
            if known == model and _is_same(size, memory_bytes):
                return name
        name = model if model not in self.kinds else f"{model} {(memory_bytes or 0) / (1 << 30):.0f}GB"
        self.kinds[name] = model, memory_bytes
        return name

    def place(self, kinds: Mapping[str, str], grid: Grid | None) -> dict[str, str]:
        """The node of each slot, by key; those that no node has room for are left out. ``kinds``: by key."""
        self._forget(kinds)
        if grid is not None:
            return self._on_grid(kinds, grid)
        there = list(dict.fromkeys(kinds.values()))
        for kind in there:
            if kind not in self.nodes:
                is_alone = not self.nodes and len(there) == 1
                self.nodes[kind] = self.host if is_alone else f"{self.host}-{re.sub('[^A-Za-z0-9]+', '-', kind)}"
        return {key: self.nodes[kind] for key, kind in kinds.items()}

    def _on_grid(self, kinds: Mapping[str, str], grid: Grid) -> dict[str, str]:
        text, (num_nodes, per_node) = grid
        if text != self.grid:
            self.grid, self.places = text, {}
        names = [f"node-{index}" for index in range(num_nodes)]
        placed = {key: self.places[key] for key in kinds if self.places.get(key) in names}
        kind_of = {node: kinds[key] for key, node in placed.items()}
        num_there = Counter(placed.values())
        for key, kind in kinds.items():
            free = (name for name in names if num_there[name] < per_node and kind_of.get(name, kind) == kind)
            if key not in placed and (node := next(free, None)) is not None:
                placed[key], kind_of[node] = node, kind
                num_there[node] += 1
        self.places |= placed
        return {key: node for name in names for key, node in placed.items() if node == name}

    def _forget(self, there: Mapping[str, str]) -> None:
        """The oldest of the devices that are gone, if there are very many."""
        gone = [key for key in self.numbers if key not in there]
        for key in gone[: max(len(gone) - MOST_GONE, 0)]:
            del self.numbers[key]
            self.places.pop(key, None)


def _read_kind(value: object, where: str) -> tuple[str, int | None]:
    model, memory = read_list(value, where, length=2)
    return read_text(model, where), None if memory is None else read_integer(memory, where)


def _is_same(size: int | None, other: int | None) -> bool:
    if size is None or other is None:  # NVML may fail to tell, for a moment
        return True
    return abs(size - other) <= SAME_MEMORY * max(size, other)
