"""Which nodes a job may use, for every policy alike: nodes of one type that jobs tell apart become types of their own.

The planner calls :func:`by_class` around the policy. Policies know accelerator types, keep each job on one, and respect
the types that a job may use. So where constraints, CPUs or memory of present jobs admit some nodes of a type and not
others, the policy is shown a type for each such class of nodes. Without such jobs it sees the snapshot as it is.

A job stays within one class while there are several. One that needs more than any class has cannot: then the policy
sees the snapshot as it is, and what it places wrongly is moved afterwards (:func:`~pollux.scheduler.nodes.avoiding`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from pollux.policy.gangs import demand
from pollux.policy.simulated import GuestAllocation, SimulatedJobView, TypeNamesOracle
from pollux.types import NO_ALLOCATION, Allocation, Constraint, JobSpec, JobView, Node, Plan, Snapshot

_T = TypeVar("_T")
_Wish = tuple[tuple[Constraint, ...], float, int]  # constraints, CPUs and memory


def by_class(snapshot: Snapshot, decide: Callable[[Snapshot], Plan]) -> Plan:
    """The plan that ``decide`` makes of the snapshot with its classes of nodes as types."""
    wishes = dict.fromkeys(_wish(job.spec) for job in snapshot.jobs if job.spec.is_picky)
    if not wishes or not snapshot.nodes:
        return decide(snapshot)
    classes = _Classes(snapshot.nodes, tuple(wishes))
    if not classes.hold(snapshot.jobs):
        return decide(snapshot)
    staying = {job.name: job.allocation for job in snapshot.jobs if job.is_fixed and classes.is_foreign(job)}
    jobs = tuple(classes.seen_by_policy(job) for job in snapshot.jobs if job.name not in staying)
    nodes = [dataclasses.replace(node, accelerator=classes.name_of[node.name]) for node in snapshot.nodes]
    taken = Counter({share.node: 0 for each in staying.values() for share in each.own_shares})
    for allocation in staying.values():
        taken.update(dict(allocation.own_shares))
    left = [
        node if not taken[node.name] else dataclasses.replace(node, num_slots=node.num_slots - taken[node.name])
        for node in nodes
        if node.num_slots > taken[node.name]
    ]
    plan = decide(dataclasses.replace(snapshot, nodes=tuple(left), jobs=jobs))
    return dataclasses.replace(plan, allocations={**plan.allocations, **staying}) if staying else plan


def barred_nodes(snapshot: Snapshot) -> dict[str, dict[str, str]]:
    """Nodes that a job may not use, by job and node, each with why. Other types are the policy's affair."""
    return {
        job.name: {node.name: why for node in snapshot.nodes if (why := misfit(job.spec, node))}
        for job in snapshot.jobs
        if job.spec.is_picky
    }


def misfit(spec: JobSpec, node: Node) -> str:
    """Why a node of an allowed type is none for this job; empty: it is one."""
    unmet = [str(constraint) for constraint in spec.constraints if not constraint.admits(node)]
    if unmet:
        return f"it is not {' and '.join(unmet)}"
    return "" if spec.most_on(node) else f"it is too small for a replica with {need_in_words(spec)}"


def need_in_words(spec: JobSpec) -> str:
    """As in: 8 CPUs and 32 GiB."""
    parts = [_cpus(spec.cpus)] * bool(spec.cpus)
    parts += [f"{spec.memory_bytes / 2**30:.3g} GiB"] * bool(spec.memory_bytes)
    return " and ".join(parts)


def _cpus(number: float) -> str:
    return f"{number:g} CPU{'s' * (number != 1)}"


def no_node_reason(spec: JobSpec, nodes: Sequence[Node]) -> str:
    """Why no node can ever hold a replica, as in: no node has zone=b; zone here: a, c. Empty: one can."""
    if not spec.is_picky:
        return ""
    typed = [node for node in nodes if spec.accelerators is None or node.accelerator in spec.accelerators]
    if not typed or any(spec.may_use(node) for node in typed):
        return ""
    for constraint in spec.constraints:
        if not any(constraint.admits(node) for node in typed):
            return f"no node has {constraint}; {_values_here(constraint.key, typed)}"
    if spec.constraints and not any(all(one.admits(node) for one in spec.constraints) for node in typed):
        return f"no node has {' and '.join(map(str, spec.constraints))} together"
    most_cpus = max((node.cpus for node in typed if node.cpus is not None), default=None)
    most_memory = max((node.memory_bytes for node in typed if node.memory_bytes is not None), default=None)
    parts = [] if most_cpus is None else [_cpus(most_cpus)]
    parts += [] if most_memory is None else [f"{most_memory / 2**30:.3g} GiB"]
    where = " that it may use" * bool(spec.constraints)
    return f"no node{where} has {need_in_words(spec)} for a replica; the largest has {' and '.join(parts)}"


def _values_here(key: str, nodes: Iterable[Node]) -> str:
    found = sorted({value for node in nodes for name, value in node.labels if name == key})
    return f"{key} here: {', '.join(found)}" if found else f"no node has a label {key}"


def _wish(spec: JobSpec) -> _Wish:
    return spec.constraints, spec.cpus, spec.memory_bytes


