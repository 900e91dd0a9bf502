"""What a server keeps: jobs, rounds, reports, transitions, resizes, in one SQL database.

Implements :class:`pollux.scheduler.ports.Store` and the reading side. A path means an SQLite file in WAL mode: readers
never wait for the writer, and what a call wrote is there when it returns, even if the process is killed at once. Any
other SQLAlchemy URL is taken as it is.

Every call is one transaction on a connection of its own, so any thread may call; writers take turns.
"""

from __future__ import annotations

import difflib
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError

from pollux import wire
from pollux.errors import InvalidValueError, StoreError, UnknownNameError
from pollux.scheduler.knowledge import Knowledge
from pollux.scheduler.lifecycle import JobState, Transition
from pollux.scheduler.record import JobRecord, RoundRecord
from pollux.server import forms
from pollux.server.fair_lock import FairLock
from pollux.server.forms import StoredJob, StoredReport, StoredResize, StoredRound
from pollux.server.tables import jobs as _jobs
from pollux.server.tables import knowledge as _knowledge
from pollux.server.tables import meta as _meta
from pollux.server.tables import reports as _reports
from pollux.server.tables import resizes as _resizes
from pollux.server.tables import rounds as _rounds
from pollux.server.tables import secrets as _secrets
from pollux.server.tables import tables as _tables
from pollux.server.tables import transitions as _transitions
from pollux.types import NO_ALLOCATION, Snapshot
from pollux.wire import WireReport, dumps, loads, read_integer, read_number

__all__ = ["MIGRATIONS", "SqlStore", "StoredJob", "StoredReport", "StoredResize", "StoredRound"]

_BUSY_TIMEOUT_S = 10.0
_MAX_WAL_PAGES = 16_384  # 64 MiB
_NUM_SUGGESTIONS = 10
_MAX_COMPARED = 1000  # names, when looking for one like the unknown one


def _create_all(connection: sa.Connection) -> None:
    _tables.create_all(connection)


MIGRATIONS: list[Callable[[sa.Connection], None]] = [_create_all]
"""What brings a database from version i to i + 1. Whoever appends one spells out the tables of version 1 first."""


# The store ------------------------------------------------------------------------------------


