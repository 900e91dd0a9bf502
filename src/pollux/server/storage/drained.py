"""Keeps which nodes the operator empties. The leader changes it, and reads it when it begins.

In the database, as a leader that was frozen and wakes up must not overwrite what the next one was told.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import sqlalchemy as sa

from pollux.server.storage.database import Database
from pollux.server.storage.tables import drained as _drained

DRAINING_FILE = "draining.json"  # where versions before this table kept them, in the data directory

logger = logging.getLogger(__name__)


class DrainedNodes:
    """Raises StoreError from every method."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def set(self, node: str, is_draining: bool) -> None:
        with self._database.writing() as connection:
            connection.execute(_drained.delete().where(_drained.c.node == node))
            if is_draining:
                connection.execute(_drained.insert().values(node=node))

    def take_over(self, directory: Path) -> None:
        """What an earlier version has left in this data directory, or a backup of it. Its file goes when it is kept."""
        path = directory / DRAINING_FILE
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be read (%s): drain again what is to be drained", path, error)
            return
        names = {name for name in kept if isinstance(name, str)} if isinstance(kept, list) else set()
        with self._database.writing() as connection:
            connection.execute(_drained.delete().where(_drained.c.node.in_(names)))
            if names:
                connection.execute(_drained.insert(), [{"node": name} for name in sorted(names)])
        path.unlink(missing_ok=True)

    def all(self) -> frozenset[str]:
        """Empty, too, where the leader is of a version before this table, and a standby of this one reads."""
        with self._database.reading() as connection:
            if not sa.inspect(connection).has_table(_drained.name):
                return frozenset()
            return frozenset(connection.scalars(sa.select(_drained.c.node)))
