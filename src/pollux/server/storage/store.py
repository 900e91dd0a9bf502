"""The server's SQL store: jobs, rounds, reports, transitions, training notes, resizes.

The scheduler's recorder writes to it (:class:`pollux.scheduler.ports.Store`), queries read from it. Every call is one
transaction, and any thread may call. Queries over longer times are in :mod:`pollux.server.storage.time_series`.
"""

from __future__ import annotations

import difflib
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

from pollux.api.codec import Json, dumps, loads, read_integer, read_number
from pollux.api.job import TrainingNote
from pollux.api.report import Report, StoredReport, decode_report, encode_report, stored
from pollux.errors import InvalidValueError, StoreError, UnknownNameError
from pollux.scheduler.knowledge import Knowledge
from pollux.scheduler.lifecycle import JobState, Transition
from pollux.scheduler.record import JobRecord, RoundRecord
from pollux.server.storage.database import Database
from pollux.server.storage.leadership import Leadership
from pollux.server.storage.records import (
    STORED,
    StoredJob,
    StoredResize,
    StoredRound,
    decode_changes,
    decode_knowledge,
    decode_plan,
    decode_record,
    decode_snapshot,
    encode_changes,
    encode_plan,
    encode_record,
    encode_snapshot,
)
from pollux.server.storage.report_bytes import ReportBytes, page_of
from pollux.server.storage.tables import jobs as _jobs
from pollux.server.storage.tables import knowledge as _knowledge
from pollux.server.storage.tables import reports as _reports
from pollux.server.storage.tables import resizes as _resizes
from pollux.server.storage.tables import rounds as _rounds
from pollux.server.storage.tables import samples as _samples
from pollux.server.storage.tables import secrets as _secrets
from pollux.server.storage.tables import training_notes as _training_notes
from pollux.server.storage.tables import transitions as _transitions
from pollux.server.storage.tables import usage as _usage
from pollux.types import NO_ALLOCATION, Allocation, Snapshot

_Select = sa.Select[Any]
_Row = sa.Row[Any]
MAX_TRAINING_NOTES = 100  # of each job; the oldest are forgotten
_NUM_SUGGESTIONS = 10
_MAX_COMPARED = 1000  # names, when looking for one like the unknown one
_MAX_ASKED = 1000  # names in one query: databases bound its variables


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """A job to take in, in the form in which it is kept."""

    name: str
    form: str
    token_hash: str


def encoded(wanted: Iterable[tuple[str, Mapping[str, Json], str]]) -> list[EncodedRequest]:
    """Of name, request and hash of the token of each. Of thousands it takes long: no lock should be held.

    Raises:
        InvalidValueError: a value that cannot be kept.
    """
    return [
        EncodedRequest(_key(name), dumps(dict(request), f"request of job {name!r}"), token_hash)
        for name, request, token_hash in wanted
    ]


