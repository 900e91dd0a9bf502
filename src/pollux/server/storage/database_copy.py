"""Copies of a server's database as one SQLite file, whichever kind it is of. ``backup`` and ``restore`` call it.

A copy is of one moment, and servers may go on writing meanwhile. It can be loaded into either kind of database, so that
a cluster can move from a file to PostgreSQL and back.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from pollux.errors import StoreError
from pollux.server.storage import postgres
from pollux.server.storage.database import SCHEMA_VERSION, Database, make_tables
from pollux.server.storage.leadership import Leadership
from pollux.server.storage.tables import leadership as _leadership
from pollux.server.storage.tables import tables as _tables

ROWS_AT_ONCE = 1000
_BUSY_S = 10.0
# What people and jobs did. Decisions and samples go on while nothing happens.
_TIMES = (
    *(("jobs", "submitted_at"), ("jobs", "finished_at"), ("transitions", "at")),
    *(("teams", "created_at"), ("users", "created_at"), ("tokens", "created_at"), ("tokens", "revoked_at")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a database holds. ``latest``: when a job or account in it last changed, in seconds since 1970."""

    schema_version: int
    num_jobs: int
    num_active: int
    latest: float


def copy_database(place: str | Path, target: Path) -> None:
    """Copy the database to a new SQLite file. A copy that is left after an error is not to be used.

    Raises:
        StoreError: it is not there, damaged, or of another version.
    """
    os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    if isinstance(place, str) and postgres.is_postgres(place):
        _dump(place, target)
    else:
        copy_sqlite(Path(place), target)


def copy_sqlite(source: Path, target: Path) -> None:
    """By SQLite's own backup: it sees what is in the write-ahead log, and waits for no writer."""
    with _sqlite(source, "rw") as original, _sqlite(target, "rwc") as copy:
        original.backup(copy)
        copy.execute("PRAGMA journal_mode = DELETE").close()  # one file, without a log beside it


def check_sqlite(path: Path) -> None:
    """Raises:
    StoreError: it is damaged.
    """
    with _sqlite(path, "ro") as connection:
        found = [row[0] for row in connection.execute("PRAGMA integrity_check(3)")]
        if found != ["ok"]:
            raise StoreError(f"{path}: the database is damaged: {'; '.join(found)}")
        if broken := connection.execute("PRAGMA foreign_key_check").fetchall():
            raise StoreError(f"{path}: the database is damaged: {len(broken)} rows refer to others that are gone")


def read_contents(path: Path) -> Contents:
    """Of an SQLite file.

    Raises:
        StoreError: it is damaged, or no database of Pollux.
    """
    with _sqlite(path, "rw") as connection:
        return Contents(
            schema_version=int(connection.execute("SELECT version FROM meta").fetchone()[0]),
            num_jobs=int(connection.execute("SELECT count(*) FROM jobs").fetchone()[0]),
            num_active=int(connection.execute("SELECT count(*) FROM jobs WHERE finished_at IS NULL").fetchone()[0]),
            latest=max(
                float(connection.execute(f"SELECT max({column}) FROM {table}").fetchone()[0] or 0.0)
                for table, column in _TIMES
            ),
        )


def load_postgres(copy: Path, place: str, owner: str, *, replaces_newer: bool, before: float) -> None:
    """Put a copy into a PostgreSQL database in place of what is there; all of it or nothing.

    ``owner``: of the data directory. ``before``: a database with something later than that is left alone, unless
    ``replaces_newer``.

    Raises:
        StoreError: a server leads there, it is newer, or cannot be used; nothing was changed.
    """
    leadership = Leadership(place, owner=owner, engine="restore")
    try:
        if not leadership.try_take():
            raise StoreError(f"{leadership.place}: a server leads on this database; end it: pollux down")
        url, arguments = postgres.connect_arguments(postgres.check_address(place))
        engine = sa.create_engine(url, connect_args=arguments, poolclass=sa.pool.NullPool)
        try:
            with engine.begin() as connection, _sqlite(copy, "ro") as source:
                _require_older(connection, leadership.place, before, replaces_newer)
                _fill(connection, source)
                _leadership.metadata.create_all(connection)
                connection.execute(_leadership.update().values(owner=owner))
                leadership.claim(connection)
        except DBAPIError as error:
            raise StoreError(
                f"{leadership.place}: {postgres.advice(error)}; it is as it was before the restore"
            ) from error
        finally:
            engine.dispose()
    finally:
        leadership.close()


