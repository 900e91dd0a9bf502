"""``pollux simulate``: one workload under one policy. Also what all simulating commands share: options and checks."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from pollux.cli.connect import DataOption, ServerOption
from pollux.cli.publishing import PublishOption, check_server, publish
from pollux.cli.ranges import parse_band, parse_cluster, parse_nodes
from pollux.errors import InputFileError, InvalidValueError, SimulationError
from pollux.look import require_plotly
from pollux.policy import PolicySettings, make_policy, policy_names
from pollux.scheduler.autoscale import DEFAULT_BAND
from pollux.scheduler.loop import SchedulerConfig
from pollux.simulator.colocation import check_applications, read_shared_speeds
from pollux.simulator.generate import BUILTIN_WORKLOADS
from pollux.simulator.physics import PHYSICS, SIA_CLUSTER
from pollux.simulator.report import html_report
from pollux.simulator.result import SimulationResult, mean_of, summarise, write_json, write_text
from pollux.simulator.run import SimulationConfig, restricted
from pollux.simulator.run import simulate as run_simulation
from pollux.simulator.source import load_source
from pollux.simulator.workload import Workload
from pollux.types import JobView, Snapshot

# Options --------------------------------------------------------------------------------------


class Switch(StrEnum):
    ON = "on"
    OFF = "off"


class Weights(StrEnum):
    EQUAL = "equal"
    REMAINING = "remaining"


class World(StrEnum):
    """The names in :data:`pollux.simulator.physics.PHYSICS`."""

    OSDI21 = "osdi21"
    SIA = "sia"


_CLUSTER, _POLICY, _OUTPUT = "Cluster", "Policy", "Output"

TracesOption = Annotated[
    str | None,
    typer.Option("--traces", metavar="DIR", help="Traces of the applications; built-in profiles if left out."),
]
NodesOption = Annotated[
    int | None,
    typer.Option("--nodes", help="Nodes (not with auto-scaling); 16 if left out.", rich_help_panel=_CLUSTER),
]
GpusOption = Annotated[
    int | None, typer.Option("--gpus-per-node", help="GPUs of each node; 4 if left out.", rich_help_panel=_CLUSTER)
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="TYPE:NODESxGPUS,..",
        help="Nodes of several types instead, as in aws:6x4,dgx-ext:2x8,rtx:3x8.",
        rich_help_panel=_CLUSTER,
    ),
]
PhysicsOption = Annotated[
    World,
    typer.Option(
        "--physics",
        help="Of which published simulator; sia: its restart delays, slowdowns and, unless you say one, its cluster.",
        rich_help_panel=_CLUSTER,
    ),
]
IntervalOption = Annotated[
    float, typer.Option("--interval", help="Seconds between decisions.", rich_help_panel=_CLUSTER)
]
ResizeOption = Annotated[
    float, typer.Option("--resize-s", help="Seconds that a start or resize takes.", rich_help_panel=_CLUSTER)
]
ChargeOption = Annotated[
    float | None,
    typer.Option(
        "--charge-s",
        metavar="S",
        help="Seconds that the policy charges for a resize; as long as it takes if left out.",
        rich_help_panel=_POLICY,
    ),
]
InterferenceOption = Annotated[
    float,
    typer.Option(
        "--interference", help="Slowdown (0..1) of spanning jobs that share a node.", rich_help_panel=_CLUSTER
    ),
]
SharedSpeedsOption = Annotated[
    Path | None,
    typer.Option(
        "--shared-speeds",
        metavar="FILE",
        help="Speeds of jobs that share GPUs (CSV: application,beside,speed); what it leaves out is modelled.",
        rich_help_panel=_CLUSTER,
    ),
]
AutoscaleOption = Annotated[
    str | None,
    typer.Option(
        "--autoscale",
        metavar="MIN..MAX",
        help="Let the number of nodes follow the jobs, between these.",
        rich_help_panel=_CLUSTER,
    ),
]
BandOption = Annotated[
    str | None,
    typer.Option(
        "--band",
        metavar="LOW..HIGH",
        help=f"Utility per GPU that auto-scaling keeps to; {DEFAULT_BAND[0]}..{DEFAULT_BAND[1]} if left out.",
        rich_help_panel=_CLUSTER,
    ),
]
BudgetOption = Annotated[
    float | None,
    typer.Option(
        "--budget", metavar="GPUS", help="GPUs that may be up on average over a day.", rich_help_panel=_CLUSTER
    ),
]
PriceOption = Annotated[
    float | None,
    typer.Option("--node-price", metavar="P", help="Of a node for an hour: shows the cost.", rich_help_panel=_CLUSTER),
]
# What --autoscale was called first; still taken.
MinNodesOption = Annotated[int | None, typer.Option("--min-nodes", hidden=True)]
MaxNodesOption = Annotated[int | None, typer.Option("--max-nodes", hidden=True)]
POption = Annotated[
    float, typer.Option("--p", help="Exponent of the fitness: 1 is greedy, -10 very fair.", rich_help_panel=_POLICY)
]
WeightsOption = Annotated[
    Weights,
    typer.Option("--weights", help="All jobs alike, or shorter remaining work first.", rich_help_panel=_POLICY),
]
EventsOption = Annotated[
    Switch, typer.Option("--events", help="Also decide when a job arrives or ends.", rich_help_panel=_POLICY)
]
MemoryOption = Annotated[
    Switch,
    typer.Option("--profile-memory", help="Let jobs start from what earlier ones measured.", rich_help_panel=_POLICY),
]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write a report to look at.", rich_help_panel=_OUTPUT)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.", rich_help_panel=_OUTPUT)]
OutputOption = Annotated[
    Path | None, typer.Option("--output", metavar="FILE", help="Write the result as JSON.", rich_help_panel=_OUTPUT)
]
WORKLOAD_HELP = f"A CSV file, or one of {', '.join(f'builtin:{name}' for name in BUILTIN_WORKLOADS)}."
POLICY_HELP = f"Which policy decides: {', '.join(policy_names())}."


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


def make_config(
    *,
    nodes: int | None,
    gpus_per_node: int | None,
    cluster: str | None,
    physics: World,
    interval: float,
    resize_s: float,
    interference: float,
    shared_speeds: Path | None = None,
    events: Switch,
    profile_memory: Switch,
    autoscale: str | None = None,
    band: str | None = None,
    budget: float | None = None,
    node_price: float | None = None,
    min_nodes: int | None = None,
    max_nodes: int | None = None,
) -> SimulationConfig:
    """The options that describe the cluster, checked.

    Raises:
        InvalidValueError: one of them makes no sense, or none without another.
        InputFileError: ``shared_speeds`` cannot be read.
    """
    if autoscale is not None:
        if min_nodes is not None or max_nodes is not None:
            raise InvalidValueError("--autoscale and --min-nodes, --max-nodes say the same thing; give the first alone")
        min_nodes, max_nodes = parse_nodes(autoscale)
    for option, value in (("--band", band), ("--budget", budget)):
        if value is not None and min_nodes is None and max_nodes is None:
            raise InvalidValueError(f"{option} {value} is for auto-scaling: add --autoscale MIN..MAX")
    low, high = parse_band(band) if band is not None else DEFAULT_BAND
    for option, value in (("--nodes", nodes), ("--gpus-per-node", gpus_per_node)):
        if cluster is not None and value is not None:
            raise InvalidValueError(f"{option} {value} and --cluster {cluster} both say how many; give one of them")
    groups = parse_cluster(cluster) if cluster is not None else ()
    if physics is World.SIA and cluster is None and nodes is None and gpus_per_node is None:
        groups = SIA_CLUSTER
    usual = SimulationConfig()
    config = SimulationConfig(
        num_nodes=usual.num_nodes if nodes is None else nodes,
        gpus_per_node=usual.gpus_per_node if gpus_per_node is None else gpus_per_node,
        cluster=groups,
        physics=PHYSICS[physics],
        interval_s=interval,
        resize_s=resize_s,
        interference=interference,
        shared_speeds=read_shared_speeds(shared_speeds) if shared_speeds is not None else (),
        decides_on_events=events is Switch.ON,
        remembers_profiles=profile_memory is Switch.ON,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        low=low,
        high=high,
        budget_slots=budget,
        node_price=node_price,
    )
    SchedulerConfig(interval_s=interval, autoscale=config.autoscale)  # raises now what a run would raise later
    return config


def policy_settings(p: float, charge_s: float | None, resize_s: float, weights: str, seed: int) -> PolicySettings:
    """``charge_s``: what the policy takes a resize to cost, whatever it does; None: as long as it takes."""
    return PolicySettings(
        p=p,
        resize_s=resize_s if charge_s is None else charge_s,
        charges_measured=charge_s is None,
        weights=weights,
        seed=seed,
    )


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


def load_setup(setup: Setup) -> Workload:
    """The workload of a simulation.

    Raises:
        PolluxError: the workload or the traces cannot be used.
    """
    workload, applications = load_source(setup.workload, setup.traces, setup.settings.seed)
    check_applications(setup.config.shared_speeds, applications.values())
    return restricted(workload, applications, setup.config)


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
    """Simulate and sum up. ``on_jobs_done(number)`` is called after every decision."""
    workload, applications = load_source(setup.workload, setup.traces, setup.settings.seed)
    policy = make_policy(setup.policy, setup.settings)
    run = run_simulation(workload, applications, policy, setup.config, lambda _, num_done: on_jobs_done(num_done))
    return summarise(run, setup.settings)


# Printing -------------------------------------------------------------------------------------


def output_console() -> Console:
    """For data. What goes to a file or pipe is not cut to the width of a terminal."""
    return Console(width=None if sys.stdout.isatty() else 140, highlight=False)


def progress_bar() -> Progress:
    """On stderr, and only where somebody can see it move."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("jobs"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )


