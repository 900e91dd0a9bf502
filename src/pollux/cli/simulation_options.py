"""The options of a simulation, one for each field of ``SimulationConfig`` or ``PolicySettings`` that may be set.

:data:`OPTIONS` is the one list of them. ``pollux simulate`` and ``pollux compare`` take their options from it
(:class:`SimulationOptions`), and so does the command line that a report prints to be repeated (:func:`said_options`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from pollux.cli.option_groups import OptionGroup
from pollux.cli.policy_options import POLICY_OPTIONS, POLICY_PANEL, SettingOption, fields_of
from pollux.cli.ranges import parse_band, parse_cluster, parse_nodes
from pollux.errors import InvalidValueError
from pollux.policy import PolicySettings, policy_names
from pollux.scheduler.autoscale import DEFAULT_BAND
from pollux.scheduler.loop import SchedulerConfig
from pollux.scheduler.node_types import NodeType
from pollux.simulator.colocation import read_shared_speeds
from pollux.simulator.config import SimulationConfig
from pollux.simulator.generate import BUILTIN_WORKLOADS
from pollux.simulator.physics import PHYSICS, SIA, SIA_CLUSTER


class PhysicsName(StrEnum):
    """The names in :data:`pollux.simulator.physics.PHYSICS`."""

    OSDI21 = "osdi21"
    SIA = "sia"


WORKLOAD_HELP = f"A CSV file, or one of {', '.join(f'builtin:{name}' for name in BUILTIN_WORKLOADS)}."
POLICY_HELP = f"Which policy decides: {', '.join(policy_names())}."
TracesOption = Annotated[
    str | None,
    typer.Option("--traces", metavar="DIR", help="Traces of the applications; built-in profiles if left out."),
]


def _said_nodes(config: SimulationConfig, settings: PolicySettings) -> object:
    """With auto-scaling the option is not allowed; without it, Sia's physics would bring their own cluster."""
    if config.autoscale is not None or (config.num_nodes == SimulationConfig().num_nodes and not _needs_nodes(config)):
        return None
    return config.num_nodes


def _needs_nodes(config: SimulationConfig) -> bool:
    return config.physics == SIA and not config.cluster


def _said_cluster(config: SimulationConfig, settings: PolicySettings) -> object:
    is_usual = config.physics == SIA and config.cluster == SIA_CLUSTER
    return None if is_usual or not config.cluster else ",".join(map(str, config.cluster))


def _said_band(config: SimulationConfig, settings: PolicySettings) -> object:
    return None if (config.low, config.high) == DEFAULT_BAND else f"{config.low:g}..{config.high:g}"


OPTIONS = (
    SettingOption(
        owner=SimulationConfig,
        flag="--nodes",
        field="num_nodes",
        help="Nodes (not with auto-scaling); {default} if left out.",
        said=_said_nodes,
    ),
    SettingOption(
        owner=SimulationConfig,
        flag="--gpus-per-node",
        field="gpus_per_node",
        help="GPUs of each node; {default} if left out.",
    ),
    SettingOption(
        owner=SimulationConfig,
        flag="--cluster",
        field="cluster",
        metavar="TYPE:NODESxGPUS,..",
        help="Nodes of several types instead, as in aws:6x4,dgx-ext:2x8,rtx:3x8.",
        kind=str,
        read=lambda text: {"cluster": parse_cluster(text)},
        said=_said_cluster,
    ),
    SettingOption(
        owner=SimulationConfig,
        flag="--physics",
        field="physics",
        help="Of which published simulator; sia: its restart delays, slowdowns and, unless you name one, its cluster.",
        kind=PhysicsName,
        read=lambda name: {"physics": PHYSICS[name]},
        said=lambda config, _: None if config.physics == SimulationConfig().physics else config.physics.name,
    ),
    SettingOption(owner=SimulationConfig, flag="--interval", field="interval_s", help="Seconds between decisions."),
    SettingOption(
        owner=SimulationConfig,
        flag="--resize-s",
        field="resize_s",
        metavar="S",
        help="Seconds that a start or resize takes; {default:g} if left out. Not with --physics sia, which has its "
        "own.",
    ),
    SettingOption(
        owner=SimulationConfig,
        flag="--interference",
        field="interference",
        help="Slowdown (0..1) of jobs that span nodes and share a node.",
    ),
    SettingOption(
        owner=SimulationConfig,
        flag="--shared-speeds",
        field="shared_speeds",
        metavar="FILE",
        help="Speeds of jobs that share GPUs (CSV: application,beside,speed); missing pairs are modelled.",
        kind=Path,
        read=lambda path: {"shared_speeds": read_shared_speeds(path)},
        said=lambda config, settings: None,  # the configuration does not know the file: see said_options
    ),
    SettingOption(
        owner=SimulationConfig,
        flag="--autoscale",
        field="min_nodes",
        metavar="MIN..MAX",
        help="Let the number of nodes follow the jobs, between these.",
        kind=str,
        read=lambda text: dict(zip(("min_nodes", "max_nodes"), parse_nodes(text), strict=True)),
        said=lambda config, _: f"{config.min_nodes}..{config.max_nodes}" if config.autoscale else None,
    ),
    SettingOption(
        owner=SimulationConfig,
        flag="--band",
        field="low",
        metavar="LOW..HIGH",
        help=f"Utility per GPU that auto-scaling keeps to; {DEFAULT_BAND[0]}..{DEFAULT_BAND[1]} if left out.",
        kind=str,
        read=lambda text: dict(zip(("low", "high"), parse_band(text), strict=True)),
        said=_said_band,
    ),
    SettingOption(
        owner=SimulationConfig,
        flag="--budget",
        field="budget_slots",
        metavar="GPUS",
        help="GPUs that may be up on average over a day.",
    ),
    SettingOption(
        owner=SimulationConfig,
        flag="--node-price",
        field="node_price",
        metavar="P",
        help="Price of a node for an hour: shows the cost.",
    ),
    SettingOption(
        owner=SimulationConfig,
        flag="--node-types",
        field="node_types",
        metavar="TYPE=SLOTS@PRICE,...",
        kind=str,
        help="Types of nodes that auto-scaling may add, with prices for an hour; the best goodput for its price is.",
        read=lambda text: {"node_types": tuple(NodeType.parse(one) for one in text.split(","))},
        said=lambda config, _: ",".join(map(str, config.node_types)) or None,
    ),
    *POLICY_OPTIONS,
    SettingOption(
        owner=SimulationConfig,
        flag="--events",
        field="decides_on_events",
        panel=POLICY_PANEL,
        help="Also decide when a job arrives or ends.",
    ),
    SettingOption(
        owner=SimulationConfig,
        flag="--profile-memory",
        field="remembers_profiles",
        panel=POLICY_PANEL,
        help="Let jobs start from what earlier ones measured.",
    ),
)


