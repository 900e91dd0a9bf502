"""``pollux compare``: every policy on every workload with every seed, in parallel processes, side by side."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from pollux.cli import simulation_notes as notes
from pollux.cli.bounds import BoundFinder
from pollux.cli.option_groups import expanded
from pollux.cli.outputs import Outputs
from pollux.cli.parallel import run_all
from pollux.cli.policy_tables import print_tables
from pollux.cli.setups import Setup, check_setup, command_line, load_setup, make_setup, summary_row
from pollux.cli.simulation_options import POLICY_HELP, WORKLOAD_HELP, SimulationOptions, TracesOption
from pollux.errors import InvalidValueError, SimulationError
from pollux.reports.page import Heading
from pollux.reports.simulation_page import html_report
from pollux.simulator.result import SimulationResult, group_results, mean_of
from pollux.simulator.source import BUILTIN_PREFIX
from pollux.simulator.workload import Workload
from pollux.version import __version__

FORMAT = "pollux-compare/1"
DRAWN_SEEDS = 3  # how many seeds a built-in workload is drawn with unless the user says how many


def parse_seeds(text: str | None, single: Sequence[int] | None = None) -> list[int]:
    """Of ``--seeds 3`` (three: 0, 1, 2), ``--seeds 0,5`` (these) or ``--seed 0 --seed 5``; empty if neither is given.

    Raises:
        InvalidValueError: both are, or one is not a whole number from 0 on.
    """
    if text is not None and single:
        raise InvalidValueError("--seeds and --seed say the same thing; give one of them")
    words = [word.strip() for word in text.split(",")] if text is not None else [str(seed) for seed in single or ()]
    for word in words:
        if not word.isdecimal():
            raise InvalidValueError(f"seeds {text or ', '.join(words)!r}; whole numbers from 0 on, as in 3 or 0,1,2")
    if text is not None and len(words) == 1:
        if words == ["0"]:
            raise InvalidValueError(
                "--seeds 0 is no seed at all; whole numbers: how many, as in 3, or which, as in 0,1"
            )
        return list(range(int(words[0])))
    return list(dict.fromkeys(int(word) for word in words))


def default_seeds(workload: str) -> range:
    """Jobs of a built-in workload are drawn at random, so one seed says little; those of a file are always the same."""
    return range(DRAWN_SEEDS if workload.startswith(BUILTIN_PREFIX) else 1)


def check_all(setups: Sequence[Setup]) -> tuple[list[int], list[str]]:
    """(number of jobs, name of the workload) of each, once all of them are known to be usable.

    Types of GPU that no job can use are noted. Two files of the same name in different directories are called by their
    whole path.
    """
    loaded: dict[tuple[str, int], Workload] = {}
    idle: list[str] = []
    for setup in setups:
        key = (setup.workload, setup.settings.seed)
        if key not in loaded:
            loaded[key], applications = load_setup(setup)
            idle += notes.idle_types(loaded[key], applications, setup.config)
        check_setup(setup, loaded[key])
    notes.say(idle)
    workloads = [loaded[setup.workload, setup.settings.seed] for setup in setups]
    origins: dict[str, set[str]] = {}
    for setup, workload in zip(setups, workloads, strict=True):
        origins.setdefault(workload.name, set()).add(setup.workload)
    names = [
        workload.name if len(origins[workload.name]) == 1 else setup.workload
        for setup, workload in zip(setups, workloads, strict=True)
    ]
    return [len(workload.jobs) for workload in workloads], names


def run_setups(
    setups: Sequence[Setup], num_processes: int, *, is_bounded: bool = False
) -> tuple[list[SimulationResult], dict[str, str]]:
    """Check all, then run all: results in the order of the setups, and why each policy that failed did.

    ``is_bounded``: results come with the lower bound of their workload.

    Results have the names of their setups. A policy that failed once has no results at all: a mean over fewer runs
    would mislead.

    Raises:
        SimulationError: all of them failed.
    """
    num_jobs, names = check_all(setups)
    outcomes = run_all(setups, num_jobs, num_processes)
    errors = {
        setup.name: outcome
        for setup, outcome in zip(setups, outcomes, strict=True)
        if isinstance(outcome, SimulationError)
    }
    if all(setup.name in errors for setup in setups):
        raise errors[setups[0].name]
    bounds = BoundFinder(is_active=is_bounded)
    results = [
        dataclasses.replace(
            outcome,
            workload=setup.table or name,
            policy=setup.label or outcome.policy,
            bound_jct_s=bounds.of(setup),
        )
        for setup, outcome, name in zip(setups, outcomes, names, strict=True)
        if setup.name not in errors and not isinstance(outcome, SimulationError)
    ]
    return results, {policy: str(error) for policy, error in errors.items()}


def end_with(failed: Mapping[str, str]) -> None:
    """Say which policies failed, and exit with code 1 if any did. Called after the results are shown."""
    for policy, reason in failed.items():
        typer.echo(f"error: {policy} is left out: {reason}", err=True)
    if failed:
        raise typer.Exit(1)


# Printing -------------------------------------------------------------------------------------


def comparison_json(results: Sequence[SimulationResult], failed: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What ``--output`` and ``--json`` give: the means by workload and policy, and every run without its series.

    ``failed``: reasons, by policy.
    """
    summary = []
    for workload, by_policy in group_results(results).items():
        best = min(mean_of(seeds, "jct_s.mean") for seeds in by_policy.values())
        for policy, seeds in by_policy.items():
            row = summary_row(workload, policy, seeds, best)
            if len(seeds) > 1:
                averages = [result.avg_jct_s for result in seeds]
                row |= {"avg_jct_min_s": min(averages), "avg_jct_max_s": max(averages)}
            summary.append(row)
    return {
        "format": FORMAT,
        "pollux_version": __version__,
        "summary": summary,
        "results": [result.to_json(with_series=False) for result in results],
        "failed": dict(failed or {}),
    }


