"""Row ranges of sharded tensors, and how they move between replicas when the number of shards changes.

:mod:`pollux.train.sharded_model` holds the shards; handovers and checkpoints move them. A tensor is cut along its first
dimension as FSDP2 does: shards of ceil(n / N) rows, the last ones shorter or empty. Each replica sends the rows that
others need straight to them, a bundle of tensors at a time, so no replica ever holds a whole model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pollux.train.encoding import sendable
from pollux.train.team import Team

BUNDLE_BYTES = 16 * 2**20  # of whole tensors moved in one message: larger ones are fewer, and need more memory

Rows = tuple[int, int]


@sendable
@dataclass(frozen=True, slots=True)
class Cut:
    """Which shard a replica holds: the ``index``-th of ``count`` equal ones."""

    index: int
    count: int

    def rows(self, num_rows: int) -> Rows:
        size = math.ceil(num_rows / self.count)
        return min(self.index * size, num_rows), min((self.index + 1) * size, num_rows)


WHOLE = Cut(0, 1)


@sendable
@dataclass(frozen=True, slots=True)
class Entry:
    """A sharded tensor as a whole."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def local_shape(self, rows: Rows) -> tuple[int, ...]:
        return (rows[1] - rows[0], *self.shape[1:])

    def num_bytes(self, rows: Rows) -> int:
        return math.prod(self.local_shape(rows)) * self.dtype.itemsize


@dataclass(slots=True)
class Shards:
    """One replica's rows of all sharded tensors, by name."""

    cut: Cut
    entries: list[Entry]
    tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Move:
    """Who has which shard, and who needs which. Equal on all ranks."""

    count: int  # of the shards that there are
    sources: tuple[int, ...]  # the rank that sends each of them
    targets: tuple[Cut | None, ...]  # by rank; None for one that leaves


def overlap(one: Rows, other: Rows) -> Rows:
    begin = max(one[0], other[0])
    return begin, max(min(one[1], other[1]), begin)


def move(
    team: Team,
    plan: Move,
    entries: Sequence[Entry],
    take: Callable[[Entry], Tensor],
    give: Callable[[Entry, Tensor], None],
) -> None:
    """Move all tensors. ``take`` gives this rank's rows of one, on ranks that send; ``give`` receives the new ones.

    A rank that keeps its shard is given the same tensor. Raises BrokenGroup.
    """
    for bundle in _bundles(entries):
        _move_bundle(team, plan, bundle, take, give)


def _move_bundle(
    team: Team,
    plan: Move,
    bundle: list[Entry],
    take: Callable[[Entry], Tensor],
    give: Callable[[Entry, Tensor], None],
) -> None:
    rank, target = team.rank, plan.targets[team.rank]
    owned = [index for index, source in enumerate(plan.sources) if source == rank]  # one, or none
    held = {entry.name: take(entry) for entry in bundle} if owned else {}
    sends: list[Tensor] = []
    send_sizes, receive_sizes = [0] * team.size, [0] * team.size
    stays = bool(owned) and target == Cut(owned[0], plan.count)
    for to, needed in enumerate(plan.targets):
        for entry in bundle if needed is not None and owned and not (stays and to == rank) else ():
            assert needed is not None
            mine = Cut(owned[0], plan.count).rows(entry.shape[0])
            begin, end = overlap(mine, needed.rows(entry.shape[0]))
            local = held[entry.name]
            if end > begin:
                sends.append(_bytes(local[begin - mine[0] : end - mine[0]], team.device))
                send_sizes[to] += sends[-1].numel()
    for index, source in enumerate(plan.sources):
        for entry in bundle if target is not None and not stays else ():
            assert target is not None
            needs = overlap(Cut(index, plan.count).rows(entry.shape[0]), target.rows(entry.shape[0]))
            receive_sizes[source] += entry.num_bytes(needs)
    packed = torch.cat(sends) if sends else torch.empty(0, dtype=torch.uint8, device=team.device)
    sends.clear()
    received = torch.empty(sum(receive_sizes), dtype=torch.uint8, device=team.device)
    team.all_to_all(received, packed, receive_sizes, send_sizes)
    del packed
    if stays:
        for entry in bundle:
            give(entry, held[entry.name])
    elif target is not None:
        _unpack(plan, target, bundle, received, receive_sizes, give)


def _unpack(
    plan: Move,
    target: Cut,
    bundle: list[Entry],
    received: Tensor,
    sizes: list[int],
    give: Callable[[Entry, Tensor], None],
) -> None:
    """Put the rows from several ranks together."""
    starts = [sum(sizes[:source]) for source in range(len(sizes))]
    parts: dict[str, list[Tensor]] = {entry.name: [] for entry in bundle}
    for index, source in enumerate(plan.sources):  # in the order of the rows; a source sends the bundle's in its order
        for entry in bundle:
            rows = overlap(Cut(index, plan.count).rows(entry.shape[0]), target.rows(entry.shape[0]))
            count = entry.num_bytes(rows)
            parts[entry.name].append(received.narrow(0, starts[source], count))
            starts[source] += count
    for entry in bundle:
        whole = torch.cat(parts.pop(entry.name))  # a copy: views would keep the whole message in memory
        give(entry, whole.view(entry.dtype).view(entry.local_shape(target.rows(entry.shape[0]))))


def _bytes(rows: Tensor, device: torch.device) -> Tensor:
    return rows.to(device).contiguous().reshape(-1).view(torch.uint8)


def _bundles(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    bundle: list[Entry] = []
    total = 0
    for entry in entries:
        size = entry.num_bytes((0, entry.shape[0]))
        if bundle and total + size > BUNDLE_BYTES:
            yield bundle
            bundle, total = [], 0
        bundle.append(entry)
        total += size
    if bundle:
        yield bundle
