"""Keeps which jobs are to be cancelled until that is done. HTTP threads add, the scheduler thread takes away.

A caller has its answer when the wish is kept: the scheduler may be deciding, or saving a round, which takes long.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import sqlalchemy as sa

from pollux.server.storage.database import Database
from pollux.server.storage.tables import cancellations as _cancellations


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancellation:
    id: int
    job: str
    reason: str


class Cancellations:
    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, job: str, reason: str) -> Cancellation:
        row = {"job": job, "reason": reason, "at": time.time()}
        with self._database.adding() as connection:  # it must not wait while the scheduler saves a round
            key = connection.execute(_cancellations.insert().values(row)).inserted_primary_key
        assert key is not None
        return Cancellation(id=key[0], job=job, reason=reason)

    def all(self) -> list[Cancellation]:
        """Those not done, oldest first."""
        with self._database.reading() as connection:
            rows = connection.execute(sa.select(_cancellations).order_by(_cancellations.c.id)).all()
        return [Cancellation(id=row.id, job=row.job, reason=row.reason) for row in rows]

    def remove(self, done: Iterable[Cancellation]) -> None:
        if ids := [one.id for one in done]:
            with self._database.writing() as connection:
                connection.execute(_cancellations.delete().where(_cancellations.c.id.in_(ids)))
