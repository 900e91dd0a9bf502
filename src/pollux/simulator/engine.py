"""The simulated engine: jobs that train by the physics of their application, in virtual time.

Implements :class:`~pollux.scheduler.ports.Engine`. Semantics are those of the OSDI'21 artifact: a start or
resize stands still for ``resize_s`` (and where newcomers' starts were recorded, the others train on until they are
there); progress goes epoch by epoch at a rate that depends on placement, batch and epoch; an epoch's end is rounded to
whole seconds.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from pollux.errors import SimulationError
from pollux.model.efficiency import MAX_NOISE_SCALE
from pollux.model.goodput import BatchTuner, fixed_batch
from pollux.model.profile import Configuration, Timing
from pollux.policy.simulated import host_of
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.ports import (
    Command,
    Event,
    JobEnded,
    JobReport,
    JobRuns,
    JobStopped,
    NodesChanged,
    ResizeJob,
    StartJob,
    StopJob,
    TuneJob,
)
from pollux.simulator.application import Application, StepTime, application_key, dense_placement, limits_in
from pollux.simulator.colocation import load, speeds_together
from pollux.simulator.config import SimulationConfig
from pollux.types import (
    DEFAULT_ACCELERATOR,
    NO_ALLOCATION,
    Allocation,
    BatchConfig,
    BatchLimits,
    JobSpec,
    Node,
    ThroughputParams,
)

Shape = tuple[str, int, int]  # accelerator, nodes, replicas

_NO_BATCH = BatchConfig(0, 0)


@dataclass(slots=True)
class SimulatedJob:
    """One job's true state; simulates its processes and the training library inside them."""

    spec: JobSpec
    application: Application
    adapts_batch: bool
    limits: BatchLimits  # where it is placed
    clock: float = 0.0  # simulated up to here
    allocation: Allocation = NO_ALLOCATION
    placement: tuple[int, ...] = ()
    accelerator: str = DEFAULT_ACCELERATOR
    generation: int = 0
    delay_s: float = 0.0  # of the start or resize under way
    joining_s: float = 0.0  # before that, until new replicas are up: ``placement`` is still the old one
    is_announced: bool = True  # the scheduler knows that this generation trains
    epoch: int = 0
    progress: float = 0.0
    completed_at: float | None = None
    batch: BatchConfig = _NO_BATCH
    batch_threshold: float = 0.0  # gain below which a batch is not changed
    rounds_epochs: bool = True  # an epoch's last stretch takes whole seconds
    counts_efficiency: bool = True  # else it goes by throughput alone, and its batch grows with its replicas
    slowdown: float = 0.0  # by interference, 0..1
    shared_speed: float = 1.0  # of its own speed, beside another job on the same slots
    params: Mapping[str, ThroughputParams] = field(default_factory=dict)
    tuner: BatchTuner | None = None
    tuner_basis: tuple[object, ...] = ()  # what the tuner was made from
    tuned_for: tuple[float, int | None] = (math.nan, None)  # the noise scale and limit that the batch was chosen for
    rate: float = math.nan  # progress per second; nan: to be computed
    new_timings: dict[Configuration, Timing] = field(default_factory=dict)
    measured: dict[Shape, dict[int, Timing]] = field(default_factory=dict)

    @property
    def num_replicas(self) -> int:
        return sum(self.placement)

    @property
    def total_batch(self) -> int:
        return min(self.batch.total(self.num_replicas), self.limits.maximum)

    def allocate(self, allocation: Allocation, accelerator: str, generation: int, delay_s: float) -> None:
        is_growing = 0 < self.num_replicas < allocation.num_replicas and accelerator == self.accelerator
        self.allocation, self.accelerator = allocation, accelerator
        self.generation, self.is_announced = generation, False
        self.delay_s = delay_s or self.delay_s
        self.joining_s = self.application.habits.join_s if is_growing else 0.0
        if self.joining_s == 0:
            self._take_place()

    def _take_place(self) -> None:
        self.placement = self.allocation.counts
        self.limits = _limits(self.spec, self.application, self.accelerator, self.placement)
        self.choose_batch(is_new_allocation=True)

    def release(self) -> None:
        self.allocation, self.placement = NO_ALLOCATION, ()

    def phi(self) -> float:
        """The noise scale that training now would measure; unbounded if all examples count as equally useful."""
        if not self.counts_efficiency:
            return MAX_NOISE_SCALE
        limits, alone = self.application.limits, self.application.habits.lone_noise_scales
        if alone and self.num_replicas * (self.batch.accum_steps + 1) == 1:
            return min(alone[self.epoch], MAX_NOISE_SCALE)
        stats = self.application.gradient(self.epoch, max(self.total_batch, limits.initial))
        return min(limits.initial * stats.var / stats.sqr, MAX_NOISE_SCALE) if stats.sqr > 0 else MAX_NOISE_SCALE

    def efficiency(self) -> float:
        """Of the batch size it trains with now."""
        scale = self.total_batch / self.application.limits.initial
        return self.application.gradient(self.epoch, self.total_batch).gain(scale) / scale

    def choose_batch(self, is_new_allocation: bool = False) -> None:
        """Re-batch: by goodput if the policy lets jobs adapt, else as requested."""
        limits, replicas = self.limits, self.num_replicas
        self.rate = math.nan
        if not self.adapts_batch:
            total = self.spec.requested_batch_size or limits.initial
            self.batch = fixed_batch(total, replicas, limits)
            return
        if not self.counts_efficiency:
            # Or et al. (MLSys'20): each replica keeps the batch that suits its device, without accumulation.
            self.batch = fixed_batch(min(limits.device_max * replicas, limits.maximum), replicas, limits)
            return
        params = self.params.get(self.accelerator)
        if params is None:
            self.batch = fixed_batch(max(limits.minimum, limits.device_min * replicas), replicas, limits)
            return
        if is_new_allocation and self.total_batch == 0:
            self.batch = fixed_batch(limits.initial, replicas, limits)
        phi, dared = self.phi(), self.application.habits.largest_batches
        limit = max(dared[self.epoch][0], dared[self.epoch][1] * replicas) if self.epoch < len(dared) else None
        shape = (len(self.placement), replicas)
        measured = self.measured.get((self.accelerator, *shape), {})
        basis = (params, limits, shape, len(measured))
        if self.tuner is None or basis != self.tuner_basis:
            self.tuner, self.tuner_basis = _tuner(params, limits, shape, tuple(measured.items())), basis
        elif (phi, limit) == self.tuned_for and not is_new_allocation:
            return
        self.tuned_for = (phi, limit)
        current, earned = None if is_new_allocation else self.batch, self.application.habits.earned
        self.batch, _ = self.tuner.best(phi, current, self.batch_threshold, limit=limit, earned=earned)

    def current_rate(self) -> float:
        """Progress per second; also notes the step time, as profiling would."""
        if math.isnan(self.rate):
            device_batch, accum_steps = self.batch
            times = self.application.step_time(self.accelerator, self.placement, device_batch)
            total = self.total_batch
            stats = self.application.gradient(self.epoch, total)
            gain = stats.gain(total / self.application.limits.initial)
            self.rate = gain / times.iteration_s(accum_steps) * (1 - self.slowdown) * self.shared_speed
            shape = (len(self.placement), self.num_replicas)
            measured = self.measured.setdefault((self.accelerator, *shape), {})
            if device_batch not in measured:
                measured[device_batch] = self.new_timings[Configuration(*shape, device_batch)] = _timing(times)
        return self.rate

    def advance(self, until: float) -> None:
        """Train up to ``until``; sets ``completed_at`` if the job is done by then."""
        left = until - self.clock
        if self.completed_at is not None or not self.placement or left <= 0:
            self.clock = max(self.clock, until)
            return
        if self.joining_s > 0:
            joining_s = min(self.joining_s, left)
            self._train(joining_s)
            if self.completed_at is not None:
                return
            self.joining_s -= joining_s
            left -= joining_s
            if self.joining_s == 0:
                self._take_place()
        waited = min(self.delay_s, left)
        self.delay_s -= waited
        self.clock += waited
        self._train(left - waited)

    def _train(self, left: float) -> None:
        """For ``left`` seconds, or to the end."""
        application = self.application
        while left > 0:
            rate = self.current_rate()
            end = application.epoch_end(self.epoch)
            if self.progress + rate * left < end:
                self.progress += rate * left
                self.clock += left
                return
            needed = (end - self.progress) / rate
            spent = min(round(needed) if self.rounds_epochs else needed, left)
            self.epoch += 1
            self.progress = end
            self.clock += spent
            left -= spent
            if self.epoch == application.num_epochs:
                self.completed_at = self.clock
                return
            self.rate = math.nan
            if self.adapts_batch:
                self.choose_batch()

    def report(self) -> JobReport:
        limits = self.application.limits
        total = self.application.epoch_end(self.application.num_epochs - 1)
        timings, self.new_timings = list(self.new_timings.items()), {}
        return JobReport(
            job=self.spec.name,
            accelerator=self.accelerator,
            timings=timings,
            noise_scale=self.phi(),
            remaining_examples=(total - self.progress) * limits.initial,
            progress=self.progress / total,
            total_batch=self.total_batch,
        )


