"""Read-only queries for the HTTP routes, the event feed and the metrics. Never blocks on the scheduler thread.

Single fields of the scheduler's records are read (see :mod:`pollux.server.present.views`); the rest is in the database.
:class:`pollux.server.live.cluster.Cluster` has one of these, and adds what changes anything.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pollux.api.cluster import CheckedNode, ClusterSample, ClusterSummary, NodeReading, NodeSummary, Timeline
from pollux.api.job import JobCurves, JobDetail, JobForecast, JobModel, JobRow, JobSummary, Replica
from pollux.api.report import StoredReport
from pollux.api.request import JobRequest, shown_request
from pollux.api.round import RoundDetail, RoundSummary
from pollux.api.usage import UsageKey, UsageRow
from pollux.engines.live import NO_PHASE, JobPhase, LiveEngine
from pollux.engines.preflight import CheckRequest, concluded
from pollux.engines.processes.devices import CPU
from pollux.errors import InvalidValueError, UnknownNameError
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.node_health import NodeCondition
from pollux.scheduler.record import JobRecord
from pollux.server.config import ClusterConfig
from pollux.server.live.accounts import Accounts
from pollux.server.live.clock import LiveClock
from pollux.server.live.job_table import LiveJob
from pollux.server.live.recorder import DecisionLog
from pollux.server.live.state import ClusterState
from pollux.server.present.charts import job_curves, job_model, known_speedups, least_useful_slots, useful_slots
from pollux.server.present.deadlines import deadline_in_words, spent_in_words
from pollux.server.present.forecasts import free_slot_reasons, job_forecast, no_forecast
from pollux.server.present.gauges import Measured
from pollux.server.present.setbacks import job_restart
from pollux.server.present.views import (
    Capacity,
    KnownJob,
    cluster_size,
    job_resize,
    job_row,
    job_summary,
    model_views,
    node_summaries,
    round_detail,
    round_summary,
    spent_s,
    standing_in_words,
    state_change,
    versions_in,
    waiting_reason,
)
from pollux.server.storage.readings import ReadingStore
from pollux.server.storage.records import StoredJob
from pollux.server.storage.store import SqlStore
from pollux.server.storage.time_series import TimeSeries
from pollux.server.storage.usage import UsageStore
from pollux.types import Node, slots_in_use
from pollux.version import __version__

TIMELINE_S = 3600.0
_HELD = "held: it waits for pollux release"
_UNWANTED = "it is being cancelled"


class Queries:
    """Any thread may ask."""

    def __init__(
        self,
        *,
        state: ClusterState,
        store: SqlStore,
        engine: LiveEngine,
        config: ClusterConfig,
        clock: LiveClock,
        decisions: DecisionLog,
        accounts: Accounts,
    ) -> None:
        self._state, self._jobs, self._store = state, state.jobs, store
        self._engine, self._config, self._clock, self._decisions = engine, config, clock, decisions
        self._series, self._accounts, self._usage = TimeSeries(store), accounts, UsageStore(store)
        self._readings = ReadingStore(store)
        self._started_at = clock.now()

    # Jobs -------------------------------------------------------------------------------------

    def summary_of(self, name: str) -> JobSummary:
        """A job in short.

        Raises:
            UnknownNameError: there is no such job.
        """
        record = self._state.records.get(name)
        if record is not None:
            return self._summary_of_record(record)
        job = self._jobs.get(name)
        if job is not None and job.is_held:
            return self.summary_of_held(job)
        return self._summary_of_stored(self._store.job(name))

    def study_of(self, name: str) -> str:
        """The study of a job that is not over; empty: none. From memory."""
        request = self._jobs.request_of(name)
        return "" if request is None else request.study

    def jobs(
        self, states: Sequence[str] | None, limit: int, offset: int, newest_first: bool
    ) -> tuple[list[JobSummary], int]:
        """A page of them, and how many there are."""
        wanted = None if states is None else [_state(state) for state in states]
        counts = self._store.counts()
        total = sum(count for state, count in counts.items() if wanted is None or state in wanted)
        records, capacity = self._state.records, self._capacity()
        found = []
        for name in self._store.job_names(wanted, limit=limit, offset=offset, newest_first=newest_first):
            record, job = records.get(name), self._jobs.get(name)
            if record is not None:
                found.append(self._summary_of_record(record, capacity))
            elif job is not None and job.is_held:
                found.append(self.summary_of_held(job))
            else:
                found.append(self.summary_of(name))
        return found, total

    def job(self, name: str) -> JobDetail:
        """All there is to say about a job.

        Raises:
            UnknownNameError: there is no such job.
        """
        stored = self._store.job(name)
        record = self._state.records.get(name)
        if record is None and (record := stored.record) is not None:
            record.knowledge.refit()  # the fit is not kept, what it follows from is
        summary, job = self.summary_of(name), self._jobs.get(name)
        energy_j, progress = self._readings.energy_of(name), summary.progress
        return JobDetail(
            **{one.name: getattr(summary, one.name) for one in dataclasses.fields(summary)},
            request=shown_request(stored.request or {}),
            failure=record.reason if record is not None and record.state is JobState.FAILED else "",
            models={} if record is None else model_views(record),
            decision=self._decisions.last(name),
            decisions=self._decisions.changes(name),
            why="" if record is None or not record.allocation else self._why(record),
            transitions=tuple(map(state_change, self._store.transitions(name))),
            training_notes=tuple(self._store.training_notes(name)),
            resizes=tuple(map(job_resize, self._store.resizes(name))),
            restarts=() if record is None else tuple(map(job_restart, record.setbacks)),
            replicas=tuple(
                Replica(
                    replica_id=replica.replica_id,
                    rank=replica.rank,
                    node=replica.node,
                    slot=replica.slot,
                    pid=replica.pid,
                    state=replica.state,
                )
                for replica in self._engine.replicas(name)
            ),
            idle="" if job is None or record is None or not record.allocation else job.idle,
            energy_j=energy_j,
            energy_per_percent_j=energy_j / progress / 100 if energy_j is not None and progress else None,
            log_directory=str(self.job_directory(name) / "logs"),
            versions=versions_in(stored.request or {}),
        )

    def _why(self, record: JobRecord) -> str:
        """It has what its last change gave it, or keeps what it has."""
        job = self._jobs.get(record.name)
        if told := self._decisions.why(record.name):
            return told
        if job is None or job.decided is None or job.decided.decision.has_changed:
            return ""
        speedups = job.decided.decision.option_speedups
        count = record.allocation.num_replicas
        is_best = len(speedups) > 0 and count < len(speedups) and speedups[count] >= speedups.max()
        gain = "no other number of slots is worth more to it" if is_best else "others make more of the slots it lacks"
        return f"keeps {count} slot{'s' * (count != 1)}: {gain}"

    def reports(self, name: str, since: int | None, limit: int) -> list[StoredReport]:
        return self._store.reports(name, since, limit)

    def job_directory(self, name: str) -> Path:
        """Raises:
        UnknownNameError: there is no such job.
        """
        self._require(name)
        return self._jobs.directory_of(name)

    def is_ended(self, name: str) -> bool:
        return name not in self._jobs

    # The cluster ------------------------------------------------------------------------------

    def nodes(self) -> list[NodeSummary]:
        records = list(self._state.records.values())
        nodes, unusable = self._engine.nodes(), self._engine.unusable
        draining, releasing, conditions = self._state.draining, self._state.releasing, self._conditions()
        readings = self._engine.readings
        return node_summaries(nodes, draining, releasing, records, conditions, unusable, readings)

    def check_nodes(self, script: str, packages: Sequence[str]) -> list[CheckedNode]:
        """Look at all nodes now. Raises EngineError: they cannot be asked."""
        needs_gpu = any(node.accelerator != CPU for node in self._engine.nodes())
        asked = CheckRequest(script=script, packages=tuple(packages), server=self._config.url, needs_gpu=needs_gpu)
        return concluded(self._engine.check(asked))

    def _conditions(self) -> dict[str, NodeCondition]:
        scheduler = self._state.scheduler
        return {} if scheduler is None else scheduler.health.conditions(self._clock.now())

    def rounds(self, since: int | None, limit: int) -> list[RoundSummary]:
        return [round_summary(round_) for round_ in self._store.rounds(since, limit)]

    def round(self, id_: int) -> RoundDetail:
        """Raises:
        UnknownNameError: there is no such round.
        """
        return round_detail(self._store.round(id_))

    def summary(self) -> ClusterSummary:
        nodes, records, scheduler = list(self._engine.nodes()), self._state.records, self._state.scheduler
        now, running_s, lost_s = self._clock.now(), 0.0, 0.0
        for name, record in records.items():
            job = self._jobs.get(name)
            spent = spent_s(record, None if job is None else job.report, now)
            running_s, lost_s = running_s + spent[0], lost_s + spent[1]
        last = self._state.last_round
        return ClusterSummary(
            version=__version__,
            engine=self._config.engine_name,
            policy=self._config.policy,
            started_at=self._started_at,
            now=now,
            num_slots=sum(node.num_slots for node in nodes),
            num_used_slots=sum(record.allocation.num_replicas for record in records.values()),
            nodes=len(nodes),
            jobs=self._counts(records.values()),
            num_rounds=0 if scheduler is None else scheduler.num_rounds,
            last_decision_s=None if last is None else last.decision_s,
            lost_share=lost_s / running_s if running_s > 0 else None,
            sizing=cluster_size(scheduler, self._config.autoscale, self._config.prices),
            data_directory=str(self._config.data_directory),
            why_free=self._why_free(nodes, records),
            warnings=tuple(filter(None, [self._accounts.unkept])),
            interval_s=self._config.interval_s,
        )

    def _why_free(self, nodes: Sequence[Node], records: Mapping[str, JobRecord]) -> tuple[str, ...]:
        leaving = self._state.draining | self._state.releasing
        holding = [record for record in records.values() if record.allocation]
        used = slots_in_use([record.allocation for record in holding])
        num_free = sum(max(one.num_slots - used.get(one.name, 0), 0) for one in nodes if one.name not in leaving)
        if not num_free:
            return ()
        capacity, running, waiting = self._capacity(), [], []
        for record in records.values():
            job = self._jobs.get(record.name)
            if record.allocation:
                running.append((record, None if job is None or job.decided is None else job.decided.decision))
            else:
                waiting.append((record.name, self._state.held_back(record.name) or waiting_reason(record, capacity)))
        return free_slot_reasons(num_free, running, waiting)

    def measured(self, *, is_ready: bool, node_s_before: Mapping[str, float]) -> Measured:
        """What is there at this moment, for the metrics. ``node_s_before``: counted by servers before."""
        scheduler, records = self._state.scheduler, list(self._state.records.values())
        jobs = [(record, self._jobs.get(record.name)) for record in records]
        node_s = {} if scheduler is None else scheduler.node_s
        return Measured(
            is_ready=is_ready,
            nodes=self._engine.nodes(),
            draining=self._state.draining,
            releasing=self._state.releasing,
            conditions=self._conditions(),
            num_unusable=len(self._engine.unusable),
            jobs=[
                (record, None if job is None or job.report is None else (job.reported_at or 0.0, job.report))
                for record, job in jobs
            ],
            num_jobs=self._counts(records),
            node_s={kind: used_s - node_s_before.get(kind, 0.0) for kind, used_s in node_s.items()},
            prices=self._config.prices,
            num_wanted_nodes=None if scheduler is None else scheduler.num_wanted_nodes,
            usage=self._usage.table(("team", "user"), None, None),
            readings=self._engine.readings,
            energy_j=self._readings.energies(),
        )

    def _counts(self, records: Iterable[JobRecord]) -> dict[str, int]:
        """Jobs by state, also those that are over."""
        active = {record.name: record.state for record in records}
        counts = Counter(active.values())
        counts[JobState.PENDING] += sum(job.name not in active for job in self._jobs.held)
        counts.update({state: count for state, count in self._store.counts().items() if state.is_final})
        return {state.value: counts[state] for state in JobState}

    # Over time --------------------------------------------------------------------------------

    def samples(self, since: float | None, until: float | None, points: int) -> list[ClusterSample]:
        since, until = _window(since, until, self._clock.now())
        return self._series.samples(since, until, points)

    def samples_after(self, id_: int) -> list[tuple[int, ClusterSample]]:
        """With their ids."""
        return self._series.samples_after(id_)

    def last_sample_id(self) -> int:
        return self._series.last_sample_id()

    def readings(self, node: str, since: float | None, until: float | None, points: int) -> list[NodeReading]:
        """What a node did, as far as that is kept; of the last hour if nothing is said."""
        _, until = _window(since, until, self._clock.now())
        return self._readings.of_node(node, until - TIMELINE_S if since is None else since, until, points)

    def timeline(self, since: float | None, until: float | None, limit: int) -> Timeline:
        """Which job held what. The last hour if nothing is said, or all there is if that is less."""
        _, until = _window(since, until, self._clock.now())
        if since is None:
            since = max(until - TIMELINE_S, min(self._series.first_time() or until, until))
        jobs, total = self._series.timeline(since, until, limit)
        return Timeline(since=since, until=until, total=total, jobs=tuple(jobs))

    def curves(self, name: str, points: int) -> JobCurves:
        """Raises:
        UnknownNameError: there is no such job.
        """
        self._require(name)
        return job_curves(self._series.reports(name, points))

    def model(self, name: str) -> JobModel:
        """What was fitted to a job's measured speed, and what follows from that.

        Raises:
            UnknownNameError: there is no such job.
        """
        record = self._state.records.get(name)
        if record is None and (record := self._store.job(name).record) is not None:
            record.knowledge.refit()  # the fit is not kept, what it follows from is
        job = self._jobs.get(name)
        report = None if job is None else job.report
        if report is None:
            report = next((one for _, one in self._series.reports(name, 1)), None)
        decided = None if job is None else job.decided
        return job_model(
            record, report, self._engine.nodes(), None if decided is None else (decided.decision, decided.id)
        )

    def forecast(self, name: str) -> JobForecast:
        """When a waiting job will start. Takes up to two seconds.

        Raises:
            UnknownNameError: there is no such job.
        """
        summary = self.summary_of(name)
        record, now = self._state.records.get(name), self._clock.now()
        if summary.state != "pending" or record is None or summary.held_back:
            why = summary.held_back or (summary.reason if summary.state == "pending" else f"it is {summary.state}")
            return no_forecast(why)
        limits_s, records = {}, self._state.records
        for one, other in records.items():
            request = self._jobs.request_of(one)
            if request is not None and request.time_limit_s is not None:
                limits_s[one] = request.time_limit_s - other.attained_s
        return job_forecast(
            name,
            self._engine.nodes(),
            [one for one in records.values() if not self._state.held_back(one.name) and one.may_run],
            leaving=self._state.draining | self._state.releasing,
            policy=self._config.policy,
            settings=self._config.settings,
            limits_s=limits_s,
            now=now,
        )

    def useful_share(self, record: JobRecord) -> float:
        """Of a job's slots, what counts: its speedup over one slot, for each. 1 where it is not known."""
        job = self._jobs.get(record.name)
        if job is None or job.decided is None or not record.allocation:
            return 1.0
        count = record.allocation.num_replicas
        useful = useful_slots(job.decided.decision, count)
        return 1.0 if useful is None else min(useful / count, 1.0)

    def speedups_of(self, name: str) -> tuple[float, ...]:
        """Of a job with 1, 2, ... replicas over that with one, as the last decision had it; empty: not known."""
        job = self._jobs.get(name)
        return () if job is None or job.decided is None else known_speedups(job.decided.decision)

    def usage(self, by: Sequence[UsageKey], since: str | None, until: str | None) -> list[UsageRow]:
        """What was used, from day to day, both included; as of a few seconds ago."""
        return self._usage.table(by, since, until)

    def take_sample(self) -> ClusterSample:
        """The cluster as it is now; it is kept. By the scheduler thread."""
        nodes, records = self._engine.nodes(), self._state.records
        holding = [record for record in records.values() if record.allocation]
        useful, efficient, num_told = [], 0.0, 0
        for record in holding:
            count, job = record.allocation.num_replicas, self._jobs.get(record.name)
            if job is None:
                continue
            if job.report is not None and job.report.efficiency is not None:
                efficient, num_told = efficient + count * job.report.efficiency, num_told + count
            if job.request is not None and job.request.kind == "fixed":
                continue  # what it does with its slots is not known
            useful.append(least_useful_slots(None if job.decided is None else job.decided.decision, count))
        scheduler = self._state.scheduler
        node_s = {} if scheduler is None else scheduler.node_s
        sample = ClusterSample(
            at=self._clock.now(),
            num_nodes=len(nodes),
            num_slots=sum(node.num_slots for node in nodes),
            num_used_slots=sum(record.allocation.num_replicas for record in holding),
            num_running=len(holding),
            num_pending=len(records) - len(holding) + sum(job.name not in records for job in self._jobs.held),
            efficiency=efficient / num_told if num_told else None,
            goodput=sum(useful) if useful or not holding else None,
            node_hours=sum(node_s.values()) / 3600.0,
            cost=self._config.prices.cost(node_s),
        )
        self._series.add_sample(sample)
        return sample

    # For the event feed -----------------------------------------------------------------------

    def active_rows(self) -> dict[str, JobRow]:
        """Jobs that are not over, by name, in short."""
        capacity = self._capacity()
        held = {job.name: job_row(self.summary_of_held(job)) for job in self._jobs.held}
        return held | {
            name: job_row(self._summary_of_record(record, capacity)) for name, record in self._state.records.items()
        }

    def row(self, name: str) -> JobRow:
        return job_row(self.summary_of(name))

    def last_ended(self, limit: int) -> list[str]:
        """Names of the jobs that ended last, the last one first."""
        return self._series.last_ended(limit)

    # Inside -----------------------------------------------------------------------------------

    def _require(self, name: str) -> None:
        if not self._jobs.is_known(name):
            self._store.job(name)  # which says what names there are

    def _capacity(self) -> Capacity:
        nodes, autoscale = self._engine.nodes(), self._config.autoscale
        most_slots = None
        if autoscale is not None and nodes:
            most_slots = autoscale.max_nodes * max(node.num_slots for node in nodes)
        return Capacity.of(nodes, self._state.draining, most_slots=most_slots, unusable=self._engine.unusable)

    def _summary_of_record(self, record: JobRecord, capacity: Capacity | None = None) -> JobSummary:
        """``capacity``: of the nodes, where it is known already."""
        job = self._jobs.get(record.name)
        if record.name not in self._jobs or job is None:  # it has ended at this moment, and is kept as such
            return self._summary_of_stored(self._store.job(record.name))
        is_waiting = record.state is JobState.PENDING
        is_held = job.request is not None and job.request.is_held
        told = _UNWANTED if job.is_unwanted else ""
        known = KnownJob(
            name=record.name,
            sequence=record.sequence,
            submitted_at=record.spec.submitted_at,
            record=record,
            request=job.request,
            report=job.report,
            reported_at=job.reported_at,
            team=(team := self._team_of(job.request)),
            standing=self._standing(team, record.spec.owner),
            held_back=(
                held_back := (_HELD if is_held else record.halted)
                or spent_in_words(record)
                or self._state.held_back(record.name)
            ),
            deadline=deadline_in_words(self._state.deadline_of(record.name), self._clock.now()),
        )
        return job_summary(
            known,
            self._clock.now(),
            reason=told or held_back or waiting_reason(record, capacity or self._capacity()) if is_waiting else "",
            note="" if is_waiting else told or self._engine.note(record.name) or job.stuck,
            phase=NO_PHASE if is_waiting else self._phase_of(record, job),
        )

    def _standing(self, team: str, owner: str) -> str:
        of_team, of_user = self._state.standing_of(team), self._state.standing_of(team, owner)
        return "; ".join(filter(None, map(standing_in_words, (of_team, None if of_user is of_team else of_user))))

    def _phase_of(self, record: JobRecord, job: LiveJob) -> JobPhase:
        phase = self._engine.phase(record.name)
        is_restartable = job.request is not None and job.request.kind == "restartable"
        if not phase.text and is_restartable and record.state in (JobState.STARTING, JobState.RESIZING):
            return JobPhase(text="waits for the job's first report")
        return phase

    def summary_of_held(self, job: LiveJob, now: float | None = None) -> JobSummary:
        """Of a job that the scheduler does not have yet."""
        blocked = self._jobs.blocked(job)
        known = KnownJob(
            name=job.name,
            sequence=job.sequence,
            submitted_at=job.submitted_at,
            record=None,
            request=job.request,
            report=None,
            reported_at=None,
            team=self._team_of(job.request),
        )
        reason = "waiting for slots" if blocked is None else blocked.reason
        if job.is_unwanted:
            reason = _UNWANTED
        elif job.request is not None and job.request.is_held:
            reason = _HELD
        elif blocked is None and job.request is not None and job.request.array_limit is not None:
            reason = f"array {job.request.array_of} runs {job.request.array_limit} jobs at a time"
        return job_summary(known, self._clock.now() if now is None else now, reason=reason)

    def _summary_of_stored(self, stored: StoredJob) -> JobSummary:
        job = self._jobs.get(stored.name)
        report, reported_at = (None, None) if job is None else (job.report, job.reported_at)
        if report is None and (kept := self._store.reports(stored.name, limit=1)):
            report, reported_at = kept[-1], kept[-1].at
        request = None if stored.request is None else JobRequest.from_dict(stored.request)
        known = KnownJob(
            name=stored.name,
            sequence=stored.sequence,
            submitted_at=stored.submitted_at,
            record=stored.record,
            request=request,
            report=report,
            reported_at=reported_at,
            team=self._team_of(request),
        )
        return job_summary(known, self._clock.now())

    def _team_of(self, request: JobRequest | None) -> str:
        return "" if request is None else self._accounts.team_of(request.owner)


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
