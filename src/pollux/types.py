"""The frozen values every package shares: nodes, jobs, allocations, snapshots and plans.

Leftmost in the arrows: this module imports nothing of ours but :mod:`pollux.errors`. It holds data only;
what the numbers mean is in :mod:`pollux.model`, what is decided from them in :mod:`pollux.policy`.

Letters, as in the paper: K replicas on N nodes, m examples per device and pass, s accumulation
steps, M = K·m·(s+1) the total batch, M0 the batch size the user tuned, φ the noise scale.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pollux.errors import InvalidValueError

DEFAULT_ACCELERATOR = "gpu"
UNBOUNDED_REPLICAS = 1 << 20
_ROUNDING = 1e-9

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidValueError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine with ``num_slots`` identical accelerators (or CPU slots)."""

    name: str
    num_slots: int
    accelerator: str = DEFAULT_ACCELERATOR
    labels: tuple[tuple[str, str], ...] = ()  # by key; what constraints of jobs speak of
    cpus: float | None = None  # None: not known, and taken as enough
    memory_bytes: int | None = None  # the same
    notice: str = ""  # why it will be gone soon, as spot nodes are told; jobs leave it
    device_memory_bytes: int | None = None  # of each slot; None: not known, or no device of its own

    def __post_init__(self) -> None:
        if self.labels:
            object.__setattr__(self, "labels", tuple(sorted((key, value) for key, value in self.labels)))
        _require(bool(self.name), "a node needs a name")
        _require(self.num_slots >= 1, f"node {self.name!r} has {self.num_slots} slots; it needs at least 1")


@dataclass(frozen=True, slots=True)
class Constraint:
    """A node's label must have one of these values; or, with ``is_not``, none of them. No such label: no value."""

    key: str
    values: tuple[str, ...]
    is_not: bool = False

    def admits(self, node: Node) -> bool:
        return any(key == self.key and value in self.values for key, value in node.labels) != self.is_not

    def __str__(self) -> str:
        return f"{self.key}{'!=' if self.is_not else '='}{','.join(self.values)}"


class NodeShare(NamedTuple):
    """Consecutive ranks of one job on one node."""

    node: str
    num_replicas: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """Replicas per node for one job, in rank order. The empty one means: not running."""

    shares: tuple[NodeShare, ...] = ()

    def __post_init__(self) -> None:
        for node, num_replicas in self.shares:
            _require(num_replicas >= 1, f"{num_replicas} replicas on node {node!r}; leave the node out instead")
        names = [share.node for share in self.shares]
        _require(len(set(names)) == len(names), f"a node is named twice in one allocation: {names}")

    @classmethod
    def of(cls, *shares: tuple[str, int]) -> Allocation:
        return cls(tuple(NodeShare(node, count) for node, count in shares))

    @property
    def num_replicas(self) -> int:
        return sum(share.num_replicas for share in self.shares)

    @property
    def own_shares(self) -> tuple[NodeShare, ...]:
        """Slots that the job takes from its nodes: one per replica. A subclass may sit on another job's slots."""
        return self.shares

    @property
    def num_slots(self) -> int:
        """The number of slots that the job takes."""
        return sum(share.num_replicas for share in self.own_shares)

    @property
    def num_nodes(self) -> int:
        return len(self.shares)

    @property
    def counts(self) -> tuple[int, ...]:
        """Replicas per node in rank order: the placement without the nodes' names."""
        return tuple(share.num_replicas for share in self.shares)

    @property
    def node_of_rank(self) -> tuple[str, ...]:
        return tuple(share.node for share in self.shares for _ in range(share.num_replicas))

    def as_mapping(self) -> dict[str, int]:
        return dict(self.shares)

    def __bool__(self) -> bool:
        return bool(self.shares)


