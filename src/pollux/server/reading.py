"""What can be asked of a live cluster: its jobs, nodes, rounds and reports, at a glance or in full.

Stands in ``server``, below :mod:`pollux.server.cluster`, which adds what changes anything. Nobody waits for the
scheduler's thread here: single fields of its records are looked at (see :mod:`pollux.server.views`), the rest is in the
database.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pollux.engines.live import LiveEngine
from pollux.errors import InvalidValueError, UnknownNameError
from pollux.jobs import JobRequest
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.loop import Scheduler
from pollux.scheduler.record import JobRecord
from pollux.server.book import RequestBook
from pollux.server.clock import LiveClock
from pollux.server.config import ClusterConfig
from pollux.server.journal import Journal
from pollux.server.past import Past, Sample
from pollux.server.seeing import curves_view, job_row, model_view, sample_view, timeline_view, useful_slots
from pollux.server.simulations import Simulations
from pollux.server.store import SqlStore, StoredJob
from pollux.server.views import (
    Capacity,
    job_view,
    model_views,
    node_views,
    resize_view,
    round_detail,
    round_view,
    sizing_view,
    spent_s,
    training_note_view,
    transition_view,
    waiting_reason,
)
from pollux.wire import WireReport, report_to_dict

TIMELINE_S = 3600.0


class ClusterReading:
    """Any thread may ask."""

    def __init__(
        self, *, store: SqlStore, engine: LiveEngine, config: ClusterConfig, clock: LiveClock, book: RequestBook
    ) -> None:
        self._store, self._engine, self._config = store, engine, config
        self._past = Past(store)
        self.simulations = Simulations(config.data_directory / "simulations")
        self._clock, self._book = clock, book
        # What the scheduler's thread replaces or adds to:
        self._scheduler: Scheduler | None = None
        self._journal: Journal | None = None
        self._held: dict[str, StoredJob] = {}  # waiting for other jobs
        self._latest: dict[str, tuple[float, WireReport]] = {}
        self._draining: set[str] = set()
        self.started_at = clock.now()

    def view(self, name: str) -> dict[str, Any]:
        record = self._active().get(name)
        if record is not None:
            return self._view_of(record)
        held = self._held.get(name)
        return self._view_of_stored(self._store.job(name)) if held is None else self._view_of_held(held)

    def jobs(
        self, states: Sequence[str] | None, limit: int, offset: int, newest_first: bool
    ) -> tuple[list[dict[str, Any]], int]:
        wanted = None if states is None else [_state(state) for state in states]
        counts = self._store.counts()
        total = sum(count for state, count in counts.items() if wanted is None or state in wanted)
        active, capacity = self._active(), Capacity.of(self._engine.nodes(), self._draining)
        views = []
        for name in self._store.job_names(wanted, limit=limit, offset=offset, newest_first=newest_first):
            record = active.get(name)
            views.append(self.view(name) if record is None else self._view_of(record, capacity))
        return views, total

    def job(self, name: str) -> dict[str, Any]:
        """All there is to say about a job."""
        stored = self._store.job(name)
        record = self._active().get(name)
        if record is None and (record := stored.record) is not None:
            record.knowledge.refit()  # the fit is not kept, what it follows from is
        journal = self._journal
        return {
            **self.view(name),
            "request": stored.request or {},
            "failure": record.reason if record is not None and record.state is JobState.FAILED else "",
            "models": {} if record is None else model_views(record),
            "decision": None if journal is None else journal.decision(name),
            "decisions": [] if journal is None else journal.changes(name),
            "transitions": [transition_view(transition) for transition in self._store.transitions(name)],
            "training_notes": [training_note_view(note) for note in self._store.training_notes(name)],
            "resizes": [resize_view(resize) for resize in self._store.resizes(name)],
            "replicas": [
                {
                    "replica_id": replica.replica_id,
                    "rank": replica.rank,
                    "node": replica.node,
                    "slot": replica.slot,
                    "pid": replica.pid,
                    "state": replica.state,
                }
                for replica in self._engine.replicas(name)
            ],
            "log_directory": str(self.job_directory(name) / "logs"),
        }

    def nodes(self) -> list[dict[str, Any]]:
        allocations = {name: record.allocation for name, record in self._active().items()}
        releasing = frozenset() if self._scheduler is None else self._scheduler.releasing
        return node_views(self._engine.nodes(), self._draining, releasing, allocations)

    def rounds(self, since: int | None, limit: int) -> list[dict[str, Any]]:
        return [round_view(round_) for round_ in self._store.rounds(since, limit)]

    def round(self, id_: int) -> dict[str, Any]:
        """Raises:
        UnknownNameError: there is no such round.
        """
        return round_detail(self._store.round(id_))

    def reports(self, name: str, since: int | None, limit: int) -> list[dict[str, Any]]:
        return [
            {"id": kept.id, "at": kept.at, **report_to_dict(kept.report)}
            for kept in self._store.reports(name, since, limit)
        ]

    def summary(self) -> dict[str, Any]:
        nodes, active = list(self._engine.nodes()), self._active()
        now, running_s, lost_s = self._clock.now(), 0.0, 0.0
        for name, record in active.items():
            spent = spent_s(record, self._latest.get(name, (now, None))[1], now)
            running_s, lost_s = running_s + spent[0], lost_s + spent[1]
        counts = Counter(record.state.value for record in active.values())
        counts[JobState.PENDING.value] += len(self._held)
        counts.update({state.value: count for state, count in self._store.counts().items() if state.is_final})
        last = None if self._journal is None else self._journal.last_round
        return {
            "engine": self._config.engine_name,
            "policy": self._config.policy,
            "started_at": self.started_at,
            "now": now,
            "num_slots": sum(node.num_slots for node in nodes),
            "num_used_slots": sum(record.allocation.num_replicas for record in active.values()),
            "nodes": len(nodes),
            "jobs": {state.value: counts[state.value] for state in JobState},
            "num_rounds": 0 if self._scheduler is None else self._scheduler.num_rounds,
            "last_decision_s": None if last is None else last.decision_s,
            "lost_share": lost_s / running_s if running_s > 0 else None,
            "sizing": sizing_view(self._scheduler, self._config.autoscale, self._config.node_price),
            "data_directory": str(self._config.data_directory),
            "interval_s": self._config.interval_s,
        }

    def job_directory(self, name: str) -> Path:
        """Raises:
        UnknownNameError: there is no such job.
        """
        self._require(name)
        return self._book.directory_of(name)

    def is_ended(self, name: str) -> bool:
        return name not in self._book

    # Over time --------------------------------------------------------------------------------

    def samples(self, since: float | None, until: float | None, points: int) -> list[dict[str, Any]]:
        since, until = _window(since, until, self._clock.now())
        return [sample_view(sample) for sample in self._past.samples(since, until, points)]

    def samples_after(self, id_: int) -> list[tuple[int, dict[str, Any]]]:
        """With their ids."""
        return [(one, sample_view(sample)) for one, sample in self._past.samples_after(id_)]

    def last_sample_id(self) -> int:
        return self._past.last_sample_id()

    def timeline(self, since: float | None, until: float | None, limit: int) -> dict[str, Any]:
        """Who held what. The last hour if nothing is said, or all there is if that is less."""
        _, until = _window(since, until, self._clock.now())
        if since is None:
            since = max(until - TIMELINE_S, min(self._past.first_time() or until, until))
        jobs, total = self._past.timeline(since, until, limit)
        return timeline_view(jobs, since, until, total)

    def curves(self, name: str, points: int) -> dict[str, Any]:
        """Raises:
        UnknownNameError: there is no such job.
        """
        self._require(name)
        return curves_view(self._past.reports(name, points))

    def model(self, name: str) -> dict[str, Any]:
        """What was fitted to a job's measured speed, and what follows from that.

        Raises:
            UnknownNameError: there is no such job.
        """
        record = self._active().get(name)
        if record is None and (record := self._store.job(name).record) is not None:
            record.knowledge.refit()  # the fit is not kept, what it follows from is
        report = self._latest.get(name) or next(iter(self._past.reports(name, 1)), None)
        journal = self._journal
        return model_view(
            record,
            None if report is None else report[1],
            self._engine.nodes(),
            None if journal is None else journal.weighed(name),
        )

    # For those who watch ----------------------------------------------------------------------

    def active_rows(self) -> dict[str, dict[str, Any]]:
        """Jobs that are not over, by name, in short."""
        capacity = Capacity.of(self._engine.nodes(), self._draining)
        rows = {name: job_row(self._view_of(record, capacity)) for name, record in self._active().items()}
        return rows | {job.name: job_row(self._view_of_held(job)) for job in list(self._held.values())}

    def row(self, name: str) -> dict[str, Any]:
        """A job in short."""
        return job_row(self.view(name))

    def last_ended(self, limit: int) -> list[str]:
        """Names of the jobs that ended last, the last one first."""
        return self._past.last_ended(limit)

    def take_sample(self) -> Sample:
        """The cluster as it is now; it is kept. By the scheduler's thread."""
        nodes, active, journal = self._engine.nodes(), self._active(), self._journal
        holding = [record for record in active.values() if record.allocation]
        useful, efficient, num_told = [], 0.0, 0
        for record in holding:
            count, told = record.allocation.num_replicas, self._latest.get(record.name)
            if told is not None and told[1].efficiency is not None:
                efficient, num_told = efficient + count * told[1].efficiency, num_told + count
            weighed = None if journal is None else journal.weighed(record.name)
            if weighed is not None and (share := useful_slots(weighed[0], count)) is not None:
                useful.append(share)
        node_hours = sum(({} if self._scheduler is None else self._scheduler.node_s).values()) / 3600.0
        price = self._config.node_price
        sample = Sample(
            at=self._clock.now(),
            num_nodes=len(nodes),
            num_slots=sum(node.num_slots for node in nodes),
            num_used_slots=sum(record.allocation.num_replicas for record in holding),
            num_running=len(holding),
            num_pending=len(active) - len(holding) + len(self._held),
            efficiency=efficient / num_told if num_told else None,
            goodput=sum(useful) if useful or not holding else None,
            node_hours=node_hours,
            cost=None if price is None else price * node_hours,
        )
        self._past.add_sample(sample)
        return sample

    # Inside -----------------------------------------------------------------------------------

    def _require(self, name: str) -> None:
        if not self._book.is_known(name):
            self._store.job(name)  # which says what names there are

    def _active(self) -> dict[str, JobRecord]:
        return {} if self._scheduler is None else {record.name: record for record in self._scheduler.active_jobs}

    def _view_of(self, record: JobRecord, capacity: Capacity | None = None) -> dict[str, Any]:
        """``capacity``: of the nodes, where it is known already."""
        request = self._book.get(record.name)
        if request is None:  # it has ended at this moment, and is kept as such
            return self._view_of_stored(self._store.job(record.name))
        is_waiting = record.state is JobState.PENDING
        if is_waiting and capacity is None:
            capacity = Capacity.of(self._engine.nodes(), self._draining)
        return job_view(
            record,
            request,
            self._latest.get(record.name),
            name=record.name,
            sequence=record.sequence,
            submitted_at=record.spec.submitted_at,
            now=self._clock.now(),
            reason="" if not is_waiting or capacity is None else waiting_reason(record, capacity),
            note="" if is_waiting else self._engine.note(record.name),
        )

    def _view_of_held(self, job: StoredJob, now: float | None = None) -> dict[str, Any]:
        request, blocked = self._book.get(job.name), self._book.blocked(job.name)
        return job_view(
            None,
            request,
            None,
            name=job.name,
            sequence=job.sequence,
            submitted_at=job.submitted_at,
            now=self._clock.now() if now is None else now,
            reason="waiting for slots" if blocked is None else blocked.reason,
        )

    def _view_of_stored(self, job: StoredJob) -> dict[str, Any]:
        report = self._latest.get(job.name)
        if report is None and (kept := self._store.reports(job.name, limit=1)):
            report = kept[-1].at, kept[-1].report
        return job_view(
            job.record,
            None if job.request is None else JobRequest.from_dict(job.request),
            report,
            name=job.name,
            sequence=job.sequence,
            submitted_at=job.submitted_at,
            now=self._clock.now(),
        )


def _state(text: str) -> JobState:
    try:
        return JobState(text)
    except ValueError:
        raise UnknownNameError("state", text, [state.value for state in JobState]) from None


def _window(since: float | None, until: float | None, now: float) -> tuple[float, float]:
    since, until = 0.0 if since is None else since, now if until is None else until
    if since > until:
        raise InvalidValueError(f"since = {since:.17g} is after until = {until:.17g}; times are seconds since 1970")
    return since, until
