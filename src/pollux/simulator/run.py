"""Run a workload under a policy: the scheduler's loop with a virtual clock and the simulated engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pollux.errors import InvalidValueError, SimulationError
from pollux.policy.base import Policy
from pollux.scheduler.autoscale import DEFAULT_BAND, DEFAULT_WINDOW_S, AutoscaleConfig
from pollux.scheduler.loop import Scheduler, SchedulerConfig
from pollux.scheduler.ports import MemoryStore
from pollux.simulator.application import Application
from pollux.simulator.clock import VirtualClock
from pollux.simulator.engine import SimulatedEngine
from pollux.simulator.oracle import SimulationOracle
from pollux.simulator.workload import Workload
from pollux.types import Node

_STALLED_S = 6 * 3600.0  # jobs wait, nobody runs, nobody will come: after this long nothing is going to change


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """The cluster and its physics. Defaults are the OSDI'21 artifact's."""

    num_nodes: int = 16
    gpus_per_node: int = 4
    interval_s: float = 60.0
    resize_s: float = 30.0
    start_s: float | None = None  # of a start, where a job's own is not known; as long as a resize if left out
    interference: float = 0.0
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
            ("resize seconds", self.resize_s, 0),
            ("start seconds", self.start_s or 0.0, 0),
            ("node start seconds", self.node_start_s, 0),
        ):
            if not (math.isfinite(value) and value >= least):
                raise InvalidValueError(f"{label}: {value}; at least {least} is needed")
        if not 0 <= self.interference < 1:
            raise InvalidValueError(f"interference {self.interference}; a share from 0 up to below 1 is needed")

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
        config.check_template(self.gpus_per_node)
        return config

    def nodes(self) -> tuple[Node, ...]:
        """Those the simulation starts with."""
        num_nodes = self.num_nodes if self.min_nodes is None else self.min_nodes
        return tuple(Node(name=f"node{i}", num_slots=self.gpus_per_node) for i in range(num_nodes))


@dataclass(frozen=True, slots=True)
class Sample:
    """The cluster right after a decision."""

    at: float
    num_slots: int
    num_waiting: int
    replicas: Mapping[str, int]  # by job, of jobs that hold any
    efficiency: Mapping[str, float]  # by job, statistical efficiency of its batch size now


@dataclass(frozen=True, slots=True)
class SimulationRun:
    """What a simulation leaves behind, before it is summed up (:mod:`pollux.simulator.result`)."""

    workload: Workload
    applications: Mapping[str, Application]
    policy: Policy
    config: SimulationConfig
    store: MemoryStore  # .jobs: every JobRecord by name; .rounds: every RoundRecord
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
    nodes = config.nodes()
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
        return now

    store = MemoryStore()
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
        ),
        pool=engine,
        oracles=SimulationOracle(engine, {job.name: job for job in workload.jobs}, config.gpus_per_node),
    )
    policy.reset()

    samples: list[Sample] = []
    alive_at = 0.0

    def is_done() -> bool:
        nonlocal alive_at
        now, active = clock.now(), scheduler.active_jobs
        if active:
            samples.append(_sample(engine, now, len(active)))
            if samples[-1].replicas or arrivals:
                alive_at = now
            elif now - alive_at > _STALLED_S:
                names = ", ".join(record.name for record in active[:5])
                raise SimulationError(
                    f"policy {policy.name!r} has run nothing for {_STALLED_S / 3600:.0f} h although jobs wait "
                    f"({names}); they may ask for more GPUs than the cluster has"
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


def _sample(engine: SimulatedEngine, now: float, num_active: int) -> Sample:
    running = [job for job in engine.jobs.values() if job.placement]
    return Sample(
        at=now,
        num_slots=sum(node.num_slots for node in engine.nodes()),
        num_waiting=num_active - len(running),
        replicas={job.spec.name: job.allocation.num_replicas for job in running},
        efficiency={job.spec.name: job.efficiency() for job in running},
    )
