"""What the scheduler remembers of a job, and of a round. The loop writes it; the server reads copies of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from pollux.scheduler.knowledge import Knowledge
from pollux.scheduler.lifecycle import JobState, Transition, check_transition
from pollux.scheduler.ports import Command, JobReport, ResizeJob, StartJob, TuneJob
from pollux.scheduler.reconcile import together
from pollux.scheduler.setbacks import KEPT, Break, Setback, Told, setback_between
from pollux.types import NO_ALLOCATION, Allocation, JobSpec, JobView, Plan

_HISTORY_LENGTH = 64  # transitions kept for an error message; a job makes a few per resize


@dataclass(slots=True, kw_only=True)
class JobRecord:
    """What the scheduler knows of a job. Mutable; only the scheduler loop writes to it.

    Stored field by field: a new field has a default, which rows from before it are read with; any other change needs a
    new SCHEMA_VERSION (``server/storage/database.py``).
    """

    spec: JobSpec
    sequence: int  # order of submission
    knowledge: Knowledge
    state: JobState = JobState.PENDING
    allocation: Allocation = NO_ALLOCATION  # what it holds, or is being brought to
    leaving: Allocation = NO_ALLOCATION  # what a resize has yet to give back
    generation: int = 0  # counts memberships; also the number of starts and resizes so far
    num_crashes: int = 0
    attained_s: float = 0.0
    attained_slot_s: float = 0.0  # slot-seconds held
    accounted_at: float = 0.0  # until when attained_s and attained_slot_s are up to date
    started_at: float | None = None  # the first time
    finished_at: float | None = None
    exit_code: int | None = None
    reason: str = ""
    resize_s: float | None = None  # what a resize costs it, as seen lately
    stops_as: JobState = JobState.PENDING  # what it becomes when it has stopped; a final state ends it
    stop_reason: str = ""
    noise_scale: float | None = None
    noise_scale_error: float | None = None  # standard error of that; None: not told
    remaining_examples: float | None = None
    progress: float | None = None
    total_batch: int | None = None
    history: list[Transition] = field(default_factory=list)
    unfit_types: dict[str, str] = field(default_factory=dict)  # where it ran out of device memory, and how
    halted: str = ""  # why it waits for a release
    told: Told | None = None  # by its last report
    broken: Break | None = None  # a crash after which it has not told anything yet
    setbacks: list[Setback] = field(default_factory=list)  # the last ones
    num_setbacks: int = 0
    set_back_s: float = 0.0  # what all of them cost, of the time in which it held slots

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_spent(self) -> bool:
        """Whether it has held all the slot-seconds that its budget allows."""
        budget = self.spec.budget_slot_s
        return budget is not None and self.attained_slot_s >= budget

    @property
    def may_run(self) -> bool:
        return not self.is_spent and not self.halted

    @property
    def num_resizes(self) -> int | None:
        """Starts and resizes after the first start; None before it."""
        return None if self.generation == 0 else self.generation - 1

    def move(self, target: JobState, at: float, reason: str) -> None:
        """Change state by the lifecycle table."""
        self.history.append(check_transition(self.name, self.state, target, at, reason, self.history))
        del self.history[:-_HISTORY_LENGTH]
        self.state = target
        self.reason = reason

    def note(self, at: float, what: str) -> None:
        """Something to tell of in the job's history that does not change its state."""
        self.history.append(Transition(at, self.state, self.state, what))
        del self.history[:-_HISTORY_LENGTH]

    @property
    def grown_nodes(self) -> list[str]:
        """Those on which it has more replicas than before its last start or resize."""
        before = self.leaving.as_mapping()
        return [node for node, count in self.allocation.shares if count > before.get(node, 0)]

    def take(self, report: JobReport) -> None:
        """What a job tells of itself, beside timings and the batch sizes it allows."""
        if report.noise_scale is not None:
            self.noise_scale, self.noise_scale_error = report.noise_scale, report.noise_scale_error
            if self.knowledge.first_noise_scale is None:
                self.knowledge.first_noise_scale = report.noise_scale
        elif self.noise_scale is None and report.batch is not None and report.batch.maximum == report.batch.initial:
            self.noise_scale = 0.0  # a batch that cannot change has efficiency 1 whatever the noise: none is measured
        if report.remaining_examples is not None:
            self.remaining_examples = report.remaining_examples
        if report.progress is not None:
            self.progress = report.progress
        if report.total_batch is not None:
            self.total_batch = report.total_batch

    def hurt(self, now: float, reason: str) -> None:
        """Some of its processes crashed; it keeps its slots."""
        self.num_crashes += 1
        self.broken = Break(at=now, cause=reason, keeps_slots=True)
        self.note(now, reason)

    def wait_again(self, now: float, reason: str) -> None:
        """It has lost its slots, and what it did since its last checkpoint."""
        self.allocation = self.leaving = NO_ALLOCATION
        self.broken = Break(at=now, cause=reason.partition("\n")[0], keeps_slots=False)
        self.move(JobState.PENDING, now, reason)

    def follow(self, report: JobReport, now: float) -> bool:
        """Whether it was started again since it reported last, and is set back by that."""
        told, before = Told.of(report), self.told
        if told is None or (before is not None and told.at <= before.at):
            return False  # seen already: a restarted server reads the last ones again
        self.told, broken = told, self.broken
        if before is None or (broken is not None and told.at <= broken.at):
            return False
        if broken is None and told.replica == before.replica:
            return False
        found = setback_between(before, told, report.resumed_at, broken or self._unseen_break(before.at))
        if found is not None or told.generation != before.generation:
            self.broken = None
        if found is None or (broken is None and not found.num_steps):
            return False  # others went on, or it was started again from where it had been stopped
        self.num_setbacks += 1
        self.set_back_s += found.lost_s
        self.setbacks.append(found)
        del self.setbacks[:-KEPT]
        again = f"; about {found.num_steps} steps are trained again" if found.num_steps else ""
        self.note(now, f"started again from step {found.step}{again}")
        return True

    def _unseen_break(self, since: float) -> Break:
        """Of replicas that were replaced although no crash was told; a stop and a resize are in the history."""
        moves = [change for change in self.history if change.at >= since and change.source is not change.target]
        cause = next((change.reason for change in moves), "its replicas were lost")
        return Break(at=moves[0].at if moves else since, cause=cause, keeps_slots=not moves)

    def lose(self, halted: str = "") -> None:
        """The engine has nothing of it any more. ``halted``: why it must not start again before it is released."""
        self.num_crashes += 1
        self.halted = halted.partition("\n")[0]

    def start(self, allocation: Allocation, now: float) -> StartJob:
        """Give it its first slots; the command that does it."""
        self.generation, self.allocation = self.generation + 1, allocation
        self.started_at = now if self.started_at is None else self.started_at
        self.move(JobState.STARTING, now, num_replicas_text(allocation))
        return StartJob(
            job=self.name,
            spec=self.spec,
            allocation=allocation,
            generation=self.generation,
            params=self.knowledge.params,
            noise_scale=self.noise_scale,
        )

    def resize(self, allocation: Allocation, now: float) -> ResizeJob:
        """Give it other slots; the command that does it."""
        was = self.allocation.num_replicas
        self.generation += allocation.shares != self.allocation.shares  # else no replica moves
        self.leaving = together(self.leaving, self.allocation)
        self.allocation = allocation
        target = JobState.STARTING if self.state is JobState.STARTING else JobState.RESIZING
        self.move(target, now, f"{was} -> {num_replicas_text(allocation)}")
        return ResizeJob(job=self.name, allocation=allocation, generation=self.generation)

    def go_on_with(self, left: Allocation, now: float, why: str) -> ResizeJob:
        """It has lost some of its slots; the command that tells the engine what it holds now."""
        self.account(now)
        self.allocation, self.generation = left, self.generation + 1
        self.move(JobState.RESIZING, now, why)
        return ResizeJob(job=self.name, allocation=left, generation=self.generation)

    def account_end(self, at: float, now: float) -> float:
        """When it ended, by our clock: the engine's may have been set meanwhile. Time since then was not its own."""
        at = min(at if self.started_at is None else max(at, self.started_at), now)
        self.account(now)
        if self.allocation:
            self.attained_s -= now - at
            self.attained_slot_s -= (now - at) * self.allocation.num_slots
        return at

    def trains(self, now: float, generation: int, took_s: float | None) -> None:
        """The membership it was brought to is at work; how long that took is what the next change will cost.

        ``took_s``: by the engine, if it knows. A start of processes is no measure for a resize in place.
        """
        since = next((change.at for change in reversed(self.history) if change.target is self.state), now)
        if took_s is None and self.state is JobState.RESIZING:
            took_s = now - since
        if took_s is not None:
            self.resize_s = took_s if self.resize_s is None else (self.resize_s + took_s) / 2
        self.leaving = NO_ALLOCATION
        self.move(JobState.RUNNING, now, f"generation {generation} trains")

    def account(self, now: float) -> None:
        """Charge the time since the last call to what the job held meanwhile."""
        if self.allocation:
            held = max(now - self.accounted_at, 0.0)
            self.attained_s += held
            self.attained_slot_s += held * self.allocation.num_slots
        self.accounted_at = now

    def _done_examples(self) -> float | None:
        """From the share that is done and what is left."""
        if self.progress is None or self.remaining_examples is None or not 0 <= self.progress < 1:
            return None
        return self.remaining_examples * self.progress / (1 - self.progress)

    def view(self, now: float, make: Callable[..., JobView] = JobView, *, pins_resizing: bool = False) -> JobView:
        """The job as a policy sees it, made by ``make`` from the fields of a :class:`JobView`.

        ``pins_resizing``: the policy may not change it while a start or resize is under way.
        """
        is_under_way = self.state in (JobState.STARTING, JobState.RESIZING)
        return make(
            spec=self.spec,
            age_s=max(now - self.spec.submitted_at, 0.0),
            allocation=self.allocation,
            num_resizes=self.num_resizes,
            resize_s=self.resize_s,
            attained_s=self.attained_s,
            attained_slot_s=self.attained_slot_s,
            params=self.knowledge.params,
            guessed=frozenset(self.knowledge.guesses),
            shape_factors=self.knowledge.shape_factors,
            noise_scale=self.noise_scale,
            noise_scale_error=self.noise_scale_error,
            max_profiled_replicas=self.knowledge.profile.max_replicas,
            remaining_examples=self.remaining_examples,
            done_examples=self._done_examples(),
            is_pinned=self.state is JobState.STOPPING or (pins_resizing and is_under_way),
        )