@dataclass(slots=True)
class _Checkpoint:
    """The state of a simulated job before an advance, to return to if the advance passed an event."""

    job: SimulatedJob
    state: tuple[object, ...]

    new_timings: dict[Configuration, Timing]
    measured: dict[Shape, dict[int, Timing]]

    FIELDS = (
        *("clock", "joining_s", "placement", "limits", "delay_s", "epoch", "progress", "completed_at"),
        *("batch", "tuner", "tuner_basis", "tuned_for", "rate"),
    )

    @classmethod
    def of(cls, job: SimulatedJob) -> _Checkpoint:
        measured = {shape: dict(timings) for shape, timings in job.measured.items()}
        return cls(job, tuple(getattr(job, name) for name in cls.FIELDS), dict(job.new_timings), measured)

    def restore(self) -> None:
        for name, value in zip(self.FIELDS, self.state, strict=True):
            setattr(self.job, name, value)
        self.job.new_timings, self.job.measured = self.new_timings, self.measured


class SimulatedEngine:
    """All simulated jobs, and the nodes they share."""

    applies_at_once = True

    def __init__(
        self,
        nodes: Sequence[Node],
        applications: Mapping[str, Application],
        config: SimulationConfig | None = None,
        *,
        adapts_batch: bool,
    ) -> None:
        """``adapts_batch``: jobs choose their batch by goodput, as the policy allows."""
        self._config = config or SimulationConfig()
        self.jobs: dict[str, SimulatedJob] = {}  # that were started and have not ended
        self.now = 0.0
        self._nodes = tuple(nodes)
        self.template = nodes[0]
        self._accelerator_of = {node.name: node.accelerator for node in nodes}
        self._applications = applications
        self._adapts_batch = adapts_batch
        self._shared_speeds = {(entry.application, entry.beside): entry.speed for entry in self._config.shared_speeds}
        self._running: dict[str, SimulatedJob] = {}
        self._events: list[Event] = []
        self._arriving: list[tuple[float, Node]] = []  # when each of them is up, in that order
        self._fresh_names = (f"node{number}" for number in itertools.count())
        self.node_s = 0.0  # node-seconds paid for; a node is from when it is asked for
        self.node_s_by_type: defaultdict[str, float] = defaultdict(float)  # the same, where types have prices

    # Engine -----------------------------------------------------------------------------------

    def nodes(self) -> Sequence[Node]:
        return self._nodes

    def apply(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case StartJob():
                    job = self.jobs.get(command.job) or self._create(command)
                    job.params = command.params
                    job.clock = self.now
                    self._allocate(job, command.allocation, command.generation, self._start_s_of(job))
                    self._running[command.job] = job
                case ResizeJob():
                    job = self._known(command.job)
                    self._allocate(job, command.allocation, command.generation, self._resize_s_of(job))
                case StopJob():
                    self._known(command.job).release()
                    self._running.pop(command.job, None)
                    self._events.append(JobStopped(job=command.job))
                case TuneJob():
                    job = self._known(command.job)
                    job.params = command.params
                    job.choose_batch()
        self._update_interference()
        self._update_sharing()

    def poll(self) -> Sequence[Event]:
        events, self._events = self._events, []
        return events

    def scale_to(self, keeping: Sequence[str], num_more: int, like: Node | None = None) -> None:
        """New nodes arrive after ``node_start_s``, surplus ones leave as soon as they are idle."""
        busy = {share.node for job in self._running.values() for share in job.allocation.shares}
        staying = [node for node in self._nodes if node.name in keeping or node.name in busy]
        if len(staying) != len(self._nodes):
            self._nodes = tuple(staying)
            self._events.append(NodesChanged())
        del self._arriving[num_more:]  # the latest requests are cancelled first
        while len(self._arriving) < num_more:
            name = next(name for name in self._fresh_names if name not in self._accelerator_of)
            node = dataclasses.replace(like or self.template, name=name)
            self._arriving.append((self.now + self._config.node_start_s, node))

    # World ------------------------------------------------------------------------------------

    def advance(self, until: float, *, stops_at_event: bool = False) -> float:
        """Let time pass up to ``until``, or to the first end of a job; returns the time reached."""
        if self._arriving:
            until = min(until, max(self._arriving[0][0], self.now)) if stops_at_event else until
        running = list(self._running.values())
        before = [_Checkpoint.of(job) for job in running] if stops_at_event else []
        for job in running:
            job.advance(until)
        ends = [job.completed_at for job in running if job.completed_at is not None]
        if stops_at_event and ends and min(ends) < until:
            until = min(ends)
            for checkpoint in before:
                if checkpoint.job.completed_at != until:
                    checkpoint.restore()
                    checkpoint.job.advance(until)
        self.node_s += (until - self.now) * (len(self._nodes) + len(self._arriving))
        if self._config.node_types:
            for node in (*self._nodes, *(node for _, node in self._arriving)):
                self.node_s_by_type[node.accelerator] += until - self.now
        self.now = until
        if any(host_of(job.allocation) for job in running):  # of guest and host, the first to end comes first
            running.sort(key=lambda job: math.inf if job.completed_at is None else job.completed_at)
        for job in running:
            self._observe(job)
        self._admit_nodes()
        return until

    def _observe(self, job: SimulatedJob) -> None:
        name = job.spec.name
        if job.delay_s == 0 and job.joining_s == 0 and not job.is_announced:
            job.is_announced = True
            self._events.append(JobRuns(job=name, generation=job.generation, took_s=self._resize_s_of(job)))
        if job.completed_at is not None:
            if job.new_timings:
                self._events.append(
                    JobReport(job=name, accelerator=job.accelerator, timings=list(job.new_timings.items()))
                )
            self._events.append(JobEnded(job=name, state=JobState.SUCCEEDED, at=job.completed_at))
            job.release()
            del self._running[name], self.jobs[name]
            self._update_interference()
            self._update_sharing()
        elif job.is_announced:
            if job.adapts_batch:
                job.choose_batch()
            self._events.append(job.report())

    def _admit_nodes(self) -> None:
        arrived = [node for at, node in self._arriving if at <= self.now]
        if arrived:
            del self._arriving[: len(arrived)]
            self._nodes = (*self._nodes, *arrived)
            self._accelerator_of.update({node.name: node.accelerator for node in arrived})
            self._events.append(NodesChanged())

    # Jobs -------------------------------------------------------------------------------------

    def job_for(self, spec: JobSpec) -> SimulatedJob:
        """A job that has not started yet."""
        application = self._applications.get(application_key(self._applications, spec))
        if application is None:
            raise SimulationError(f"job {spec.name!r}: nothing is known of application {spec.application!r}")
        habits = application.habits
        return SimulatedJob(
            spec,
            application,
            self._adapts_batch,
            spec.batch or application.limits,
            batch_threshold=self._config.batch_threshold if habits.batch_threshold is None else habits.batch_threshold,
            rounds_epochs=self._config.rounds_epochs and habits.rounds_epochs,
            counts_efficiency=self._config.counts_efficiency,
        )

    def profile(self, spec: JobSpec, num_batches: int) -> None:
        """Report what a job would measure on its least replicas, on every type that it may use.

        With so many device batches from the largest to the smallest. It costs nothing here; on a cluster it would take
        some steps with each.
        """
        job = self.job_for(spec)
        known = (*self._nodes, *(one.node for one in self._config.node_types))
        for node in {node.accelerator: node for node in known}.values():
            accelerator = node.accelerator
            if spec.accelerators is not None and accelerator not in spec.accelerators:
                continue
            placement = dense_placement(spec.min_replicas, node.num_slots)
            limits = _limits(spec, job.application, accelerator, placement)
            timings = []
            batches = np.geomspace(limits.device_max, limits.device_min, num_batches)
            for device_batch in sorted({round(batch) for batch in batches.tolist()}):
                times = job.application.step_time(accelerator, placement, device_batch)
                timings.append((Configuration(len(placement), spec.min_replicas, device_batch), _timing(times)))
            self._events.append(JobReport(job=spec.name, accelerator=accelerator, timings=timings))

    def _create(self, command: StartJob) -> SimulatedJob:
        job = self.jobs[command.job] = self.job_for(command.spec)
        return job

    def _start_s_of(self, job: SimulatedJob) -> float:
        known = (job.application.habits.start_s, self._config.start_s, self._config.resize_s)
        return next(start_s for start_s in known if start_s is not None)

    def _resize_s_of(self, job: SimulatedJob) -> float:
        own_s = job.application.habits.resize_s
        return self._config.resize_s if own_s is None else own_s

    def _known(self, name: str) -> SimulatedJob:
        job = self.jobs.get(name)
        if job is None:
            raise SimulationError(f"job {name!r} was never started, or has ended")
        return job

    def _allocate(self, job: SimulatedJob, allocation: Allocation, generation: int, delay_s: float) -> None:
        accelerator = self._accelerator_of[allocation.shares[0].node]
        if allocation.shares == job.allocation.shares or (  # only the job that shares its slots changed
            self._config.physics.moves_are_free
            and accelerator == job.accelerator
            and allocation.counts == job.allocation.counts
        ):
            delay_s = 0.0
        job.allocate(allocation, accelerator, generation, delay_s)

    def _update_interference(self) -> None:
        """Spanning jobs that share a node with another spanning job are slowed."""
        if self._config.interference == 0:
            return
        spanners: dict[str, int] = {}
        for job in self._running.values():
            if job.allocation.num_nodes > 1:
                for node, _ in job.allocation.shares:
                    spanners[node] = spanners.get(node, 0) + 1
        for job in self._running.values():
            shares_network = job.allocation.num_nodes > 1 and any(
                spanners[node] > 1 for node, _ in job.allocation.shares
            )
            slowdown = self._config.interference if shares_network else 0.0
            if slowdown != job.slowdown:
                job.slowdown, job.rate = slowdown, math.nan

    def _update_sharing(self) -> None:
        """Guests and their hosts slow each other down; a guest whose host is gone has the slots to itself."""
        speeds = dict.fromkeys(self._running, 1.0)
        guests = {name: job for name, job in self._running.items() if host_of(job.allocation)}
        for name, guest in guests.items():
            host = self._running.get(host_of(guest.allocation))
            if host is None:
                guest.allocation = Allocation(guest.allocation.shares)
            else:
                pair = speeds_together(
                    guest.application, _load(guest), host.application, _load(host), self._shared_speeds
                )
                speeds[name], speeds[host.spec.name] = pair
        for name, speed in speeds.items():
            job = self._running[name]
            if speed != job.shared_speed:
                job.shared_speed, job.rate = speed, math.nan


@lru_cache(maxsize=4096)  # a few KB each
def _tuner(
    params: ThroughputParams, limits: BatchLimits, shape: tuple[int, int], measured: tuple[tuple[int, Timing], ...]
) -> BatchTuner:
    """Shared by all jobs of which the same is known: those of an application, once it has been measured."""
    return BatchTuner(params, limits, *shape, dict(measured))


def _load(job: SimulatedJob) -> float:
    return load(job.application, job.accelerator, job.placement, job.batch)


def _timing(times: StepTime) -> Timing:
    return Timing(max(times.grad_s, 1e-3 * times.step_s), times.step_s)


def _limits(spec: JobSpec, application: Application, accelerator: str, placement: tuple[int, ...]) -> BatchLimits:
    return limits_in(application, accelerator, placement, spec.batch)
