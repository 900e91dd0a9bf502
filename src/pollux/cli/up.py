"""``pollux up``: start the server, here or in the background.

The server itself is :mod:`pollux.server.service`; this reads options, says what happens, and waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import os
import shlex
import subprocess
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pollux.api.request import parse_duration
from pollux.cli.connect import DataOption, say
from pollux.cli.dashboard import link
from pollux.cli.ranges import parse_band, parse_nodes
from pollux.cli.server_log import LogFormat, show_log
from pollux.client import Client
from pollux.client.address import find_address, find_data_directory
from pollux.errors import (
    InputFileError,
    InvalidValueError,
    PolluxError,
    ServerNotFoundError,
    UnknownNameError,
)
from pollux.policy import WEIGHTINGS, policy_names
from pollux.scheduler.autoscale import DEFAULT_BAND, AutoscaleConfig

if TYPE_CHECKING:
    from pollux.server.config import ServiceConfig
    from pollux.server.service import Service

EXIT_FAILED, EXIT_BAD_USAGE = 1, 2
LOG_FILE = "server.log"
START_TIMEOUT_S, STOP_TIMEOUT_S = 120.0, 70.0
_POLL_S = 0.1
_TAIL_LINES = 20
_CLUSTER, _SERVICE, _MANY = "Cluster", "Service", "Many machines"

logger = logging.getLogger(__name__)


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
WeightsOption = Annotated[
    str,
    typer.Option(
        "--weights",
        metavar="|".join(WEIGHTINGS),
        help="For pollux: all jobs count the same, or more the less is left of them, as they have declared (remaining) "
        "or jobs of their name have shown (learnt).",
        rich_help_panel=_CLUSTER,
    ),
]
IntervalOption = Annotated[
    float | None,
    typer.Option("--interval", metavar="S", help="Decide at least every so many seconds.", rich_help_panel=_CLUSTER),
]


def require_server_libraries() -> None:
    """Raises:
    InvalidValueError: they are an extra, and not installed.
    """
    for name in ("fastapi", "uvicorn", "sqlalchemy", "prometheus_client"):
        if importlib.util.find_spec(name) is None:
            raise InvalidValueError(
                f'a server needs {name}, not installed here: pip install "pollux-scheduler[server]"'
            )


def up(
    is_detached: Annotated[bool, typer.Option("--detach", "-d", help="Run it in the background.")] = False,
    data: DataOption = None,
    slots: SlotsOption = None,
    nodes: NodesOption = None,
    policy: PolicyOption = "pollux",
    weights: WeightsOption = "equal",
    interval: IntervalOption = None,
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage",
            metavar="PATH|URL",
            help="For checkpoints: a shared folder or s3://..., that all nodes reach. The data directory if left out.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    engine: Annotated[
        EngineName, typer.Option("--engine", help="This machine, or a Ray cluster.", rich_help_panel=_MANY)
    ] = EngineName.LOCAL,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="HOST:PORT",
            help="Of Ray's head; a running one is found, or a head is started, if left out.",
            rich_help_panel=_MANY,
        ),
    ] = None,
    name: Annotated[
        str, typer.Option("--name", help="Tells several Pollux on one Ray cluster apart.", rich_help_panel=_MANY)
    ] = "pollux",
    resource: Annotated[
        Resource | None,
        typer.Option("--slot", help="What a slot is; GPUs where there are any if left out.", rich_help_panel=_MANY),
    ] = None,
    autoscale: Annotated[
        str | None,
        typer.Option(
            "--autoscale",
            metavar="MIN..MAX",
            help="Let Ray's auto-scaler add and end nodes, as the jobs make use of them.",
            rich_help_panel=_MANY,
        ),
    ] = None,
    band: Annotated[
        str | None,
        typer.Option(
            "--band",
            metavar="LOW..HIGH",
            help=f"Utility per slot to keep to; {DEFAULT_BAND[0]}..{DEFAULT_BAND[1]} if left out.",
            rich_help_panel=_MANY,
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget", metavar="SLOTS", help="Slots that may be up on average over a day.", rich_help_panel=_MANY
        ),
    ] = None,
    settle: Annotated[
        str | None,
        typer.Option(
            "--settle",
            metavar="TIME",
            help="How long nodes must be of little use before they are given back; 5m if left out.",
            rich_help_panel=_MANY,
        ),
    ] = None,
    node_slots: Annotated[
        int | None,
        typer.Option(
            "--node-slots",
            metavar="N",
            min=1,
            help="Slots of a node that is added; as many as the largest has if left out.",
            rich_help_panel=_MANY,
        ),
    ] = None,
    node_price: Annotated[
        float | None,
        typer.Option("--node-price", metavar="P", help="Of a node for an hour: shows the cost.", rich_help_panel=_MANY),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="Where it listens; 127.0.0.1 if left out, or with Ray what the nodes can reach.",
            rich_help_panel=_SERVICE,
        ),
    ] = None,
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
    ] = None,
    has_open_metrics: Annotated[
        bool,
        typer.Option(
            "--open-metrics",
            help="Whoever reaches the server may read /metrics, jobs' names among them, without a token.",
            rich_help_panel=_SERVICE,
        ),
    ] = False,
    log_format: Annotated[
        LogFormat,
        typer.Option("--log-format", help="Of the server's log; json: an object a line.", rich_help_panel=_SERVICE),
    ] = LogFormat.TEXT,
) -> None:
    """Start the server, here or in the background. Ctrl-C: its jobs checkpoint, leave, and go on at the next start."""
    require_server_libraries()
    from pollux.server.config import LIVE_SETTINGS, ServiceConfig

    settings: dict[str, Any] = {"host": host, "port": port, "slots": slots, "nodes": nodes, "policy": policy}
    if interval is not None:
        settings["interval_s"] = interval
    config = ServiceConfig(
        data_directory=find_data_directory(data),
        storage=storage,
        engine=engine.value,
        address=address,
        name=name,
        resource=None if resource is None else resource.value,
        autoscale=make_autoscale(autoscale, band, budget, settle),
        node_slots=node_slots,
        node_price=node_price,
        has_open_metrics=has_open_metrics,
        settings=dataclasses.replace(LIVE_SETTINGS, weights=weights),
        **settings,
    )
    if policy not in policy_names():
        raise UnknownNameError("policy", policy, policy_names())
    if is_detached:
        typer.echo(url := start_detached(config, log_format))
        if sys.stderr.isatty():
            say(f"Dashboard: {link(url, find_address(None, None, config.data_directory).token)}")
        return
    from pollux.server.service import serve  # takes longer than all the rest, and a detached one does it itself

    show_log(logging.INFO, log_format)
    if log_format is LogFormat.TEXT:
        serve(config, _say_where)
        return
    try:  # whoever collects the log finds nothing else in it
        serve(config)
    except PolluxError as error:
        logger.critical("%s", error)
        raise typer.Exit(EXIT_BAD_USAGE) from None
    except Exception:
        logger.critical("the server failed", exc_info=True)
        raise typer.Exit(EXIT_FAILED) from None


def make_autoscale(
    nodes: str | None, band: str | None, budget: float | None, settle: str | None
) -> AutoscaleConfig | None:
    """Raises:
    InvalidValueError: an option makes no sense, or none without another.
    """
    if nodes is None:
        for option, value in (("--band", band), ("--budget", budget), ("--settle", settle)):
            if value is not None:
                raise InvalidValueError(f"{option} {value} is for auto-scaling: add --autoscale MIN..MAX")
        return None
    min_nodes, max_nodes = parse_nodes(nodes)
    low, high = parse_band(band) if band is not None else DEFAULT_BAND
    more = {} if settle is None else {"settle_s": parse_duration(settle)}
    return AutoscaleConfig(min_nodes=min_nodes, max_nodes=max_nodes, low=low, high=high, budget_slots=budget, **more)


def _say_where(service: Service) -> None:
    data = shlex.quote(str(service.config.data_directory))
    option = "" if service.config.data_directory == find_data_directory() else f" --data {data}"
    say(f"Pollux runs at {service.url}, with its data in {data}.")
    # What is no terminal may be a log that others read.
    say(f"Dashboard: {link(service.url, service.token) if sys.stderr.isatty() else f'pollux dashboard{option}'}")
    say(f"Submit a job: pollux submit{option} -- python train.py    Watch: pollux top{option}")
    say("Ctrl-C: jobs checkpoint and leave; they go on when it is started again.")


# In the background ----------------------------------------------------------------------------


def start_detached(config: ServiceConfig, log_format: LogFormat = LogFormat.TEXT) -> str:
    """The URL of a server in a session of its own, when it takes jobs. What it logs is in its data directory.

    Raises:
        typer.Exit: it ended instead, or was not ready in time and was ended; the end of its log has been shown.
    """
    from pollux.server.storage.files import make_directory

    log = config.data_directory / LOG_FILE
    make_directory(config.data_directory)  # before there is a log in it
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InputFileError(log, f"cannot be written: {error.strerror or error}") from error
    with open(file, "ab") as output:
        log_begin = os.fstat(file).st_size
        process = subprocess.Popen(
            [sys.executable, "-m", "pollux.cli", *arguments_of(config, log_format)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # it ends neither with this terminal nor by its Ctrl-C
        )
    try:
        return _wait_until_ready(process, config.data_directory)
    except BaseException as error:
        code = _end(process)
        if not isinstance(error, TimeoutError):
            raise
        text = log.read_bytes()[log_begin:].decode("utf-8", "replace")
        for line in text.splitlines()[-_TAIL_LINES:]:
            say(line)
        if code != EXIT_BAD_USAGE:
            say(f"error: the server did not start: {error}; its log is {log}")
        raise typer.Exit(EXIT_BAD_USAGE if code == EXIT_BAD_USAGE else EXIT_FAILED) from None


def arguments_of(config: ServiceConfig, log_format: LogFormat = LogFormat.TEXT) -> list[str]:
    """The command line of a server with this configuration."""
    options: dict[str, object] = {
        "--data": config.data_directory,
        "--host": config.host,
        "--port": config.port,
        "--slots": config.slots,
        "--nodes": config.nodes,
        "--policy": config.policy,
        "--weights": config.settings.weights,
        "--interval": config.interval_s,
        "--storage": config.storage,
        "--engine": config.engine,
        "--address": config.address,
        "--name": config.name,
        "--slot": config.resource,
        "--node-slots": config.node_slots,
        "--node-price": config.node_price,
        "--log-format": None if log_format is LogFormat.TEXT else log_format,
    }
    if (size := config.autoscale) is not None:
        options |= {
            "--autoscale": f"{size.min_nodes}..{size.max_nodes}",
            "--band": f"{size.low!r}..{size.high!r}",
            "--budget": size.budget_slots,
            "--settle": f"{size.settle_s!r}s",
        }
    words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    return ["up", *words, *(["--open-metrics"] if config.has_open_metrics else [])]


def _wait_until_ready(process: subprocess.Popen[bytes], directory: Path) -> str:
    ends_at = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None:
        with contextlib.suppress(ServerNotFoundError), Client(data_directory=directory, timeout_s=5.0) as client:
            if client.address.pid == process.pid and client.is_ready():
                return client.address.url
        if time.monotonic() > ends_at:
            raise TimeoutError(f"it was not ready after {START_TIMEOUT_S:g} s")
        time.sleep(_POLL_S)
    raise TimeoutError(f"it ended with exit code {process.returncode}")


def _end(process: subprocess.Popen[bytes]) -> int:
    """Its exit code, if need be after it was ended: a server that nobody knows of must not stay."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()
