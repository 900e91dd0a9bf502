"""The cluster over time: samples, who held which slots, and a job's reports thinned out. On the store's database.

Queries read these for charts. What is read is bounded by the number of points or jobs that are wanted, not by how much
was kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import sqlalchemy as sa

from pollux.api.cluster import ClusterSample, HeldSpan, TimelineJob
from pollux.api.codec import loads
from pollux.api.report import Report, decode_report
from pollux.scheduler.lifecycle import JobState
from pollux.server.storage.database import Database
from pollux.server.storage.records import STORED
from pollux.server.storage.report_bytes import fitting
from pollux.server.storage.tables import jobs as _jobs
from pollux.server.storage.tables import reports as _reports
from pollux.server.storage.tables import resizes as _resizes
from pollux.server.storage.tables import samples as _samples
from pollux.server.storage.tables import transitions as _transitions
from pollux.types import Allocation

KEEP_SAMPLES = 50_000  # of one every ten seconds: almost six days
_FINAL = [state.value for state in JobState if state.is_final]
_FREES = [*_FINAL, JobState.PENDING.value]  # a job in one of these holds nothing


class TimeSeries:
    """Raises:
    StoreError: from every method: the database cannot be used, and what to do about it.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    # Samples ----------------------------------------------------------------------------------

    def add_sample(self, sample: ClusterSample, keep: int = KEEP_SAMPLES) -> int:
        """Its id; the oldest beyond ``keep`` are forgotten."""
        row = {entry.name: getattr(sample, entry.name) for entry in fields(sample)}
        with self._database.writing() as connection:
            id_ = int(connection.execute(_samples.insert().values(row)).inserted_primary_key[0])  # type: ignore[index]
            connection.execute(_samples.delete().where(_samples.c.id <= id_ - keep))
        return id_

    def samples(self, since: float, until: float, points: int) -> list[ClusterSample]:
        """Those of a time, oldest first, thinned evenly to ``points``."""
        ends = sa.select(sa.func.min(_samples.c.id), sa.func.max(_samples.c.id))
        with self._database.reading() as connection:
            first, last = connection.execute(ends.where(_samples.c.at.between(since, until))).one()
            if first is None or points < 1:
                return []
            # They are numbered as they were taken, so evenly in number is evenly in time.
            chosen = [first + place for place in thinned(last - first + 1, points)]
            rows = connection.execute(sa.select(_samples).where(_samples.c.id.in_(chosen)).order_by(_samples.c.id))
            return [_sample(row) for row in rows]

    def samples_after(self, id_: int, limit: int = 1000) -> list[tuple[int, ClusterSample]]:
        """The newest after the one of this id, oldest first."""
        query = sa.select(_samples).where(_samples.c.id > id_).order_by(_samples.c.id.desc()).limit(limit)
        with self._database.reading() as connection:
            return [(row.id, _sample(row)) for row in connection.execute(query)][::-1]

    def last_sample_id(self) -> int:
        """0: there is none."""
        with self._database.reading() as connection:
            return int(connection.scalar(sa.select(sa.func.max(_samples.c.id))) or 0)

    # Jobs -------------------------------------------------------------------------------------

    def last_ended(self, limit: int) -> list[str]:
        """Names of the jobs that ended last, the last one first."""
        query = sa.select(_jobs.c.name).where(_jobs.c.finished_at.is_not(None))
        query = query.order_by(_jobs.c.finished_at.desc(), _jobs.c.sequence.desc()).limit(limit)
        with self._database.reading() as connection:
            return list(connection.scalars(query))

    def reports(self, job: str, points: int) -> list[tuple[float, Report]]:
        """Those of a job, oldest first, thinned evenly to ``points``; the first and the last are among them.

        To fewer, where they would have more bytes together than a page of reports.
        """
        ids = sa.select(_reports.c.id).where(_reports.c.job == job).order_by(_reports.c.id)
        with self._database.reading() as connection:
            kept = list(connection.scalars(ids))
            chosen = [kept[place] for place in thinned(len(kept), points)]
            if (share := fitting(connection, chosen)) < 1:
                chosen = [kept[place] for place in thinned(len(kept), max(int(share * len(chosen)), 1))]
            query = sa.select(_reports.c.id, _reports.c.at, _reports.c.report)
            rows = connection.execute(query.where(_reports.c.id.in_(chosen)).order_by(_reports.c.id)).all()
        found = []
        for row in rows:
            with self._database.interpreting(f"report {row.id}"):
                found.append((row.at, decode_report(loads(row.report, "report"))))
        return found

    def first_time(self) -> float | None:
        """When the first job there is came."""
        with self._database.reading() as connection:
            first: float | None = connection.scalar(sa.select(sa.func.min(_jobs.c.submitted_at)))
        return first

    def timeline(self, since: float, until: float, limit: int) -> tuple[list[TimelineJob], int]:
        """Jobs that were present then, by arrival, with what they held; and how many there were.

        Of more than ``limit`` those are left out first that had not started, then the oldest.
        """
        has_started = sa.exists().where(_resizes.c.job == _jobs.c.name, _resizes.c.at <= until)
        is_present = (
            _jobs.c.submitted_at <= until,
            sa.or_(_jobs.c.finished_at.is_(None), _jobs.c.finished_at >= since),
        )
        columns = _jobs.c
        query = sa.select(columns.name, columns.sequence, columns.state, columns.submitted_at, columns.finished_at)
        query = query.where(*is_present).order_by(has_started.desc(), columns.sequence.desc()).limit(limit)
        with self._database.reading() as connection:
            total = int(connection.scalar(sa.select(sa.func.count()).select_from(_jobs).where(*is_present)) or 0)
            rows = sorted(connection.execute(query).all(), key=lambda row: row.sequence)
            held = self._holdings(connection, [row.name for row in rows])
        jobs = []
        for row in rows:
            spans = tuple(
                span
                for span in _spans(held.get(row.name, []), row.finished_at, JobState(row.state))
                if span.since <= until and (span.until is None or span.until >= since)
            )
            jobs.append(
                TimelineJob(
                    name=row.name,
                    sequence=row.sequence,
                    state=JobState(row.state).value,
                    submitted_at=row.submitted_at,
                    finished_at=row.finished_at,
                    spans=spans,
                )
            )
        return jobs, total

    def _holdings(
        self, connection: sa.Connection, names: Sequence[str]
    ) -> dict[str, list[tuple[float, Allocation | None]]]:
        """Of each job, when it came to hold what (None: nothing), in that order."""
        found: dict[str, list[tuple[float, Allocation | None]]] = {}
        # What frees comes before what is given at the same time: a job that starts anew is given its slots after.
        freed = sa.select(_transitions.c.job, _transitions.c.at).where(
            _transitions.c.job.in_(names), _transitions.c.target.in_(_FREES)
        )
        for job, at in connection.execute(freed.order_by(_transitions.c.id)):
            found.setdefault(job, []).append((at, None))
        given = sa.select(_resizes.c.job, _resizes.c.at, _resizes.c.after).where(_resizes.c.job.in_(names))
        for job, at, after in connection.execute(given.order_by(_resizes.c.generation)):
            with self._database.interpreting(f"resizes of job {job!r}"):
                allocation = STORED.decode(Allocation, loads(after, "allocation"), "allocation")
            found.setdefault(job, []).append((at, allocation))
        for entries in found.values():
            entries.sort(key=lambda entry: entry[0])  # stable: those of one time stay as they are
        return found