# Command --------------------------------------------------------------------------------------


# Beside --suite, which says all else itself.
_WITH_SUITE = {
    *("suite", "is_quick", "most_workloads", "artifacts", "policy", "jobs", "is_bounded"),
    *("output", "html", "is_published", "as_json", "data", "server"),
}


def check_suite_options(context: typer.Context) -> None:
    """Refuse options that a suite would ignore: it has its own workloads, cluster and settings.

    Raises:
        InvalidValueError: an option was given that a suite does not take.
    """
    is_suite = context.params["suite"] is not None
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        is_given = source is not None and source.name == "COMMANDLINE"
        if is_suite and is_given and name not in _WITH_SUITE:
            raise InvalidValueError(
                f"{parameter.opts[0]} is not for --suite, which says its own; leave one of them out"
            )
        if not is_suite and is_given and name in ("is_quick", "most_workloads", "artifacts"):
            raise InvalidValueError(f"{parameter.opts[0]} is for suites; add --suite NAME")


@expanded
def compare(
    context: typer.Context,
    options: SimulationOptions,
    outputs: Outputs,
    workload: Annotated[
        list[str] | None,
        typer.Option("--workload", metavar="FILE|builtin:NAME", help=WORKLOAD_HELP + " May be repeated."),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", metavar="NAME", help=f"{POLICY_HELP} May be repeated.")
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option("--suite", metavar="NAME", help="Instead of both: a published evaluation; list: which there are."),
    ] = None,
    is_quick: Annotated[bool, typer.Option("--quick", help="Fewer cases of the suite.")] = False,
    most_workloads: Annotated[
        int | None,
        typer.Option("--workloads", metavar="N", min=1, help="Only the first N workloads of the suite."),
    ] = None,
    artifacts: Annotated[
        Path | None,
        typer.Option(
            "--artifacts",
            metavar="DIR",
            envvar="POLLUX_ARTIFACTS",
            help="Folder with osdi21/ and sia/, the published data of suites; ../shared if left out and there.",
        ),
    ] = None,
    traces: TracesOption = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            "--seeds",
            metavar="N",
            help="How many seeds to average over, or which: 0,5. "
            f"Left out: {DRAWN_SEEDS} for built-in workloads, whose jobs are drawn at random; 1 for files.",
        ),
    ] = None,
    seed: Annotated[list[int] | None, typer.Option("--seed", help="One seed. May be repeated.")] = None,
    is_bounded: Annotated[
        bool,
        typer.Option(
            "--bound", help="Also a proven lower bound on the average JCT, and each policy's distance from it."
        ),
    ] = False,
    jobs: Annotated[int | None, typer.Option("--jobs", help="Processes; one per core if left out.", min=1)] = None,
) -> None:
    """Run every policy on every workload and print them side by side."""
    check_suite_options(context)
    outputs.check()
    num_processes = jobs or os.cpu_count() or 1
    if suite is not None:
        from pollux.cli.suites import compare_suite  # it imports this module

        compare_suite(
            suite,
            artifacts=artifacts,
            policies=policy or (),
            is_quick=is_quick,
            most_workloads=most_workloads,
            is_bounded=is_bounded,
            num_processes=num_processes,
            outputs=outputs,
        )
        return
    if not workload or not policy:
        raise InvalidValueError("compare what? --workload and --policy are needed, or --suite NAME")
    workloads, policies = list(dict.fromkeys(workload)), list(dict.fromkeys(policy))
    asked = parse_seeds(seeds, seed)
    setups = [
        make_setup(source, traces, name, options, number)
        for source, name in itertools.product(workloads, policies)
        for number in asked or default_seeds(source)
    ]
    notes.say(notes.unread_settings(policies, setups[0].settings))
    results, failed = run_setups(setups, num_processes, is_bounded=is_bounded)
    notes.say(notes.equal_seeds(results))
    command = command_line("compare", _arguments(workloads, policies, asked), setups[0]) + " --bound" * is_bounded
    heading = Heading(title=report_title(results), command=command)
    outputs.deliver(
        heading,
        kind="compare",
        document=lambda: comparison_json(results, failed),
        summary=lambda: comparison_json(results)["summary"],
        page=lambda plotly_url: html_report(results, heading, plotly_url=plotly_url),
        show=lambda console: print_tables(console, results),
    )
    end_with(failed)


def _arguments(workloads: Sequence[str], policies: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, str]]:
    """So that the command says its seeds where one list of them holds for all workloads."""
    defaults = {tuple(default_seeds(source)) for source in workloads}
    used = tuple(seeds) or (defaults.pop() if len(defaults) == 1 else ())
    return [
        *(("--workload", source) for source in workloads),
        *(("--policy", name) for name in policies),
        *([("--seeds" if len(used) > 1 else "--seed", ",".join(map(str, used)))] if used else []),
    ]


def report_title(results: Sequence[SimulationResult]) -> str:
    groups = group_results(results)
    num_policies = len({result.policy for result in results})
    where = next(iter(groups)) if len(groups) == 1 else f"{len(groups)} workloads"
    return f"{num_policies} {'policies' if num_policies > 1 else 'policy'} on {Path(where).name}"
