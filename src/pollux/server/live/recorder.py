"""Records what the scheduler does: in the database, the metrics, the server's log and the table of live jobs.

The scheduler calls it as its :class:`pollux.scheduler.ports.Store`, on the scheduler thread. Queries ask it for the
last decisions about a job, on any thread.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable

from pollux.api.round import Decision, DecisionWithOptions
from pollux.errors import UnknownNameError
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.record import JobRecord, RoundRecord
from pollux.server.live.job_table import NUM_CHANGES, Decided
from pollux.server.live.state import ClusterState
from pollux.server.present.explanations import changes_of, explain_job
from pollux.server.present.metrics import Metrics
from pollux.server.present.views import decision_view, decision_with_options
from pollux.server.storage.records import StoredRound
from pollux.server.storage.store import SqlStore
from pollux.types import Plan, Snapshot

NUM_RECALLED = 50  # rounds that are read again after a restart; older decisions about a job are read when asked for
PRUNE_EVERY = 200  # rounds
MANY_JOBS = 200  # from here on only what a round changed is kept: writing all of it would take longer than deciding
_BY_DECISION = frozenset({JobState.STARTING, JobState.RESIZING, JobState.STOPPING})

logger = logging.getLogger(__name__)


class DecisionLog:
    """The last decisions about a job: those of this server from memory, older ones from the database."""

    def __init__(self, store: SqlStore, state: ClusterState) -> None:
        self._store, self._state = store, state
        self._first_id = 0  # of the rounds that this server makes
        self._told: dict[str, tuple[int, str]] = {}  # of jobs that were asked about: a round, and what it said of them

    def recall(self) -> None:
        """Remember the last rounds of the server before."""
        for stored in self._store.rounds(limit=NUM_RECALLED):
            self._first_id = stored.id + 1
            self.remember(stored.record, stored.id, is_old=True)

    def remember(self, record: RoundRecord, id_: int, *, is_old: bool = False) -> None:
        self._state.last_round = record
        explanation = record.plan.explanation
        # Of ended jobs the last decision stays: it must not keep those about all others of its round alive.
        alone = dataclasses.replace(record, plan=_without_jobs(record.plan))
        for decision in () if explanation is None else explanation.jobs:
            job = self._state.jobs.entry(decision.job)
            job.decided = Decided(decision, alone, id_)
            if decision.has_changed and not is_old:
                job.changes.append(decision_view(decision, record, id_))

    def last(self, name: str) -> DecisionWithOptions | None:
        """The last decision about a job, with the options that were weighed."""
        job = self._state.jobs.get(name)
        found = None if job is None else job.decided
        if found is None and (earlier := self._earlier(name)):
            found = earlier[-1]
        return None if found is None else decision_with_options(found.decision, found.round, found.id)

    def changes(self, name: str) -> tuple[Decision, ...]:
        """The last decisions that changed something for a job, oldest first."""
        job = self._state.jobs.get(name)
        own = () if job is None else tuple(job.changes)
        if len(own) >= NUM_CHANGES:
            return own
        earlier = (decision_view(found.decision, found.round, found.id) for found in self._earlier(name))
        return (*earlier, *own)[-NUM_CHANGES:]

    def why(self, name: str) -> str:
        """What was said of the decision that changed it last; empty: there was none, or it is not kept any more."""
        changes = self.changes(name)
        if not changes:
            return ""
        id_ = changes[-1].round
        known = self._told.get(name)
        if known is None or known[0] != id_:
            try:
                record = self._store.round(id_).record
            except UnknownNameError:
                return ""
            known = self._told[name] = id_, explain_job(record, changes_of(record), name)
        return known[1]

    def _earlier(self, name: str) -> list[Decided]:
        """Decisions of servers before that changed something for a job, as far as they are kept; oldest first.

        They are found by when the job changed: a change is commanded in its round, or after it if slots had to become
        free first, and then the rounds in between had decided the same.
        """
        times = [change.at for change in self._store.transitions(name) if change.target in _BY_DECISION]
        rounds = self._store.rounds_at(times[-2 * NUM_CHANGES :], before=self._first_id)
        found = [decided for one in rounds if (decided := _about(name, one)) and decided.decision.has_changed]
        return found[-NUM_CHANGES:]


class Recorder:
    """``on_ended`` is called when a job is over and that is saved, ``on_halted`` when it waits for its owner."""

    def __init__(
        self,
        store: SqlStore,
        state: ClusterState,
        decisions: DecisionLog,
        *,
        keep_rounds: int,
        keep_reports: int,
        on_ended: Callable[[JobRecord], None],
        on_halted: Callable[[JobRecord], None] = lambda record: None,
        metrics: Metrics | None = None,
    ) -> None:
        self._store, self._state, self._decisions = store, state, decisions
        self._on_ended, self._on_halted, self._metrics = on_ended, on_halted, metrics or Metrics()
        self._keep = keep_rounds, keep_reports
        decisions.recall()

    def resume(self, records: Iterable[JobRecord]) -> None:
        """Jobs of a scheduler that is gone: what happened to them before is in its log."""
        for record in records:
            if (job := self._state.jobs.get(record.name)) is not None:
                job.is_logged, job.logged = True, record.history[-1] if record.history else None
                job.is_halted = bool(record.halted)

    def save_job(self, record: JobRecord) -> None:
        self._store.save_job(record)
        self._metrics.saw_job(record)
        self._log(record)
        job = self._state.jobs.entry(record.name)
        was_halted, job.is_halted = job.is_halted, bool(record.halted)
        if job.is_halted and not was_halted:
            self._on_halted(record)
        if record.state.is_final:
            self._on_ended(record)

    def save_round(self, round_record: RoundRecord, snapshot: Snapshot) -> None:
        if round_record.num_jobs < MANY_JOBS:
            id_ = self._store.save_round(round_record, snapshot)
        else:
            id_ = self._store.save_round(_changes_alone(round_record), None)
        self._metrics.saw_round(round_record)
        self._decisions.remember(round_record, id_)
        if round_record.number % PRUNE_EVERY == 0:
            self._store.prune(*self._keep)

    def _log(self, record: JobRecord) -> None:
        """What has happened to a job since it was saved last, a line each."""
        job, history = self._state.jobs.entry(record.name), list(record.history)
        if not job.is_logged:
            logger.info("job %s: submitted", record.name)
        last = job.logged
        place = next((place for place in range(len(history), 0, -1) if history[place - 1] is last), 0)
        for change in history[place:]:
            what = change.reason.partition("\n")[0].removeprefix(f"{record.name}: ")
            said = "" if what == change.target.value else f": {what}"
            logger.info("job %s: %s%s", record.name, change.target.value, said)
        job.is_logged, job.logged = True, history[-1] if history else None


def _about(job: str, round_: StoredRound) -> Decided | None:
    explanation = round_.record.plan.explanation
    for decision in () if explanation is None else explanation.jobs:
        if decision.job == job:
            alone = dataclasses.replace(round_.record, plan=_without_jobs(round_.record.plan))
            return Decided(decision, alone, round_.id)
    return None


def _without_jobs(plan: Plan) -> Plan:
    explanation = plan.explanation
    return Plan(allocations={}, explanation=None if explanation is None else dataclasses.replace(explanation, jobs=()))


def _changes_alone(record: RoundRecord) -> RoundRecord:
    explanation = record.plan.explanation
    if explanation is not None:
        changed = tuple(decision for decision in explanation.jobs if decision.has_changed)
        explanation = dataclasses.replace(explanation, jobs=changed)
    allocations = {change.job: change.after for change in record.changes}
    return dataclasses.replace(record, plan=Plan(allocations=allocations, explanation=explanation))
