"""``pollux demo --simulate``: a few policies on a small workload, in seconds, with a report to look at."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from pollux.cli.compare import end_with, report_title, run_setups
from pollux.cli.outputs import announce, output_console, write_page
from pollux.cli.policy_tables import policy_table
from pollux.cli.setups import Setup, command_line
from pollux.policy import PolicySettings
from pollux.reports.numbers import duration
from pollux.reports.page import Heading
from pollux.reports.simulation_page import html_report
from pollux.simulator.config import SimulationConfig
from pollux.simulator.result import SimulationResult, group_results

WORKLOAD = "builtin:small"
POLICIES = ("pollux", "tiresias", "optimus", "equal", "srtf", "fifo")
_SKETCH_WIDTH = 48  # characters of the longest bar


def sketch(results: Sequence[SimulationResult]) -> list[str]:
    """Bars of average completion time, shortest first."""
    ranked = sorted(results, key=lambda result: result.avg_jct_s)
    longest = ranked[-1].avg_jct_s or 1.0
    label_width = max(len(result.policy) for result in ranked)
    return [
        f"{result.policy:>{label_width}}  {'█' * max(1, round(_SKETCH_WIDTH * result.avg_jct_s / longest))} "
        f"{duration(result.avg_jct_s)}"
        for result in ranked
    ]


def print_sketch(console: Console, results: Sequence[SimulationResult]) -> None:
    console.print("\nHow long a job takes on average, from submission to end:")
    for number, line in enumerate(sketch(results)):
        console.print(f"[bold green]{escape(line)}[/]" if number == 0 else escape(line))


def simulated_demo(html: Path, seed: int, jobs: int | None) -> None:
    """Compare Pollux with other schedulers on 30 jobs and 16 GPUs."""
    config = SimulationConfig(num_nodes=4, gpus_per_node=4)
    settings = PolicySettings(resize_s=config.resize_s, seed=seed)
    setups = [
        Setup(workload=WORKLOAD, traces=None, policy=policy, config=config, settings=settings) for policy in POLICIES
    ]
    results, failed = run_setups(setups, jobs or os.cpu_count() or 1)
    console = output_console()
    for workload, by_policy in group_results(results).items():
        title = f"{results[0].num_jobs} jobs ({workload}) on {config.num_nodes} nodes of {config.gpus_per_node} GPUs"
        console.print(policy_table(console, title, by_policy))
    print_sketch(console, results)
    arguments = [("--workload", WORKLOAD), *(("--policy", policy) for policy in POLICIES), ("--seed", seed)]
    command = command_line("compare", arguments, setups[0])
    heading = Heading(title=report_title(results), command=command)
    write_page(html, lambda url: html_report(results, heading, plotly_url=url))
    announce(html)
    end_with(failed)
