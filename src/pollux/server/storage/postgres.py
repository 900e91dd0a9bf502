"""What is special about PostgreSQL: its address, its connections, and what its errors mean. ``database`` calls it.

Passwords never stand in an address: libpq takes them from PGPASSWORD, PGPASSFILE or ~/.pgpass.
"""

from __future__ import annotations

import importlib.util
import select
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError, DisconnectionError

from pollux.errors import InvalidValueError

CONNECT_S = 5  # the longest that a connection may take
STATEMENT_S, LOCK_S = 30, 10
FROZEN_S = 5  # a session that says nothing for so long, with a lock or in a transaction, is ended by the database
MIN_VERSION = 14  # the first that ends idle sessions
SPARE_CONNECTIONS = 24  # beyond those that are kept; PostgreSQL allows 100 by default, and two servers share them
POOL_S = 10.0
_DRIVER = "postgresql+psycopg"
_NEEDED = "postgresql://USER@HOST/DATABASE is needed"


def is_postgres(place: str) -> bool:
    return place.partition("://")[0].partition("+")[0] in ("postgresql", "postgres")


def check_address(place: str) -> sa.URL:
    """The address of a database, as SQLAlchemy wants it.

    Raises:
        InvalidValueError: it is none, has a password in it, or there is no driver.
    """
    try:
        url = sa.make_url(place.replace("postgres://", "postgresql://", 1))
    except (ArgumentError, ValueError):
        raise InvalidValueError(f"this is no address of a database; {_NEEDED}") from None  # it may hold a password
    if url.get_backend_name() != "postgresql":
        raise InvalidValueError(f"{url.get_backend_name()} is no database that Pollux uses; {_NEEDED}, or nothing")
    if url.password is not None or "password" in url.query:
        raise InvalidValueError(
            f"the address of the database at {url.host or 'this machine'} has a password in it, and every user of this "
            "machine can read command lines: leave it out, and put it into ~/.pgpass, the file that PGPASSFILE names, "
            "or PGPASSWORD"
        )
    if not url.database:
        raise InvalidValueError(f"{shown(url)}: it names no database; {_NEEDED}")
    if importlib.util.find_spec("psycopg") is None:
        raise InvalidValueError(
            'a server on PostgreSQL needs psycopg, not installed here: pip install "pollux-scheduler[postgres]"'
        )
    return url.set(drivername=_DRIVER)


def shown(url: sa.URL) -> str:
    """How to call it in messages, which all who can reach the server may read."""
    host = url.host or url.query.get("host") or "localhost"
    return f"database {url.database!r} at {host}"


def connect_arguments(url: sa.URL, **settings: int) -> tuple[sa.URL, dict[str, Any]]:
    """The address and what to connect with, so that no wait is for ever. ``settings``: of the session, in seconds."""
    limits = {
        "statement_timeout": STATEMENT_S,
        "lock_timeout": LOCK_S,
        "idle_in_transaction_session_timeout": FROZEN_S,
        **settings,
    }
    words = [f"-c {name}={seconds}s" for name, seconds in limits.items()]
    own = url.query.get("options", "")
    words.append(own if isinstance(own, str) else " ".join(own))
    network = {"keepalives_idle": 2, "keepalives_interval": 1, "keepalives_count": 3, "tcp_user_timeout": 5000}
    arguments: dict[str, Any] = {
        "connect_timeout": CONNECT_S,
        "application_name": "pollux",
        **network,
        **{name: value for name, value in url.query.items() if name != "options"},
        "options": " ".join(word for word in (*words, "-c jit=off") if word),
    }
    return url.set(query={}), arguments


def replace_ended(connection: Any, record: object, proxy: object) -> None:
    """When the pool gives out a connection: one that the database has ended meanwhile is made anew.

    A session that waits hears nothing, so one that can be read has ended. It costs no question to the database.
    """
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    if connection.closed or poll.poll(0):
        raise DisconnectionError


_BY_TEXT = {
    "password authentication failed": "the password is wrong: see PGPASSWORD, or the file that PGPASSFILE names",
    "no password supplied": "it wants a password: put it into ~/.pgpass (mode 0600), the file that PGPASSFILE names, "
    "or PGPASSWORD",
    "not yet accepting connections": "the database is starting: it is tried again",
    "starting up": "the database is starting: it is tried again",
    "does not exist": "make it first: createdb, and createuser for its owner",
    "Connection refused": "no database answers there: see that PostgreSQL runs and that the address is right",
    "No such file or directory": "no database answers there: see that PostgreSQL runs and that the address is right",
    "failed to resolve host": "the host is not known: see that the address is right",
    "pg_hba.conf": "it lets nobody in from here: add a line to its pg_hba.conf",
    "certificate": "its certificate is not trusted: name the one that signed it with sslrootcert=FILE in the address",
}
_BY_STATE = {
    "42501": "this role may not do that: make it the owner of the database",
    "53100": "its disk is full: free some space and try again",
    "53300": "it has no connections left: raise max_connections, or end other programs",
    "55P03": "a row was locked for too long: try again",
    "57014": f"it took longer than {STATEMENT_S} s: try again",
    "57P01": "the connection was ended by an administrator, or with the database: it is tried again",
    "57P02": "the database has crashed: it is tried again",
    "57P03": "the database is starting or stopping: it is tried again",
}


def advice(error: DBAPIError) -> str:
    """What was wrong and what to do, in one line."""
    cause = " ".join(str(error.orig).split())
    told = _BY_STATE.get(getattr(error.orig, "sqlstate", None) or "")
    if told is None and error.connection_invalidated:
        told = "the connection to the database was lost: it is tried again"
    if told is None:
        told = next((text for part, text in _BY_TEXT.items() if part in cause), None)
    return cause if told is None else f"{told} ({cause})"
