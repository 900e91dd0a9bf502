"""Opens a server's database and runs transactions on it. The base of :class:`pollux.server.storage.store.SqlStore`.

A path means an SQLite file in WAL mode: readers never wait for the writer, and what a call wrote is there when it
returns, even if the process is killed at once. A URL means PostgreSQL, where only the server that leads may write
(:mod:`pollux.server.storage.leadership`).

Every call is one transaction on a connection of its own, so any thread may call; writers take turns.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from pollux.errors import InvalidValueError, NotLeaderError, StoreError
from pollux.server.storage import postgres
from pollux.server.storage.fair_lock import FairLock
from pollux.server.storage.leadership import Leadership
from pollux.server.storage.tables import meta as _meta
from pollux.server.storage.tables import tables as _tables

SCHEMA_VERSION = 3  # of the tables and of the records in them; a database of another version is refused
_BUSY_TIMEOUT_S = 10.0
_MAX_WAL_PAGES = 16_384  # 64 MiB


class Database:
    """Opens the database, and makes its tables in a new one.

    ``leadership``: on PostgreSQL, taken already; without it a database there can only be read.

    Raises:
        StoreError: from every method: the database cannot be used, and what to do about it.
    """

    def __init__(self, place: str | Path, leadership: Leadership | None = None) -> None:
        self._url, self.place = _url_of(place)
        self._is_closed = False
        self._turn, self._leadership = FairLock(), leadership
        self._batch = threading.local()
        self._is_sqlite = self._url.get_backend_name() == "sqlite"
        if self._is_sqlite:
            _make_private(self._url)
            # Connections beyond the pool's size are closed after use; no caller waits for one.
            self._engine = sa.create_engine(self._url, pool_size=8, max_overflow=-1)
            sa.event.listen(self._engine, "connect", _set_up_sqlite)
            sa.event.listen(self._engine, "begin", _begin_sqlite)
            self._writer = self._engine.execution_options(writes=True)
        else:
            self._engine = _postgres_engine(self._url)
            sa.event.listen(self._engine, "checkout", postgres.replace_ended)
            # One that wants to write must see the epoch as it is, not as it was when its transaction began.
            self._writer = self._engine.execution_options(isolation_level="READ COMMITTED")
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @property
    def epoch(self) -> int:
        """Of the leader that this is. 0 for SQLite, where there is one server."""
        return 0 if self._leadership is None else self._leadership.epoch

    @property
    def trouble(self) -> str:
        """Why nothing can be written now; "" if that is not known to be so. Returns at once."""
        return "" if self._leadership is None else self._leadership.trouble

    def require_leader(self) -> None:
        """Before anything is written beside the database.

        Raises:
            NotLeaderError: another server leads.
        """
        if self._leadership is not None:
            with self.writing():
                pass

    def close(self) -> None:
        """Let go of the file. Calling it twice does no harm; calling anything else afterwards does."""
        self._is_closed = True
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tidy(self) -> None:
        """Now and then: bring what SQLite has in its log to its file. Readers and writers go on meanwhile."""
        if self._is_sqlite and not self._is_closed:
            with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)")

    def _open(self) -> None:
        may_write = self._is_sqlite or self._leadership is not None
        with self._turn, self._transaction(self._writer) as connection:
            if self._is_sqlite:
                self._check_pages(connection)
            self._check_tables(connection, makes_them=may_write)
            if self._leadership is not None:
                self._leadership.claim(connection)

    def _check_pages(self, connection: sa.Connection) -> None:
        """Damage is found now, and not when a job that was acknowledged cannot be read."""
        found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
        if found != "ok":
            raise StoreError(f"{self.place}: {_DAMAGED} ({found})")

    def _check_tables(self, connection: sa.Connection, *, makes_them: bool) -> None:
        tables = set(sa.inspect(connection).get_table_names())
        if not tables and makes_them:
            make_tables(connection)
            return
        if _meta.name not in tables:
            raise StoreError(
                f"{self.place}: this database is not Pollux's: it holds {', '.join(sorted(tables)[:5]) or 'nothing'}; "
                "name another place"
            )
        version: int = connection.execute(sa.select(_meta.c.version)).scalar_one()
        if version != SCHEMA_VERSION:
            raise StoreError(
                f"{self.place}: written by another Pollux (schema version {version}; this one reads "
                f"{SCHEMA_VERSION}); nothing was changed: use that Pollux, or name another place"
            )
        if makes_them:
            _tables.create_all(connection)  # those that are missing

    @contextmanager
    def batched(self) -> Iterator[None]:
        """All that this thread writes inside is one transaction: much faster, and all of it or nothing."""
        with self.writing() as connection:
            self._batch.connection = connection
            try:
                yield
            finally:
                self._batch.connection = None

    @contextmanager
    def adding(self) -> Iterator[sa.Connection]:
        """As :meth:`writing`, for rows that no other transaction knows yet: on PostgreSQL it waits for no turn."""
        is_alone = self._is_sqlite or getattr(self._batch, "connection", None) is not None
        if is_alone or self._leadership is None:
            with self.writing() as connection:
                yield connection
            return
        with self._transaction(self._writer) as connection:
            self._leadership.check(connection)
            yield connection

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        if (batch := getattr(self._batch, "connection", None)) is not None:
            yield batch
            return
        if not self._is_sqlite and self._leadership is None:
            raise NotLeaderError(f"{self.place}: this server does not lead, and may only read")
        with self._turn, self._transaction(self._writer) as connection:
            if self._leadership is not None:
                self._leadership.check(connection)
            yield connection

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        if (batch := getattr(self._batch, "connection", None)) is not None:
            yield batch
            return
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
        except PoolTimeoutError as error:
            raise StoreError(f"{self.place}: all connections were busy for {postgres.POOL_S:g} s: try again") from error

    @contextmanager
    def interpreting(self, what: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, KeyError) as error:
            raise StoreError(
                f"{self.place}: {what} cannot be read: {error}; put a backup in its place (pollux restore FILE), "
                "or move it away"
            ) from error


def require_content(path: Path, note: Path) -> None:
    """Before a new database is made: where a server has been before (``note``), an empty file is a damaged one.

    Raises:
        StoreError: it is.
    """
    log = path.with_name(f"{path.name}-wal")
    if note.exists() and path.exists() and path.stat().st_size == 0 and not (log.exists() and log.stat().st_size):
        raise StoreError(f"{path}: it is empty, and a server has kept jobs here: {_DAMAGED}")


def make_tables(connection: sa.Connection) -> None:
    """In a database that is empty."""
    _tables.create_all(connection)
    connection.execute(_meta.insert().values(version=SCHEMA_VERSION, created=time.time()))


def _url_of(place: str | Path) -> tuple[sa.URL, str]:
    """What to connect to, and how to call it in messages."""
    if isinstance(place, Path) or "://" not in place:
        return sa.URL.create("sqlite", database=str(place)), str(place)
    if postgres.is_postgres(place):
        url = postgres.check_address(place)
        return url, postgres.shown(url)
    if not place.startswith("sqlite:"):
        kind = place.partition("://")[0]  # the rest may hold a password
        raise InvalidValueError(
            f"{kind}://... is no place for a database; a path is, or postgresql://USER@HOST/DATABASE"
        )
    url = sa.make_url(place)
    return url, url.render_as_string()


def _postgres_engine(url: sa.URL) -> sa.Engine:
    """A transaction that only reads sees one moment, as with SQLite."""
    url, arguments = postgres.connect_arguments(url)
    return sa.create_engine(
        url,
        connect_args=arguments,
        isolation_level="REPEATABLE READ",
        pool_size=8,
        max_overflow=postgres.SPARE_CONNECTIONS,
        pool_timeout=postgres.POOL_S,
    )


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
        f"wal_autocheckpoint = {_MAX_WAL_PAGES}",  # in time it is done by tidy(), where no caller waits for the disk
        "synchronous = NORMAL",
        "foreign_keys = ON",
    ):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: sa.Connection) -> None:
    # A transaction that reads first and then writes could find that another one wrote in between; so lock at once.
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


_DAMAGED = "it is damaged: put a backup in its place (pollux restore FILE), or move it away to begin anew"
_ADVICE = {
    sqlite3.SQLITE_BUSY: f"another process kept it busy for {_BUSY_TIMEOUT_S:g} s: end that process",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened: its folder must exist, and both be writable for this user",
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_FULL: "the disk is full: free some space and try again",
    sqlite3.SQLITE_IOERR: "the disk cannot be read or written, or is full: free some space or check it, and try again",
    sqlite3.SQLITE_NOTADB: "it is no database, or its beginning is damaged: put a backup in its place (pollux restore "
    "FILE), move the file away, or name another place",
    sqlite3.SQLITE_READONLY: "it is write-protected: make the file and its folder writable for this user",
}


def _advice(error: DBAPIError | sqlite3.Error) -> str:
    cause = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(cause, "sqlite_errorcode", None)
    if code is None and isinstance(error, DBAPIError):
        return postgres.advice(error)
    advice = None if code is None else _ADVICE.get(code & 0xFF)  # the rest of the code tells details
    return f"{cause}" if advice is None else f"{advice} ({cause})"