class _Classes:
    """Nodes of one accelerator that all wishes treat alike. ``name_of``: a node's class, which is its type then."""

    def __init__(self, nodes: Sequence[Node], wishes: Sequence[_Wish]) -> None:
        self._nodes = nodes
        askers = [JobSpec(name="asker", constraints=wish[0], cpus=wish[1], memory_bytes=wish[2]) for wish in wishes]
        marks = {node.name: (node.accelerator, tuple(one.may_use(node) for one in askers)) for node in nodes}
        names: dict[tuple[str, tuple[bool, ...]], str] = {}
        per_type = Counter(kind for kind, _ in dict.fromkeys(marks.values()))
        for kind, admitted in marks.values():
            meets = [_in_words(wish) for wish, is_met in zip(wishes, admitted, strict=True) if is_met]
            name = f"{kind} ({'; '.join(meets) or 'other'})" if per_type[kind] > 1 else kind
            names.setdefault((kind, admitted), name)
        self.name_of = {node: names[mark] for node, mark in marks.items()}
        self.type_of = {name: kind for (kind, _), name in names.items()}

    def hold(self, jobs: Iterable[JobView]) -> bool:
        """Whether every job fits into a class that it may use, or into no type either."""
        whole: Counter[str] = Counter()
        parts: Counter[str] = Counter()
        for node in self._nodes:
            whole[node.accelerator] += node.num_slots
            parts[self.name_of[node.name]] += node.num_slots
        largest = {kind: max(num for name, num in parts.items() if self.type_of[name] == kind) for kind in whole}
        for job in jobs:
            if job.spec.is_picky:
                continue
            kinds = [kind for kind in whole if job.spec.accelerators is None or kind in job.spec.accelerators]
            least = demand(job)
            if any(least <= whole[kind] for kind in kinds) and not any(least <= largest[kind] for kind in kinds):
                return False
        return True

    def is_foreign(self, job: JobView) -> bool:
        """It holds slots of several classes, or of one that it may not use."""
        held = {self.name_of[share.node] for share in job.allocation.shares}
        return len(held) > 1 or not held <= self._allowed(job.spec)

    def seen_by_policy(self, job: JobView) -> JobView:
        allowed = self._allowed(job.spec)
        changes: dict[str, object] = {
            "spec": self._spec(job.spec, allowed),
            "allocation": self._seen_allocation(job, allowed),
            "params": self._by_class(job.params),
            "shape_factors": self._by_class(job.shape_factors),
            "guessed": frozenset(name for name, kind in self.type_of.items() if kind in job.guessed),
        }
        if isinstance(job, SimulatedJobView):
            changes["oracle"] = TypeNamesOracle(job.oracle, self.type_of)
        return dataclasses.replace(job, **changes)  # type: ignore[arg-type]

    def _allowed(self, spec: JobSpec) -> frozenset[str]:
        return frozenset(self.name_of[node.name] for node in self._nodes if spec.may_use(node))

    def _spec(self, spec: JobSpec, allowed: frozenset[str]) -> JobSpec:
        most: Counter[str] = Counter()  # by class, what CPUs and memory leave room for
        for node in self._nodes if spec.cpus or spec.memory_bytes else ():
            if spec.may_use(node):
                most[self.name_of[node.name]] += spec.most_on(node)
        bound = max(most.values(), default=spec.max_replicas)
        batch = spec.batch
        if batch is not None and batch.device_max_on:
            named = dict(batch.device_max_on)
            limits = tuple((name, named[kind]) for name, kind in self.type_of.items() if kind in named)
            batch = dataclasses.replace(batch, device_max_on=limits)
        changes: dict[str, object] = {"accelerators": allowed, "batch": batch}
        if bound < spec.max_replicas:
            changes["max_replicas"] = max(bound, spec.min_replicas)
        return dataclasses.replace(spec, **changes)  # type: ignore[arg-type]

    def _seen_allocation(self, job: JobView, allowed: frozenset[str]) -> Allocation:
        """What it holds in the class where it holds most: it can keep that, and leave the rest."""
        if not self.is_foreign(job):
            return job.allocation
        held: Counter[str] = Counter()
        for share in job.allocation.shares:
            held[self.name_of[share.node]] += share.num_replicas
        best = max((name for name in held if name in allowed), key=held.__getitem__, default="")
        kept = tuple(share for share in job.allocation.shares if self.name_of[share.node] == best)
        is_enough = sum(share.num_replicas for share in kept) >= job.spec.min_replicas
        return Allocation(kept) if is_enough and not isinstance(job.allocation, GuestAllocation) else NO_ALLOCATION

    def _by_class(self, by_type: Mapping[str, _T]) -> dict[str, _T]:
        there = {name: by_type[kind] for name, kind in self.type_of.items() if kind in by_type}
        gone = {kind: value for kind, value in by_type.items() if kind not in self.type_of.values()}
        return there | gone


def _in_words(wish: _Wish) -> str:
    constraints, cpus, memory_bytes = wish
    needs = need_in_words(JobSpec(name="asker", cpus=cpus, memory_bytes=memory_bytes))
    return " and ".join([*map(str, constraints), *([needs] if needs else [])])