class SqlStore:
    """Opens the database, makes or upgrades its tables.

    Raises:
        StoreError: from every method: the database cannot be used, and what to do about it. A call that raises has
            changed nothing.
        UnknownNameError: from those that are asked about one job: there is none of that name.
    """

    def __init__(self, place: str | Path) -> None:
        self._url, self.place = _url_of(place)
        self._is_closed = False
        self._turn = FairLock()
        is_sqlite = self._url.get_backend_name() == "sqlite"
        if is_sqlite:
            _make_private(self._url)
        # Connections beyond the pool's size are closed after use; nobody waits for one.
        try:
            self._engine = sa.create_engine(self._url, pool_size=8, max_overflow=-1)
        except (NoSuchModuleError, ImportError) as error:
            raise StoreError(f"{self.place}: no driver for this database: {error}") from error
        if is_sqlite:
            sa.event.listen(self._engine, "connect", _set_up_sqlite)
            sa.event.listen(self._engine, "begin", _begin_sqlite)
        self._writer = self._engine.execution_options(writes=True)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the file. Calling it twice does no harm; calling anything else afterwards does."""
        self._is_closed = True
        self._engine.dispose()

    def __enter__(self) -> SqlStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Writing ----------------------------------------------------------------------------------

    def add_request(self, name: str, request: Mapping[str, Any], token_hash: str, at: float | None = None) -> int:
        """Take in a job before the scheduler does; the sequence number to submit it with. Names are unique for ever.

        Raises:
            InvalidValueError: there is, or was, a job of this name; or a value that cannot be kept.
        """
        return self.add_requests([(name, request, token_hash)], at)[0]

    def add_requests(self, wanted: Sequence[tuple[str, Mapping[str, Any], str]], at: float | None = None) -> list[int]:
        """As :meth:`add_request`, all of them or none: name, request and hash of the token of each."""
        rows = [
            {
                "name": _key(name),
                "request": dumps(dict(request), f"request of job {name!r}"),
                "state": JobState.PENDING.value,
                "submitted_at": time.time() if at is None else at,
            }
            for name, request, _ in wanted
        ]
        sequences: list[int] = []
        with self._writing() as connection:
            for row in rows:
                name = row["name"]
                if connection.scalar(sa.select(_jobs.c.sequence).where(_jobs.c.name == name)) is not None:
                    raise InvalidValueError(
                        f"there is a job named {name!r} already; names are unique for ever: take another"
                    )
                sequences.append(connection.execute(_jobs.insert().values(row)).inserted_primary_key[0])  # type: ignore[index]
            secrets = [{"job": name, "token_hash": token_hash} for name, _, token_hash in wanted]
            if secrets:
                connection.execute(_secrets.insert(), secrets)
        return sequences

    def save_job(self, record: JobRecord) -> None:
        form = forms.record_to_dict(record)
        name, label = _key(record.name), _storable(record.knowledge.label)
        knowledge = dumps(form.pop("knowledge"), f"knowledge of job {record.name!r}")
        row = {
            "record": dumps(form, f"record of job {record.name!r}"),
            "knowledge": label,
            "state": record.state.value,
            "submitted_at": record.spec.submitted_at,
            "finished_at": record.finished_at,
        }
        with self._writing() as connection:
            _put(connection, _knowledge, {"label": label}, {"form": knowledge})
            _put(connection, _jobs, {"name": name}, row)
            self._append_transitions(connection, record)
            self._note_resize(connection, record)

    def save_round(self, round_record: RoundRecord, snapshot: Snapshot | None) -> None:
        """``snapshot``: what was decided from, if that is worth its space."""
        form = forms.round_to_dict(round_record)
        row = {
            "number": form["number"],
            "at": form["at"],
            "trigger": _storable(form["trigger"]),
            "plan": dumps(form["plan"], f"plan of round {round_record.number}"),
            "error": _storable(form["error"]),
            "decision_s": form["decision_s"],
            "num_jobs": form["num_jobs"],
            "num_slots": form["num_slots"],
            "snapshot": dumps(
                None if snapshot is None else forms.snapshot_to_dict(snapshot),
                f"snapshot of round {round_record.number}",
            ),
        }
        with self._writing() as connection:
            connection.execute(_rounds.insert().values(row))

    def save_report(self, job: str, at: float, report: WireReport) -> None:
        row = {
            "job": _storable(job),
            "at": read_number(at, "at"),
            "report": dumps(wire.report_to_dict(report), f"report of job {job!r}"),
        }
        try:
            with self._writing() as connection:
                connection.execute(_reports.insert().values(row))
        except StoreError as error:
            if isinstance(error.__cause__, IntegrityError):
                with self._reading() as connection:
                    self._require_job(connection, job)
            raise

    def save_reports(self, reports: Sequence[tuple[float, WireReport]]) -> None:
        """Several at once, each with when it came; all of jobs that are here."""
        rows = [
            {"job": report.job, "at": read_number(at, "at"), "report": dumps(wire.report_to_dict(report), "report")}
            for at, report in reports
        ]
        if rows:
            with self._writing() as connection:
                connection.execute(_reports.insert(), rows)

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
        with self._reading() as connection:
            old_reports = [(name, id_) for name, id_ in connection.execute(sa.select(_jobs.c.name, last)) if id_]
        where_old = _rounds.c.id <= old_rounds.scalar_subquery()
        with self._writing() as connection:
            num_rounds = connection.execute(_rounds.delete().where(where_old)).rowcount
        num_reports = 0
        for name, id_ in old_reports:
            with self._writing() as connection:
                where = _reports.c.job == name, _reports.c.id <= id_
                num_reports += connection.execute(_reports.delete().where(*where)).rowcount
        return num_rounds, num_reports

    def tidy(self) -> None:
        """Now and then: bring what SQLite has in its log to its file. Readers and writers go on meanwhile."""
        if self._url.get_backend_name() == "sqlite" and not self._is_closed:
            with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)")

    # Reading ----------------------------------------------------------------------------------

    def jobs(
        self, states: Iterable[JobState] | None = None, limit: int = 100, offset: int = 0, newest_first: bool = False
    ) -> list[StoredJob]:
        """In order of arrival, or the other way round."""
        return self._read_jobs(self._page_of_jobs(_job_rows, states, limit, offset, newest_first))

    def job(self, name: str) -> StoredJob:
        return self._read_jobs(_job_rows.where(_jobs.c.name == _storable(name)), name)[0]

    def names(self) -> set[str]:
        """Of all jobs there ever were."""
        with self._reading() as connection:
            return set(connection.scalars(sa.select(_jobs.c.name)))

    def counts(self) -> dict[JobState, int]:
        """How many jobs are in each state, as they were last saved."""
        query = sa.select(_jobs.c.state, sa.func.count()).group_by(_jobs.c.state)
        with self._reading() as connection:
            return {JobState(state): count for state, count in connection.execute(query).all()}

    def job_names(
        self, states: Iterable[JobState] | None = None, limit: int = 100, offset: int = 0, newest_first: bool = False
    ) -> list[str]:
        """As :meth:`jobs`, the names alone."""
        with self._reading() as connection:
            page = self._page_of_jobs(sa.select(_jobs.c.name), states, limit, offset, newest_first)
            return list(connection.scalars(page))

    def active(self) -> list[StoredJob]:
        """Jobs that are not over, in order of arrival."""
        return self._read_jobs(_job_rows.where(_is_active).order_by(_jobs.c.sequence))

    def latest_time(self) -> float:
        """The latest time that is kept of anything; 0 if nothing is."""
        columns = (_jobs.c.submitted_at, _jobs.c.finished_at, _transitions.c.at, _rounds.c.at)
        with self._reading() as connection:
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
        with self._reading() as connection:
            rows = connection.execute(sa.select(_knowledge)).all()
        with self._interpreting("knowledge"):
            return {row.label: forms.knowledge_from_dict(loads(row.form, "knowledge")) for row in rows}

    def rounds(self, since: int | None = None, limit: int = 100) -> list[StoredRound]:
        """The first ``limit`` rounds after the one with the id ``since``; without it the last ones. Oldest first."""
        found = []
        for row in self._page(sa.select(_rounds), _rounds, since, limit):
            with self._interpreting(f"round {row.id}"):
                form = {name: getattr(row, name) for name in _ROUND_COLUMNS}
                form |= {"version": forms.ROUND_VERSION, "plan": loads(row.plan, "plan")}
                snapshot = loads(row.snapshot, "snapshot")
                found.append(StoredRound(id=row.id, record=forms.round_from_dict(form), snapshot=snapshot))
        return found

    def transitions(self, job: str) -> list[Transition]:
        """All of them since the job was submitted."""
        query = sa.select(_transitions).where(_transitions.c.job == job).order_by(_transitions.c.id)
        with self._interpreting(f"transitions of job {job!r}"):
            return [
                Transition(row.at, JobState(row.source), JobState(row.target), row.reason)
                for row in self._rows_of(job, query)
            ]

    def reports(self, job: str, since: int | None = None, limit: int = 100) -> list[StoredReport]:
        """The first ``limit`` reports after the one with the id ``since``; without it the last ones. Oldest first."""
        query = sa.select(_reports).where(_reports.c.job == job)
        found = []
        for row in self._page(query, _reports, since, limit, job):
            with self._interpreting(f"report {row.id}"):
                found.append(
                    StoredReport(id=row.id, at=row.at, report=wire.report_from_dict(loads(row.report, "report")))
                )
        return found

    def resizes(self, job: str) -> list[StoredResize]:
        """Starts and resizes by generation."""
        query = sa.select(_resizes).where(_resizes.c.job == job).order_by(_resizes.c.generation)
        found = []
        for row in self._rows_of(job, query):
            with self._interpreting(f"resizes of job {job!r}"):
                before, after = (
                    wire.allocation_from_list(loads(text, "allocation")) for text in (row.before, row.after)
                )
            found.append(
                StoredResize(generation=row.generation, at=row.at, before=before, after=after, runs_at=row.runs_at)
            )
        return found

    def job_of_token(self, token_hash: str) -> str | None:
        """Whose token this is the hash of, if anybody's."""
        with self._reading() as connection:
            name: str | None = connection.scalar(sa.select(_secrets.c.job).where(_secrets.c.token_hash == token_hash))
        return name

    # Inside -----------------------------------------------------------------------------------

    def _open(self) -> None:
        with self._writing() as connection:
            tables = set(sa.inspect(connection).get_table_names())
            if _meta.name in tables:
                version: int = connection.execute(sa.select(_meta.c.version)).scalar_one()
            elif tables:
                raise StoreError(
                    f"{self.place}: this database is not Pollux's: it holds {', '.join(sorted(tables)[:5])}; "
                    "name another place"
                )
            else:
                version = 0
                _meta.create(connection)
                connection.execute(_meta.insert().values(version=version, created=time.time()))
            if version > len(MIGRATIONS):
                raise StoreError(
                    f"{self.place}: written by a newer Pollux (schema version {version}; this one knows up to "
                    f"{len(MIGRATIONS)}); nothing was changed: upgrade Pollux, or name another place"
                )
            for migrate in MIGRATIONS[version:]:
                migrate(connection)
            connection.execute(_meta.update().values(version=len(MIGRATIONS)))

    @contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        with self._turn, self._transaction(self._writer) as connection:
            yield connection

    @contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        with self._transaction(self._engine) as connection:
            yield connection

    @contextmanager
    def _transaction(self, engine: sa.Engine) -> Iterator[sa.Connection]:
        if self._is_closed:
            raise StoreError(f"{self.place}: the store was closed; open it again")
        try:
            with engine.begin() as connection:
                yield connection
        except (DBAPIError, sqlite3.Error) as error:
            raise StoreError(f"{self.place}: {_advice(error)}") from error

    @contextmanager
    def _interpreting(self, what: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, KeyError) as error:
            raise StoreError(
                f"{self.place}: {what} cannot be read: {error}; restore a copy of the database, or move it away"
            ) from error

    def _append_transitions(self, connection: sa.Connection, record: JobRecord) -> None:
        """Those of the record's history that are not stored yet; it holds the last ones only, and so do we look."""
        if not record.history:
            return
        history = [(t.at, t.source.value, t.target.value, _storable(t.reason)) for t in record.history]
        columns = _transitions.c
        query = sa.select(columns.at, columns.source, columns.target, columns.reason)
        query = query.where(columns.job == record.name).order_by(columns.id.desc()).limit(len(history))
        stored = [tuple(row) for row in reversed(connection.execute(query).all())]
        overlap = min(len(stored), len(history))
        while stored[len(stored) - overlap :] != history[:overlap]:
            overlap -= 1
        new = [dict(zip(_TRANSITION_COLUMNS, (record.name, *entry), strict=True)) for entry in history[overlap:]]
        if new:
            connection.execute(_transitions.insert(), new)

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
                "before": dumps(wire.allocation_to_list(NO_ALLOCATION), "allocation") if is_start else last.after,  # type: ignore[union-attr]
                "after": dumps(wire.allocation_to_list(record.allocation), "allocation"),
            }
            connection.execute(_resizes.insert().values(row))
        if moved is not None and moved.target is record.state is JobState.RUNNING:
            this = (columns.job == record.name, columns.generation == record.generation, columns.runs_at.is_(None))
            connection.execute(_resizes.update().where(*this).values(runs_at=moved.at))

    @staticmethod
    def _page_of_jobs(
        query: sa.Select[Any], states: Iterable[JobState] | None, limit: int, offset: int, newest_first: bool
    ) -> sa.Select[Any]:
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

    def _rows_of(self, job: str, query: sa.Select[Any]) -> Sequence[sa.Row[Any]]:
        with self._reading() as connection:
            rows = connection.execute(query).all() if _storable(job) == job else []
            if not rows:
                self._require_job(connection, job)
        return rows

    def _page(
        self, query: sa.Select[Any], table: sa.Table, since: int | None, limit: int, job: str | None = None
    ) -> Sequence[sa.Row[Any]]:
        query = query.limit(_count(limit, "limit"))
        if since is None:
            query = query.order_by(table.c.id.desc())
        else:
            query = query.where(table.c.id > _count(since, "since")).order_by(table.c.id)
        if job is not None:
            rows = self._rows_of(job, query)
        else:
            with self._reading() as connection:
                rows = connection.execute(query).all()
        return rows[::-1] if since is None else rows

    def _read_jobs(self, query: sa.Select[Any], name: str | None = None) -> list[StoredJob]:
        labels = query.with_only_columns(_jobs.c.knowledge).subquery()
        known = sa.select(_knowledge).where(_knowledge.c.label.in_(sa.select(labels.c.knowledge)))
        with self._reading() as connection:
            if name is not None:
                self._require_job(connection, name)
            rows = connection.execute(query).all()
            learnt = connection.execute(known).all()
        knowledge = {}
        for row in learnt:
            with self._interpreting(f"knowledge of {row.label}"):
                knowledge[row.label] = forms.knowledge_from_dict(loads(row.form, "knowledge"))
        found = []
        for row in rows:
            with self._interpreting(f"job {row.name!r}"):
                found.append(
                    StoredJob(
                        name=row.name,
                        sequence=row.sequence,
                        state=JobState(row.state),
                        submitted_at=row.submitted_at,
                        finished_at=row.finished_at,
                        request=None if row.request is None else loads(row.request, "request"),
                        record=None
                        if row.record is None
                        else forms.record_from_dict(loads(row.record, "record"), knowledge=knowledge[row.knowledge]),
                    )
                )
        return found


