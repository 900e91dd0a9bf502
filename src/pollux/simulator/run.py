"""Runs a workload under a policy: the scheduler's loop with a virtual clock and the simulated engine."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pollux.errors import InvalidValueError, SimulationError
from pollux.policy.base import Policy
from pollux.policy.simulated import host_of
from pollux.scheduler.autoscale import DEFAULT_BAND, DEFAULT_WINDOW_S, AutoscaleConfig
from pollux.scheduler.loop import Scheduler, SchedulerConfig
from pollux.scheduler.ports import MemoryStore
from pollux.scheduler.record import RoundRecord
from pollux.simulator.application import Application, application_key
from pollux.simulator.clock import VirtualClock
from pollux.simulator.colocation import SharedSpeed, check_applications
from pollux.simulator.engine import SimulatedEngine
from pollux.simulator.oracle import SimulationOracle
from pollux.simulator.physics import OSDI21, SIA, SIA_CLUSTER, NodeGroup, Physics
from pollux.simulator.slot_sharing import SimulatedSlots
from pollux.simulator.workload import Workload
from pollux.types import DEFAULT_ACCELERATOR, Node, Snapshot

# Seconds in which no job runs or arrives although jobs wait, after which a run is given up. No policy waits so long:
# the longest memory of any is Themis' lease of ten minutes.
_STALLED_S = 6 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """The cluster and its physics. Defaults are the OSDI'21 artifact's."""

    num_nodes: int = 16
    gpus_per_node: int = 4
    cluster: tuple[NodeGroup, ...] = ()  # instead of these two: nodes of several types
    physics: Physics = OSDI21
    profiles_types: bool | None = None  # jobs are tried on every type before they start; where there are several
    guesses_types: bool = True  # of types that a job has not run on, from those it has
    profiled_batches: int = 5  # with so many device batches on each
    interval_s: float = 60.0
    resize_s: float = 30.0
    start_s: float | None = None  # of a start, where a job's own is not known; as long as a resize if left out
    interference: float = 0.0
    shared_speeds: tuple[SharedSpeed, ...] = ()  # of jobs on the same slots; what is not given follows from loads
    batch_threshold: float = 0.0  # jobs re-batch for any gain; live jobs ask for 5 %
    decides_on_events: bool = False
    remembers_profiles: bool = False
    min_nodes: int | None = None  # with max_nodes: auto-scale between them, starting with the fewest
    max_nodes: int | None = None
    low: float = DEFAULT_BAND[0]  # the band of utility that auto-scaling keeps to
    high: float = DEFAULT_BAND[1]
    budget_slots: float | None = None  # GPUs that may be up on average over ``budget_window_s``
    budget_window_s: float = DEFAULT_WINDOW_S
    node_start_s: float = 120.0  # until a node that was asked for can be used; it is paid for meanwhile
    node_price: float | None = None  # of a node for an hour, in any currency
    counts_efficiency: bool = True  # off: jobs and scheduler go by throughput, and batches grow with replicas
    rounds_epochs: bool = True  # an epoch's last stretch takes whole seconds; off for jobs of minutes

    def __post_init__(self) -> None:
        for label, value, least in (
            ("nodes", self.num_nodes, 1),
            ("GPUs per node", self.gpus_per_node, 1),
            ("device batches to try", self.profiled_batches, 1),
            ("resize seconds", self.resize_s, 0),
            ("start seconds", self.start_s or 0.0, 0),
            ("node start seconds", self.node_start_s, 0),
        ):
            if not (math.isfinite(value) and value >= least):
                raise InvalidValueError(f"{label}: {value}; at least {least} is needed")
        if not 0 <= self.interference < 1:
            raise InvalidValueError(f"interference {self.interference}; a share from 0 up to below 1 is needed")

        names = [group.accelerator for group in self.cluster]
        if len(set(names)) < len(names):
            raise InvalidValueError(f"an accelerator type is named twice in the cluster: {', '.join(names)}")
        if len(names) > 1 and self.min_nodes is not None:
            raise InvalidValueError(f"auto-scaling is for nodes of one type; the cluster has {', '.join(names)}")
        if (self.min_nodes is None) != (self.max_nodes is None):
            raise InvalidValueError("auto-scaling needs both the fewest and the most nodes; one of them is missing")
        if self.budget_slots is not None and self.min_nodes is None:
            raise InvalidValueError("a budget is for auto-scaling; say the fewest and the most nodes too")
        if self.node_price is not None and not (math.isfinite(self.node_price) and self.node_price >= 0):
            raise InvalidValueError(f"a node's price of {self.node_price} an hour; a number >= 0 is needed")

    @property
    def autoscale(self) -> AutoscaleConfig | None:
        if self.min_nodes is None or self.max_nodes is None:
            return None
        config = AutoscaleConfig(
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            low=self.low,
            high=self.high,
            budget_slots=self.budget_slots,
            budget_window_s=self.budget_window_s,
        )
        config.check_template(self.groups[0].slots_per_node)
        return config

    @property
    def groups(self) -> tuple[NodeGroup, ...]:
        """The nodes by type: those the simulation starts with."""
        groups = self.cluster or (
            NodeGroup(accelerator=DEFAULT_ACCELERATOR, num_nodes=self.num_nodes, slots_per_node=self.gpus_per_node),
        )
        if self.min_nodes is None:
            return groups
        return tuple(dataclasses.replace(group, num_nodes=self.min_nodes) for group in groups)

    @property
    def full(self) -> SimulationConfig:
        """The same configuration at its largest size, without auto-scaling."""
        if self.max_nodes is None:
            return self
        cluster = tuple(dataclasses.replace(group, num_nodes=self.max_nodes) for group in self.cluster)
        return dataclasses.replace(
            self, num_nodes=self.max_nodes, cluster=cluster, min_nodes=None, max_nodes=None, budget_slots=None
        )

    @property
    def cluster_text(self) -> str:
        """As it is typed: ``aws:6x4,rtx:3x8``."""
        if self.min_nodes is None:
            return ",".join(map(str, self.groups))
        return f"{self.groups[0].accelerator}:{self.min_nodes}..{self.max_nodes}x{self.groups[0].slots_per_node}"

    @property
    def mean_slots_per_node(self) -> float:
        return sum(group.num_slots for group in self.groups) / sum(group.num_nodes for group in self.groups)

    def nodes(self) -> tuple[Node, ...]:
        """Those the simulation starts with."""
        return tuple(
            Node(
                name=f"{group.accelerator}-{number}" if self.cluster else f"node{number}",
                num_slots=group.slots_per_node,
                accelerator=group.accelerator,
            )
            for group in self.groups
            for number in range(group.num_nodes)
        )


def sia_config(scale: int = 1) -> SimulationConfig:
    """The Sia artifact's cluster, ``scale`` times as large, and its physics; the rest is as by default."""
    cluster = tuple(dataclasses.replace(group, num_nodes=scale * group.num_nodes) for group in SIA_CLUSTER)
    return SimulationConfig(cluster=cluster, physics=SIA)


