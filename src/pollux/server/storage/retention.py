"""Which jobs are old, and how their rows go. :mod:`pollux.server.live.retention` calls it.

What jobs used stays in the table ``usage``: it is the accounts', and keeps a name from being given out again.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from pollux.api.codec import loads
from pollux.server.storage.database import Database
from pollux.server.storage.readings import keep_energy
from pollux.server.storage.tables import energy, jobs, knowledge, reports, resizes, secrets, training_notes, transitions

JOBS_AT_ONCE = 100  # in a transaction: others want to write, too
_OF_JOB = (reports, training_notes, transitions, resizes, secrets, energy)


def ended_before(database: Database, at: float) -> list[str]:
    """Names of jobs that ended before a time, the first first. Not trials: their study reads them."""
    query = sa.select(jobs.c.name, jobs.c.request).where(jobs.c.finished_at < at).order_by(jobs.c.finished_at)
    with database.reading() as connection:
        rows = connection.execute(query).all()
    return [row.name for row in rows if not _is_trial(row.request)]


def _is_trial(request: str | None) -> bool:
    found = None if request is None else loads(request, "request")
    return isinstance(found, dict) and bool(found.get("study"))


def count_rows(database: Database, names: Sequence[str]) -> int:
    """That :func:`forget` would remove; not what was learnt."""
    total = 0
    with database.reading() as connection:
        for some in _pieces(names):
            for table in _OF_JOB:
                counted = sa.select(sa.func.count()).select_from(table).where(table.c.job.in_(some))
                total += connection.scalar(counted) or 0
            total += len(some)
    return total


def forget(database: Database, names: Sequence[str]) -> None:
    """Remove all rows of jobs that are over. What was learnt of an application stays; of a single job it goes."""
    for some in _pieces(names):
        with database.writing() as connection:
            keep_energy(connection, some)
            for table in _OF_JOB:
                connection.execute(table.delete().where(table.c.job.in_(some)))
            connection.execute(jobs.delete().where(jobs.c.name.in_(some)))
            labels = [f"job {name}" for name in some]
            used = sa.select(jobs.c.knowledge).where(jobs.c.knowledge.in_(labels))
            connection.execute(knowledge.delete().where(knowledge.c.label.in_(labels), knowledge.c.label.not_in(used)))


def _pieces(names: Sequence[str]) -> list[Sequence[str]]:
    return [names[first : first + JOBS_AT_ONCE] for first in range(0, len(names), JOBS_AT_ONCE)]
