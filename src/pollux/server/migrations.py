"""What brings a server's database from one version to the next, one function for each step.

Stands in ``server``, below :mod:`pollux.server.database`. The tables of every version are spelled out here, however
:mod:`pollux.server.tables` looks by now: a database that was written years ago must become what it would have become.
"""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa

# Version 1 ------------------------------------------------------------------------------------

_version_1 = sa.MetaData()


def _of_job(is_key: bool = False) -> sa.Column[str]:
    return sa.Column("job", sa.Text, sa.ForeignKey("jobs.name"), primary_key=is_key, nullable=False)


sa.Table(
    "jobs",
    _version_1,
    sa.Column("sequence", sa.Integer, primary_key=True),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("request", sa.Text),
    sa.Column("record", sa.Text),
    sa.Column("knowledge", sa.Text, sa.ForeignKey("knowledge.label")),
    sa.Column("state", sa.Text, nullable=False, index=True),
    sa.Column("submitted_at", sa.Float, nullable=False),
    sa.Column("finished_at", sa.Float),
    sqlite_autoincrement=True,
)
sa.Table(
    "knowledge",
    _version_1,
    sa.Column("label", sa.Text, primary_key=True),
    sa.Column("form", sa.Text, nullable=False),
)
sa.Table(
    "transitions",
    _version_1,
    sa.Column("id", sa.Integer, primary_key=True),
    _of_job(),
    sa.Column("at", sa.Float, nullable=False),
    *(sa.Column(name, sa.Text, nullable=False) for name in ("source", "target", "reason")),
    sa.Index("transitions_by_job", "job", "id"),
    sqlite_autoincrement=True,
)
sa.Table(
    "rounds",
    _version_1,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("at", sa.Float, nullable=False),
    *(sa.Column(name, sa.Text, nullable=False) for name in ("trigger", "plan", "error", "snapshot")),
    sa.Column("decision_s", sa.Float, nullable=False),
    *(sa.Column(name, sa.Integer, nullable=False) for name in ("num_jobs", "num_slots")),
    sqlite_autoincrement=True,
)
sa.Table(
    "reports",
    _version_1,
    sa.Column("id", sa.Integer, primary_key=True),
    _of_job(),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("report", sa.Text, nullable=False),
    sa.Index("reports_by_job", "job", "id"),
    sqlite_autoincrement=True,
)
sa.Table(
    "resizes",
    _version_1,
    _of_job(is_key=True),
    sa.Column("generation", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("before", sa.Text, nullable=False),
    sa.Column("after", sa.Text, nullable=False),
    sa.Column("runs_at", sa.Float),
)
sa.Table(
    "secrets",
    _version_1,
    _of_job(is_key=True),
    sa.Column("token_hash", sa.Text, nullable=False, unique=True),
)


def _make_version_1(connection: sa.Connection) -> None:
    _version_1.create_all(connection)


# Version 2: the cluster over time; and who ended last, without looking at everybody -------------

_version_2 = sa.MetaData()
sa.Table(
    "samples",
    _version_2,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("at", sa.Float, nullable=False, index=True),
    *(
        sa.Column(name, sa.Integer, nullable=False)
        for name in ("num_nodes", "num_slots", "num_used_slots", "num_running", "num_pending")
    ),
    *(sa.Column(name, sa.Float) for name in ("efficiency", "goodput", "node_hours", "cost")),
    sqlite_autoincrement=True,
)


def _make_version_2(connection: sa.Connection) -> None:
    _version_2.create_all(connection)
    connection.exec_driver_sql("CREATE INDEX jobs_by_end ON jobs (finished_at)")


# Version 3: what a decision changed, and who had ended since the one before -------------------


def _make_version_3(connection: sa.Connection) -> None:
    connection.exec_driver_sql("ALTER TABLE rounds ADD COLUMN changes TEXT")


# Version 4: what runs told of their decisions ------------------------------------------------

_version_4 = sa.MetaData()
sa.Table("jobs", _version_4, sa.Column("name", sa.Text, unique=True))  # there already; for the reference to it
_training_notes = sa.Table(
    "training_notes",
    _version_4,
    sa.Column("id", sa.Integer, primary_key=True),
    _of_job(),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("text", sa.Text, nullable=False),
    sa.Index("training_notes_by_job", "job", "id"),
    sqlite_autoincrement=True,
)


def _make_version_4(connection: sa.Connection) -> None:
    _training_notes.create(connection)


MIGRATIONS: list[Callable[[sa.Connection], None]] = [
    _make_version_1,
    _make_version_2,
    _make_version_3,
    _make_version_4,
]
"""What brings a database from version i to i + 1."""
