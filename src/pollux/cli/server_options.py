"""Options of ``pollux up`` in groups, each a record; ``run`` and ``demo`` share some of them.

:func:`takes_records` gives a command an option for each field of its records, and calls it with the records.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from pollux.api.request import parse_duration, parse_size
from pollux.cli.ranges import parse_band, parse_nodes
from pollux.cli.server_log import LogFormat
from pollux.errors import InvalidValueError
from pollux.scheduler.autoscale import DEFAULT_BAND, AutoscaleConfig
from pollux.scheduler.node_types import NodeType

_CLUSTER, _SERVICE, _MANY = "Cluster", "Service", "Many machines"
_R = TypeVar("_R")


class EngineName(StrEnum):
    LOCAL = "local"
    RAY = "ray"


class Resource(StrEnum):
    GPU = "GPU"
    CPU = "CPU"


SlotsOption = Annotated[
    int | None,
    typer.Option(
        "--slots",
        metavar="N",
        min=1,
        help="CPU slots; the GPUs if left out, or the cores where there are none.",
        rich_help_panel=_CLUSTER,
    ),
]
NodesOption = Annotated[
    str | None,
    typer.Option(
        "--nodes", metavar="NxS", help="Pretend N nodes of S slots each, as in 2x2.", rich_help_panel=_CLUSTER
    ),
]
PolicyOption = Annotated[
    str, typer.Option("--policy", metavar="NAME", help="Which policy decides.", rich_help_panel=_CLUSTER)
]
IntervalOption = Annotated[
    float | None,
    typer.Option(
        "--interval", metavar="S", help="Longest time between decisions, in seconds.", rich_help_panel=_CLUSTER
    ),
]


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What is shared, and how that is decided."""

    slots: SlotsOption = None
    nodes: NodesOption = None
    slots_per_gpu: Annotated[
        int,
        typer.Option(
            "--slots-per-gpu",
            metavar="N",
            help="Slots on each GPU or MIG slice. Each has that part of the memory; speeds are not kept apart.",
            rich_help_panel=_CLUSTER,
        ),
    ] = 1
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            metavar="KEY=VALUE",
            help="A label of this machine's nodes, for --constraint of jobs; NODE:KEY=VALUE for one. May be repeated.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None
    policy: PolicyOption = "pollux"
    interval: IntervalOption = None
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage",
            metavar="PATH|URL",
            help="For checkpoints: a shared folder or s3://..., that all nodes reach. The data directory if left out.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None

    hang_timeout: Annotated[
        str | None,
        typer.Option(
            "--hang-timeout",
            metavar="TIME|never",
            help="Stop a job that holds slots and makes no step for this long; 30m if left out.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None

    max_workdir: Annotated[
        int | None,
        typer.Option(
            "--max-workdir",
            metavar="MIB",
            min=1,
            help="The largest directory that may be sent along with a job; 512 if left out.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None
    log_limit: Annotated[
        str | None,
        typer.Option(
            "--log-limit",
            metavar="SIZE|never",
            help="Keep this much of a job's logs, as in 200M or 2G, and drop the oldest part; 1G if left out.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None

    def max_log_bytes(self, default: int | None) -> int | None:
        if self.log_limit is None:
            return default
        return None if self.log_limit == "never" else parse_size(self.log_limit)

    def hang_timeout_s(self, default_s: float | None) -> float | None:
        if self.hang_timeout is None:
            return default_s
        return None if self.hang_timeout == "never" else parse_duration(self.hang_timeout)


@dataclass(frozen=True, slots=True)
class ManyMachinesOptions:
    """A cluster of several machines: Ray, and auto-scaling."""

    engine: Annotated[
        EngineName, typer.Option("--engine", help="This machine, or a Ray cluster.", rich_help_panel=_MANY)
    ] = EngineName.LOCAL
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="HOST:PORT",
            help="Of Ray's head; a running one is found, or a head is started, if left out.",
            rich_help_panel=_MANY,
        ),
    ] = None
    name: Annotated[
        str, typer.Option("--name", help="Tells several Pollux on one Ray cluster apart.", rich_help_panel=_MANY)
    ] = "pollux"
    resource: Annotated[
        Resource | None,
        typer.Option("--slot", help="What a slot is; GPUs where there are any if left out.", rich_help_panel=_MANY),
    ] = None
    autoscale: Annotated[
        str | None,
        typer.Option(
            "--autoscale",
            metavar="MIN..MAX",
            help="Let Ray's auto-scaler add and end nodes, as the jobs make use of them.",
            rich_help_panel=_MANY,
        ),
    ] = None
    band: Annotated[
        str | None,
        typer.Option(
            "--band",
            metavar="LOW..HIGH",
            help=f"Utility per slot to keep to; {DEFAULT_BAND[0]}..{DEFAULT_BAND[1]} if left out.",
            rich_help_panel=_MANY,
        ),
    ] = None
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget", metavar="SLOTS", help="Slots that may be up on average over a day.", rich_help_panel=_MANY
        ),
    ] = None
    settle: Annotated[
        str | None,
        typer.Option(
            "--settle",
            metavar="TIME",
            help="How long nodes must be of little use before they are given back; 5m if left out.",
            rich_help_panel=_MANY,
        ),
    ] = None
    lost_after: Annotated[
        str | None,
        typer.Option(
            "--lost-after",
            metavar="TIME",
            help="Give a node up that has been silent for so long; 2s if left out.",
            rich_help_panel=_MANY,
        ),
    ] = None
    node_slots: Annotated[
        int | None,
        typer.Option(
            "--node-slots",
            metavar="N",
            min=1,
            help="Slots of a node that is added; as many as the largest has if left out.",
            rich_help_panel=_MANY,
        ),
    ] = None
    node_price: Annotated[
        float | None,
        typer.Option("--node-price", metavar="P", help="Of a node for an hour: shows the cost.", rich_help_panel=_MANY),
    ] = None
    node_type: Annotated[
        list[str] | None,
        typer.Option(
            "--node-type",
            metavar="TYPE=SLOTS@PRICE",
            help="A type of nodes that can be added, with its slots and its price for an hour; /GROUP at the end is "
            "its worker group. May be repeated: the type is added whose goodput costs least.",
            rich_help_panel=_MANY,
        ),
    ] = None

    @property
    def lost_after_s(self) -> float | None:
        return None if self.lost_after is None else parse_duration(self.lost_after)

    def sizing(self) -> AutoscaleConfig | None:
        """Raises:
        InvalidValueError: an option makes no sense, or none without another.
        """
        if self.autoscale is None:
            given = {"--band": self.band, "--budget": self.budget, "--settle": self.settle}
            for option, value in (*given.items(), ("--node-type", " ".join(self.node_type or ()) or None)):
                if value is not None:
                    raise InvalidValueError(f"{option} {value} is for auto-scaling: add --autoscale MIN..MAX")
            return None
        min_nodes, max_nodes = parse_nodes(self.autoscale)
        low, high = parse_band(self.band) if self.band is not None else DEFAULT_BAND
        types = tuple(NodeType.parse(text) for text in self.node_type or ())
        made = AutoscaleConfig(
            min_nodes=min_nodes, max_nodes=max_nodes, low=low, high=high, budget_slots=self.budget, types=types
        )
        return made if self.settle is None else dataclasses.replace(made, settle_s=parse_duration(self.settle))


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Where the server listens, where it keeps jobs, and what it tells."""

    database: Annotated[
        str | None,
        typer.Option(
            "--database",
            metavar="URL",
            help="Keep jobs in PostgreSQL: postgresql://USER@HOST/DB, the password in ~/.pgpass or $PGPASSWORD. "
            "A second server there stands by. If left out, they are kept in a file of the data directory.",
            rich_help_panel=_SERVICE,
        ),
    ] = None
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="Where it listens; 127.0.0.1 if left out, or with Ray what the nodes can reach.",
            rich_help_panel=_SERVICE,
        ),
    ] = None
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            metavar="P",
            min=0,
            max=65535,
            help="7077 if left out, or the next that is free; 0 is any.",
            rich_help_panel=_SERVICE,
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            "--tls-cert",
            metavar="FILE",
            help="Serve https with this PEM certificate, for the name of --host.",
            rich_help_panel=_SERVICE,
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option("--tls-key", metavar="FILE", help="The certificate's key, in PEM.", rich_help_panel=_SERVICE),
    ] = None
    has_open_metrics: Annotated[
        bool,
        typer.Option(
            "--open-metrics",
            help="Anyone who reaches the server may read /metrics, jobs' names among them, without a token.",
            rich_help_panel=_SERVICE,
        ),
    ] = False
    log_format: Annotated[
        LogFormat,
        typer.Option("--log-format", help="Of the server's log; json: an object a line.", rich_help_panel=_SERVICE),
    ] = LogFormat.TEXT


def takes_records(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each field of its parameters that are records."""
    hints = typing.get_type_hints(command, include_extras=True)
    own = inspect.signature(command).parameters
    records = {name: hints[name] for name in own if dataclasses.is_dataclass(hints[name])}

    @functools.wraps(command)
    def with_options(**arguments: object) -> None:
        made = {name: _made(kind, arguments) for name, kind in records.items()}
        command(**arguments, **made)

    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=hints[name])
        for name, one in own.items()
        if name not in records
    ]
    for kind in records.values():
        types = typing.get_type_hints(kind, include_extras=True)
        parameters += [
            inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=types[one.name])
            for one in dataclasses.fields(kind)
        ]
    del with_options.__wrapped__  # its signature is the one made here
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {one.name: one.annotation for one in parameters}
    return with_options


def _made(kind: type[_R], arguments: dict[str, object]) -> _R:
    """A record, of those of the arguments that are its own; they are taken out."""
    names = [one.name for one in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: arguments.pop(name) for name in names})
