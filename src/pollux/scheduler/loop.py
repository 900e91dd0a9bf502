"""The scheduler: clock + store + policy + engine.

One :meth:`Scheduler.tick` takes in what happened, decides if it is time to, and sends the engine what follows.
The simulator and the live server call the same ticks; only clock, store and engine differ.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from pollux.errors import InvalidValueError, PolluxError, UnknownNameError
from pollux.policy.base import Policy
from pollux.scheduler.autoscale import AutoscaleConfig, SizeDecision, decide_size, nodes_to_have
from pollux.scheduler.knowledge import Knowledge, ProfileMemory
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.ports import (
    Clock,
    Command,
    Engine,
    Event,
    JobEnded,
    JobHurt,
    JobLost,
    JobReport,
    JobRuns,
    JobStopped,
    NodePool,
    NodesChanged,
    OracleSource,
    ResizeJob,
    StartJob,
    StopJob,
    Store,
    TuneJob,
    check_report,
)
from pollux.scheduler.reconcile import Actual, Change, Resize, Start, reconcile, together, verify_plan
from pollux.scheduler.record import JobRecord, RoundRecord
from pollux.types import NO_ALLOCATION, Allocation, JobSpec, JobView, Node, Plan, Snapshot

logger = logging.getLogger(__name__)

_MAY_STOP = frozenset({JobState.STOPPING, JobState.RUNNING, JobState.RESIZING})
_MAX_SETTLING = 8  # passes of reconcile in one tick; real engines need one, trades a few


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How often to decide, and what to remember."""

    interval_s: float = 60.0
    decides_on_events: bool = False  # also when a job arrives or ends, or nodes change
    decides_on_models: bool = False  # and when a job was measured in a configuration not seen before
    min_pause_s: float = 0.0  # from one decision to the next
    max_duty: float = 1.0  # share of the time that deciding may take
    remembers_profiles: bool = False
    tunes_batches: bool = True  # hand fitted θ to jobs; off for policies that fix the batch
    autoscale: AutoscaleConfig | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.interval_s) and self.interval_s > 0):
            raise InvalidValueError(f"scheduling interval of {self.interval_s} s; it must be a positive number")
        if not (math.isfinite(self.min_pause_s) and self.min_pause_s >= 0):
            raise InvalidValueError(f"a pause of {self.min_pause_s} s between decisions; a number >= 0 is needed")
        if not 0 < self.max_duty <= 1:
            raise InvalidValueError(f"max_duty = {self.max_duty}; a share above 0 and up to 1 is needed")


