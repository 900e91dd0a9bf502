"""Keeps what nodes did over time, and the energy of each job. The scheduler thread writes, queries read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from pollux.api.cluster import NodeReading
from pollux.api.codec import decode, dumps, encoded, loads
from pollux.server.storage.database import Database
from pollux.server.storage.tables import energy as _energy
from pollux.server.storage.tables import jobs
from pollux.server.storage.tables import readings as _readings
from pollux.server.storage.tables import totals as _totals
from pollux.server.storage.time_series import thinned

KEEP_READINGS = 200_000  # of all nodes: one node every ten seconds is 23 days, a hundred nodes are 5 hours

PRUNED_JOULES = "pruned_joules"


class ReadingStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, readings: Mapping[str, NodeReading], keep: int = KEEP_READINGS) -> None:
        """One of each node; the oldest beyond ``keep`` are forgotten."""
        rows = [
            {"at": one.at, "node": name, "reading": dumps(encoded(one), "reading")} for name, one in readings.items()
        ]
        if not rows:
            return
        with self._database.writing() as connection:
            connection.execute(_readings.insert(), rows)
            last = sa.select(sa.func.max(_readings.c.id)).scalar_subquery()
            connection.execute(_readings.delete().where(_readings.c.id <= last - keep))

    def of_node(self, node: str, since: float, until: float, points: int) -> list[NodeReading]:
        """Those of a time, oldest first, thinned evenly to ``points``."""
        columns = _readings.c
        ids = sa.select(columns.id).where(columns.node == node, columns.at.between(since, until)).order_by(columns.id)
        with self._database.reading() as connection:
            kept = list(connection.scalars(ids))
            chosen = [kept[place] for place in thinned(len(kept), points)]
            query = sa.select(columns.id, columns.reading).where(columns.id.in_(chosen)).order_by(columns.id)
            rows = connection.execute(query).all()
        found = []
        for row in rows:
            with self._database.interpreting(f"reading {row.id}"):
                found.append(decode(NodeReading, loads(row.reading, "reading"), "reading"))
        return found

    def add_energy(self, joules: Mapping[str, float]) -> None:
        """To what jobs took before; all of them or none. Jobs that were pruned meanwhile are left out."""
        with self._database.writing() as connection:
            known = set(connection.scalars(sa.select(jobs.c.name).where(jobs.c.name.in_(list(joules)))))
            for job, more in joules.items():
                if job not in known:
                    continue
                change = _energy.update().where(_energy.c.job == job).values(joules=_energy.c.joules + more)
                if connection.execute(change).rowcount == 0:
                    connection.execute(_energy.insert().values(job=job, joules=more))

    def energy_of(self, job: str) -> float | None:
        with self._database.reading() as connection:
            found: float | None = connection.scalar(sa.select(_energy.c.joules).where(_energy.c.job == job))
        return found

    def energies(self) -> float:
        """Of all jobs since the database was made; those that were pruned count."""
        with self._database.reading() as connection:
            kept = float(connection.scalar(sa.select(sa.func.sum(_energy.c.joules))) or 0.0)
            pruned = connection.scalar(sa.select(_totals.c.value).where(_totals.c.name == PRUNED_JOULES))
            return kept + float(pruned or 0.0)


def keep_energy(connection: sa.Connection, names: Sequence[str]) -> None:
    """Before these jobs' rows go: what they took stays in the sum of all."""
    query = sa.select(sa.func.sum(_energy.c.joules)).where(_energy.c.job.in_(names))
    joules = float(connection.scalar(query) or 0.0)
    change = _totals.update().where(_totals.c.name == PRUNED_JOULES).values(value=_totals.c.value + joules)
    if joules and connection.execute(change).rowcount == 0:
        connection.execute(_totals.insert().values(name=PRUNED_JOULES, value=joules))
