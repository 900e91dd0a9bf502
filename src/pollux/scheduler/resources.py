"""CPUs and memory of nodes: what a plan gives beyond them is moved or taken back. The planner calls :func:`fitting`.

Policies count slots alone. A job that asks for CPUs or memory is kept away from nodes that are too small for it
(:mod:`pollux.scheduler.node_classes`). What several such jobs need together is seen only here, when they have their
nodes: jobs that must stay come first, then those that stay where they are, then the others as they were submitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pollux.scheduler.nodes import rewritten
from pollux.types import JobSpec, JobView, Node, Plan, Snapshot

_ROUNDING = 1e-9


class _Room:
    """What is left of every node, in slots, CPUs and memory."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.nodes = {node.name: node for node in snapshot.nodes}
        self.slots = Counter({name: node.num_slots for name, node in self.nodes.items()})
        self._cpus = {name: node.cpus for name, node in self.nodes.items()}
        self._memory = {name: node.memory_bytes for name, node in self.nodes.items()}

    def most(self, spec: JobSpec, node: str) -> int:
        """Replicas that CPUs and memory leave room for; slots are not looked at."""
        most = 1 << 30
        if spec.cpus and (cpus := self._cpus[node]) is not None:
            most = min(most, int(max(cpus, 0.0) / spec.cpus + _ROUNDING))
        if spec.memory_bytes and (memory := self._memory[node]) is not None:
            most = min(most, max(memory, 0) // spec.memory_bytes)
        return most

    def take(self, spec: JobSpec, counts: Mapping[str, int], sign: int = 1) -> None:
        for node, count in counts.items():
            if (cpus := self._cpus[node]) is not None:
                self._cpus[node] = cpus - sign * count * spec.cpus
            if (memory := self._memory[node]) is not None:
                self._memory[node] = memory - sign * count * spec.memory_bytes
            self.slots[node] -= sign * count


def fitting(snapshot: Snapshot, plan: Plan) -> Plan:
    """The plan with no more CPUs and memory given away than nodes have; the same plan if it gives no more.

    Replicas too many go to nodes of the same type that have room and that the job may use. A job that has less than its
    minimum then keeps what it holds, if that fits, or waits.
    """
    views = {view.name: view for view in snapshot.jobs}
    if not any(view.spec.cpus or view.spec.memory_bytes for view in snapshot.jobs):
        return plan
    room = _Room(snapshot)
    wanted = {name: dict(plan.allocations[name].own_shares) for name in plan.allocations}
    for name, counts in wanted.items():
        if not _asks(views[name]):
            room.take(views[name].spec, counts)
    changed: dict[str, tuple[Counter[str], str]] = {}
    for name in sorted((name for name in wanted if _asks(views[name])), key=lambda name: _rank(views[name], plan)):
        view, counts = views[name], wanted[name]
        found, why = (Counter(counts), "") if view.is_fixed else _placed(view, counts, room)
        if found.total() < view.spec.min_replicas and counts:
            held = view.allocation.as_mapping()
            is_free = all(
                room.most(view.spec, node) >= count and room.slots[node] >= count for node, count in held.items()
            )
            found = Counter(held) if is_free else Counter()
        room.take(view.spec, found)
        if found != Counter(counts):
            changed[name] = (found, why)
    return rewritten(plan, changed) if changed else plan


def overdrawn(nodes: Mapping[str, Node], jobs: Mapping[str, JobView], plan: Plan) -> list[str]:
    """Nodes that get new replicas, and give away more CPUs or memory than they have; in words."""
    cpus: dict[str, float] = {}
    memory: Counter[str] = Counter()
    touched: set[str] = set()
    for name, allocation in plan.allocations.items():
        if name not in jobs or not _asks(job := jobs[name]):
            continue
        held = job.allocation.as_mapping()
        for node, count in allocation.own_shares:
            cpus[node] = cpus.get(node, 0.0) + count * job.spec.cpus
            memory[node] += count * job.spec.memory_bytes
            touched |= {node} if count > held.get(node, 0) else set()
    problems = []
    for name in sorted(touched & nodes.keys()):
        has = nodes[name]
        if has.cpus is not None and cpus[name] > has.cpus + _ROUNDING:
            problems.append(f"node {name!r} has {has.cpus:g} CPUs, {cpus[name]:g} are given away")
        if has.memory_bytes is not None and memory[name] > has.memory_bytes:
            problems.append(f"node {name!r} has {has.memory_bytes} bytes of memory, {memory[name]} are given away")
    return problems


def _asks(view: JobView) -> bool:
    return bool(view.spec.cpus or view.spec.memory_bytes)


def _rank(view: JobView, plan: Plan) -> int:
    return 0 if view.is_fixed else 1 if view.allocation == plan.allocation_of(view.name) else 2


def _placed(view: JobView, counts: Mapping[str, int], room: _Room) -> tuple[Counter[str], str]:
    """Its replicas where there is room for them, and why not all are where the policy put them."""
    spec, found, why = view.spec, Counter[str](), ""
    num_over = 0
    for node, count in counts.items():
        fits = min(count, room.most(spec, node), max(room.slots[node], 0))
        if fits:
            found[node] = fits
        if fits < count:
            num_over += count - fits
            why = f"{node} has no CPUs or memory left for {count - fits} of its replicas"
    kinds = {room.nodes[node].accelerator for node in counts}
    others = [name for name, node in room.nodes.items() if node.accelerator in kinds and spec.may_use(node)]
    for node in sorted(others, key=lambda name: -room.slots[name]) if num_over else ():
        spare = min(room.slots[node] - found[node], room.most(spec, node) - found[node], num_over)
        if spare > 0:
            found[node] += spare
            num_over -= spare
    return +found, why