def restricted(workload: Workload, applications: Mapping[str, Application], config: SimulationConfig) -> Workload:
    """The workload with jobs that may use those types alone on which their applications were measured.

    Raises:
        SimulationError: a job can run on no type of the cluster; says on which it could.
    """
    types = frozenset(group.accelerator for group in config.groups)
    jobs = []
    for job in workload.jobs:
        application = applications.get(application_key(applications, job))
        measured = frozenset(application.accelerators if application is not None else ()) or types
        allowed = measured if job.accelerators is None else measured & job.accelerators
        if types.isdisjoint(allowed):
            raise SimulationError(
                f"job {job.name!r} of {job.application} can run on {', '.join(sorted(allowed)) or 'no type'}, the "
                f"cluster has {', '.join(sorted(types))}; give it nodes of a type that the application was measured on"
            )
        jobs.append(job if types <= allowed else dataclasses.replace(job, accelerators=types & allowed))
    return dataclasses.replace(workload, jobs=tuple(jobs))


@dataclass(frozen=True, slots=True)
class Sample:
    """The cluster right after a decision."""

    at: float
    num_slots: int
    num_waiting: int
    replicas: Mapping[str, int]  # by job, of jobs that hold any
    efficiency: Mapping[str, float]  # by job, statistical efficiency of its batch size now
    guests: frozenset[str] = frozenset()  # jobs whose replicas sit on the slots of others
    types: Mapping[str, str] = field(
        default_factory=dict
    )  # by job, of the slots it holds; empty where there is one type


_NO_REPLICAS, _NO_SPEEDUPS = np.zeros(0, dtype=int), np.zeros(0)


class _RunStore(MemoryStore):
    """Keeps of a decision what a result contains: how good it was, and which jobs moved.

    The options that were weighed for every job are nearly all the memory that a long simulation would take.
    """

    def save_round(self, round_record: RoundRecord, snapshot: Snapshot) -> None:
        plan = round_record.plan
        if plan.explanation is not None:
            moved = tuple(
                dataclasses.replace(decision, option_replicas=_NO_REPLICAS, option_speedups=_NO_SPEEDUPS)
                for decision in plan.explanation.jobs
                if decision.has_changed
            )
            plan = dataclasses.replace(plan, explanation=dataclasses.replace(plan.explanation, jobs=moved))
            round_record = dataclasses.replace(round_record, plan=plan)
        super().save_round(round_record, snapshot)