class SqlStore(Database):
    """The tables, written and read.

    Raises:
        StoreError: from every method: the database cannot be used, and what to do about it. A call that raises has
            changed nothing.
        UnknownNameError: from those that are asked about one job: there is none of that name.
    """

    def __init__(self, place: str | Path, leadership: Leadership | None = None) -> None:
        super().__init__(place, leadership)
        # What this server, the only one that writes, has written: most saves change little of it.
        self._written_knowledge: dict[str, int] = {}  # by label, hash of its form
        self._written_history: dict[str, Transition | None] = {}  # by job that is not over, the last one
        self._report_bytes = ReportBytes()

    @contextmanager
    def batched(self) -> Iterator[None]:
        try:
            with super().batched():
                yield
        except BaseException:
            self._written_knowledge.clear()  # what was written is undone
            self._written_history.clear()
            raise

    # Writing ----------------------------------------------------------------------------------

    def add_request(self, name: str, request: Mapping[str, Json], token_hash: str, at: float | None = None) -> int:
        """Take in a job before the scheduler does; the sequence number to submit it with. Names are unique for ever.

        Raises:
            InvalidValueError: there is, or was, a job of this name; or a value that cannot be kept.
        """
        return self.add_requests([(name, request, token_hash)], at)[0]

    def add_requests(self, wanted: Sequence[tuple[str, Mapping[str, Json], str]], at: float | None = None) -> list[int]:
        """As :meth:`add_request`, all of them or none: name, request and hash of the token of each."""
        return self.add_encoded(encoded(wanted), at)

    def add_encoded(self, rows: Sequence[EncodedRequest], at: float | None = None) -> list[int]:
        """As :meth:`add_requests`, when the requests are in their stored form already."""
        if not rows:
            return []
        at = time.time() if at is None else at
        jobs = [
            {"name": row.name, "request": row.form, "state": JobState.PENDING.value, "submitted_at": at} for row in rows
        ]
        with self.adding() as connection:  # a submission must not wait while the scheduler saves a round
            for name in _sequences_of(connection, [row.name for row in rows]):
                raise InvalidValueError(
                    f"there is a job named {name!r} already; names are unique for ever: take another"
                )
            connection.execute(_jobs.insert(), jobs)
            sequences = _sequences_of(connection, [row.name for row in rows])
            connection.execute(_secrets.insert(), [{"job": row.name, "token_hash": row.token_hash} for row in rows])
        self._written_history.update({row.name: None for row in rows})
        return [sequences[row.name] for row in rows]

    def save_request(self, name: str, request: Mapping[str, Json]) -> None:
        """What a job asks for, changed."""
        form = dumps(dict(request), f"request of job {name!r}")
        with self.writing() as connection:
            connection.execute(_jobs.update().where(_jobs.c.name == name).values(request=form))

    def save_job(self, record: JobRecord) -> None:
        form = encode_record(record)
        name, label = _key(record.name), _storable(record.knowledge.label)
        knowledge = dumps(form.pop("knowledge"), f"knowledge of job {record.name!r}")
        row = {
            "record": dumps(form, f"record of job {record.name!r}"),
            "knowledge": label,
            "state": record.state.value,
            "submitted_at": record.spec.submitted_at,
            "finished_at": record.finished_at,
        }
        with self.writing() as connection:
            if self._written_knowledge.get(label) != (digest := hash(knowledge)):
                connection.execute(_put_knowledge[connection.dialect.name], {"label": label, "form": knowledge})
            if connection.execute(_update_job, {"key": name, **row}).rowcount == 0:
                connection.execute(_jobs.insert(), {"name": name, **row})
            self._append_transitions(connection, record)
            self._note_resize(connection, record)
        self._written_knowledge[label] = digest
        if record.state.is_final:
            self._written_history.pop(name, None)
        elif record.history:
            self._written_history[name] = record.history[-1]

    def save_round(self, round_record: RoundRecord, snapshot: Snapshot | None) -> int:
        """Its id. ``snapshot``: what was decided from, if that is worth its space."""
        what = f"round {round_record.number}"
        row = {
            **{name: getattr(round_record, name) for name in ("number", "at", "decision_s", "num_jobs", "num_slots")},
            "trigger": _storable(round_record.trigger),
            "plan": dumps(encode_plan(round_record.plan), f"plan of {what}"),
            "error": _storable(round_record.error),
            "snapshot": dumps(None if snapshot is None else encode_snapshot(snapshot), f"snapshot of {what}"),
            "changes": dumps(encode_changes(round_record), f"changes of {what}"),
        }
        with self.writing() as connection:
            return int(connection.execute(_rounds.insert().values(row)).inserted_primary_key[0])  # type: ignore[index]

    def save_report(self, job: str, at: float, report: Report) -> None:
        row = {
            "job": _storable(job),
            "at": read_number(at, "at"),
            "report": dumps(encode_report(report), f"report of job {job!r}"),
        }
        try:
            with self.writing() as connection:
                connection.execute(_reports.insert().values(row))
                self._report_bytes.add(connection, [row])
                self._append_notes(connection, [(_storable(job), at, text) for text in report.notes])
        except StoreError as error:
            if isinstance(error.__cause__, IntegrityError):
                with self.reading() as connection:
                    self._require_job(connection, job)
            raise

    def save_reports(self, reports: Sequence[tuple[float, Report]]) -> None:
        """Several at once, each with when it came; all of jobs that are here."""
        rows = [
            {"job": report.job, "at": read_number(at, "at"), "report": dumps(encode_report(report), "report")}
            for at, report in reports
        ]
        if rows:
            with self.writing() as connection:
                connection.execute(_reports.insert(), rows)
                self._report_bytes.add(connection, rows)
                notes = [(report.job, at, text) for at, report in reports for text in report.notes]
                self._append_notes(connection, notes)

    def prune(self, keep_rounds: int, keep_reports_per_job: int) -> tuple[int, int]:
        """Forget the oldest rounds and reports beyond these numbers; how many of each went.

        What is to go is looked for by reading, and goes job by job: there may be millions, and others want to write.
        """
        keep_rounds, keep_reports = (
            _count(keep_rounds, "keep_rounds"),
            _count(keep_reports_per_job, "keep_reports_per_job"),
        )
        old_rounds = sa.select(_rounds.c.id).order_by(_rounds.c.id.desc()).limit(1).offset(keep_rounds)
        of_job = sa.select(_reports.c.id).where(_reports.c.job == _jobs.c.name).order_by(_reports.c.id.desc())
        last = of_job.limit(1).offset(keep_reports).scalar_subquery()
        with self.reading() as connection:
            old_reports = [(name, id_) for name, id_ in connection.execute(sa.select(_jobs.c.name, last)) if id_]
        where_old = _rounds.c.id <= old_rounds.scalar_subquery()
        with self.writing() as connection:
            num_rounds = connection.execute(_rounds.delete().where(where_old)).rowcount
        num_reports = 0
        for name, id_ in old_reports:
            with self.writing() as connection:
                where = _reports.c.job == name, _reports.c.id <= id_
                num_reports += connection.execute(_reports.delete().where(*where)).rowcount
        return num_rounds, num_reports

    # Reading ----------------------------------------------------------------------------------

    def jobs(
        self, states: Iterable[JobState] | None = None, limit: int = 100, offset: int = 0, newest_first: bool = False
    ) -> list[StoredJob]:
        """In order of arrival, or the other way round."""
        return self._read_jobs(self._page_of_jobs(_job_rows, states, limit, offset, newest_first))

    def job(self, name: str) -> StoredJob:
        return self._read_jobs(_job_rows.where(_jobs.c.name == _storable(name)), name)[0]

    def names(self) -> set[str]:
        """Of all jobs there ever were. One that was removed is in the accounts, if it ever had a token to keep."""
        with self.reading() as connection:
            return {*connection.scalars(sa.select(_jobs.c.name)), *connection.scalars(sa.select(_usage.c.job))}

    def counts(self) -> dict[JobState, int]:
        """How many jobs are in each state, as they were last saved."""
        query = sa.select(_jobs.c.state, sa.func.count()).group_by(_jobs.c.state)
        with self.reading() as connection:
            return {JobState(state): count for state, count in connection.execute(query).all()}

    def job_names(
        self, states: Iterable[JobState] | None = None, limit: int = 100, offset: int = 0, newest_first: bool = False
    ) -> list[str]:
        """As :meth:`jobs`, the names alone."""
        with self.reading() as connection:
            page = self._page_of_jobs(sa.select(_jobs.c.name), states, limit, offset, newest_first)
            return list(connection.scalars(page))

    def active(self) -> list[StoredJob]:
        """Jobs that are not over, in order of arrival."""
        return self._read_jobs(_job_rows.where(_is_active).order_by(_jobs.c.sequence))

    def latest_time(self) -> float:
        """The latest time that is kept of anything; 0 if nothing is."""
        columns = (_jobs.c.submitted_at, _jobs.c.finished_at, _transitions.c.at, _rounds.c.at, _samples.c.at)
        with self.reading() as connection:
            return max((connection.scalar(sa.select(sa.func.max(column))) or 0.0 for column in columns), default=0.0)

    def records(self) -> list[JobRecord]:
        """Jobs that are not over, by sequence: what a restarted server goes on with.

        Records that shared their knowledge share it again. Jobs whose request was taken in but whose record was never
        saved are not among them: they are in :meth:`requests`.
        """
        query = _job_rows.where(_jobs.c.record.is_not(None), _is_active).order_by(_jobs.c.sequence)
        found = [job.record for job in self._read_jobs(query) if job.record is not None]
        return sorted(found, key=lambda record: record.sequence)

    def requests(self) -> list[StoredJob]:
        """Jobs that the scheduler has not taken in: the server stopped between the two. In order of arrival."""
        return self._read_jobs(_job_rows.where(_jobs.c.record.is_(None), _is_active).order_by(_jobs.c.sequence))

    def knowledge(self) -> dict[str, Knowledge]:
        """All that was learnt, by label; also of jobs that are over."""
        with self.reading() as connection:
            rows = connection.execute(sa.select(_knowledge)).all()
        with self.interpreting("knowledge"):
            return {row.label: decode_knowledge(loads(row.form, "knowledge")) for row in rows}

    def rounds(self, since: int | None = None, limit: int = 100) -> list[StoredRound]:
        """The first ``limit`` rounds after the one with the id ``since``; without it the last ones. Oldest first."""
        return [self._round(row) for row in self._page(sa.select(_rounds), _rounds, since, limit)]

    def rounds_at(self, times: Iterable[float], *, before: int) -> list[StoredRound]:
        """Of each time the last round until then, of those with an id below ``before``. Oldest first, each once."""
        query = sa.select(_rounds.c.id, _rounds.c.at).where(_rounds.c.id < before).order_by(_rounds.c.id)
        with self.reading() as connection:
            kept = connection.execute(query).all()
            places = {bisect_right(kept, at, key=lambda row: row.at) - 1 for at in times}
            ids = [kept[place].id for place in places if place >= 0]
            rows = connection.execute(sa.select(_rounds).where(_rounds.c.id.in_(ids)).order_by(_rounds.c.id)).all()
        return [self._round(row) for row in rows]

    def round(self, id_: int) -> StoredRound:
        """Raises:
        UnknownNameError: there is none of this id, or it was forgotten.
        """
        with self.reading() as connection:
            row = connection.execute(sa.select(_rounds).where(_rounds.c.id == id_)).first()
            if row is None:
                last = sa.select(_rounds.c.id).order_by(_rounds.c.id.desc()).limit(_NUM_SUGGESTIONS)
                raise UnknownNameError("round", str(id_), [str(known) for known in connection.scalars(last)])
        return self._round(row)

    def _round(self, row: _Row) -> StoredRound:
        with self.interpreting(f"round {row.id}"):
            snapshot, told = loads(row.snapshot, "snapshot"), decode_changes(loads(row.changes, "changes"))
            record = RoundRecord(
                **{name: getattr(row, name) for name in _ROUND_COLUMNS},
                plan=decode_plan(loads(row.plan, "plan")),
                changes=told.changes,
                departures=told.departures,
                sizing=told.sizing,
            )
            return StoredRound(
                id=row.id, record=record, snapshot=None if snapshot is None else decode_snapshot(snapshot)
            )

    def transitions(self, job: str) -> list[Transition]:
        """All of them since the job was submitted."""
        query = sa.select(_transitions).where(_transitions.c.job == job).order_by(_transitions.c.id)
        with self.interpreting(f"transitions of job {job!r}"):
            return [
                Transition(row.at, JobState(row.source), JobState(row.target), row.reason)
                for row in self._rows_of(job, query)
            ]

    def add_note(self, job: str, at: float, text: str) -> None:
        """To a job's history, beside what it tells itself."""
        with self.writing() as connection:
            self._append_notes(connection, [(job, at, text)])

    def training_notes(self, job: str) -> list[TrainingNote]:
        """The last ones, oldest first."""
        query = sa.select(_training_notes).where(_training_notes.c.job == job).order_by(_training_notes.c.id)
        return [TrainingNote(id=row.id, at=row.at, text=row.text) for row in self._rows_of(job, query)]

    def reports(self, job: str, since: int | None = None, limit: int = 100) -> list[StoredReport]:
        """The first ``limit`` reports after the one with the id ``since``; without it the last ones. Oldest first.

        There are fewer where they would have more than ``ANSWER_BYTES`` together; at least one, if there is any.
        """
        found = []
        for row in self._page_of_reports(
            job, None if since is None else _count(since, "since"), _count(limit, "limit")
        ):
            with self.interpreting(f"report {row.id}"):
                found.append(stored(decode_report(loads(row.report, "report")), row.id, row.at))
        return found

    def _page_of_reports(self, job: str, since: int | None, limit: int) -> Sequence[_Row]:
        with self.reading() as connection:
            rows = page_of(connection, job, since, limit) if _storable(job) == job else []
            if not rows:
                self._require_job(connection, job)
        return rows

    def resizes(self, job: str) -> list[StoredResize]:
        """Starts and resizes by generation."""
        query = sa.select(_resizes).where(_resizes.c.job == job).order_by(_resizes.c.generation)
        found = []
        for row in self._rows_of(job, query):
            with self.interpreting(f"resizes of job {job!r}"):
                before, after = (
                    STORED.decode(Allocation, loads(text, "allocation"), "allocation")
                    for text in (row.before, row.after)
                )
            found.append(
                StoredResize(generation=row.generation, at=row.at, before=before, after=after, runs_at=row.runs_at)
            )
        return found

    def job_of_token(self, token_hash: str) -> str | None:
        """The job whose token has this hash; None: there is none."""
        with self.reading() as connection:
            name: str | None = connection.scalar(sa.select(_secrets.c.job).where(_secrets.c.token_hash == token_hash))
        return name

    # Inside -----------------------------------------------------------------------------------

    def _append_transitions(self, connection: sa.Connection, record: JobRecord) -> None:
        """Store the transitions of the record's history that are not stored yet. It holds the last ones only."""
        if not record.history:
            return
        history = [(t.at, t.source.value, t.target.value, _storable(t.reason)) for t in record.history]
        overlap = self._num_written(record)
        if overlap is None:
            last = connection.execute(_last_transitions, {"key": record.name, "number": len(history)})
            stored = [tuple(row) for row in reversed(last.all())]
            overlap = min(len(stored), len(history))
            while stored[len(stored) - overlap :] != history[:overlap]:
                overlap -= 1
        new = [dict(zip(_TRANSITION_COLUMNS, (record.name, *entry), strict=True)) for entry in history[overlap:]]
        if new:
            connection.execute(_transitions.insert(), new)

    def _num_written(self, record: JobRecord) -> int | None:
        """How many of a record's transitions this server has written; None: the database has to be asked."""
        if record.name not in self._written_history:
            return None
        last = self._written_history[record.name]
        if last is None:
            return 0
        return next((place for place in range(len(record.history), 0, -1) if record.history[place - 1] is last), None)

    @staticmethod
    def _append_notes(connection: sa.Connection, notes: Iterable[tuple[str, float, str]]) -> None:
        rows = [{"job": job, "at": at, "text": _storable(text)} for job, at, text in notes]
        if not rows:
            return
        connection.execute(_training_notes.insert(), rows)
        columns = _training_notes.c
        for job in {row["job"] for row in rows}:
            newest = sa.select(columns.id).where(columns.job == job).order_by(columns.id.desc())
            last = newest.limit(1).offset(MAX_TRAINING_NOTES).scalar_subquery()
            connection.execute(_training_notes.delete().where(columns.job == job, columns.id <= last))

    def _note_resize(self, connection: sa.Connection, record: JobRecord) -> None:
        if record.generation == 0:
            return
        columns = _resizes.c
        query = sa.select(_resizes).where(columns.job == record.name).order_by(columns.generation.desc()).limit(1)
        last = connection.execute(query).first()
        moved = record.history[-1] if record.history else None
        if record.allocation and (last is None or last.generation < record.generation):
            is_start = last is None or moved is None or moved.source is JobState.PENDING
            row = {
                "job": record.name,
                "generation": record.generation,
                "at": record.accounted_at if moved is None else moved.at,
                "before": dumps(STORED.encode(NO_ALLOCATION), "allocation") if is_start else last.after,  # type: ignore[union-attr]
                "after": dumps(STORED.encode(record.allocation), "allocation"),
            }
            connection.execute(_resizes.insert().values(row))
        if moved is not None and moved.target is record.state is JobState.RUNNING:
            this = (columns.job == record.name, columns.generation == record.generation, columns.runs_at.is_(None))
            connection.execute(_resizes.update().where(*this).values(runs_at=moved.at))

    @staticmethod
    def _page_of_jobs(
        query: _Select, states: Iterable[JobState] | None, limit: int, offset: int, newest_first: bool
    ) -> _Select:
        order = _jobs.c.sequence.desc() if newest_first else _jobs.c.sequence
        query = query.order_by(order).limit(_count(limit, "limit")).offset(_count(offset, "offset"))
        return query if states is None else query.where(_jobs.c.state.in_([state.value for state in states]))

    def _require_job(self, connection: sa.Connection, name: str) -> None:
        if _storable(name) == name:
            query = sa.select(_jobs.c.sequence).where(_jobs.c.name == name)
            if connection.scalar(query) is not None:
                return
        newest = sa.select(_jobs.c.name).order_by(_jobs.c.sequence.desc()).limit(_MAX_COMPARED)
        known = list(connection.scalars(newest))
        near = difflib.get_close_matches(name, known, n=_NUM_SUGGESTIONS)
        raise UnknownNameError("job", name, {*near, *known[:_NUM_SUGGESTIONS]})

    def _rows_of(self, job: str, query: _Select) -> Sequence[_Row]:
        with self.reading() as connection:
            rows = connection.execute(query).all() if _storable(job) == job else []
            if not rows:
                self._require_job(connection, job)
        return rows

    def _page(self, query: _Select, table: sa.Table, since: int | None, limit: int) -> Sequence[_Row]:
        query = query.limit(_count(limit, "limit"))
        if since is None:
            query = query.order_by(table.c.id.desc())
        else:
            query = query.where(table.c.id > _count(since, "since")).order_by(table.c.id)
        with self.reading() as connection:
            rows = connection.execute(query).all()
        return rows[::-1] if since is None else rows

    def _read_jobs(self, query: _Select, name: str | None = None) -> list[StoredJob]:
        labels = query.with_only_columns(_jobs.c.knowledge).subquery()
        known = sa.select(_knowledge).where(_knowledge.c.label.in_(sa.select(labels.c.knowledge)))
        with self.reading() as connection:
            if name is not None:
                self._require_job(connection, name)
            rows = connection.execute(query).all()
            learnt = connection.execute(known).all()
        knowledge = {}
        for row in learnt:
            with self.interpreting(f"knowledge of {row.label}"):
                knowledge[row.label] = decode_knowledge(loads(row.form, "knowledge"))
        found = []
        for row in rows:
            with self.interpreting(f"job {row.name!r}"):
                found.append(
                    StoredJob(
                        name=row.name,
                        sequence=row.sequence,
                        state=JobState(row.state),
                        submitted_at=row.submitted_at,
                        finished_at=row.finished_at,
                        request=None if row.request is None else _request(row.request),
                        record=None
                        if row.record is None
                        else decode_record(loads(row.record, "record"), knowledge[row.knowledge]),
                    )
                )
        return found


