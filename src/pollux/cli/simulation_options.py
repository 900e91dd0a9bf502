"""Options that simulating commands share, and what is made of them: the cluster's configuration, a policy's settings.

Imports the simulator; :mod:`pollux.cli.simulate` and :mod:`pollux.cli.compare` stand on it.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pollux.cli.ranges import parse_band, parse_cluster, parse_nodes
from pollux.errors import InvalidValueError
from pollux.policy import PolicySettings, policy_names
from pollux.scheduler.autoscale import DEFAULT_BAND
from pollux.scheduler.loop import SchedulerConfig
from pollux.simulator.colocation import read_shared_speeds
from pollux.simulator.generate import BUILTIN_WORKLOADS
from pollux.simulator.physics import PHYSICS, SIA_CLUSTER
from pollux.simulator.run import SimulationConfig


class Switch(StrEnum):
    ON = "on"
    OFF = "off"


class Weights(StrEnum):
    EQUAL = "equal"
    LEARNT = "learnt"
    REMAINING = "remaining"


class World(StrEnum):
    """The names in :data:`pollux.simulator.physics.PHYSICS`."""

    OSDI21 = "osdi21"
    SIA = "sia"


CLUSTER_PANEL, POLICY_PANEL, OUTPUT_PANEL = "Cluster", "Policy", "Output"

TracesOption = Annotated[
    str | None,
    typer.Option("--traces", metavar="DIR", help="Traces of the applications; built-in profiles if left out."),
]
NodesOption = Annotated[
    int | None,
    typer.Option("--nodes", help="Nodes (not with auto-scaling); 16 if left out.", rich_help_panel=CLUSTER_PANEL),
]
GpusOption = Annotated[
    int | None, typer.Option("--gpus-per-node", help="GPUs of each node; 4 if left out.", rich_help_panel=CLUSTER_PANEL)
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="TYPE:NODESxGPUS,..",
        help="Nodes of several types instead, as in aws:6x4,dgx-ext:2x8,rtx:3x8.",
        rich_help_panel=CLUSTER_PANEL,
    ),
]
PhysicsOption = Annotated[
    World,
    typer.Option(
        "--physics",
        help="Of which published simulator; sia: its restart delays, slowdowns and, unless you say one, its cluster.",
        rich_help_panel=CLUSTER_PANEL,
    ),
]
IntervalOption = Annotated[
    float, typer.Option("--interval", help="Seconds between decisions.", rich_help_panel=CLUSTER_PANEL)
]
ResizeOption = Annotated[
    float | None,
    typer.Option(
        "--resize-s",
        metavar="S",
        help="Seconds that a start or resize takes; 30 if left out. Not with --physics sia, which has its own.",
        rich_help_panel=CLUSTER_PANEL,
    ),
]
ChargeOption = Annotated[
    float | None,
    typer.Option(
        "--charge-s",
        metavar="S",
        help="Seconds that the policy charges for a resize; as long as it takes if left out.",
        rich_help_panel=POLICY_PANEL,
    ),
]
InterferenceOption = Annotated[
    float,
    typer.Option(
        "--interference", help="Slowdown (0..1) of spanning jobs that share a node.", rich_help_panel=CLUSTER_PANEL
    ),
]
SharedSpeedsOption = Annotated[
    Path | None,
    typer.Option(
        "--shared-speeds",
        metavar="FILE",
        help="Speeds of jobs that share GPUs (CSV: application,beside,speed); what it leaves out is modelled.",
        rich_help_panel=CLUSTER_PANEL,
    ),
]
AutoscaleOption = Annotated[
    str | None,
    typer.Option(
        "--autoscale",
        metavar="MIN..MAX",
        help="Let the number of nodes follow the jobs, between these.",
        rich_help_panel=CLUSTER_PANEL,
    ),
]
BandOption = Annotated[
    str | None,
    typer.Option(
        "--band",
        metavar="LOW..HIGH",
        help=f"Utility per GPU that auto-scaling keeps to; {DEFAULT_BAND[0]}..{DEFAULT_BAND[1]} if left out.",
        rich_help_panel=CLUSTER_PANEL,
    ),
]
BudgetOption = Annotated[
    float | None,
    typer.Option(
        "--budget", metavar="GPUS", help="GPUs that may be up on average over a day.", rich_help_panel=CLUSTER_PANEL
    ),
]
PriceOption = Annotated[
    float | None,
    typer.Option(
        "--node-price", metavar="P", help="Of a node for an hour: shows the cost.", rich_help_panel=CLUSTER_PANEL
    ),
]
# What --autoscale was called first; still taken.
MinNodesOption = Annotated[int | None, typer.Option("--min-nodes", hidden=True)]
MaxNodesOption = Annotated[int | None, typer.Option("--max-nodes", hidden=True)]
POption = Annotated[
    float,
    typer.Option("--p", help="Exponent of the fitness: 1 is greedy, -10 very fair.", rich_help_panel=POLICY_PANEL),
]
WeightsOption = Annotated[
    Weights,
    typer.Option(
        "--weights",
        help="All jobs alike; or more for those with less left, as declared (remaining) or as others of the same "
        "application have shown (learnt).",
        rich_help_panel=POLICY_PANEL,
    ),
]
EventsOption = Annotated[
    Switch, typer.Option("--events", help="Also decide when a job arrives or ends.", rich_help_panel=POLICY_PANEL)
]
MemoryOption = Annotated[
    Switch,
    typer.Option(
        "--profile-memory", help="Let jobs start from what earlier ones measured.", rich_help_panel=POLICY_PANEL
    ),
]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write a report to look at.", rich_help_panel=OUTPUT_PANEL)
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON instead of a table.", rich_help_panel=OUTPUT_PANEL)
]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", metavar="FILE", help="Write the result as JSON.", rich_help_panel=OUTPUT_PANEL),
]
WORKLOAD_HELP = f"A CSV file, or one of {', '.join(f'builtin:{name}' for name in BUILTIN_WORKLOADS)}."
POLICY_HELP = f"Which policy decides: {', '.join(policy_names())}."


# What is made of them -------------------------------------------------------------------------


def make_config(
    *,
    nodes: int | None,
    gpus_per_node: int | None,
    cluster: str | None,
    physics: World,
    interval: float,
    resize_s: float | None,
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
    if nodes is not None and (min_nodes is not None or max_nodes is not None):
        said = f"--autoscale {autoscale}" if autoscale is not None else "--min-nodes, --max-nodes"
        raise InvalidValueError(f"--nodes {nodes} is not for auto-scaling; leave it or {said} out")
    low, high = parse_band(band) if band is not None else DEFAULT_BAND
    for option, value in (("--nodes", nodes), ("--gpus-per-node", gpus_per_node)):
        if cluster is not None and value is not None:
            raise InvalidValueError(f"{option} {value} and --cluster {cluster} both say how many; give one of them")
    groups = parse_cluster(cluster) if cluster is not None else ()
    if physics is World.SIA and cluster is None and nodes is None and gpus_per_node is None:
        groups = SIA_CLUSTER
    if PHYSICS[physics].resize_s and resize_s is not None:
        raise InvalidValueError(
            f"--resize-s {resize_s:g} is not for --physics {physics}, which has its own for its applications; leave "
            "one of them out"
        )
    usual = SimulationConfig()
    config = SimulationConfig(
        num_nodes=usual.num_nodes if nodes is None else nodes,
        gpus_per_node=usual.gpus_per_node if gpus_per_node is None else gpus_per_node,
        cluster=groups,
        physics=PHYSICS[physics],
        interval_s=interval,
        resize_s=usual.resize_s if resize_s is None else resize_s,
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
