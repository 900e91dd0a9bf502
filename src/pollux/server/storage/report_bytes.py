"""How many bytes of reports are kept of a job and read at once. The store and the charts call it.

A report is ASCII in the database, so characters are bytes. The sizes of a job's reports are looked at now and then
alone: whenever it has written a part of what is kept of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from pollux.server.storage.tables import reports as _reports

KEEP_BYTES = 64_000_000  # of each job: 5,000 usual reports with 50 metrics are 16 MB
LOOK_BYTES = KEEP_BYTES // 4  # that a job writes between two looks
ANSWER_BYTES = 8_000_000  # of one page
_size = sa.func.length(_reports.c.report).label("size")


class ReportBytes:
    """What each job has written since its reports were looked at. For those who hold the writers' lock."""

    def __init__(self) -> None:
        self._written: dict[str, int] = {}

    def add(self, connection: sa.Connection, rows: Iterable[dict[str, Any]]) -> None:
        """These rows were written: forget the oldest reports of jobs that have too many bytes."""
        for row in rows:
            self._written[row["job"]] = self._written.get(row["job"], 0) + len(row["report"])
        for job in {row["job"] for row in rows}:
            if self._written[job] >= LOOK_BYTES:
                self._forget_oldest(connection, job)
                self._written[job] = 0

    @staticmethod
    def _forget_oldest(connection: sa.Connection, job: str) -> None:
        of_job = _reports.c.job == job
        query = sa.select(_reports.c.id, _size).where(of_job).order_by(_reports.c.id.desc())
        found = connection.execute(query).all()
        num_kept = max(num_within([row.size for row in found], KEEP_BYTES), 1)
        if num_kept < len(found):
            connection.execute(_reports.delete().where(of_job, _reports.c.id <= found[num_kept].id))


def page_of(connection: sa.Connection, job: str, since: int | None, limit: int) -> Sequence[sa.Row[Any]]:
    """The first reports after an id, or the last ones, oldest first: no more than ``limit``, and than fit a page."""
    of_job = _reports.c.job == job
    query = sa.select(_reports.c.id, _size).where(of_job).limit(limit)
    if since is None:
        query = query.order_by(_reports.c.id.desc())
    else:
        query = query.where(_reports.c.id > since).order_by(_reports.c.id)
    sizes = connection.execute(query).all()
    if not sizes:
        return []
    last = sizes[max(num_within([row.size for row in sizes], ANSWER_BYTES), 1) - 1].id
    ends = sorted((sizes[0].id, last))
    page = sa.select(_reports).where(of_job, _reports.c.id.between(*ends)).order_by(_reports.c.id)
    return connection.execute(page).all()


def fitting(connection: sa.Connection, ids: Sequence[int]) -> float:
    """The share of these reports that fits a page; at most 1."""
    total = connection.scalar(sa.select(sa.func.sum(_size)).where(_reports.c.id.in_(ids))) or 0
    return min(ANSWER_BYTES / total, 1.0) if total else 1.0


def num_within(sizes: Sequence[int], most: int) -> int:
    """How many of these, from the first on, have at most so many bytes together."""
    total = 0
    for number, size in enumerate(sizes):
        total += size
        if total > most:
            return number
    return len(sizes)
