"""``pollux simulate``: one workload under one policy."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from pollux.cli import simulation_notes as notes
from pollux.cli.option_groups import expanded
from pollux.cli.outputs import Outputs
from pollux.cli.policy_options import POLICY_PANEL
from pollux.cli.progress import Tally, progress_bar, telling
from pollux.cli.setups import Setup, check_setup, command_line, load_setup, make_setup, run_setup, summary_row
from pollux.cli.simulation_options import POLICY_HELP, WORKLOAD_HELP, SimulationOptions, TracesOption
from pollux.reports.page import Heading
from pollux.reports.simulation_page import html_report
from pollux.simulator.result import SimulationResult


def result_table(result: SimulationResult) -> Table:
    table = Table(title=Text(f"{result.policy} on {result.workload}"), show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    jct, rho, decision = result.jct_s, result.rho, result.decision_s
    for name, value in (
        ("jobs", f"{result.num_jobs}"),
        ("cluster", result.cluster),
        ("average JCT", f"{jct.mean:,.1f} s"),
        ("median JCT", f"{jct.p50:,.1f} s"),
        ("99th percentile JCT", f"{jct.p99:,.1f} s"),
        ("makespan", f"{result.makespan_s / 3600:,.2f} h"),
        ("finish-time fairness ρ (mean, p99, worst)", f"{rho.mean:.2f}, {rho.p99:.2f}, {rho.max:.2f}"),
        ("resizes per job", f"{result.resizes_mean:.2f}"),
        ("GPU-hours held", f"{result.gpu_hours:,.1f}"),
        *((f"  of type {kind}", f"{hours:,.1f}") for kind, hours in result.gpu_hours_by_type.items()),
        ("node-hours, GPU-hours paid for", f"{result.node_hours:,.1f}, {result.slot_hours:,.1f}"),
        *((("cost", f"{result.cost:,.2f}"),) if result.cost is not None else ()),
        ("utilisation", f"{result.utilisation_mean:.1%}"),
        ("statistical efficiency", f"{result.efficiency_mean:.1%}"),
        ("decisions", f"{result.rounds:,}"),
        ("one decision (mean, p99)", f"{decision.mean * 1e3:.2f} ms, {decision.p99 * 1e3:.2f} ms"),
        ("simulated in", f"{result.wall_s:.2f} s"),
    ):
        table.add_row(Text(name), Text(value))
    return table


@expanded
def simulate(
    workload: Annotated[str, typer.Option("--workload", metavar="FILE|builtin:NAME", help=WORKLOAD_HELP)],
    policy: Annotated[str, typer.Option("--policy", metavar="NAME", help=POLICY_HELP)],
    options: SimulationOptions,
    outputs: Outputs,
    traces: TracesOption = None,
    seed: Annotated[
        int,
        typer.Option(
            "--seed",
            help="Of the policy and of built-in workloads; pollux compare runs several.",
            min=0,
            rich_help_panel=POLICY_PANEL,
        ),
    ] = 0,
) -> None:
    """Run a workload under a policy, in virtual time, and print how its jobs fared."""
    outputs.check()
    setup = make_setup(workload, traces, policy, options, seed)
    loaded, applications = load_setup(setup)
    check_setup(setup, loaded)
    notes.say([*notes.unread_settings([policy], setup.settings), *notes.idle_types(loaded, applications, setup.config)])
    result = _run_with_progress(setup, len(loaded.jobs))
    arguments = [("--workload", workload), ("--policy", policy), ("--seed", seed)]
    heading = Heading(title=f"{result.policy} on {result.workload}", command=command_line("simulate", arguments, setup))
    outputs.deliver(
        heading,
        kind="simulate",
        document=result.to_json,
        summary=lambda: [summary_row(result.workload, result.policy, [result], result.avg_jct_s)],
        page=lambda plotly_url: html_report([result], heading, plotly_url=plotly_url),
        show=lambda console: console.print(result_table(result)),
    )


def _run_with_progress(setup: Setup, num_jobs: int) -> SimulationResult:
    tally = Tally(things="jobs", num_all=num_jobs)
    with telling(tally), progress_bar() as progress:
        bar = progress.add_task(setup.policy, total=num_jobs, tally=tally)

        def show(num_done: int) -> None:
            tally.num_done, tally.share = num_done, num_done / num_jobs
            progress.update(bar, completed=num_done)

        return run_setup(setup, show)