def _spans(
    held: Iterable[tuple[float, Allocation | None]], finished_at: float | None, state: JobState
) -> list[HeldSpan]:
    spans: list[HeldSpan] = []
    since, allocation = 0.0, None
    for at, after in held:
        if allocation is not None and at > since:
            spans.append(_span(since, at, allocation))
        since, allocation = at, after
    # One that is over or waits holds nothing, whatever the last entry says.
    if allocation is not None and state.holds_slots:
        spans.append(_span(since, None, allocation))
    elif allocation is not None and finished_at is not None and finished_at > since:
        spans.append(_span(since, finished_at, allocation))
    return spans


def _span(since: float, until: float | None, allocation: Allocation) -> HeldSpan:
    shares = allocation.shares
    return HeldSpan(since=since, until=until, num_replicas=allocation.num_replicas, allocation=shares)


def thinned(count: int, points: int) -> list[int]:
    """At most ``points`` of the places 0 to ``count`` - 1, evenly; the first and the last are among them."""
    if count <= points:
        return list(range(count))
    if points <= 1:
        return [count - 1] * points
    return [round(index * (count - 1) / (points - 1)) for index in range(points)]


def _sample(row: sa.Row[Any]) -> ClusterSample:
    return ClusterSample(**{entry.name: getattr(row, entry.name) for entry in fields(ClusterSample)})
