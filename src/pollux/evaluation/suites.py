"""What a suite is: a published evaluation, or one of ours, as data. ``pollux compare --suite NAME`` runs one.

A suite is a list of cases (a policy with its settings on a workload in a configuration), the published figures beside
them, and what to plot. Cases with the same ``table`` are compared with each other; one ``label`` means the same
in every table. Rows of tables are plain mappings from a column's key to its value, so that terminal, page
and file show the same. :mod:`pollux.evaluation.registry` names the suites, :mod:`pollux.evaluation.verdicts` says which
policy is first, :mod:`pollux.evaluation.suite_page` draws them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pollux.evaluation.scale import Size
from pollux.policy import PolicySettings
from pollux.simulator.config import SimulationConfig

Row = Mapping[str, Any]  # values by key of a column; numbers, but for names and flags
_NewRow = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One simulation."""

    table: str
    label: str
    workload: str  # as on the command line: a file, or builtin:NAME
    traces: str | None
    policy: str
    settings: PolicySettings = field(default_factory=PolicySettings)
    config: SimulationConfig = field(default_factory=SimulationConfig)
    x: float | None = None  # its place on the x axis of figures with lines
    line: str = ""  # on which
    is_aside: bool = False  # in another configuration than the rest of its table: no verdict names it first


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyCase:
    """One simulated study, or (``is_one_job``) one job in its place."""

    table: str
    label: str
    traces: str | None
    config: SimulationConfig
    trials: int
    seed: int = 0
    policy: str = "pollux"
    sampler: Literal["tpe", "random"] = "random"
    pruner: Literal["asha", "none"] = "asha"
    parallel: int | None = None
    replicas: int | None = None  # of every trial; None: as scheduled
    is_promising: bool = True  # slots follow the trials' promise
    num_beside: int = 0  # jobs of another tenant
    is_one_job: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Published figures for a row of a table: of an artifact, measured with its own code."""

    table: str
    label: str
    values: Mapping[str, float]  # by key of a column
    x: float | None = None
    line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    heading: str
    key: str
    form: str  # of the value times ``factor``
    factor: float = 1.0
    rank: int = 0  # the highest are left out first where a terminal is narrow

    def text(self, row: Row) -> str:
        """Of a row that may not have it."""
        value = row.get(self.key)
        return "" if value is None else format(value * self.factor, self.form)


BOUND_COLUMN = Column(heading="above bound %", key="above_bound", form=",.0f", factor=100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A figure of means over tables: a bar for each label, or a line of each ``line`` over x."""

    title: str
    key: str  # of the column
    factor: float = 1.0
    unit: str = ""
    x: str = ""  # what x is; without it there are bars
    lines: tuple[tuple[str, str], ...] = ()  # (name, key) of lines, where rows do not say on which line they are
    is_log: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    name: str
    title: str
    about: str
    is_quick: bool = False  # some of its cases are left out
    cases: tuple[Case, ...] = ()
    sizes: tuple[Size, ...] = ()  # of clusters to decide for, instead of simulations
    studies: tuple[StudyCase, ...] = ()
    measurements: Path | None = None  # of others, that models are compared with, instead of simulations
    published: tuple[Published, ...] = ()
    reference: str = ""  # label of the published row that others are compared with
    base: str = ""  # label of the row of this run that makespans and average JCTs are ratios to
    has_means: bool = True  # means over tables make sense
    columns: tuple[Column, ...] = ()
    charts: tuple[Chart, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        """The title of what was run."""
        return f"{self.title} (quick: fewer cases)" if self.is_quick else self.title


# Rows -----------------------------------------------------------------------------------------


def all_rows(suite: Suite, measured: Sequence[Row]) -> list[_NewRow]:
    """Published rows and measured ones, by table; then their means, if there are several tables and means make sense.

    Each says how it stands to the table's reference.
    """
    published = [
        {"workload": p.table, "policy": p.label, "is_published": True, "x": p.x, "line": p.line, **p.values}
        for p in suite.published
    ]
    tables: dict[str, list[_NewRow]] = {}
    for row in (*published, *({"is_published": False, **row} for row in measured)):
        tables.setdefault(row["workload"], []).append(row)
    if suite.has_means and len(tables) > 1:
        tables[f"mean of {len(tables)}"] = _means(list(tables.values()), f"mean of {len(tables)}")
    for rows in tables.values():
        reference_s = next((row["avg_jct_s"] for row in rows if row["policy"] == suite.reference), None)
        for row in rows if reference_s else ():
            row["ratio_to_published"] = row["avg_jct_s"] / reference_s
        base = next((row for row in rows if suite.base and row["policy"] == suite.base), None)
        for row in rows:
            if base is not None and not row["is_published"]:
                row["makespan_ratio"] = row["makespan_s"] / base["makespan_s"]
                row["jct_ratio"] = row["avg_jct_s"] / base["avg_jct_s"]
        bounds = [row["bound_jct_s"] for row in rows if row.get("bound_jct_s") and not row.get("is_aside")]
        for row in rows if bounds else ():
            if row["is_published"] and "avg_jct_s" in row:  # no policy there shares slots, so the highest bound holds
                row["above_bound"] = row["avg_jct_s"] / max(bounds) - 1
    return [row for rows in tables.values() for row in rows]


def by_table(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["workload"], []).append(row)
    return found


def chart_rows(rows: Sequence[Row], *, has_x: bool) -> list[Row]:
    """What a figure shows: means, where there are any; with an x every row is a point otherwise."""
    means = [row for row in rows if row.get("is_mean")]
    return means or (list(rows) if has_x else next(iter(by_table(rows).values()), []))


def _means(tables: Sequence[Sequence[Row]], name: str) -> list[_NewRow]:
    """Of every label that is in all tables."""
    by_label: dict[str, list[Row]] = {}
    for row in (row for rows in tables for row in rows):
        by_label.setdefault(row["policy"], []).append(row)
    return [
        {
            "workload": name,
            "policy": label,
            "is_published": mine[0]["is_published"],
            "is_mean": True,
            **{key: mine[0][key] for key in ("line", "policy_name", "is_aside") if key in mine[0]},
            **{key: math.fsum(row[key] for row in mine) / len(mine) for key in _numbers(mine)},
        }
        for label, mine in by_label.items()
        if len(mine) == len(tables)
    ]


def _numbers(rows: Sequence[Row]) -> list[str]:
    """Keys that are numbers in all rows."""
    return [
        key
        for key in rows[0]
        if all(isinstance(row.get(key), int | float) and not isinstance(row[key], bool) for row in rows)
    ]
