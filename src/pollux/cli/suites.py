"""``pollux compare --suite NAME``: runs all cases of a suite in parallel, beside an artifact's figures."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import multiprocessing
import os
import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pollux.cli.compare import end_with, run_setups
from pollux.cli.outputs import Outputs, output_console
from pollux.cli.policy_tables import fitting_table, print_fitting
from pollux.cli.progress import Tally, progress_bar, telling
from pollux.cli.setups import Setup, summary_row
from pollux.errors import InputFileError, InvalidValueError, UnknownNameError
from pollux.evaluation import scale, truth
from pollux.evaluation.catalogue import SCALE_TABLE, Artifacts
from pollux.evaluation.registry import SUITES, make_suite
from pollux.evaluation.scale import Size
from pollux.evaluation.suite_page import suite_report
from pollux.evaluation.suites import BOUND_COLUMN, Case, Row, StudyCase, Suite, all_rows
from pollux.evaluation.verdicts import MARKED, label_of, shown_tables, verdicts
from pollux.reports.page import Heading
from pollux.reports.versions import versions
from pollux.simulator.result import SimulationResult, group_results, mean_of
from pollux.version import __version__

FORMAT = "pollux-suite/1"
LIST = "list"
_BESIDE = Path("..") / "shared"  # where the published data is looked for without --artifacts


def find_artifacts(folder: Path | None) -> Artifacts:
    """Of ``--artifacts``, or beside the working directory if there is anything.

    Raises:
        InputFileError: the folder that was named has none of them.
    """
    found = Artifacts(folder=_BESIDE if folder is None else folder)
    has_measurements = folder is not None and (folder / "thirdparty").is_dir()
    if folder is not None and not has_measurements and not any(found.part(name) for name in ("osdi21", "sia")):
        raise InputFileError(folder, "has neither osdi21/traces nor sia/traces; name the folder that they are in")
    return found


def choose_suite(name: str, artifacts: Artifacts, policies: Sequence[str], *, is_quick: bool) -> Suite:
    """The suite with what it has of these policies alone; with all if none is named.

    Raises:
        UnknownNameError: there is no such suite, or it has nothing of one of the policies.
        InvalidValueError: it has, but not with ``is_quick``.
        InputFileError: it needs data that is not there.
    """
    suite = make_suite(name, artifacts, is_quick=is_quick)
    if not policies:
        return suite
    known, all_known = _policies(suite), _policies(make_suite(name, artifacts))
    for policy in policies:
        if policy not in all_known:
            raise UnknownNameError(f"policy of suite {name}", policy, all_known)
        if policy not in known:
            raise InvalidValueError(
                f"policy {policy!r} of suite {name} is left out by --quick, which has {', '.join(sorted(known))}; "
                "run it without --quick"
            )
    return dataclasses.replace(
        suite,
        cases=tuple(case for case in suite.cases if case.policy in policies),
        studies=tuple(case for case in suite.studies if case.policy in policies),
        sizes=suite.sizes if scale.POLICY in policies else (),
    )


def first_workloads(suite: Suite, most: int) -> Suite:
    """The suite with its first workloads alone, and a note that says so."""
    tables = list(dict.fromkeys(case.table for case in suite.cases))
    if len(tables) <= most:
        return suite
    kept = set(tables[:most])
    return dataclasses.replace(
        suite,
        cases=tuple(case for case in suite.cases if case.table in kept),
        published=tuple(row for row in suite.published if row.table in kept),
        notes=(*suite.notes, f"Run on {', '.join(tables[:most])} alone; left out: {', '.join(tables[most:])}."),
    )


def _policies(suite: Suite) -> set[str]:
    known = {case.policy for case in suite.cases} | {case.policy for case in suite.studies}
    return known | ({scale.POLICY} if suite.sizes else set())


# Running --------------------------------------------------------------------------------------


def run_cases(
    cases: Sequence[Case], num_processes: int, *, is_bounded: bool = False
) -> tuple[list[dict[str, Any]], list[SimulationResult], dict[str, str]]:
    """Rows, results, and the reasons of labels that failed."""
    if not cases:
        return [], [], {}
    setups = [
        Setup(
            workload=case.workload,
            traces=case.traces,
            policy=case.policy,
            config=case.config,
            settings=case.settings,
            label=case.label,
            table=case.table,
        )
        for case in cases
    ]
    results, failed = run_setups(setups, num_processes, is_bounded=is_bounded)
    places = {(case.table, case.label): case for case in cases}
    rows = []
    for table, by_label in group_results(results).items():
        best_s = min(mean_of(seeds, "jct_s.mean") for seeds in by_label.values())
        for label, (result,) in by_label.items():
            case, rho = places[table, label], [job.rho for job in result.jobs]
            rows.append(
                summary_row(table, label, [result], best_s)
                | {"rho_p50": result.rho.p50, "x": case.x, "line": case.line}
                | {"policy_name": case.policy, "is_aside": case.is_aside}
                | {"deadlines_met": result.deadlines_met, "best_effort_jct_s": result.best_effort_jct_s}
                | {f"rho_above_{most}": sum(value > most for value in rho) / len(rho) for most in (1, 2)}
            )
    return rows, results, failed


def run_sizes(sizes: Sequence[Size]) -> list[dict[str, Any]]:
    """Measure one after the other, in this process, so that times are right."""
    if not sizes:
        return []
    rows = []
    tally = Tally(things="sizes", num_all=len(sizes))
    total = sum(size.num_jobs for size in sizes)
    with telling(tally), progress_bar() as progress:
        bar = progress.add_task("decisions", total=total, tally=tally)
        for size in sizes:
            found = dataclasses.asdict(scale.measure(size))
            label = f"{size.num_gpus:,} GPUs"
            rows.append({"workload": SCALE_TABLE, "policy": label, "x": size.num_gpus, "line": scale.POLICY, **found})
            progress.advance(bar, size.num_jobs)
            tally.num_done, tally.share = tally.num_done + 1, tally.share + size.num_jobs / total
    return rows


def run_studies(cases: Sequence[StudyCase], num_processes: int) -> list[dict[str, Any]]:
    """Simulate studies, several at a time.

    Raises:
        InvalidValueError: Optuna is not installed.
    """
    if not cases:
        return []
    if importlib.util.find_spec("optuna") is None:
        raise InvalidValueError('the suite tune needs optuna: pip install "pollux-scheduler[tune]"')
    from pollux.evaluation.studies import run_case

    rows: list[dict[str, Any]] = []
    tally = Tally(things="studies", num_all=len(cases))
    context = multiprocessing.get_context("spawn")
    with (
        telling(tally),
        progress_bar() as progress,
        ProcessPoolExecutor(min(num_processes, len(cases)), mp_context=context) as pool,
    ):
        bar = progress.add_task("studies", total=len(cases), tally=tally)
        for row in pool.map(run_case, cases):
            rows.append(dict(row))
            progress.advance(bar)
            tally.num_done, tally.share = len(rows), len(rows) / len(cases)
    return rows


def run_truth(folder: Path | None) -> list[dict[str, Any]]:
    """Compare models with measurements; says which are not there."""
    if folder is None:
        return []
    found, skipped = truth.measure(folder)
    for reason in skipped:
        typer.echo(f"note: left out: {reason}", err=True)
    return [{"workload": row.check, "policy": row.model, **dataclasses.asdict(row)} for row in found]


# Printing -------------------------------------------------------------------------------------


def suite_table(console: Console, suite: Suite, title: str, rows: Sequence[Row]) -> tuple[Table, list[str]]:
    """With as many columns as fit, and the others' headings; the best average in bold, an artifact's rows marked."""
    measured = [row["avg_jct_s"] for row in rows if not row["is_published"] and "avg_jct_s" in row]

    def make(max_rank: int) -> Table:
        table = Table(title=Text(title), title_justify="left")
        table.add_column("", no_wrap=True)
        columns = [column for column in suite.columns if column.rank <= max_rank]
        columns = [column for column in columns if any(row.get(column.key) is not None for row in rows)]
        for column in columns:
            table.add_column(column.heading, justify="right", no_wrap=True)
        for row in rows:
            is_best = not row["is_published"] and bool(measured) and row["avg_jct_s"] == min(measured)
            style = "italic" if row["is_published"] else "bold" if is_best else ""
            table.add_row(Text(label_of(row)), *(column.text(row) for column in columns), style=style)
        return table

    return fitting_table(console, make, max(column.rank for column in suite.columns))


def print_suite(console: Console, suite: Suite, rows: Sequence[Row]) -> None:
    """Print a suite: its description, its tables and the verdict."""
    console.print(Text(suite.heading, style="bold"))
    console.print(Text(suite.about))
    console.print()
    print_fitting(
        console, (suite_table(console, suite, name, mine) for name, mine in shown_tables(suite, rows).items())
    )
    if any(row["is_published"] for row in rows):
        console.print(Text(MARKED, style="dim"))
    for text in verdicts(suite, rows):
        console.print(Text(text))


def suite_json(
    suite: Suite,
    rows: Sequence[Row],
    results: Sequence[SimulationResult],
    failed: Mapping[str, str],
    **more: Any,
) -> dict[str, Any]:
    """All that ``scripts/results.py`` needs, and every run without its series."""
    return {
        "format": FORMAT,
        "pollux_version": __version__,
        "suite": suite.name,
        "title": suite.title,
        "about": suite.about,
        "notes": list(suite.notes),
        **more,
        "versions": versions(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        "columns": [dataclasses.asdict(column) for column in suite.columns],
        "rows": list(rows),
        "failed": dict(failed),
        "results": [result.to_json(with_series=False) for result in results],
    }


def list_suites(*, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({name: listed.summary for name, listed in SUITES.items()}, indent=1))
        return
    table = Table(title=Text("pollux compare --suite NAME"), title_justify="left", show_header=False)
    for name, listed in SUITES.items():
        table.add_row(name, listed.summary)
    output_console().print(table)


# Command --------------------------------------------------------------------------------------


def compare_suite(
    name: str,
    *,
    artifacts: Path | None,
    policies: Sequence[str],
    is_quick: bool,
    most_workloads: int | None = None,
    is_bounded: bool = False,
    num_processes: int,
    outputs: Outputs,
) -> None:
    """Run a suite and show it.

    Raises:
        PolluxError: there is no such suite, it lacks data, or none of it could be run.
    """
    if name == LIST:
        list_suites(as_json=outputs.as_json)
        return
    suite = choose_suite(name, find_artifacts(artifacts), policies, is_quick=is_quick)
    suite = suite if most_workloads is None else first_workloads(suite, most_workloads)
    if is_bounded and suite.cases:
        suite = dataclasses.replace(suite, columns=(suite.columns[0], BOUND_COLUMN, *suite.columns[1:]))
    for note in suite.notes:
        typer.echo(f"note: {note}", err=True)
    began = time.perf_counter()
    measured, results, failed = run_cases(suite.cases, num_processes, is_bounded=is_bounded)
    rows = all_rows(
        suite,
        [
            *measured,
            *run_studies(suite.studies, num_processes),
            *run_sizes(suite.sizes),
            *run_truth(suite.measurements),
        ],
    )
    words = ["pollux", "compare", "--suite", name, *(["--quick"] if is_quick else [])]
    words += [] if most_workloads is None else ["--workloads", str(most_workloads)]
    words += ["--bound"] if is_bounded else []
    words += [word for policy in policies for word in ("--policy", policy)]
    command = shlex.join([*words, *(["--artifacts", str(artifacts)] if artifacts is not None else [])])

    def document() -> dict[str, Any]:
        wall_s = round(time.perf_counter() - began, 1)
        return suite_json(suite, rows, results, failed, command=shlex.join(words), is_quick=is_quick, wall_s=wall_s)

    outputs.deliver(
        Heading(title=suite.heading, command=command),
        kind="compare",
        document=document,
        summary=lambda: rows,
        page=lambda plotly_url: suite_report(suite, rows, results, command=command, plotly_url=plotly_url),
        show=lambda console: print_suite(console, suite, rows),
    )
    end_with(failed)
