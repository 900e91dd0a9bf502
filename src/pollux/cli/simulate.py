"""``pollux simulate``: one workload under one policy. Also what all simulating commands share: checks and printing."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pollux.cli import simulation_notes as notes
from pollux.cli.connect import DataOption, ServerOption
from pollux.cli.progress import Tally, progress_bar, telling
from pollux.cli.publish import PublishOption, check_server, publish
from pollux.cli.simulation_options import (
    POLICY_HELP,
    POLICY_PANEL,
    WORKLOAD_HELP,
    AutoscaleOption,
    BandOption,
    BudgetOption,
    ChargeOption,
    ClusterOption,
    EventsOption,
    GpusOption,
    HtmlOption,
    InterferenceOption,
    IntervalOption,
    JsonOption,
    MaxNodesOption,
    MemoryOption,
    MinNodesOption,
    NodesOption,
    OutputOption,
    PhysicsOption,
    POption,
    PriceOption,
    ResizeOption,
    SharedSpeedsOption,
    Switch,
    TracesOption,
    Weights,
    WeightsOption,
    World,
    make_config,
    policy_settings,
)
from pollux.errors import InputFileError, InvalidPlanError, PolicyError, SimulationError
from pollux.policy import PolicySettings, make_policy
from pollux.reports.look import require_plotly
from pollux.reports.simulation_page import html_report
from pollux.simulator.application import Application
from pollux.simulator.colocation import check_applications
from pollux.simulator.physics import SIA_CLUSTER
from pollux.simulator.result import SimulationResult, mean_of, summarise, write_json, write_text
from pollux.simulator.run import SimulationConfig, restricted
from pollux.simulator.run import simulate as run_simulation
from pollux.simulator.source import load_source
from pollux.simulator.workload import Workload
from pollux.types import JobView, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One simulation, as plain data that can be handed to another process."""

    workload: str
    traces: str | None
    policy: str
    config: SimulationConfig
    settings: PolicySettings
    shared_speeds: Path | None = None  # where the configuration's were read from
    label: str = ""  # what it is called beside others, if not as its policy
    table: str = ""  # with whom it is compared, if not with all on the same workload

    @property
    def name(self) -> str:
        return self.label or self.policy


# Before a run ---------------------------------------------------------------------------------


def check_outputs(*paths: Path | None) -> None:
    """Fail before a long run, not after it.

    Raises:
        InputFileError: one of the paths cannot be written, or two are the same.
    """
    seen: set[str] = set()
    for path in paths:
        if path is None:
            continue
        folder = path.parent
        if path.is_dir():
            raise InputFileError(path, "cannot be written: it is a directory; a file's name is needed")
        if not folder.is_dir():
            raise InputFileError(path, f"cannot be written: there is no directory {str(folder)!r}; create it first")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise InputFileError(path, "cannot be written: permission denied")
        if os.path.realpath(path) in seen:
            raise InputFileError(path, "named for two outputs; each needs its own file")
        seen.add(os.path.realpath(path))


def load_setup(setup: Setup) -> tuple[Workload, Mapping[str, Application]]:
    """The workload of a simulation, and all applications there are.

    Raises:
        PolluxError: the workload or the traces cannot be used.
    """
    workload, applications = load_source(setup.workload, setup.traces, setup.settings.seed)
    check_applications(setup.config.shared_speeds, applications.values())
    return restricted(workload, applications, setup.config), applications


def check_setup(setup: Setup, workload: Workload) -> None:
    """Fail before a long run, not in the middle of it.

    Raises:
        PolluxError: the policy cannot be used, or would never run one of the jobs.
    """
    policy = make_policy(setup.policy, setup.settings)
    # A policy that gives jobs what they asked for would wait for ever for GPUs that there are not.
    full = setup.config.full
    for job in workload.jobs if not policy.needs_oracle else ():
        allowed = [g for g in full.groups if job.accelerators is None or g.accelerator in job.accelerators]
        num_gpus = max(group.num_slots for group in allowed)
        if (job.requested_replicas or 1) <= num_gpus:
            continue
        alone = Snapshot(now=job.submitted_at, nodes=full.nodes(), jobs=(JobView(spec=job, age_s=0.0),))
        if not policy.decide(alone).allocation_of(job.name):
            raise SimulationError(
                f"workload {setup.workload}: job {job.name!r} asks for {job.requested_replicas} GPUs, the cluster "
                f"has {num_gpus}{' of one type' * (len(full.groups) > 1)}; policy {setup.policy} would never run it"
            )


