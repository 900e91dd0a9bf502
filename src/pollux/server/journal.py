"""The scheduler's store as the live cluster uses it: all goes to the database, and what is shown often stays here.

Stands in ``server``, between the scheduler and :class:`~pollux.server.store.SqlStore`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from pollux.scheduler.lifecycle import JobState, Transition
from pollux.scheduler.record import JobRecord, RoundRecord
from pollux.server.forms import StoredRound
from pollux.server.metrics import Metrics
from pollux.server.store import SqlStore
from pollux.server.views import decision_view
from pollux.types import JobDecision, Plan, Snapshot

NUM_CHANGES = 10  # decisions that are remembered of each job
NUM_RECALLED = 50  # rounds that are read again after a restart; of older ones, what was decided about a job if asked
NUM_RECALLED_JOBS = 1000  # of which that stays here
PRUNE_EVERY = 200  # rounds
MANY_JOBS = 200  # from here on only what a round changed is kept: writing all of it would take longer than deciding
_BY_DECISION = frozenset({JobState.STARTING, JobState.RESIZING, JobState.STOPPING})

logger = logging.getLogger(__name__)
_Decided = tuple[JobDecision, RoundRecord, int]  # the round without its other decisions, and its id


class Journal:
    def __init__(
        self,
        store: SqlStore,
        *,
        keep_rounds: int,
        keep_reports: int,
        on_ended: Callable[[JobRecord], None],
        metrics: Metrics | None = None,
    ) -> None:
        self._store, self._on_ended, self._metrics = store, on_ended, metrics or Metrics()
        self._keep = keep_rounds, keep_reports
        self._last: dict[str, _Decided] = {}
        self._changes: dict[str, deque[dict[str, Any]]] = {}  # by this server
        self._recalled: dict[str, list[_Decided]] = {}  # by servers before: what changed something for a job
        self._told: dict[str, Transition | None] = {}  # the last of each job's history that is in the log
        self.last_round: RoundRecord | None = None
        self._first_id = 0  # of the rounds to come
        for stored in store.rounds(limit=NUM_RECALLED):
            self._first_id = stored.id + 1
            self._remember(stored.record, stored.id, is_old=True)

    def resume(self, records: Iterable[JobRecord]) -> None:
        """Jobs of a scheduler that is gone: what happened to them before is in its log."""
        self._told = {record.name: record.history[-1] if record.history else None for record in records}

    def save_job(self, record: JobRecord) -> None:
        self._store.save_job(record)
        self._metrics.saw_job(record)
        self._log(record)
        if record.state.is_final:
            self._on_ended(record)

    def save_round(self, round_record: RoundRecord, snapshot: Snapshot) -> None:
        if round_record.num_jobs < MANY_JOBS:
            id_ = self._store.save_round(round_record, snapshot)
        else:
            id_ = self._store.save_round(_changes_alone(round_record), None)
        self._metrics.saw_round(round_record)
        self._remember(round_record, id_)
        if round_record.number % PRUNE_EVERY == 0:
            self._store.prune(*self._keep)

    def forget(self, job: str) -> None:
        self._last.pop(job, None)
        self._changes.pop(job, None)

    def decision(self, job: str) -> dict[str, Any] | None:
        """The last one about a job, with the options that were weighed."""
        found = self._last.get(job)
        if found is None and (older := self._recall(job)):
            found = older[-1]
        return None if found is None else decision_view(*found, with_options=True)

    def weighed(self, job: str) -> tuple[JobDecision, int] | None:
        """The last decision about a job as it was made, and the id of its round."""
        found = self._last.get(job)
        return None if found is None else (found[0], found[2])

    def changes(self, job: str) -> list[dict[str, Any]]:
        """The last decisions that changed something for a job, oldest first."""
        own = list(self._changes.get(job, ()))
        if len(own) >= NUM_CHANGES:
            return own
        older = [decision_view(*found, with_options=False) for found in self._recall(job)]
        return [*older, *own][-NUM_CHANGES:]

    def _recall(self, job: str) -> list[_Decided]:
        """What was decided before this server and changed something for a job, as far as it is kept; oldest first.

        They are found by when it changed: a change is commanded in its round, or after it if slots had to become free
        first, and then the rounds in between had decided the same.
        """
        found = self._recalled.get(job)
        if found is None:
            times = [change.at for change in self._store.transitions(job) if change.target in _BY_DECISION]
            rounds = self._store.rounds_at(times[-2 * NUM_CHANGES :], before=self._first_id)
            found = [told for one in rounds if (told := _about(job, one)) is not None and told[0].has_changed]
            if len(self._recalled) >= NUM_RECALLED_JOBS:
                self._recalled.clear()
            self._recalled[job] = found = found[-NUM_CHANGES:]
        return found

    def _log(self, record: JobRecord) -> None:
        """What has happened to a job since it was saved last, a line each."""
        history = list(record.history)
        if record.name not in self._told:
            logger.info("job %s: submitted", record.name)
        last = self._told.get(record.name)
        place = next((place for place in range(len(history), 0, -1) if history[place - 1] is last), 0)
        for change in history[place:]:
            what = change.reason.partition("\n")[0].removeprefix(f"{record.name}: ")
            said = "" if what == change.target.value else f": {what}"
            logger.info("job %s: %s%s", record.name, change.target.value, said)
        self._told[record.name] = history[-1] if history else None
        if record.state.is_final:
            del self._told[record.name]

    def _remember(self, record: RoundRecord, id_: int, *, is_old: bool = False) -> None:
        self.last_round = record
        explanation = record.plan.explanation
        # Of ended jobs the last decision stays: it must not keep those about all others of its round alive.
        alone = dataclasses.replace(record, plan=_without_jobs(record.plan))
        for decision in () if explanation is None else explanation.jobs:
            self._last[decision.job] = decision, alone, id_
            if decision.has_changed and not is_old:
                changes = self._changes.setdefault(decision.job, deque(maxlen=NUM_CHANGES))
                changes.append(decision_view(decision, record, id_, with_options=False))


def _about(job: str, round_: StoredRound) -> _Decided | None:
    explanation = round_.record.plan.explanation
    for decision in () if explanation is None else explanation.jobs:
        if decision.job == job:
            return decision, dataclasses.replace(round_.record, plan=_without_jobs(round_.record.plan)), round_.id
    return None


def _without_jobs(plan: Plan) -> Plan:
    explanation = plan.explanation
    return Plan(allocations={}, explanation=None if explanation is None else dataclasses.replace(explanation, jobs=()))


def _changes_alone(record: RoundRecord) -> RoundRecord:
    explanation = record.plan.explanation
    if explanation is not None:
        changed = tuple(decision for decision in explanation.jobs if decision.has_changed)
        explanation = dataclasses.replace(explanation, jobs=changed)
    allocations = {change.job: change.after for change in record.changes or ()}
    return dataclasses.replace(record, plan=Plan(allocations=allocations, explanation=explanation))