@dataclass(frozen=True, slots=True)
class SimulationRun:
    """The records of a simulation, before they are summed up (:mod:`pollux.simulator.result`)."""

    workload: Workload
    applications: Mapping[str, Application]
    policy: Policy
    config: SimulationConfig
    store: MemoryStore  # .jobs: every JobRecord by name; .rounds: every RoundRecord, without the options weighed
    samples: Sequence[Sample]
    node_s: float  # node-seconds to be paid for, those of nodes that were starting included
    wall_s: float
    ended_at: float


def simulate(
    workload: Workload,
    applications: Mapping[str, Application],
    policy: Policy,
    config: SimulationConfig,
    on_round: Callable[[float, int], None] | None = None,
) -> SimulationRun:
    """Run ``workload`` to its end. ``on_round(now, jobs done)`` is called after every decision."""
    began = time.perf_counter()
    check_applications(config.shared_speeds, applications.values())
    applications = config.physics.applied_to(applications)
    nodes, workload = config.nodes(), restricted(workload, applications, config)
    slots_per_node = {node.accelerator: node.num_slots for node in nodes}
    profiles_types = len(slots_per_node) > 1 if config.profiles_types is None else config.profiles_types
    engine = SimulatedEngine(
        nodes,
        applications,
        adapts_batch=policy.adapts_batch,
        resize_s=config.resize_s,
        interference=config.interference,
        batch_threshold=config.batch_threshold,
        node_start_s=config.node_start_s,
        start_s=config.start_s,
        rounds_epochs=config.rounds_epochs,
        counts_efficiency=config.counts_efficiency,
        moves_are_free=config.physics.moves_are_free,
        shared_speeds={(entry.application, entry.beside): entry.speed for entry in config.shared_speeds},
    )
    arrivals = sorted(enumerate(workload.jobs), key=lambda item: item[1].submitted_at)
    arrivals.reverse()  # next one last

    def advance(deadline: float) -> float:
        if config.decides_on_events and arrivals:
            deadline = min(deadline, max(arrivals[-1][1].submitted_at, engine.now))
        now = engine.advance(deadline, stops_at_event=config.decides_on_events)
        while arrivals and arrivals[-1][1].submitted_at <= now:
            sequence, spec = arrivals.pop()
            scheduler.submit(spec, sequence)
            if profiles_types:
                engine.profile(spec, config.profiled_batches)
        return now

    store = _RunStore()
    clock = VirtualClock(advance)
    scheduler = Scheduler(
        policy=policy,
        engine=engine,
        store=store,
        clock=clock,
        config=SchedulerConfig(
            interval_s=config.interval_s,
            decides_on_events=config.decides_on_events,
            remembers_profiles=config.remembers_profiles,
            tunes_batches=policy.adapts_batch,
            autoscale=config.autoscale,
            pins_resizing=config.physics.pins_resizing,
            guesses_types=config.guesses_types,
            is_strict=True,
        ),
        pool=engine,
        rules=SimulatedSlots(SimulationOracle(engine, {job.name: job for job in workload.jobs}, slots_per_node)),
    )
    policy.reset()

    samples: list[Sample] = []
    alive_at = 0.0

    def is_done() -> bool:
        nonlocal alive_at
        now, active = clock.now(), scheduler.active_jobs
        if active:
            samples.append(_sample(engine, now, len(active), has_types=len(slots_per_node) > 1))
            if samples[-1].replicas or arrivals:
                alive_at = now
            elif now - alive_at > _STALLED_S:
                names = ", ".join(record.name for record in active[:5])
                raise SimulationError(
                    f"policy {policy.name!r} has run nothing for {_STALLED_S / 3600:.0f} h although jobs wait "
                    f"({names}); {_why_stalled(config)}"
                )
        if on_round is not None:
            on_round(now, len(store.jobs) - len(active))
        return not arrivals and not active

    scheduler.run(is_done)
    return SimulationRun(
        workload=workload,
        applications=applications,
        policy=policy,
        config=config,
        store=store,
        samples=samples,
        node_s=engine.node_s,
        wall_s=time.perf_counter() - began,
        ended_at=clock.now(),
    )


def _why_stalled(config: SimulationConfig) -> str:
    """A likely reason."""
    if config.autoscale is None:
        return "they may ask for more GPUs than the cluster has"
    most = f"the largest cluster of {config.full.groups[0].num_slots} GPUs"
    if config.budget_slots is not None:
        most = f"the budget of {config.budget_slots:g} GPUs, or {most},"
    return f"{most} may be too small for them"


def _sample(engine: SimulatedEngine, now: float, num_active: int, *, has_types: bool) -> Sample:
    running = [job for job in engine.jobs.values() if job.placement]
    return Sample(
        at=now,
        num_slots=sum(node.num_slots for node in engine.nodes()),
        num_waiting=num_active - len(running),
        replicas={job.spec.name: job.allocation.num_replicas for job in running},
        efficiency={job.spec.name: job.efficiency() for job in running},
        guests=frozenset(job.spec.name for job in running if host_of(job.allocation)),
        types={job.spec.name: job.accelerator for job in running} if has_types else {},
    )