def tunings(records: Iterable[JobRecord], learnt: Iterable[Knowledge]) -> list[Command]:
    """Tells running jobs what was learnt anew of their throughput."""
    fresh = {id(knowledge) for knowledge in learnt}
    return [
        TuneJob(job=record.name, params=record.knowledge.params)
        for record in records
        if id(record.knowledge) in fresh and record.allocation
    ]


def num_replicas_text(allocation: Allocation) -> str:
    return f"{allocation.num_replicas} replica{'s' * (allocation.num_replicas != 1)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reallocation:
    """What a round changed for a job.

    ``before`` is what it held, also where the policy was shown that it holds nothing: nodes it may use no longer are
    ``barred``, each with why: drained, released or lost.
    """

    job: str
    before: Allocation
    after: Allocation
    has_started: bool  # before this round
    barred: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A job that ended, and how many slots it held until then."""

    job: str
    state: JobState
    reason: str  # in one line
    num_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One decision: when, why then, what was planned, how long that took, and what changed."""

    number: int
    at: float
    trigger: str
    plan: Plan
    num_jobs: int
    num_slots: int
    decision_s: float
    error: str = ""
    changes: tuple[Reallocation, ...] = ()
    departures: tuple[Departure, ...] = ()  # jobs that ended since the round before
    sizing: str = ""  # how many nodes there should be instead of how many, and why; "": as many as before


