"""The scheduler's store as the live cluster uses it: all goes to the database, and what is shown often stays here.

Stands in ``server``, between the scheduler and :class:`~pollux.server.store.SqlStore`.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

from pollux.scheduler.record import JobRecord, RoundRecord
from pollux.server.metrics import Metrics
from pollux.server.store import SqlStore
from pollux.server.views import decision_view
from pollux.types import JobDecision, Plan, Snapshot

NUM_CHANGES = 10  # decisions that are remembered of each job
NUM_RECALLED = 50  # rounds that are read again after a restart
PRUNE_EVERY = 200  # rounds
MANY_JOBS = 200  # from here on only what a round changed is kept: writing all of it would take longer than deciding


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
        self._last: dict[str, tuple[JobDecision, RoundRecord, int]] = {}  # with the round's id
        self._changes: dict[str, deque[dict[str, Any]]] = {}
        self.last_round: RoundRecord | None = None
        for stored in store.rounds(limit=NUM_RECALLED):
            self._remember(stored.record, stored.id)

    def save_job(self, record: JobRecord) -> None:
        self._store.save_job(record)
        self._metrics.saw_job(record)
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
        return None if found is None else decision_view(*found, with_options=True)

    def weighed(self, job: str) -> tuple[JobDecision, int] | None:
        """The last decision about a job as it was made, and the id of its round."""
        found = self._last.get(job)
        return None if found is None else (found[0], found[2])

    def changes(self, job: str) -> list[dict[str, Any]]:
        """The last decisions that changed something for a job, oldest first."""
        return list(self._changes.get(job, ()))

    def _remember(self, record: RoundRecord, id_: int) -> None:
        self.last_round = record
        explanation = record.plan.explanation
        # Of ended jobs the last decision stays: it must not keep those about all others of its round alive.
        alone = dataclasses.replace(record, plan=_without_jobs(record.plan))
        for decision in () if explanation is None else explanation.jobs:
            self._last[decision.job] = decision, alone, id_
            if decision.has_changed:
                changes = self._changes.setdefault(decision.job, deque(maxlen=NUM_CHANGES))
                changes.append(decision_view(decision, record, id_, with_options=False))


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
