"""Keeps which nodes the operator empties. The leader changes it, and reads it when it begins.

In the database, as a leader that was frozen and wakes up must not overwrite what the next one was told.
"""

from __future__ import annotations

import sqlalchemy as sa

from pollux.server.storage.database import Database
from pollux.server.storage.tables import drained as _drained


class DrainedNodes:
    """Raises StoreError from every method."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def set(self, node: str, is_draining: bool) -> None:
        with self._database.writing() as connection:
            connection.execute(_drained.delete().where(_drained.c.node == node))
            if is_draining:
                connection.execute(_drained.insert().values(node=node))

    def all(self) -> frozenset[str]:
        with self._database.reading() as connection:
            return frozenset(connection.scalars(sa.select(_drained.c.node)))