_job_rows = sa.select(_jobs)
_is_active = _jobs.c.state.not_in([state.value for state in JobState if state.is_final])
_TRANSITION_COLUMNS = ("job", "at", "source", "target", "reason")
_ROUND_COLUMNS = ("number", "at", "trigger", "error", "decision_s", "num_jobs", "num_slots")


def _put(connection: sa.Connection, table: sa.Table, key: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """Update the row with this key, or make it."""
    where = [table.c[name] == value for name, value in key.items()]
    if connection.execute(table.update().where(*where).values(**values)).rowcount == 0:
        connection.execute(table.insert().values(**key, **values))


def _storable(text: str) -> str:
    """Databases take no half characters, and some no NUL."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\x00")


def _key(name: str) -> str:
    if not name or _storable(name) != name:
        raise InvalidValueError(f"the name {name!r} cannot be kept; text of valid Unicode characters is needed")
    return name


def _count(value: int, name: str) -> int:
    return read_integer(value, name, minimum=0)


def _url_of(place: str | Path) -> tuple[sa.URL, str]:
    """What to connect to, and how to call it in messages."""
    if isinstance(place, Path) or "://" not in place:
        return sa.URL.create("sqlite", database=str(place)), str(place)
    try:
        url = sa.make_url(place)
    except ArgumentError as error:
        raise InvalidValueError(
            f"{place!r} is no place for a database: {error}; a path or an SQLAlchemy URL is"
        ) from error
    return url, url.render_as_string(hide_password=True)


def _make_private(url: sa.URL) -> None:
    """Make the file readable for its owner alone (it holds hashes of tokens); SQLite's other files follow it."""
    path = url.database or ":memory:"
    if path == ":memory:":
        raise InvalidValueError(
            "a database in memory is lost with the process, and threads do not share it; name a file"
        )
    if path.startswith("file:") or Path(path).exists():
        return
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}; its folder must exist and be writable for this user") from error