_job_rows = sa.select(_jobs)
_JOB_COLUMNS = ("record", "knowledge", "state", "submitted_at", "finished_at")
# Made once: making a statement takes longer than to carry it out.
_update_job = (
    _jobs.update()
    .where(_jobs.c.name == sa.bindparam("key"))
    .values({name: sa.bindparam(name) for name in _JOB_COLUMNS})
)
_last_transitions = (
    sa.select(_transitions.c.at, _transitions.c.source, _transitions.c.target, _transitions.c.reason)
    .where(_transitions.c.job == sa.bindparam("key"))
    .order_by(_transitions.c.id.desc())
    .limit(sa.bindparam("number", type_=sa.Integer))
)
_put_knowledge = {
    dialect: (added := insert(_knowledge)).on_conflict_do_update(
        index_elements=["label"], set_={"form": added.excluded.form}
    )
    for dialect, insert in (("sqlite", sqlite.insert), ("postgresql", postgresql.insert))
}
_is_active = _jobs.c.state.not_in([state.value for state in JobState if state.is_final])
_TRANSITION_COLUMNS = ("job", "at", "source", "target", "reason")
_ROUND_COLUMNS = ("number", "at", "trigger", "error", "decision_s", "num_jobs", "num_slots")


def _request(text: str) -> dict[str, Json]:
    found = loads(text, "request")
    if not isinstance(found, dict):
        raise InvalidValueError("request; an object is needed")
    return found


def _storable(text: str) -> str:
    """Databases take no half characters, and some no NUL."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\x00")


def _sequences_of(connection: sa.Connection, names: Sequence[str]) -> dict[str, int]:
    """Of those of these jobs that there are."""
    found: dict[str, int] = {}
    for start in range(0, len(names), _MAX_ASKED):
        some = names[start : start + _MAX_ASKED]
        rows = connection.execute(sa.select(_jobs.c.name, _jobs.c.sequence).where(_jobs.c.name.in_(some)))
        found |= {row.name: row.sequence for row in rows}
    return found


def _key(name: str) -> str:
    if not name or _storable(name) != name:
        raise InvalidValueError(f"the name {name!r} cannot be kept; text of valid Unicode characters is needed")
    return name


def _count(value: int, name: str) -> int:
    return read_integer(value, name, minimum=0)