def _require_older(connection: sa.Connection, place: str, before: float, replaces_newer: bool) -> None:
    names = set(sa.inspect(connection).get_table_names())
    if not names:
        make_tables(connection)
        return
    if "meta" not in names:
        raise StoreError(f"{place}: this database is not Pollux's: it holds {', '.join(sorted(names)[:5])}")
    version = connection.scalar(sa.text("SELECT version FROM meta"))
    if version != SCHEMA_VERSION:
        raise StoreError(
            f"{place}: written by another Pollux (schema version {version}; this one has {SCHEMA_VERSION}): name an "
            "empty database"
        )
    _tables.create_all(connection)  # those that an earlier version of this schema did not have
    latest = max(
        float(connection.scalar(sa.text(f"SELECT max({column}) FROM {table}")) or 0.0) for table, column in _TIMES
    )
    if latest > before and not replaces_newer:
        raise StoreError(newer_than_backup(place, latest - before))


def newer_than_backup(place: str, by_s: float) -> str:
    return (
        f"{place}: this database is newer than the backup by {by_s:.0f} s, and what happened since would be lost: "
        "add --force to replace it all the same"
    )


def _fill(connection: sa.Connection, source: sqlite3.Connection) -> None:
    preparer = connection.dialect.identifier_preparer
    names = ", ".join(preparer.format_table(table) for table in _tables.sorted_tables)
    connection.exec_driver_sql(f"TRUNCATE {names}")
    there = {name for (name,) in source.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    for table in _tables.sorted_tables:
        if table.name not in there:  # a copy by an earlier version of this schema
            continue
        columns = [column.name for column in table.columns]
        quoted = ", ".join(f'"{name}"' for name in columns)
        rows = source.execute(f'SELECT {quoted} FROM "{table.name}"')
        while some := rows.fetchmany(ROWS_AT_ONCE):
            connection.execute(table.insert(), [dict(zip(columns, row, strict=True)) for row in some])
        key = table.primary_key.columns.values()
        if len(key) == 1 and isinstance(key[0].type, sa.Integer) and key[0].autoincrement is not False:
            # Ids that were given out are never given out again.
            connection.execute(
                sa.text(
                    f"SELECT setval(pg_get_serial_sequence(:table, :column), greatest(1, (SELECT "
                    f'coalesce(max("{key[0].name}"), 1) FROM "{table.name}")))'
                ),
                {"table": table.name, "column": key[0].name},
            )


def _dump(place: str, target: Path) -> None:
    engine = sa.create_engine(sa.URL.create("sqlite", database=str(target)), poolclass=sa.pool.NullPool)
    try:
        with Database(place) as database, database.reading() as source, engine.begin() as copy:
            _tables.create_all(copy)
            there = set(sa.inspect(source).get_table_names())
            for table in _tables.sorted_tables:
                if table.name not in there:  # no server of this version has led there yet
                    continue
                streamed = source.execution_options(yield_per=ROWS_AT_ONCE).execute(sa.select(table))
                for rows in streamed.mappings().partitions():
                    copy.execute(table.insert(), [dict(row) for row in rows])
    except DBAPIError as error:
        raise StoreError(f"{target}: the copy cannot be written: {error.orig}; free some space") from error
    finally:
        engine.dispose()


@contextlib.contextmanager
def _sqlite(path: Path, mode: str) -> Iterator[sqlite3.Connection]:
    try:
        connection = sqlite3.connect(f"file:{quote(str(path))}?mode={mode}", uri=True, timeout=_BUSY_S)
        try:
            yield connection
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise StoreError(f"{path}: the database cannot be copied or read: {error}") from error