class Scheduler:
    """Owns the jobs' records. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        *,
        policy: Policy,
        engine: Engine,
        store: Store,
        clock: Clock,
        config: SchedulerConfig,
        oracles: OracleSource | None = None,
        pool: NodePool | None = None,
    ) -> None:
        if policy.needs_oracle and oracles is None:
            raise InvalidValueError(f"policy {policy.name!r} needs an oracle: it can only be simulated")
        self.policy, self.config = policy, config
        self._engine, self._store, self._clock, self._oracles = engine, store, clock, oracles
        self._memory = ProfileMemory() if config.remembers_profiles else None
        self._active: dict[str, JobRecord] = {}  # in order of submission
        self._desired: dict[str, Allocation] = {}
        self._next_round_at = clock.now() + config.interval_s
        self._not_before = -math.inf  # for decisions that events ask for
        self._trigger: str | None = None  # an event that asks for a decision now
        self._num_rounds = 0
        self._next_sequence = 0
        if config.autoscale is not None and pool is None:
            raise InvalidValueError("auto-scaling needs an engine whose nodes can come and go")
        self._pool = pool
        self._draining: set[str] = set()
        self._resized_at = -math.inf
        self._slot_s_spent: deque[tuple[float, float]] = deque()  # (until, slot-seconds) of the budget's window
        self._wanted_nodes: tuple[Node, ...] = ()
        self.last_size: SizeDecision | None = None

    @property
    def active_jobs(self) -> list[JobRecord]:
        return list(self._active.values())

    @property
    def num_rounds(self) -> int:
        return self._num_rounds

    @property
    def next_tick_at(self) -> float:
        """When to tick at the latest, if nothing happens before."""
        return min(self._next_round_at, self._not_before) if self._is_asked else self._next_round_at

    @property
    def _is_asked(self) -> bool:
        return self.config.decides_on_events and self._trigger is not None

    @property
    def draining(self) -> frozenset[str]:
        return frozenset(self._draining)

    def submit(self, spec: JobSpec, sequence: int | None = None) -> JobRecord:
        """Take in a job; it is considered in the next round.

        Raises:
            InvalidValueError: an active job has this name.
        """
        if spec.name in self._active:
            raise InvalidValueError(f"a job named {spec.name!r} is active; names must be unique")
        if self._memory is not None and spec.application:
            knowledge = self._memory.of(spec.application)
        else:
            knowledge = Knowledge(f"job {spec.name}")
        record = JobRecord(
            spec=spec,
            sequence=self._next_sequence if sequence is None else sequence,
            knowledge=knowledge,
            noise_scale=knowledge.first_noise_scale,
            accounted_at=self._clock.now(),
        )
        self._next_sequence = max(self._next_sequence, record.sequence) + 1
        in_order = not self._active or next(reversed(self._active.values())).sequence <= record.sequence
        self._active[spec.name] = record
        if not in_order:
            self._active = dict(sorted(self._active.items(), key=lambda item: item[1].sequence))
        self._store.save_job(record)
        self._ask_for_round("submit")
        return record

    def restore(self, records: Iterable[JobRecord], learnt: Iterable[Knowledge] = ()) -> None:
        """Take over jobs of a scheduler that is gone; the engine will say what has become of them.

        Jobs that hold slots keep them until a decision says otherwise. ``learnt``: also of jobs that are over.
        """
        if self._memory is not None:
            self._memory.recall(learnt)
        for record in sorted(records, key=lambda record: record.sequence):
            if record.state.is_final:
                continue
            self._active[record.name] = record
            self._next_sequence = max(self._next_sequence, record.sequence + 1)
            if record.allocation and record.state is not JobState.STOPPING:
                self._desired[record.name] = record.allocation
            if self._memory is not None and record.spec.application:
                record.knowledge = self._memory.adopt(record.spec.application, record.knowledge)
        self._ask_for_round("restart")

    def cancel(self, name: str, reason: str = "cancelled", state: JobState = JobState.CANCELLED) -> None:
        """End a job: at once if it waits, as soon as it has stopped if it runs.

        Raises:
            UnknownNameError: no active job has this name.
        """
        record = self._active.get(name)
        if record is None:
            raise UnknownNameError("active job", name, self._active)
        now = self._clock.now()
        record.account(now)
        record.stops_as, record.stop_reason = state, reason
        self._desired.pop(name, None)
        if not record.state.holds_slots:
            self._end(record, state, now, reason)
        elif record.state is JobState.STOPPING:
            self._store.save_job(record)  # a restart must not make it wait again
        else:
            record.move(JobState.STOPPING, now, reason)
            self._store.save_job(record)
            self._engine.apply([StopJob(job=name, reason=reason)])
        self._ask_for_round("cancel")

    def suspend(self, reason: str) -> None:
        """Ask every job to checkpoint and leave its slots; they wait then. No decisions after this: see `settle`."""
        self._desired.clear()
        now = self._clock.now()
        for record in self._active.values():
            if record.state.holds_slots and record.state is not JobState.STOPPING:
                record.account(now)
                record.move(JobState.STOPPING, now, reason)
                self._store.save_job(record)
                self._engine.apply([StopJob(job=record.name, reason=reason)])

    def settle(self) -> bool:
        """Take in events without deciding anything; whether all slots are free."""
        self._take_in(self._clock.now())
        return not any(record.state.holds_slots for record in self._active.values())

    def run(self, is_done: Callable[[], bool]) -> None:
        """Tick until ``is_done``."""
        while not is_done():
            self._clock.wait_until(self._next_round_at)
            self.tick()

    def tick(self) -> None:
        """Take in events; decide if it is time; command."""
        now = self._clock.now()
        self._take_in(now)
        for record in self._active.values():
            record.account(now)
        due = now >= self._next_round_at
        if due or (self._is_asked and now >= self._not_before):
            self._decide(now, "interval" if due else self._trigger or "event")
        self._settle(now)

    # Events -----------------------------------------------------------------------------------

    def _take_in(self, now: float) -> bool:
        events = self._engine.poll()
        for event in events:
            self._handle(event, now)
        return bool(events)

    def _handle(self, event: Event, now: float) -> None:
        if isinstance(event, NodesChanged):
            self._ask_for_round("nodes")
            return
        record = self._active.get(event.job)
        if record is None:
            logger.debug("event for a job that is not active: %s", event)
            return
        match event:
            case JobReport():
                self._take_report(record, event)
            case JobRuns(generation=generation):
                if generation == record.generation and record.state in (JobState.STARTING, JobState.RESIZING):
                    record.leaving = NO_ALLOCATION
                    record.move(JobState.RUNNING, now, f"generation {generation} trains")
                    self._store.save_job(record)
            case JobStopped() if record.state in _MAY_STOP:  # otherwise it is late: the job is starting again
                record.account(now)
                record.allocation = record.leaving = NO_ALLOCATION
                if record.stops_as.is_final:
                    self._end(record, record.stops_as, now, record.stop_reason)
                else:
                    record.move(JobState.PENDING, now, "stopped")
                    self._store.save_job(record)
                self._ask_for_round("stop")
            case JobHurt(reason=reason):
                record.num_crashes += 1
                record.note(now, reason)
                self._store.save_job(record)
            case JobLost(reason=reason) if record.state.holds_slots:
                # Nobody knows since when: perhaps the machine was off. That time is not the job's.
                record.allocation = record.leaving = NO_ALLOCATION
                record.num_crashes += 1
                if record.stops_as.is_final:
                    self._end(record, record.stops_as, now, record.stop_reason)
                else:
                    record.move(JobState.PENDING, now, reason)
                    self._store.save_job(record)
                self._ask_for_round("loss")
            case JobEnded(state=state, at=at, reason=reason, exit_code=exit_code):
                # By another clock than ours, which may have been set meanwhile.
                at = min(at if record.started_at is None else max(at, record.started_at), now)
                record.account(now)
                if record.allocation:  # time since it ended was not its own
                    record.attained_s -= now - at
                    record.gpu_s -= (now - at) * record.allocation.num_replicas
                record.allocation = record.leaving = NO_ALLOCATION
                record.exit_code = exit_code
                self._end(record, state, at, reason)
                self._ask_for_round("end")

    def _end(self, record: JobRecord, state: JobState, at: float, reason: str) -> None:
        record.finished_at = at
        record.move(state, at, reason or state.value)
        del self._active[record.name]
        self._desired.pop(record.name, None)
        self._store.save_job(record)

    def _take_report(self, record: JobRecord, report: JobReport) -> None:
        knowledge = record.knowledge
        try:
            check_report(report)
        except InvalidValueError as error:
            logger.warning("job %s: report refused: %s", record.name, error)
            return
        for configuration, timing in report.timings:
            is_new = knowledge.observe(report.accelerator, configuration, timing)
            if is_new and self.config.decides_on_models:
                self._ask_for_round("model")
        if report.noise_scale is not None:
            record.noise_scale = report.noise_scale
            if knowledge.first_noise_scale is None:
                knowledge.first_noise_scale = report.noise_scale
        if report.remaining_examples is not None:
            record.remaining_examples = report.remaining_examples
        if report.progress is not None:
            record.progress = report.progress
        if report.total_batch is not None:
            record.total_batch = report.total_batch
        if report.batch is not None and report.batch != record.spec.batch:
            record.spec = dataclasses.replace(record.spec, batch=report.batch)
            self._store.save_job(record)
            if self.config.decides_on_models:
                self._ask_for_round("model")

    def _ask_for_round(self, trigger: str) -> None:
        if self._trigger is None:
            self._trigger = trigger

    # Decisions --------------------------------------------------------------------------------

    def snapshot(self, now: float) -> Snapshot:
        """All that a policy may read, as of now."""
        oracle = self._oracles.oracle if self._oracles is not None else None
        views = [record.view(now, oracle(record.name) if oracle else None) for record in self._active.values()]
        nodes, views = _usable(self._draining, self._engine.nodes(), views)
        return Snapshot.of(now, nodes, views)

    def drain(self, nodes: Iterable[str]) -> None:
        """Use these nodes no longer, and no others are drained; jobs leave them with the next decision."""
        draining = set(nodes)
        if draining != self._draining:
            self._draining = draining
            self._ask_for_round("drain")

    def _autoscale(self, now: float) -> None:
        """Ask for more nodes, or drain some and give back those that nobody uses any more."""
        config, pool = self.config.autoscale, self._pool
        if config is None or pool is None:
            return
        up = self._engine.nodes()
        since = now - (self._slot_s_spent[-1][0] if self._slot_s_spent else now)
        self._slot_s_spent.append((now, since * sum(node.num_slots for node in up)))
        while self._slot_s_spent[0][0] < now - config.budget_window_s:
            self._slot_s_spent.popleft()
        snapshot = self.snapshot(now)
        decision = decide_size(
            snapshot,
            config,
            pool.template,
            self.policy.decide,
            since_change_s=now - self._resized_at,
            spent_slot_s=sum(spent for _, spent in self._slot_s_spent),
        )
        self.last_size = decision
        if decision.num_nodes != len(snapshot.nodes):
            self._resized_at = now
            wanted = nodes_to_have(
                up, [record.allocation for record in self._active.values()], decision.num_nodes, pool.template
            )
            logger.info("%d -> %d nodes: %s", len(snapshot.nodes), decision.num_nodes, decision.reason)
            self.drain({node.name for node in up} - {node.name for node in wanted})
            self._wanted_nodes = wanted
        if self._wanted_nodes:
            pool.scale_to(self._wanted_nodes)

    def _decide(self, now: float, trigger: str) -> None:
        """A round; the next one waits until this one's cost is a small share of the time."""
        began = time.perf_counter()
        self._next_round_at = now + self.config.interval_s
        self._trigger = None
        self._make_round(now, trigger)
        took_s = time.perf_counter() - began
        # Without a bound nothing depends on how fast this machine is: simulations repeat exactly.
        busy_s = took_s / self.config.max_duty if self.config.max_duty < 1 else 0.0
        self._not_before = now + max(self.config.min_pause_s, busy_s)

    def _make_round(self, now: float, trigger: str) -> None:
        self._learn()
        self._autoscale(now)
        if not self._active:
            return
        snapshot = self._placeable(self.snapshot(now))
        began = time.perf_counter()
        plan, error = self._plan(snapshot)
        decision_s = time.perf_counter() - began
        if plan.explanation is not None:
            explanation = dataclasses.replace(plan.explanation, decision_s=decision_s)
            plan = dataclasses.replace(plan, explanation=explanation)
        # A job that is stopping keeps its slots until it has; what it held is not what it should get back.
        self._desired = {
            name: allocation
            for name, allocation in plan.allocations.items()
            if allocation and self._active[name].state is not JobState.STOPPING
        }
        self._num_rounds += 1
        self._store.save_round(
            RoundRecord(
                number=self._num_rounds,
                at=now,
                trigger=trigger,
                plan=plan,
                num_jobs=len(snapshot.jobs),
                num_slots=snapshot.num_slots,
                decision_s=decision_s,
                error=error,
            ),
            snapshot,
        )

    def _plan(self, snapshot: Snapshot) -> tuple[Plan, str]:
        """The policy's plan; what is held already if that plan cannot be carried out."""
        try:
            plan = self.policy.decide(snapshot)
            verify_plan(snapshot, plan)
        except PolluxError as error:
            logger.error("policy %s made an invalid plan; nothing changes this round: %s", self.policy.name, error)
            return Plan(allocations=dict(self._desired)), str(error)
        return plan, ""

    def _placeable(self, snapshot: Snapshot) -> Snapshot:
        """Without the jobs that may run on none of the accelerators there are: they wait, and hold up nobody."""
        types = {node.accelerator for node in snapshot.nodes}
        jobs = tuple(
            job for job in snapshot.jobs if job.spec.accelerators is None or not types.isdisjoint(job.spec.accelerators)
        )
        return snapshot if len(jobs) == len(snapshot.jobs) else dataclasses.replace(snapshot, jobs=jobs)

    def _learn(self) -> None:
        """Refit what was measured anew and tell the jobs concerned."""
        if not self.config.tunes_batches:
            return
        fresh: dict[int, bool] = {}
        commands: list[Command] = []
        for record in self._active.values():
            knowledge = record.knowledge
            if id(knowledge) not in fresh:
                fresh[id(knowledge)] = knowledge.refit()
            if fresh[id(knowledge)] and record.allocation:
                commands.append(TuneJob(job=record.name, params=knowledge.params))
        if commands:
            self._engine.apply(commands)

    # Commands ---------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Command what can be done now, and again as long as that makes more possible."""
        for _ in range(_MAX_SETTLING):
            changes = reconcile(
                self._desired,
                {
                    name: Actual(record.state, record.allocation, record.leaving)
                    for name, record in self._active.items()
                },
                self._engine.nodes(),
                trades_at_once=self._engine.applies_at_once,
            )
            if not changes:
                return
            self._engine.apply([self._command(change, now) for change in changes])
            if not self._take_in(now):
                return

    def _command(self, change: Change, now: float) -> Command:
        record = self._active[change.job]
        command: Command
        match change:
            case Start(allocation=allocation):
                record.generation += 1
                record.allocation = allocation
                record.started_at = now if record.started_at is None else record.started_at
                record.move(JobState.STARTING, now, _replicas(allocation.num_replicas))
                command = StartJob(
                    job=record.name,
                    spec=record.spec,
                    allocation=allocation,
                    generation=record.generation,
                    params=record.knowledge.params,
                    noise_scale=record.noise_scale,
                )
            case Resize(allocation=allocation):
                was = record.allocation.num_replicas
                record.generation += 1
                record.leaving = together(record.leaving, record.allocation)
                record.allocation = allocation
                target = JobState.STARTING if record.state is JobState.STARTING else JobState.RESIZING
                record.move(target, now, f"{was} -> {_replicas(allocation.num_replicas)}")
                command = ResizeJob(job=record.name, allocation=allocation, generation=record.generation)
            case _:
                record.move(JobState.STOPPING, now, "preempted")
                command = StopJob(job=record.name, reason="preempted")
        self._store.save_job(record)
        return command


def _usable(
    draining: Collection[str], nodes: Sequence[Node], views: Sequence[JobView]
) -> tuple[list[Node], list[JobView]]:
    """Draining nodes keep what jobs hold that must not be moved, and nothing else; the others hold nothing there.

    A node that has shrunk keeps that too: no plan could leave them alone otherwise.
    """
    held: Counter[str] = Counter()
    staying = []
    for view in views:
        if view.is_fixed:
            held.update(view.allocation.as_mapping())
        elif any(node in draining for node, _ in view.allocation.shares):
            view = dataclasses.replace(view, allocation=NO_ALLOCATION)
        staying.append(view)
    kept = []
    for node in nodes:
        num_slots = held[node.name] if node.name in draining else max(node.num_slots, held[node.name])
        if num_slots:
            kept.append(node if num_slots == node.num_slots else dataclasses.replace(node, num_slots=num_slots))
    return kept, staying


def _replicas(number: int) -> str:
    return f"{number} replica{'s' * (number != 1)}"