def announce(path: Path) -> None:
    typer.echo(f"wrote {path}", err=True)


def command_line(command: str, arguments: Sequence[tuple[str, object]], setup: Setup) -> str:
    """The command that repeats this: its own arguments, then every option that is not as by default."""
    usual, usual_settings = SimulationConfig(), PolicySettings()
    config, settings = setup.config, setup.settings
    is_sia = config.physics.name == World.SIA
    options: list[tuple[str, object, object]] = [
        ("--traces", setup.traces, None),
        ("--nodes", config.num_nodes, None if is_sia and not config.cluster else usual.num_nodes),
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
    resize_s: ResizeOption = 30.0,
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
        int, typer.Option("--seed", help="Of the policy and of built-in workloads.", min=0, rich_help_panel=_POLICY)
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
    settings = policy_settings(p, charge_s, resize_s, weights.value, seed)
    setup = Setup(
        workload=workload,
        traces=traces,
        policy=policy,
        config=config,
        settings=settings,
        shared_speeds=shared_speeds,
    )
    loaded = load_setup(setup)
    check_setup(setup, loaded)
    with progress_bar() as progress:
        bar = progress.add_task(policy, total=len(loaded.jobs))
        result = run_setup(setup, lambda num_done: progress.update(bar, completed=num_done))
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