def run_setup(setup: Setup, on_jobs_done: Callable[[int], None]) -> SimulationResult:
    """Simulate and sum up. ``on_jobs_done(number)`` is called after every decision.

    Raises:
        SimulationError: it comes to no end, or the policy made a plan that cannot be.
    """
    workload, applications = load_source(setup.workload, setup.traces, setup.settings.seed)
    policy = make_policy(setup.policy, setup.settings)
    try:
        run = run_simulation(workload, applications, policy, setup.config, lambda _, num_done: on_jobs_done(num_done))
    except InvalidPlanError as error:
        first, *more = error.problems
        rest = f" (and {len(more)} more)" if more else ""
        raise SimulationError(f"policy {setup.policy!r} made a plan that cannot be: {first}{rest}") from error
    except PolicyError as error:
        raise SimulationError(f"policy {setup.policy!r}: {error}") from error
    return summarise(run, setup.settings)


# Printing -------------------------------------------------------------------------------------


def output_console() -> Console:
    """For data. What goes to a file or pipe is not cut to the width of a terminal."""
    return Console(width=None if sys.stdout.isatty() else 140, highlight=False)


def announce(path: Path) -> None:
    typer.echo(f"wrote {path}", err=True)


def command_line(command: str, arguments: Sequence[tuple[str, object]], setup: Setup) -> str:
    """The command that repeats this: its own arguments, then every option that is not as by default."""
    usual, usual_settings = SimulationConfig(), PolicySettings()
    config, settings = setup.config, setup.settings
    is_sia = config.physics.name == World.SIA
    options: list[tuple[str, object, object]] = [
        ("--traces", setup.traces, None),
        ("--nodes", config.num_nodes, _usual_nodes(config)),
        ("--gpus-per-node", config.gpus_per_node, usual.gpus_per_node),
        ("--cluster", ",".join(map(str, () if is_sia and config.cluster == SIA_CLUSTER else config.cluster)), ""),
        ("--physics", config.physics.name, usual.physics.name),
        ("--interval", config.interval_s, usual.interval_s),
        ("--resize-s", config.resize_s, usual.resize_s),
        ("--interference", config.interference, usual.interference),
        ("--shared-speeds", setup.shared_speeds, None),
        ("--events", "on" if config.decides_on_events else "off", "off"),
        ("--profile-memory", "on" if config.remembers_profiles else "off", "off"),
        ("--autoscale", f"{config.min_nodes}..{config.max_nodes}" if config.autoscale else None, None),
        ("--band", f"{config.low:g}..{config.high:g}", f"{usual.low:g}..{usual.high:g}"),
        ("--budget", config.budget_slots, None),
        ("--node-price", config.node_price, None),
        ("--charge-s", None if settings.charges_measured else settings.resize_s, None),
        ("--p", settings.p, usual_settings.p),
        ("--weights", settings.weights, usual_settings.weights),
    ]
    words = ["pollux", command]
    for name, value in [*arguments, *((name, value) for name, value, default in options if value != default)]:
        words += [name, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


def _usual_nodes(config: SimulationConfig) -> int | None:
    """How many there are without ``--nodes``: with auto-scaling the option is not for them."""
    if config.autoscale is not None:
        return config.num_nodes
    return None if config.physics.name == World.SIA and not config.cluster else SimulationConfig().num_nodes


def summary_row(workload: str, policy: str, seeds: Sequence[SimulationResult], best_s: float) -> dict[str, Any]:
    """The means over a policy's seeds on a workload, of which the best policy has an average JCT of ``best_s``."""
    average = mean_of(seeds, "jct_s.mean")
    return {
        "workload": workload,
        "policy": policy,
        "seeds": [result.config["policy_settings"]["seed"] for result in seeds],
        "ratio_to_best": average / best_s if best_s > 0 else 1.0,
        "avg_jct_s": average,
        "p50_jct_s": mean_of(seeds, "jct_s.p50"),
        "p99_jct_s": mean_of(seeds, "jct_s.p99"),
        "makespan_s": mean_of(seeds, "makespan_s"),
        "rho_p99": mean_of(seeds, "rho.p99"),
        "rho_max": mean_of(seeds, "rho.max"),
        "restarts_mean": mean_of(seeds, "restarts_mean"),
        "gpu_hours": mean_of(seeds, "gpu_hours"),
        "node_hours": mean_of(seeds, "node_hours"),
        "slot_hours": mean_of(seeds, "slot_hours"),
        "cost": mean_of(seeds, "cost") if seeds[0].cost is not None else None,
        "efficiency_mean": mean_of(seeds, "efficiency_mean"),
        "decision_s": mean_of(seeds, "decision_s.mean"),
    }


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
        ("restarts per job", f"{result.restarts_mean:.2f}"),
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
        table.add_row(name, value)
    return table


# Command --------------------------------------------------------------------------------------


def simulate(
    workload: Annotated[str, typer.Option("--workload", metavar="FILE|builtin:NAME", help=WORKLOAD_HELP)],
    policy: Annotated[str, typer.Option("--policy", metavar="NAME", help=POLICY_HELP)],
    traces: TracesOption = None,
    nodes: NodesOption = None,
    gpus_per_node: GpusOption = None,
    cluster: ClusterOption = None,
    physics: PhysicsOption = World.OSDI21,
    interval: IntervalOption = 60.0,
    resize_s: ResizeOption = None,
    interference: InterferenceOption = 0.0,
    shared_speeds: SharedSpeedsOption = None,
    autoscale: AutoscaleOption = None,
    band: BandOption = None,
    budget: BudgetOption = None,
    node_price: PriceOption = None,
    min_nodes: MinNodesOption = None,
    max_nodes: MaxNodesOption = None,
    charge_s: ChargeOption = None,
    seed: Annotated[
        int,
        typer.Option("--seed", help="Of the policy and of built-in workloads.", min=0, rich_help_panel=POLICY_PANEL),
    ] = 0,
    p: POption = -1.0,
    weights: WeightsOption = Weights.EQUAL,
    events: EventsOption = Switch.OFF,
    profile_memory: MemoryOption = Switch.OFF,
    output: OutputOption = None,
    html: HtmlOption = None,
    is_published: PublishOption = False,
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Run a workload under a policy, in virtual time, and print how its jobs fared."""
    check_outputs(output, html)
    if html is not None:
        require_plotly()
    check_server(is_published, data, server)
    config = make_config(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        cluster=cluster,
        physics=physics,
        interval=interval,
        resize_s=resize_s,
        interference=interference,
        shared_speeds=shared_speeds,
        events=events,
        profile_memory=profile_memory,
        autoscale=autoscale,
        band=band,
        budget=budget,
        node_price=node_price,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
    )
    settings = policy_settings(p, charge_s, config.resize_s, weights.value, seed)
    setup = Setup(
        workload=workload,
        traces=traces,
        policy=policy,
        config=config,
        settings=settings,
        shared_speeds=shared_speeds,
    )
    loaded, applications = load_setup(setup)
    check_setup(setup, loaded)
    notes.say([*notes.unread_settings([policy], settings), *notes.idle_types(loaded, applications, config)])
    tally = Tally(things="jobs", num_all=len(loaded.jobs))
    with telling(tally), progress_bar() as progress:
        bar = progress.add_task(policy, total=tally.num_all, tally=tally)

        def show(num_done: int) -> None:
            tally.num_done, tally.share = num_done, num_done / tally.num_all
            progress.update(bar, completed=num_done)

        result = run_setup(setup, show)
    if output is not None:
        write_json(output, result.to_json())
        announce(output)
    arguments = [("--workload", workload), ("--policy", policy), ("--seed", seed)]
    command, title = command_line("simulate", arguments, setup), f"{result.policy} on {result.workload}"

    def page(plotly_url: str | None = None) -> str:
        return html_report([result], title=title, command=command, plotly_url=plotly_url)

    if html is not None:
        write_text(html, page())
        announce(html)
    if is_published:
        summary = [summary_row(result.workload, result.policy, [result], result.avg_jct_s)]
        publish(data, server, title=title, command=command, kind="simulate", summary=summary, make_html=page)
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=1, allow_nan=False))
    else:
        output_console().print(result_table(result))
