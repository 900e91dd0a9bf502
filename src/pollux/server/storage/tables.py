"""The tables of a server's database. :mod:`pollux.server.storage.store` fills and reads them.

A change here, or of a record that is stored, needs a new ``SCHEMA_VERSION`` in :mod:`pollux.server.storage.database`.
A new table does not: it is made where it is missing.
"""

from __future__ import annotations

import sqlalchemy as sa

tables = sa.MetaData()
_leadership_tables = sa.MetaData()  # for PostgreSQL alone: an SQLite file has one server
_Id = sa.BigInteger().with_variant(sa.Integer, "sqlite")  # which counts the ids of an INTEGER PRIMARY KEY in 64 bits


def _of_job(is_key: bool = False) -> sa.Column[str]:
    return sa.Column("job", sa.Text, sa.ForeignKey("jobs.name"), primary_key=is_key, nullable=False)


meta = sa.Table(
    "meta",
    tables,
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
)
jobs = sa.Table(
    "jobs",
    tables,
    sa.Column("sequence", _Id, primary_key=True),  # order of arrival
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("request", sa.Text),  # JSON; null: the scheduler was given the job by a program, not over HTTP
    sa.Column("record", sa.Text),  # JSON without its knowledge; null: the scheduler has not taken it in yet
    sa.Column("knowledge", sa.Text, sa.ForeignKey("knowledge.label")),
    sa.Column("state", sa.Text, nullable=False, index=True),
    sa.Column("submitted_at", sa.Float, nullable=False),
    sa.Column("finished_at", sa.Float),
    sa.Index("jobs_by_end", "finished_at"),
    sqlite_autoincrement=True,
)
cancellations = sa.Table(  # asked for and not done yet
    "cancellations",
    tables,
    sa.Column("id", _Id, primary_key=True),
    *(sa.Column(name, sa.Text, nullable=False) for name in ("job", "reason")),
    sa.Column("at", sa.Float, nullable=False),
    sqlite_autoincrement=True,
)
drained = sa.Table("drained", tables, sa.Column("node", sa.Text, primary_key=True))  # the operator empties it
knowledge = sa.Table(  # shared by the jobs of an application, where profiles are remembered
    "knowledge",
    tables,
    sa.Column("label", sa.Text, primary_key=True),
    sa.Column("form", sa.Text, nullable=False),
)
transitions = sa.Table(
    "transitions",
    tables,
    sa.Column("id", _Id, primary_key=True),
    _of_job(),
    sa.Column("at", sa.Float, nullable=False),
    *(sa.Column(name, sa.Text, nullable=False) for name in ("source", "target", "reason")),
    sa.Index("transitions_by_job", "job", "id"),
    sqlite_autoincrement=True,
)
rounds = sa.Table(
    "rounds",
    tables,
    sa.Column("id", _Id, primary_key=True),
    sa.Column("number", sa.Integer, nullable=False),  # of the scheduler: may begin again with a restart
    sa.Column("at", sa.Float, nullable=False),
    *(sa.Column(name, sa.Text, nullable=False) for name in ("trigger", "plan", "error", "snapshot")),
    sa.Column("decision_s", sa.Float, nullable=False),
    *(sa.Column(name, sa.Integer, nullable=False) for name in ("num_jobs", "num_slots")),
    sa.Column("changes", sa.Text, nullable=False),  # JSON: what changed, and which jobs had ended
    sqlite_autoincrement=True,
)
reports = sa.Table(
    "reports",
    tables,
    sa.Column("id", _Id, primary_key=True),
    _of_job(),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("report", sa.Text, nullable=False),
    sa.Index("reports_by_job", "job", "id"),
    sqlite_autoincrement=True,
)
training_notes = sa.Table(  # what runs told of their decisions: the last ones of each job
    "training_notes",
    tables,
    sa.Column("id", _Id, primary_key=True),
    _of_job(),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("text", sa.Text, nullable=False),
    sa.Index("training_notes_by_job", "job", "id"),
    sqlite_autoincrement=True,
)
resizes = sa.Table(
    "resizes",
    tables,
    _of_job(is_key=True),
    sa.Column("generation", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("before", sa.Text, nullable=False),
    sa.Column("after", sa.Text, nullable=False),
    sa.Column("runs_at", sa.Float),
)
secrets = sa.Table(
    "secrets",
    tables,
    _of_job(is_key=True),
    sa.Column("token_hash", sa.Text, nullable=False, unique=True),
)
samples = sa.Table(  # the cluster over time
    "samples",
    tables,
    sa.Column("id", _Id, primary_key=True),
    sa.Column("at", sa.Float, nullable=False, index=True),
    *(
        sa.Column(name, sa.Integer, nullable=False)
        for name in ("num_nodes", "num_slots", "num_used_slots", "num_running", "num_pending")
    ),
    *(sa.Column(name, sa.Float) for name in ("efficiency", "goodput", "node_hours", "cost")),
    sqlite_autoincrement=True,
)
readings = sa.Table(  # what nodes did over time
    "readings",
    tables,
    sa.Column("id", _Id, primary_key=True),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("node", sa.Text, nullable=False),
    sa.Column("reading", sa.Text, nullable=False),  # JSON
    sa.Index("readings_by_node", "node", "at"),
    sqlite_autoincrement=True,
)
energy = sa.Table(
    "energy",
    tables,
    _of_job(is_key=True),
    sa.Column("joules", sa.Float, nullable=False),
)
totals = sa.Table(  # that go on counting when the rows they came from are pruned
    "totals",
    tables,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.Float, nullable=False),
)
teams = sa.Table(
    "teams",
    tables,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("quota", sa.Text, nullable=False),  # JSON
    sa.Column("created_at", sa.Float, nullable=False),
)
users = sa.Table(
    "users",
    tables,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("team", sa.Text, sa.ForeignKey("teams.name"), nullable=False),
    *(sa.Column(name, sa.Text, nullable=False) for name in ("role", "unix_user", "quota")),
    sa.Column("created_at", sa.Float, nullable=False),
)
tokens = sa.Table(  # of people; those of jobs are in "secrets"
    "tokens",
    tables,
    sa.Column("id", _Id, primary_key=True),
    sa.Column("user", sa.Text, sa.ForeignKey("users.name")),  # null: a link that belongs to no user
    *(sa.Column(name, sa.Text, nullable=False) for name in ("role", "label")),
    sa.Column("token_hash", sa.Text, nullable=False, unique=True),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("expires_at", sa.Float),
    sa.Column("revoked_at", sa.Float),
    sqlite_autoincrement=True,
)
usage = sa.Table(  # what jobs used, by day
    "usage",
    tables,
    *(
        sa.Column(name, sa.Text, primary_key=True)
        for name in ("day", "job", "owner", "team", "accelerator")  # the owner and team of that day
    ),
    *(sa.Column(name, sa.Float, nullable=False) for name in ("slot_s", "useful_s", "cost")),
    sa.Index("usage_by_day", "day"),
)
leadership = sa.Table(  # one row: who leads
    "leadership",
    _leadership_tables,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),  # counted up by every new leader
    *(sa.Column(name, sa.Text, nullable=False) for name in ("url", "host", "engine", "owner")),
    sa.Column("since", sa.Float, nullable=False),
)