def _set_up_sqlite(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves, see below
    for pragma in (
        f"busy_timeout = {int(_BUSY_TIMEOUT_S * 1000)}",
        "journal_mode = WAL",
        f"wal_autocheckpoint = {_MAX_WAL_PAGES}",  # in time it is done by tidy(), where nobody waits for the disk
        "synchronous = NORMAL",
        "foreign_keys = ON",
    ):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: sa.Connection) -> None:
    # A transaction that reads first and then writes could find that somebody else wrote in between; so ask at once.
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


_ADVICE = {
    sqlite3.SQLITE_BUSY: f"another process kept it busy for {_BUSY_TIMEOUT_S:g} s: end that process",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened: its folder must exist, and both be writable for this user",
    sqlite3.SQLITE_CORRUPT: "it is damaged: restore a copy of it, or move it away to begin anew",
    sqlite3.SQLITE_FULL: "the disk is full: free some space and try again",
    sqlite3.SQLITE_IOERR: "the disk cannot be read or written, or is full: free some space or check it, and try again",
    sqlite3.SQLITE_NOTADB: "it is no database: move the file away, or name another place",
    sqlite3.SQLITE_READONLY: "it is write-protected: make the file and its folder writable for this user",
}


def _advice(error: DBAPIError | sqlite3.Error) -> str:
    cause = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(cause, "sqlite_errorcode", None)
    advice = None if code is None else _ADVICE.get(code & 0xFF)  # the rest of the code tells details
    return f"{cause}" if advice is None else f"{advice} ({cause})"
