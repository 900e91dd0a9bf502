"""The scheduler: clock + store + policy + engine.

One :meth:`Scheduler.tick` takes in what happened, decides if it is time to, and sends the engine what follows.
The simulator and the live server call the same ticks; only clock, store and engine differ.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from pollux.errors import InvalidValueError, UnknownNameError
from pollux.model.transfer import TypeRatios
from pollux.policy.base import Policy
from pollux.scheduler.autoscale import SizeDecision
from pollux.scheduler.config import SchedulerConfig as SchedulerConfig
from pollux.scheduler.deadlines import Deadlines, Verdict
from pollux.scheduler.device_memory import memory_by_type, narrowed, newly_unfit, unfit_here
from pollux.scheduler.knowledge import Knowledge, ProfileMemory, learn_all, recall_ratios
from pollux.scheduler.lifecycle import PREEMPTED, JobState
from pollux.scheduler.node_health import NodeHealth
from pollux.scheduler.nodes import SlotRules, noticed, placeable, shrunk
from pollux.scheduler.planner import Planner
from pollux.scheduler.plausible import Plausibility
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
    ResizeFailed,
    StopJob,
    Store,
)
from pollux.scheduler.quotas import Quotas
from pollux.scheduler.reconcile import Actual, Change, Resize, Start, reconcile
from pollux.scheduler.record import (
    Departure,
    JobRecord,
    RoundRecord,
    as_it_was,
    num_replicas_text,
    reallocations,
    tunings,
)
from pollux.scheduler.sizing import Sizer
from pollux.types import NO_ALLOCATION, Allocation, JobSpec, JobView, Node, Plan, Snapshot

logger = logging.getLogger(__name__)

_MAY_STOP = frozenset({JobState.STOPPING, JobState.RUNNING, JobState.RESIZING})
_GOES_ON = frozenset({JobState.RUNNING, JobState.RESIZING})  # with the replicas that are left when nodes are lost
_MAX_SETTLING = 8  # passes of reconcile in one tick; real engines need one, trades a few


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
        rules: SlotRules | None = None,
        pool: NodePool | None = None,
        node_s: Mapping[str, float] | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        """``node_s``: node-seconds by accelerator that were counted before this scheduler. ``quotas``: of teams."""
        rules = rules or SlotRules()
        if policy.needs_oracle and not rules.has_oracles:
            raise InvalidValueError(f"policy {policy.name!r} needs an oracle: it can only be simulated")
        if policy.shares_slots and not rules.shares_slots:
            raise InvalidValueError(f"policy {policy.name!r} lets jobs share slots: it can only be simulated")
        self.policy, self.config = policy, config
        self._engine, self._store, self._clock, self._rules = engine, store, clock, rules
        self.quotas = quotas
        self.deadlines = Deadlines(is_active=config.keeps_deadlines)
        self._planner = Planner(policy, rules, quotas, self.deadlines, is_strict=config.is_strict)
        self._memory = ProfileMemory() if config.remembers_profiles else None
        self._ratios, self._plausibility = TypeRatios(), Plausibility(store.save_job)
        self._active: dict[str, JobRecord] = {}  # in order of submission
        self._desired: dict[str, Allocation] = {}
        self._next_round_at = clock.now() + config.interval_s
        self._not_before = -math.inf  # for decisions that events ask for
        self._trigger: str | None = None  # an event that asks for a decision now
        self._num_rounds = 0
        self._departures: list[Departure] = []  # since the last round
        self._next_sequence = 0
        self._draining: frozenset[str] = frozenset()
        self._on_hold: frozenset[str] = frozenset()
        self._sizer: Sizer | None = None
        if config.autoscale is not None:
            if pool is None:
                raise InvalidValueError("auto-scaling needs an engine whose nodes can come and go")
            self._sizer = Sizer(config.autoscale, pool, rules)
        self._node_s = dict(node_s or {})
        self._nodes_up: Sequence[Node] | None = None  # since the last tick
        self._ticked_at = clock.now()
        self.health = NodeHealth()

    @property
    def active_jobs(self) -> list[JobRecord]:
        return list(self._active.values())

    def has(self, name: str) -> bool:
        """Whether there is such a job and it is not over."""
        return name in self._active

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
        """Nodes that the operator wants emptied."""
        return self._draining

    @property
    def releasing(self) -> frozenset[str]:
        """Nodes that auto-scaling wants emptied, to give them back."""
        return self._sizer.releasing if self._sizer is not None else frozenset()

    @property
    def last_size(self) -> SizeDecision | None:
        """What auto-scaling decided last, and why."""
        return self._sizer.last if self._sizer is not None else None

    @property
    def num_wanted_nodes(self) -> int | None:
        """How many nodes auto-scaling wants, whether or not they are up; None without it."""
        return self._sizer.num_wanted if self._sizer is not None else None

    @property
    def node_s(self) -> Mapping[str, float]:
        """Node-seconds that were up so far, by accelerator: what a cluster costs."""
        return dict(self._node_s)

    def submit(self, spec: JobSpec, sequence: int | None = None) -> JobRecord:
        """Take in a job; it is considered in the next round.

        Raises:
            InvalidValueError: an active job has this name.
        """
        if spec.name in self._active:
            raise InvalidValueError(f"a job named {spec.name!r} is active; names must be unique")
        record = self._new_record(spec, self._next_sequence if sequence is None else sequence)
        self._next_sequence = max(self._next_sequence, record.sequence) + 1
        in_order = not self._active or next(reversed(self._active.values())).sequence <= record.sequence
        self._active[spec.name] = record
        if not in_order:
            self._active = dict(sorted(self._active.items(), key=lambda item: item[1].sequence))
        self._store.save_job(record)
        self.reconsider("submit")
        return record

    def _new_record(self, spec: JobSpec, sequence: int) -> JobRecord:
        knowledge = self._memory.of(spec) if self._memory and spec.family else Knowledge(f"job {spec.name}", spec.owner)
        now, noise_scale = self._clock.now(), knowledge.first_noise_scale
        record = JobRecord(spec=spec, sequence=sequence, knowledge=knowledge, noise_scale=noise_scale, accounted_at=now)
        self.deadlines.prepare(record)
        return record

    def assess(self, spec: JobSpec) -> Verdict:
        """Whether a job that is not here yet could be promised its deadline; nothing changes."""
        now, record = self._clock.now(), self._new_record(spec, self._next_sequence)
        return self.deadlines.assess(self.snapshot(now), record.view(now, self._rules.make_view))

    def restore(self, records: Iterable[JobRecord], learnt: Iterable[Knowledge] = ()) -> None:
        """Take over jobs of a scheduler that is gone; the engine will say what has become of them.

        Jobs that hold slots keep them until a decision says otherwise. ``learnt``: also of jobs that are over.
        """
        learnt = list(learnt)
        if self._memory is not None:
            self._memory.recall(learnt)
        if self.config.tunes_batches and self.config.guesses_types:
            recall_ratios(learnt, self._ratios)
        for record in sorted(records, key=lambda record: record.sequence):
            if record.state.is_final:
                continue
            self._active[record.name] = record
            self._next_sequence = max(self._next_sequence, record.sequence + 1)
            if record.allocation and record.state is not JobState.STOPPING:
                self._desired[record.name] = record.allocation
            if self._memory is not None and record.spec.family:
                record.knowledge = self._memory.adopt(record.spec, record.knowledge)
        self.reconsider("restart")

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
            self._stop(record, reason)
        self.reconsider("cancel")

    def reweigh(self, weights: Mapping[str, float]) -> None:
        """Give active jobs other weights, for the next round; those that are over are left alone."""
        for record in (self._active[name] for name in weights if name in self._active):
            if record.spec.weight != weights[record.name]:
                record.spec = dataclasses.replace(record.spec, weight=weights[record.name])
                self._store.save_job(record)
                self.reconsider("weights")

    def suspend(self, reason: str) -> None:
        """Ask every job to checkpoint and leave its slots; they wait then. No decisions after this: see `settle`."""
        self._desired.clear()
        for record in self._active.values():
            self._stop(record, reason)

    def _stop(self, record: JobRecord, reason: str) -> None:
        if record.state.holds_slots and record.state is not JobState.STOPPING:
            now = self._clock.now()
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
        self._account_nodes(now)
        if self.quotas is not None:
            self.quotas.usage.account(
                now, [(one.spec.owner, one.allocation.num_slots) for one in self._active.values()]
            )
        self._take_in(now)
        self.health.see((node.name for node in self._engine.nodes()), self.releasing, now)
        for record in self._active.values():
            record.account(now)
        due = now >= self._next_round_at
        if due or (self._is_asked and now >= self._not_before):
            self._decide(now, "interval" if due else self._trigger or "event")
        self._settle(now)
        self._nodes_up = self._engine.nodes()

    def _account_nodes(self, now: float) -> None:
        """Charge the time since the last tick to the nodes that were up then."""
        since, self._ticked_at = self._ticked_at, now
        nodes = self._engine.nodes() if self._nodes_up is None else self._nodes_up
        for node in nodes:
            self._node_s[node.accelerator] = self._node_s.get(node.accelerator, 0.0) + max(now - since, 0.0)
        if self._sizer is not None:
            self._sizer.account(since, now, sum(node.num_slots for node in nodes))

    # Events -----------------------------------------------------------------------------------

    def _take_in(self, now: float) -> bool:
        events = self._engine.poll()
        for event in events:
            self._handle(event, now)
        return bool(events)

    def _handle(self, event: Event, now: float) -> None:
        if isinstance(event, NodesChanged):
            self._keep_survivors(now)
            self.reconsider("nodes")
            return
        if (record := self._active.get(event.job)) is None:
            logger.debug("event for a job that is not active: %s", event)
            return
        match event:
            case JobReport():
                self._take_report(record, event, now)
            case JobRuns(generation=generation, took_s=took_s):
                if generation == record.generation and record.state in (JobState.STARTING, JobState.RESIZING):
                    self.health.train(record.name, record.grown_nodes, now)
                    record.trains(now, generation, took_s)
                    self._store.save_job(record)
            case JobStopped() if record.state in _MAY_STOP:  # otherwise it is late: the job is starting again
                record.account(now)
                if record.stops_as.is_final:
                    self._end(record, record.stops_as, now, record.stop_reason)
                else:
                    record.allocation = record.leaving = NO_ALLOCATION
                    is_known = record.state is JobState.STOPPING
                    record.move(JobState.PENDING, now, record.reason if is_known else "stopped")
                    self._store.save_job(record)
                self.reconsider("stop")
            case ResizeFailed():
                self._give_up_resize(record, event, now)
            case JobHurt(reason=reason):
                record.hurt(now, reason)
                self._store.save_job(record)
            case JobLost(reason=reason, is_halted=is_halted) if record.state.holds_slots:
                record.lose(reason if is_halted else "")
                self._start_again(record, now, reason)
            case JobEnded(node=node) if node and self._may_start_elsewhere(record, event, now):
                self._start_again(record, now, f"failed on {node} ({event.cause}): it starts on another node")
            case JobEnded() if unfit := unfit_here(event, record, self._engine.nodes()):
                record.unfit_types |= unfit
                self._start_again(record, now, f"{next(iter(unfit.values()))}: it starts on another type")
            case JobEnded(state=state, at=at, reason=reason, exit_code=exit_code):
                record.exit_code = exit_code
                self._end(record, state, record.account_end(at, now), reason)
                self.reconsider("end")

    def _start_again(self, record: JobRecord, now: float, reason: str) -> None:
        """From its checkpoint. Since when the job does not run is unknown: that time is not the job's."""
        if record.stops_as.is_final:
            self._end(record, record.stops_as, now, record.stop_reason)
        else:
            record.wait_again(now, reason)
            self._store.save_job(record)
        self.reconsider("loss")

    def _may_start_elsewhere(self, record: JobRecord, end: JobEnded, now: float) -> bool:
        """A node may be the cause of this failure, and there is another one that the job has not tried."""
        self.health.fail(record.name, end.node, end.cause, now, is_proven=False, owner=record.spec.owner)
        barred = self._leaving().keys() | self.health.excluded(record.name, now, record.spec.owner).keys()
        others = [node for node in self._engine.nodes() if node.name not in barred and record.spec.may_use(node)]
        return bool(others) and record.state.holds_slots and self.health.may_try_elsewhere(record.name)

    def _give_up_resize(self, record: JobRecord, event: ResizeFailed, now: float) -> None:
        """New replicas fail on a node. The job goes on with the replicas it had, and the node is excluded for it."""
        cause = f"replicas fail on {event.node} ({event.reason})" if event.node else event.reason
        why = f"{cause}: the job goes on without it"
        if event.node:
            record.unfit_types |= newly_unfit(event, record.leaving, self._engine.nodes())
            self.health.fail(record.name, event.node, event.reason, now, is_proven=True, owner=record.spec.owner)
        is_current = event.generation == record.generation and record.state in _GOES_ON
        if event.allocation is None or not is_current:
            record.note(now, why)
        elif event.allocation.num_replicas < record.spec.min_replicas:
            self._desired.pop(record.name, None)
            self._stop(record, f"{event.reason}: what is left is not enough to go on with")
        else:
            self._desired[record.name], record.leaving = event.allocation, NO_ALLOCATION
            self._engine.apply([record.go_on_with(event.allocation, now, why)])
        self._store.save_job(record)
        self.reconsider("node failure")

    def _keep_survivors(self, now: float) -> None:
        """Jobs that lost some of their nodes go on with the rest; one that was moving to a lost node stays.

        The engine keeps them alive without being asked, and is told what they hold now: what it was told before may
        name nodes that are gone. If too little is left, or of a job that is only starting, it will say what has become
        of it.
        """
        nodes = self._engine.nodes()
        running = [record for record in self._active.values() if record.state in _GOES_ON]
        left = self._rules.survivors(nodes, [record.view(now) for record in running])
        names = {node.name for node in nodes}
        for record in running:
            allocation = left.get(record.name)
            if allocation is None and names.isdisjoint(share.node for share in record.allocation.shares):
                allocation = Allocation(tuple(share for share in record.leaving.shares if share.node in names))
            if allocation is None or allocation.num_replicas < record.spec.min_replicas:
                gone = [share.node for share in record.allocation.shares if share.node not in names]
                if gone:
                    record.note(now, f"lost {', '.join(gone)}: what is left is not enough to go on with")
                continue
            lost = [share.node for share in record.allocation.shares if share not in allocation.shares]
            if self._desired.get(record.name) == record.allocation:
                self._desired[record.name] = allocation
            was = record.allocation.num_replicas
            why = f"lost {', '.join(lost)}: {was} -> {num_replicas_text(allocation)}"
            resize = record.go_on_with(allocation, now, why)
            self._store.save_job(record)
            self._engine.apply([resize])

    def _end(self, record: JobRecord, state: JobState, at: float, reason: str) -> None:
        self.health.end(record.name)
        num_slots, record.allocation, record.leaving = record.allocation.num_slots, NO_ALLOCATION, NO_ALLOCATION
        record.finished_at = at
        record.move(state, at, reason or state.value)
        why = record.reason.partition("\n")[0]
        self._departures.append(Departure(job=record.name, state=state, reason=why, num_slots=num_slots))
        self._desired.pop(record.name, None)
        self._plausibility.forget(record.name)
        held = ((other.name, other.allocation) for other in self._active.values())
        for name, allocation in self._rules.changed_by_end(record.name, held).items():
            other = self._active[name]
            other.account(max(at, other.accounted_at))
            other.allocation = self._desired[name] = allocation
        self._store.save_job(record)
        del self._active[record.name]  # after it is saved: a reader meanwhile finds it in one place or the other

    def _take_report(self, record: JobRecord, report: JobReport, now: float) -> None:
        knowledge = record.knowledge
        if (believed := self._plausibility.clip(report, record, now)) is None:
            return
        report = believed
        for configuration, timing in report.timings:
            is_news = knowledge.observe(report.accelerator, configuration, timing)
            if is_news and self.config.decides_on_models:
                self.reconsider("model")
        record.take(report)
        if record.follow(report, now):
            self._store.save_job(record)
        if report.batch is not None and report.batch != record.spec.batch:
            record.spec = dataclasses.replace(record.spec, batch=report.batch)
            self._store.save_job(record)
            if self.config.decides_on_models:
                self.reconsider("model")
        self.deadlines.learn(record)

    def hold(self, jobs: Iterable[str], released: Iterable[str] = ()) -> None:
        """These jobs get nothing, and no others are held; those that run checkpoint and leave. Others are released."""
        self._on_hold = frozenset(jobs)
        for record in (self._active[name] for name in released if name in self._active):
            record.halted = ""
            self._store.save_job(record)
        self.reconsider("hold")

    def update(self, name: str, spec: JobSpec) -> None:
        """Take over what of a job may be changed; nothing if it is not here yet."""
        record = self._active.get(name)
        if record is not None:
            changing = ("weight", "priority", "min_replicas", "max_replicas", "deadline_at", "budget_slot_s")
            kept = {key: getattr(spec, key) for key in changing}
            record.spec = dataclasses.replace(record.spec, **kept)
            self._store.save_job(record)
            self.reconsider("update")

    def requeue(self, name: str, reason: str = "requeued") -> None:
        """Let a job leave its slots and wait again; the next decision may start it anew."""
        self._desired.pop(name, None)
        if (record := self._active.get(name)) is not None:
            self._stop(record, reason)

    def reconsider(self, trigger: str) -> None:
        """Decide soon, because of this."""
        if self._trigger is None:
            self._trigger = trigger

    # Decisions --------------------------------------------------------------------------------

    def snapshot(self, now: float) -> Snapshot:
        """All that a policy may read, as of now."""
        views = self._views(now)
        owners = {view.spec.owner for view in views}
        nodes = shrunk(self._engine.nodes(), self.health.quarantined(now, owners), views)
        return self._rules.snapshot(now, *self._rules.usable(self._leaving(), nodes, views))

    def _leaving(self) -> dict[str, str]:
        """Nodes that jobs are to leave, each with why in a word."""
        asked = dict.fromkeys(self.releasing, "released") | dict.fromkeys(self._draining, "drained")
        return noticed(self._engine.nodes()) | asked

    def _views(self, now: float) -> list[JobView]:
        make, pins_resizing = self._rules.make_view, self.config.pins_resizing
        records = [one for one in self._active.values() if one.name not in self._on_hold and one.may_run]
        memory = memory_by_type(self._engine.nodes())
        views = [record.view(now, make, pins_resizing=pins_resizing) for record in records]
        return [narrowed(view, one.unfit_types, memory) for view, one in zip(views, records, strict=True)]

    def drain(self, nodes: Iterable[str]) -> None:
        """Use these nodes no longer, and no others are drained; jobs leave them with the next decision."""
        draining = frozenset(nodes)
        if draining != self._draining:
            self._draining = draining
            self.reconsider("drain")

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
        began, nodes = time.perf_counter(), self._engine.nodes()  # the size's plan may be the round's
        if self._sizer is not None:
            going = self._draining | noticed(nodes).keys()
            self._sizer.update(now, nodes, self._views(now), going, self._planner.decide)
        # A cluster that decides on events tells of the last job's end when it ends, not when the next one comes.
        sizing = "" if self._sizer is None else self._sizer.changed
        if not self._active and not ((self._departures or sizing) and self.config.decides_on_events):
            return
        snapshot = placeable(self.snapshot(now))
        plan, error = self._plan(snapshot) if self._active else (Plan(allocations={}), "")
        decision_s = time.perf_counter() - began
        there = {node.name for node in nodes}
        changes = () if error else reallocations(plan, self._active.values(), there, self._leaving())
        plan = as_it_was(plan, decision_s, self._active)
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
                changes=changes,
                departures=tuple(self._departures),
                sizing=sizing,
            ),
            snapshot,
        )
        self._departures.clear()

    def _plan(self, snapshot: Snapshot) -> tuple[Plan, str]:
        """The policy's plan; what is held already if there is none that can be carried out."""
        known = self._sizer.plan_for(snapshot) if self._sizer is not None else None
        excluded = {job.name: self.health.excluded(job.name, snapshot.now, job.spec.owner) for job in snapshot.jobs}
        plan, error = self._planner.checked(snapshot, known, excluded)
        return Plan(allocations=dict(self._desired)) if plan is None else plan, error

    def _learn(self) -> None:
        """Refit what was measured anew and tell the jobs concerned."""
        if not self.config.tunes_batches:
            return
        here, other = (node.accelerator for node in self._engine.nodes()), self.config.types_to_come
        types = [*here, *other] if self.config.guesses_types else None
        known = [record.knowledge for record in self._active.values()]
        learnt = learn_all(known, self._ratios, types, is_published=self.config.fits_published)
        if commands := tunings(self._active.values(), learnt):
            self._engine.apply(commands)

    # Commands ---------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Command what can be done now, and again as long as that makes more possible."""
        for _ in range(_MAX_SETTLING):
            actual = {name: Actual(one.state, one.allocation, one.leaving) for name, one in self._active.items()}
            at_once = self._engine.applies_at_once
            changes = reconcile(self._desired, actual, self._engine.nodes(), trades_at_once=at_once)
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
                command = record.start(allocation, now)
            case Resize(allocation=allocation):
                command = record.resize(allocation, now)
            case _:
                record.move(JobState.STOPPING, now, PREEMPTED)
                command = StopJob(job=record.name, reason=PREEMPTED)
        self._store.save_job(record)
        return command