class SimulationOptions(OptionGroup):
    """What was said of :data:`OPTIONS`, by the option's name."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        return [option.parameter() for option in OPTIONS]

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> Self:
        return cls(values)

    @property
    def shared_speeds(self) -> Path | None:
        """The file, if one was named."""
        return self._values.get("shared_speeds")

    def config(self) -> SimulationConfig:
        """The cluster and its physics, checked.

        Raises:
            InvalidValueError: a value makes no sense, or not beside another one.
            InputFileError: the file of shared speeds cannot be read.
        """
        self._check()
        fields = self._fields(SimulationConfig)
        if fields.get("physics") == SIA and not fields.keys() & {"cluster", "num_nodes", "gpus_per_node"}:
            fields["cluster"] = SIA_CLUSTER
        config = SimulationConfig(**fields)
        SchedulerConfig(interval_s=config.interval_s, autoscale=config.autoscale)  # raises now what a run would later
        return config

    def settings(self, config: SimulationConfig, seed: int) -> PolicySettings:
        """The policy's. It charges for a resize as long as one takes, unless another charge was named.

        Raises:
            InvalidValueError: a value makes no sense.
        """
        return PolicySettings(**{"resize_s": config.resize_s, "seed": seed} | self._fields(PolicySettings))

    def _fields(self, owner: type) -> dict[str, Any]:
        return fields_of([option for option in OPTIONS if option.owner is owner], self._values)

    def _check(self) -> None:
        """Refuse options that contradict each other."""
        given = self._values
        for name in ("band", "budget"):
            if name in given and "autoscale" not in given:
                raise InvalidValueError(f"--{name} {given[name]} is for auto-scaling: add --autoscale MIN..MAX")
        if "nodes" in given and "autoscale" in given:
            raise InvalidValueError(
                f"--nodes {given['nodes']} is not for auto-scaling; leave it or --autoscale {given['autoscale']} out"
            )
        for name, flag in (("nodes", "--nodes"), ("gpus_per_node", "--gpus-per-node")):
            if "cluster" in given and name in given:
                raise InvalidValueError(
                    f"{flag} {given[name]} and --cluster {given['cluster']} both say how many; give one of them"
                )
        physics = given.get("physics")
        if physics is not None and PHYSICS[physics].resize_s and "resize_s" in given:
            raise InvalidValueError(
                f"--resize-s {given['resize_s']:g} is not for --physics {physics}, which has its own for its "
                "applications; leave one of them out"
            )


def said_options(
    config: SimulationConfig, settings: PolicySettings, shared_speeds: Path | None
) -> list[tuple[str, object]]:
    """The options, with their values, that make this configuration and these settings: those not as by default."""
    found: list[tuple[str, object]] = []
    for option in OPTIONS:
        value = shared_speeds if option.name == "shared_speeds" else option.said_value(config, settings)
        if value is not None:
            found.append((option.flag, value))
    return found
