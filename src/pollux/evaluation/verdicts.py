"""The verdict on a suite: the order of its rows, and a sentence that says which policy is first and by how much.

The terminal (:mod:`pollux.cli.suites`) and the page (:mod:`pollux.evaluation.suite_page`) show it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pollux.evaluation.suites import Row, Suite, by_table
from pollux.reports.numbers import duration

OURS = "pollux"  # the policy whose rows are marked
MARK = "†"  # of rows that were not simulated here
MARKED = f"{MARK} not simulated here: measured with the artifact's own code"


def is_ours(row: Row) -> bool:
    return bool(row.get("policy_name") == OURS)


def label_of(row: Row) -> str:
    """The row's label, with a mark if it was not simulated here."""
    return f"{row['policy']} {MARK}" if row["is_published"] else str(row["policy"])


def shown_tables(suite: Suite, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """That of the means first, if there is one; in each the best row first, by its first column.

    Rows along an x (loads, intervals, sizes) stay in its order.
    """
    tables = by_table(rows)
    order = sorted(tables, key=lambda name: not tables[name][0].get("is_mean"))
    return {name: _ranked(suite, tables[name]) for name in order}


def _ranked(suite: Suite, rows: list[Row]) -> list[Row]:
    if len({row.get("x") for row in rows}) > 1 or not suite.columns:
        return rows
    key = suite.columns[0].key
    return sorted(rows, key=lambda row: (row.get(key) is None, row.get(key)))


def verdicts(suite: Suite, rows: Sequence[Row]) -> list[str]:
    """One sentence about the means; without means, one about every table."""
    tables = shown_tables(suite, rows)
    means = {name: mine for name, mine in tables.items() if mine[0].get("is_mean")}
    chosen = means or tables
    found = [(name, _verdict(suite, mine)) for name, mine in chosen.items()]
    return [text if len(chosen) == 1 else f"{name}: {text}" for name, text in found if text]


def _verdict(suite: Suite, rows: Sequence[Row]) -> str:
    here = [row for row in rows if not row["is_published"] and not row.get("is_aside") and "avg_jct_s" in row]
    if not here:
        return _growth(suite, rows)
    best, *rest = sorted(here, key=lambda row: float(row["avg_jct_s"]))
    text = f"{best['policy']} is first: a job takes {duration(best['avg_jct_s'])} on average."
    others = [row for row in rest if row.get("policy_name") != best.get("policy_name")]
    if others:
        text += f" The next policy, {others[0]['policy']}, takes {_compared(others[0], best)}."
    elif rest:
        text += f" The next, {rest[0]['policy']}, takes {_compared(rest[0], best)}."
    reference = next((row for row in rows if row["is_published"] and row["policy"] == suite.reference), None)
    if reference is not None:
        text += f" Measured with its own code, {reference['policy']}, takes {_compared(reference, best)}."
    return text


def _compared(row: Row, best: Row) -> str:
    took = duration(row["avg_jct_s"])
    return f"{took}, {row['avg_jct_s'] / best['avg_jct_s']:.2f} times as long" if best["avg_jct_s"] > 0 else took


def _growth(suite: Suite, rows: Sequence[Row]) -> str:
    """How the first figure's value grows along its x."""
    chart = next((chart for chart in suite.charts if chart.x), None)
    known = [row for row in rows if chart is not None and row.get(chart.key) is not None]
    if chart is None or not known:
        return ""
    told = [f"{row[chart.key] * chart.factor:,.3g} {chart.unit} with {row['policy']}" for row in known]
    which = f", {chart.lines[0][0]}" if chart.lines else ""
    return f"{chart.title}{which}: {told[0]}{f', {told[-1]}' if len(told) > 1 else ''}."