def as_it_was(plan: Plan, decision_s: float, records: Mapping[str, JobRecord]) -> Plan:
    """With how long it took, and what jobs really held: one that must leave a node was shown as holding nothing."""
    if plan.explanation is None:
        return plan
    jobs = []
    for decision in plan.explanation.jobs:
        record = records[decision.job]
        if decision.before != record.allocation and record.state is not JobState.STOPPING:
            decision = dataclasses.replace(decision, before=record.allocation)
        jobs.append(decision)
    explanation = dataclasses.replace(plan.explanation, jobs=tuple(jobs), decision_s=decision_s)
    return dataclasses.replace(plan, explanation=explanation)


def reallocations(
    plan: Plan, records: Iterable[JobRecord], there: Collection[str], leaving: Mapping[str, str]
) -> tuple[Reallocation, ...]:
    """What a plan changes for jobs, also those it does not know; nothing for jobs that are stopping anyway.

    ``there``: all nodes; ``leaving``: those that jobs may use no longer, each with why.
    """
    found = []
    for record in records:
        before, after = record.allocation, plan.allocation_of(record.name)
        if before == after or record.state is JobState.STOPPING:
            continue
        barred = {node: leaving.get(node, "lost") for node, _ in before.shares if node in leaving or node not in there}
        has_started = record.num_resizes is not None
        found.append(Reallocation(job=record.name, before=before, after=after, has_started=has_started, barred=barred))
    return tuple(found)
