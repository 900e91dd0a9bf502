"""Tables that compare policies, with as many columns as the terminal has room for.

``compare``, ``replay``, suites and ``demo --simulate`` print them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pollux.cli.simulation_notes import are_alike
from pollux.simulator.result import SimulationResult, group_results, half_range_s, mean_of

# (heading, attribute, format, factor, rank: the highest are left out first where the terminal is narrow)
_COLUMNS: tuple[tuple[str, str, str, float, int], ...] = (
    ("avg JCT s", "jct_s.mean", ",.0f", 1, 0),
    ("p50 JCT s", "jct_s.p50", ",.0f", 1, 6),
    ("p99 JCT s", "jct_s.p99", ",.0f", 1, 1),
    ("makespan h", "makespan_s", ",.2f", 1 / 3600, 2),
    ("ρ p99", "rho.p99", ".2f", 1, 5),
    ("ρ worst", "rho.max", ".2f", 1, 7),
    ("resizes", "resizes_mean", ".2f", 1, 3),
    ("GPU-h", "gpu_hours", ",.0f", 1, 8),
    ("node-h", "node_hours", ",.0f", 1, 9),
    ("effic. %", "efficiency_mean", ".0f", 100, 4),
    ("decision ms", "decision_s.mean", ".2f", 1000, 10),
)
_SMALL = 10.0  # columns whose values are all below this get two decimals


def fitting_table(console: Console, make: Callable[[int], Table], max_rank: int) -> tuple[Table, list[str]]:
    """``make(rank)`` for the highest rank whose table fits the terminal, or 0, and the headings that are left out."""
    unlimited = console.options.update(width=10_000)
    whole = table = make(max_rank)
    for rank in range(max_rank - 1, -1, -1):
        if console.measure(table, options=unlimited).maximum <= console.width:
            break
        table = make(rank)
    shown = {str(column.header) for column in table.columns}
    return table, [str(column.header) for column in whole.columns if str(column.header) not in shown]


def print_fitting(console: Console, tables: Iterable[tuple[Table, Sequence[str]]]) -> None:
    """Tables, and once for all of them which columns are left out."""
    left_out: dict[str, None] = {}
    for table, headings in tables:
        console.print(table)
        left_out.update(dict.fromkeys(headings))
    if left_out:
        more = f"{len(left_out)} more column{'s' * (len(left_out) > 1)}"
        text = f"{more} with --json, or on a wider terminal: {', '.join(left_out)}"
        console.print(Text(text, style="dim"))


ByPolicy = Mapping[str, Sequence[SimulationResult]]


def policy_table(console: Console, title: str, by_policy: ByPolicy) -> Table:
    """Policies as rows, with as many columns as fit."""
    return _fitting(console, title, by_policy)[0]


def _fitting(console: Console, title: str, by_policy: ByPolicy) -> tuple[Table, list[str]]:
    return fitting_table(
        console, lambda max_rank: _table(title, by_policy, max_rank), max(rank for *_, rank in _COLUMNS)
    )


def _table(title: str, by_policy: ByPolicy, max_rank: int) -> Table:
    """The mean over each policy's results, and how many times the best one's JCT that is.

    Results on one workload differ by their seed; half their range is shown unless it is 0.
    """
    is_one_workload = len({result.workload for results in by_policy.values() for result in results}) == 1
    spreads = {policy: half_range_s(results) * is_one_workload for policy, results in by_policy.items()}
    columns = [column for column in _COLUMNS if column[-1] <= max_rank]
    if all(result.above_bound is not None for results in by_policy.values() for result in results):
        columns.insert(1, ("above bound %", "above_bound", ",.0f", 100, 0))
    if all(result.cost is not None for results in by_policy.values() for result in results):
        columns.append(("cost", "cost", ",.2f", 1, 0))
    table = Table(title=Text(title), title_justify="left")
    table.add_column("policy", no_wrap=True)
    table.add_column("× best", justify="right", no_wrap=True)
    for heading, *_ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
        if heading == _COLUMNS[0][0] and any(spreads.values()):
            table.add_column("± half range", justify="right", no_wrap=True)
    averages = {policy: mean_of(results, "jct_s.mean") for policy, results in by_policy.items()}
    best = min(averages.values())
    forms = []
    for _, name, form, factor, _ in columns:
        most = max(mean_of(results, name) * factor for results in by_policy.values())
        forms.append(",.2f" if form == ",.0f" and most < _SMALL else form)  # of few jobs on few slots
    for policy, results in by_policy.items():
        is_best = averages[policy] == best
        ratio = averages[policy] / best if best > 0 else 1.0
        cells = [
            f"{mean_of(results, name) * factor:{form}}"
            for (_, name, _, factor, _), form in zip(columns, forms, strict=True)
        ]
        if any(spreads.values()):
            cells.insert(1, f"{spreads[policy]:{forms[0]}}")
        table.add_row(Text(policy), f"{ratio:.2f}", *cells, style="bold" if is_best else "")
    return table


def print_tables(console: Console, results: Sequence[SimulationResult]) -> None:
    """One table per workload; with several, one more of the means over them."""
    groups = group_results(results)
    tables = []
    for workload, by_policy in groups.items():
        num_seeds = max(len(seeds) for seeds in by_policy.values())
        alike = ", all alike" * all(map(are_alike, by_policy.values()))
        title = workload + (f" (mean of {num_seeds} seeds{alike})" if num_seeds > 1 else "")
        tables.append(_fitting(console, title, by_policy))
    if len(groups) > 1:
        by_policy = {}
        for result in results:
            by_policy.setdefault(result.policy, []).append(result)
        tables.append(_fitting(console, f"all {len(groups)} workloads (mean)", by_policy))
    print_fitting(console, tables)
