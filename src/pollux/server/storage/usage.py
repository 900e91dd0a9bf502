"""Writes and sums up the table of usage. :class:`pollux.server.live.meter.Meter` fills it, queries read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from pollux.api.usage import USAGE_KEYS, UsageKey, UsageRow
from pollux.server.storage.database import Database
from pollux.server.storage.tables import usage as _usage

CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsagePlace:
    """Where an amount belongs."""

    day: str
    job: str
    owner: str
    team: str
    accelerator: str


@dataclass(slots=True, kw_only=True)
class Amount:
    slot_s: float = 0.0
    useful_s: float = 0.0
    cost: float = 0.0


def _adding(insert: Callable[[sa.Table], Any]) -> Any:
    """One statement for all rows: thousands of jobs are added every few seconds."""
    added = insert(_usage)
    sums = {name: _usage.c[name] + added.excluded[name] for name in Amount.__dataclass_fields__}
    return added.on_conflict_do_update(index_elements=list(UsagePlace.__dataclass_fields__), set_=sums)


_add = {"sqlite": _adding(sqlite.insert), "postgresql": _adding(postgresql.insert)}


class UsageStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, amounts: Mapping[UsagePlace, Amount]) -> None:
        """To what is there, all of them or none."""
        rows = [
            {name: getattr(part, name) for part in pair for name in type(part).__dataclass_fields__}
            for pair in amounts.items()
        ]
        if rows:
            with self._database.writing() as connection:
                connection.execute(_add[connection.dialect.name], rows)

    def of_jobs(self, jobs: Sequence[str]) -> dict[str, float]:
        """Slot-seconds that were recorded, by job."""
        query = sa.select(_usage.c.job, sa.func.sum(_usage.c.slot_s)).group_by(_usage.c.job)
        with self._database.reading() as connection:
            wanted = set(jobs)
            return {job: total for job, total in connection.execute(query) if job in wanted}

    def lately(self, since_day: str) -> list[tuple[str, float, float]]:
        """Owner, slot-seconds and the time (noon) of each day since then."""
        columns = _usage.c
        query = sa.select(columns.owner, sa.func.sum(columns.slot_s), columns.day).where(columns.day >= since_day)
        with self._database.reading() as connection:
            rows = connection.execute(query.group_by(columns.owner, columns.day)).all()
        return [(owner, total, datetime.fromisoformat(f"{day}T12:00").timestamp()) for owner, total, day in rows]

    def table(self, by: Sequence[UsageKey], since: str | None, until: str | None) -> list[UsageRow]:
        """Sums from day ``since`` to day ``until``, both included, in order of their keys."""
        columns = _usage.c
        expressions: dict[str, sa.ColumnElement[str]] = {
            "month": sa.func.substr(columns.day, 1, 7),
            "day": columns.day,
            "team": columns.team,
            "user": columns.owner,
            "job": columns.job,
        }
        keys = [expressions[key].label(f"key_{key}") for key in USAGE_KEYS if key in by]
        gpu_s = sa.func.sum(sa.case((columns.accelerator == CPU, 0.0), else_=columns.slot_s))
        sums = (sa.func.sum(columns.slot_s), gpu_s, sa.func.sum(columns.useful_s), sa.func.sum(columns.cost))
        query = sa.select(*keys, *sums)
        if since is not None:
            query = query.where(columns.day >= since)
        if until is not None:
            query = query.where(columns.day <= until)
        if keys:
            query = query.group_by(*keys).order_by(*keys)
        with self._database.reading() as connection:
            rows = connection.execute(query).all()
        found = []
        for row in rows:
            names = dict(zip([key for key in USAGE_KEYS if key in by], row, strict=False))
            slot_s, gpu, useful_s, cost = (float(value or 0.0) for value in row[len(keys) :])
            found.append(
                UsageRow(
                    month=names.get("month"),
                    day=names.get("day"),
                    team=names.get("team"),
                    user=names.get("user"),
                    job=names.get("job"),
                    slot_hours=slot_s / 3600,
                    gpu_hours=gpu / 3600,
                    goodput_hours=useful_s / 3600,
                    cost=cost,
                )
            )
        return found