NO_ALLOCATION = Allocation()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Which batch sizes a job may train with.

    ``initial`` is M0; ``maximum`` bounds the total M; ``device_min``/``device_max`` bound m;
    ``minimum`` is the least total (M0 unless the job must train with larger batches).
    """

    initial: int
    maximum: int
    device_min: int = 1
    device_max: int
    minimum: int = 0
    device_max_on: tuple[tuple[str, int], ...] = ()
    """``device_max`` by accelerator type, where a type's memory makes it another."""
    accumulates_alone: bool = False
    """One replica with more than M0 takes at least two passes. Only jobs simulated as the OSDI'21 and Sia artifacts ran
    them; a live job takes one pass as long as it fits the device."""

    def __post_init__(self) -> None:
        if not isinstance(self.device_max_on, tuple):  # read from JSON
            object.__setattr__(self, "device_max_on", tuple((name, most) for name, most in self.device_max_on))
        if self.minimum == 0:
            object.__setattr__(self, "minimum", self.initial)
        _require(self.initial >= 1, f"initial batch size {self.initial}; it must be at least 1")
        _require(
            self.maximum >= self.initial,
            f"max batch size {self.maximum} is below the initial batch size {self.initial}",
        )
        _require(
            1 <= self.device_min <= self.device_max,
            f"device batch bounds {self.device_min}..{self.device_max}; they need 1 <= min <= max",
        )
        _require(
            self.device_min <= self.maximum,
            f"device batch size of at least {self.device_min} exceeds the max batch size {self.maximum}",
        )
        _require(
            self.initial <= self.minimum <= self.maximum,
            f"min batch size {self.minimum} lies outside {self.initial}..{self.maximum}",
        )
        _require(
            not self.accumulates_alone or self.device_min <= self.initial or 2 * self.device_min <= self.maximum,
            f"one replica has no batch: one pass of {self.device_min} exceeds the initial batch size {self.initial}, "
            f"two exceed the max batch size {self.maximum}",
        )

    def on(self, accelerator: str) -> BatchLimits:
        """The limits on slots of this type."""
        for name, device_max in self.device_max_on:
            if name == accelerator:
                return dataclasses.replace(self, device_max=device_max, device_max_on=())
        return self if not self.device_max_on else dataclasses.replace(self, device_max_on=())

    @property
    def max_replicas(self) -> int:
        """More replicas than this could not all be given ``device_min`` examples."""
        return max(1, self.maximum // self.device_min)


class BatchConfig(NamedTuple):
    """How one step is made up on every replica: m examples, s extra accumulation passes."""

    device_batch: int
    accum_steps: int

    def total(self, num_replicas: int) -> int:
        return num_replicas * self.device_batch * (self.accum_steps + 1)


class ThroughputParams(NamedTuple):
    """θ of the throughput model (seconds; γ and δ have no unit). See :mod:`pollux.model.throughput`.

    The last two are beyond the paper, whose model they leave as it is by default.
    """

    alpha_g: float
    beta_g: float
    alpha_n: float
    beta_n: float
    alpha_r: float
    beta_r: float
    gamma: float
    delta: float = 1.0  # exponent of the device batch in T_grad
    ring: float = 0.0  # 1: T_sync approaches α + β as replicas are added; 0: it grows with each, as published


class ShapeFactor(NamedTuple):
    """How much faster (> 1) or slower than θ predicts a job was seen to run with this many replicas."""

    spans: bool  # on several nodes
    num_replicas: int
    factor: float


ShapeFactors = tuple[ShapeFactor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What the user asked for. ``None`` means: not said, let the scheduler find out."""

    name: str
    application: str = ""
    submitted_at: float = 0.0
    batch: BatchLimits | None = None
    min_replicas: int = 1
    max_replicas: int = UNBOUNDED_REPLICAS
    requested_replicas: int | None = None
    requested_batch_size: int | None = None
    is_preemptible: bool = True
    weight: float = 1.0
    accelerators: frozenset[str] | None = None
    owner: str = ""  # the user who submitted it
    priority: int = 0  # of two jobs of one team, the one with less is stopped first
    deadline_at: float | None = None  # by when it should be through; None: no deadline
    budget_slot_s: float | None = None  # slot-seconds that it may hold; None: no budget
    constraints: tuple[Constraint, ...] = ()  # that each of its nodes meets
    cpus: float = 0.0  # for each replica; what is not asked for is not counted
    memory_bytes: int = 0  # the same
    device_memory_bytes: int | None = None  # that each of its slots must have; None: not said

    def __post_init__(self) -> None:
        _require(bool(self.name), "a job needs a name")
        _require(
            math.isfinite(self.cpus) and self.cpus >= 0 and self.memory_bytes >= 0,
            f"job {self.name!r}: {self.cpus} CPUs and {self.memory_bytes} bytes for a replica; numbers >= 0 are needed",
        )
        _require(
            1 <= self.min_replicas <= self.max_replicas,
            f"job {self.name!r}: replicas {self.min_replicas}..{self.max_replicas}; they need 1 <= min <= max",
        )
        _require(
            math.isfinite(self.submitted_at) and self.submitted_at >= 0,
            f"job {self.name!r}: submission time {self.submitted_at}; it must be a number >= 0",
        )
        _require(
            self.deadline_at is None or self.deadline_at > self.submitted_at,
            f"job {self.name!r}: deadline at {self.deadline_at}, submitted at {self.submitted_at}; it must be later",
        )
        _require(
            self.budget_slot_s is None or self.budget_slot_s > 0,
            f"job {self.name!r}: budget of {self.budget_slot_s} slot-seconds; a positive number is needed",
        )
        _require(
            self.device_memory_bytes is None or self.device_memory_bytes >= 1,
            f"job {self.name!r}: {self.device_memory_bytes} bytes of device memory; a positive number is needed",
        )
        _require(
            math.isfinite(self.weight) and self.weight > 0,
            f"job {self.name!r}: weight {self.weight}; it must be a positive number",
        )
        _require(
            self.requested_replicas is None or self.requested_replicas >= 1,
            f"job {self.name!r}: {self.requested_replicas} replicas requested; at least 1 is needed",
        )
        _require(
            self.requested_batch_size is None or self.requested_batch_size >= 1,
            f"job {self.name!r}: batch size {self.requested_batch_size} requested; at least 1 is needed",
        )

    def may_use(self, node: Node) -> bool:
        """Its type, its labels, and room for one replica if it had the node to itself."""
        return (
            (self.accelerators is None or node.accelerator in self.accelerators)
            and all(constraint.admits(node) for constraint in self.constraints)
            and self.most_on(node) > 0
        )

    def most_on(self, node: Node) -> int:
        """Replicas that fit on a node by its slots, CPUs and memory, if nothing else is on it."""
        most = node.num_slots
        if self.cpus and node.cpus is not None:
            most = min(most, int(node.cpus / self.cpus + _ROUNDING))
        if self.memory_bytes and node.memory_bytes is not None:
            most = min(most, node.memory_bytes // self.memory_bytes)
        return most

    @property
    def family(self) -> str:
        """Jobs of one owner and application, which learn from each other; empty: it learns from none.

        Not those of other owners: a job that lies about its speed or length must not change how theirs are judged.
        """
        return f"{self.owner}/{self.application}" if self.owner and self.application else self.application

    @property
    def is_picky(self) -> bool:
        """It asks more of a node than slots of a type."""
        return bool(self.constraints or self.cpus or self.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """One job as a policy may see it."""

    spec: JobSpec
    age_s: float
    allocation: Allocation = NO_ALLOCATION
    num_resizes: int | None = None  # None: never started
    resize_s: float | None = None  # what a resize was seen to cost it; None: not yet
    attained_s: float = 0.0  # seconds spent holding an allocation, starts and resizes included
    attained_slot_s: float = 0.0  # the same, each second times the slots held
    params: Mapping[str, ThroughputParams] = field(default_factory=dict)  # by accelerator type
    guessed: frozenset[str] = frozenset()  # types whose params come from others; measured there on one replica at most
    shape_factors: Mapping[str, ShapeFactors] = field(default_factory=dict)  # by accelerator type
    noise_scale: float | None = None  # φ in examples
    noise_scale_error: float | None = None  # standard error of φ; None: not known
    max_profiled_replicas: int = 0
    remaining_examples: float | None = None  # useful examples (goodput x time) left, if known
    done_examples: float | None = None  # useful examples so far, if known
    is_pinned: bool = False  # its allocation must stay as it is this round
    share: float = 0.0  # what its owner's jobs together are entitled to, in equal shares of all jobs; 0: no teams

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def has_started(self) -> bool:
        return self.num_resizes is not None

    @property
    def noise_scale_low(self) -> float | None:
        """φ less its standard error: what may be counted on when a job would grow."""
        if self.noise_scale is None or self.noise_scale_error is None:
            return self.noise_scale
        return max(self.noise_scale - self.noise_scale_error, 0.0)

    @property
    def is_fixed(self) -> bool:
        """No policy may change its allocation: it is pinned, or runs and is not preemptible."""
        return self.is_pinned or (bool(self.allocation) and not self.spec.is_preemptible)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that a policy may read. Jobs are in submission order, which also breaks ties.

    Jobs hold slots of these nodes only: one that sits on a node that is lost or leaving is shown as holding nothing.
    """

    now: float
    nodes: tuple[Node, ...]
    jobs: tuple[JobView, ...]

    def __post_init__(self) -> None:
        names = {node.name for node in self.nodes}
        _require(len(names) == len(self.nodes), "two nodes share a name")
        _require(len({job.name for job in self.jobs}) == len(self.jobs), "two jobs share a name")
        for job in self.jobs:
            for node, _ in job.allocation.shares:
                _require(node in names, f"job {job.name!r} holds slots of node {node!r}, which is not in the snapshot")

    @classmethod
    def of(cls, now: float, nodes: Sequence[Node], jobs: Iterable[JobView]) -> Snapshot:
        """A snapshot of ``nodes``: jobs that sit elsewhere are shown as holding nothing.

        So are jobs for which a node has become too small; jobs that must not be moved stay before the others.
        """
        jobs = list(jobs)
        free = {node.name: node.num_slots for node in nodes}
        gone = set()
        for job in sorted(jobs, key=lambda job: not job.is_fixed):
            shares = job.allocation.shares
            if all(count <= free.get(node, 0) for node, count in shares):
                for node, count in shares:
                    free[node] -= count
            else:
                gone.add(job.name)
        views = (dataclasses.replace(job, allocation=NO_ALLOCATION) if job.name in gone else job for job in jobs)
        return cls(now=now, nodes=tuple(nodes), jobs=tuple(views))

    @property
    def num_slots(self) -> int:
        return sum(node.num_slots for node in self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDecision:
    """Why one job got what it got: the options weighed, and what the change gains."""

    job: str
    before: Allocation
    after: Allocation
    speedup_before: float  # of keeping everything as it was
    speedup_after: float  # move penalty included
    move_factor: float  # what a move would multiply the speedup with
    option_replicas: IntArray  # (num_options,)
    option_speedups: FloatArray  # (num_options,) best speedup at that many replicas, without penalty
    note: str = ""

    @property
    def has_changed(self) -> bool:
        return self.before != self.after

    @property
    def gain(self) -> float:
        return self.speedup_after - self.speedup_before


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The decision as data: how good it is, how good any could be, and why per job."""

    fitness_before: float
    fitness: float
    upper_bound: float
    jobs: tuple[JobDecision, ...] = ()
    method: str = ""
    decision_s: float = math.nan  # filled in by the loop, which has a clock

    @property
    def gap(self) -> float:
        """Relative distance to the bound: no allocation is better by more than this."""
        return 0.0 if self.upper_bound <= 1e-9 else min(max(0.0, 1.0 - self.fitness / self.upper_bound), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A proposal: the allocation every job should have. A job left out gets nothing."""

    allocations: Mapping[str, Allocation]
    explanation: Explanation | None = None

    def allocation_of(self, job: str) -> Allocation:
        return self.allocations.get(job, NO_ALLOCATION)


def slots_in_use(allocations: Sequence[Allocation]) -> dict[str, int]:
    """Slots per node that several allocations take together."""
    used: dict[str, int] = {}
    for allocation in allocations:
        for node, count in allocation.own_shares:
            used[node] = used.get(node, 0) + count
    return used
