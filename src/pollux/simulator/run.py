"""Runs a workload under a policy: the scheduler's loop with a virtual clock and the simulated engine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pollux.errors import SimulationError
from pollux.policy.base import Policy
from pollux.policy.simulated import host_of
from pollux.scheduler.loop import Scheduler, SchedulerConfig
from pollux.scheduler.ports import MemoryStore
from pollux.scheduler.quotas import Quotas
from pollux.scheduler.record import JobRecord, RoundRecord
from pollux.simulator.application import Application, application_key
from pollux.simulator.clock import VirtualClock
from pollux.simulator.colocation import check_applications
from pollux.simulator.config import SimulationConfig
from pollux.simulator.engine import SimulatedEngine
from pollux.simulator.oracle import SimulationOracle
from pollux.simulator.round_log import NO_REPLICAS, NO_SPEEDUPS, RoundLog
from pollux.simulator.slot_sharing import SimulatedSlots
from pollux.simulator.workload import Workload
from pollux.types import JobSpec, Snapshot

# Seconds in which no job runs or arrives although jobs wait, after which a run is given up. No policy waits so long:
# the longest memory of any is Themis' lease of ten minutes.
_STALLED_S = 6 * 3600.0


def restricted(workload: Workload, applications: Mapping[str, Application], config: SimulationConfig) -> Workload:
    """The workload with jobs that may use those types alone on which their applications were measured.

    Raises:
        SimulationError: a job can run on no type of the cluster; says on which it could.
    """
    types = frozenset(config.accelerators)
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
class SimulatedSample:
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


class Attendant(Protocol):
    """Submits, weighs and cancels jobs while a simulation runs, as a study does."""

    next_at: float  # when it wants to act again

    def begin(self, scheduler: Scheduler, engine: SimulatedEngine, submit: Callable[[JobSpec], JobRecord]) -> None: ...

    def attend(self, now: float) -> None: ...

    @property
    def is_over(self) -> bool:
        """It will submit no more jobs."""


class _RunStore(MemoryStore):
    """Keeps of a decision what a result contains: how good it was, and which jobs moved.

    The options that were weighed for every job are nearly all the memory that a simulation would take. What is left of
    the rounds of a long one goes to a file.
    """

    def __init__(self) -> None:
        super().__init__(keep_rounds=False)
        self._log = RoundLog()

    @property
    def rounds(self) -> RoundLog:
        return self._log

    def save_round(self, round_record: RoundRecord, snapshot: Snapshot) -> None:
        plan = round_record.plan
        if plan.explanation is not None:
            moved = tuple(
                dataclasses.replace(decision, option_replicas=NO_REPLICAS, option_speedups=NO_SPEEDUPS)
                for decision in plan.explanation.jobs
                if decision.has_changed
            )
            plan = dataclasses.replace(plan, explanation=dataclasses.replace(plan.explanation, jobs=moved))
            round_record = dataclasses.replace(round_record, plan=plan)
        self._log.append(round_record)


@dataclass(frozen=True, slots=True)
class SimulationRun:
    """The records of a simulation, before they are summed up (:mod:`pollux.simulator.result`)."""

    workload: Workload
    applications: Mapping[str, Application]
    policy: Policy
    config: SimulationConfig
    store: MemoryStore  # .jobs: every JobRecord by name; .rounds: every RoundRecord, without the options weighed
    samples: Sequence[SimulatedSample]
    node_s: float  # node-seconds to be paid for, those of nodes that were starting included
    wall_s: float
    ended_at: float
    node_s_by_type: Mapping[str, float] = field(default_factory=dict)  # the same, where types of nodes have prices


def simulate(
    workload: Workload,
    applications: Mapping[str, Application],
    policy: Policy,
    config: SimulationConfig,
    on_round: Callable[[float, int], None] | None = None,
    attendant: Attendant | None = None,
) -> SimulationRun:
    """Run ``workload`` to its end, and that of ``attendant``. ``on_round(now, jobs done)`` follows every decision."""
    began = time.perf_counter()
    check_applications(config.shared_speeds, applications.values())
    applications = config.physics.applied_to(applications)
    nodes, workload = config.nodes(), restricted(workload, applications, config)
    slots_per_node = {node.accelerator: node.num_slots for node in nodes}
    slots_per_node |= {one.accelerator: one.num_slots for one in config.node_types}
    profiles_types = len(slots_per_node) > 1 if config.profiles_types is None else config.profiles_types
    engine = SimulatedEngine(nodes, applications, config, adapts_batch=policy.adapts_batch)
    arrivals = sorted(enumerate(workload.jobs), key=lambda item: item[1].submitted_at)[::-1]  # next one last

    def advance(deadline: float) -> float:
        if attendant is not None and not attendant.is_over:
            deadline = min(deadline, max(attendant.next_at, engine.now))
        if config.decides_on_events and arrivals:
            deadline = min(deadline, max(arrivals[-1][1].submitted_at, engine.now))
        now = engine.advance(deadline, stops_at_event=config.decides_on_events)
        while arrivals and arrivals[-1][1].submitted_at <= now:
            sequence, spec = arrivals.pop()
            scheduler.submit(spec, sequence)
            if profiles_types:
                engine.profile(spec, config.profiled_batches)
        if attendant is not None and not attendant.is_over:
            attendant.attend(now)
        return now

    def submit(spec: JobSpec) -> JobRecord:
        specs[spec.name] = spec
        return scheduler.submit(spec)

    store, specs = _RunStore(), {job.name: job for job in workload.jobs}
    clock = VirtualClock(advance)
    scheduler = Scheduler(
        policy=policy,
        engine=engine,
        store=store,
        clock=clock,
        config=_scheduler_config(config, policy),
        pool=engine,
        quotas=None if (entitled := config.entitlements) is None else Quotas(lambda: entitled),
        rules=SimulatedSlots(SimulationOracle(engine, specs, slots_per_node)),
    )
    policy.reset()
    if attendant is not None:
        attendant.begin(scheduler, engine, submit)

    samples, alive_at = list[SimulatedSample](), 0.0

    def is_done() -> bool:
        nonlocal alive_at
        now, active = clock.now(), scheduler.active_jobs
        if active:
            samples.append(_sample(engine, now, len(active), has_types=len(slots_per_node) > 1))
            if samples[-1].replicas or arrivals:
                alive_at = now
            elif now - alive_at > _STALLED_S:
                raise _stalled(policy, config, active)
        if on_round is not None:
            on_round(now, len(store.jobs) - len(active))
        return not arrivals and not active and (attendant is None or attendant.is_over)

    scheduler.run(is_done)
    return SimulationRun(
        workload=workload,
        applications=applications,
        policy=policy,
        config=config,
        store=store,
        samples=samples,
        node_s=engine.node_s,
        node_s_by_type=dict(engine.node_s_by_type),
        wall_s=time.perf_counter() - began,
        ended_at=clock.now(),
    )


def _stalled(policy: Policy, config: SimulationConfig, waiting: Sequence[JobRecord]) -> SimulationError:
    names = ", ".join(record.name for record in waiting[:5])
    return SimulationError(
        f"policy {policy.name!r} has run nothing for {_STALLED_S / 3600:.0f} h although jobs wait "
        f"({names}); {_why_stalled(config)}"
    )


def _scheduler_config(config: SimulationConfig, policy: Policy) -> SchedulerConfig:
    return SchedulerConfig(
        interval_s=config.interval_s,
        decides_on_events=config.decides_on_events,
        remembers_profiles=config.remembers_profiles,
        tunes_batches=policy.adapts_batch,
        autoscale=config.autoscale,
        pins_resizing=config.physics.pins_resizing,
        guesses_types=config.guesses_types,
        fits_published=config.fits_published,
        keeps_deadlines=config.keeps_deadlines,
        is_strict=True,
    )


def _why_stalled(config: SimulationConfig) -> str:
    """A likely reason."""
    if config.autoscale is None:
        return "they may ask for more GPUs than the cluster has"
    most = f"the largest cluster of {config.full.groups[0].num_slots} GPUs"
    if config.budget_slots is not None:
        most = f"the budget of {config.budget_slots:g} GPUs, or {most},"
    return f"{most} may be too small for them"


def _sample(engine: SimulatedEngine, now: float, num_active: int, *, has_types: bool) -> SimulatedSample:
    running = [job for job in engine.jobs.values() if job.placement]
    return SimulatedSample(
        at=now,
        num_slots=sum(node.num_slots for node in engine.nodes()),
        num_waiting=num_active - len(running),
        replicas={job.spec.name: job.allocation.num_replicas for job in running},
        efficiency={job.spec.name: job.efficiency() for job in running},
        guests=frozenset(job.spec.name for job in running if host_of(job.allocation)),
        types={job.spec.name: job.accelerator for job in running} if has_types else {},
    )
