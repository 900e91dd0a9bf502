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
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pollux.cli.config_file import NOTIFY, OIDC, read_toml, take_defaults
from pollux.cli.connect import DataOption, say
from pollux.cli.dashboard import link
from pollux.cli.option_groups import expanded
from pollux.cli.policy_options import PolicyOptions, said_settings
from pollux.cli.server_log import LogFormat, show_log
from pollux.cli.server_options import ClusterOptions, ManyMachinesOptions, ServiceOptions, takes_records
from pollux.cli.terminal import visible
from pollux.client import Client
from pollux.client.address import (
    DATA_VARIABLE,
    STANDBY_FILE,
    URL_VARIABLE,
    find_address,
    find_data_directory,
    read_server_file,
)
from pollux.errors import (
    InputFileError,
    InvalidValueError,
    PolluxError,
    ServerNotFoundError,
)
from pollux.policy import policy_names, unknown_policy

if TYPE_CHECKING:
    from pollux.server.config import ServiceConfig
    from pollux.server.service import Service
    from pollux.server.standby import Standby

EXIT_FAILED, EXIT_BAD_USAGE = 1, 2
LOG_FILE = "server.log"
START_TIMEOUT_S, STOP_TIMEOUT_S = 120.0, 70.0
_POLL_S = 0.1
_TAIL_LINES = 20

logger = logging.getLogger(__name__)


def require_server_libraries() -> None:
    """Raises:
    InvalidValueError: they are an extra, and not installed.
    """
    for name in ("fastapi", "uvicorn", "sqlalchemy", "prometheus_client"):
        if importlib.util.find_spec(name) is None:
            raise InvalidValueError(
                f'a server needs {name}, not installed here: pip install "pollux-scheduler[server]"'
            )


@expanded
@takes_records
def up(
    cluster: ClusterOptions,
    decides: PolicyOptions,
    machines: ManyMachinesOptions,
    service: ServiceOptions,
    is_detached: Annotated[bool, typer.Option("--detach", "-d", help="Run it in the background.")] = False,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Options by name in TOML, and whom to notify; the command line wins.",
            is_eager=True,
            callback=take_defaults,
        ),
    ] = None,
    data: DataOption = None,
) -> None:
    """Start the server, here or in the background. Ctrl-C: its jobs checkpoint, leave, and go on at the next start."""
    require_server_libraries()
    config = make_config(find_data_directory(data), cluster, decides, machines, service)
    if config_file is not None:
        config = _with_tables(config, config_file)
    if cluster.policy not in policy_names():
        raise unknown_policy(cluster.policy)
    if is_detached:
        typer.echo(url := start_detached(config, service.log_format))
        _say_how_to_reach(config.data_directory)
        _say_how_to_join(config)
        if sys.stderr.isatty():
            say(f"Dashboard: {link(url, find_address(None, None, config.data_directory).token)}")
        return
    from pollux.server.service import serve  # takes longer than all the rest, and a detached one does it itself

    show_log(logging.INFO, service.log_format)
    if service.log_format is LogFormat.TEXT:
        serve(config, _say_where)
        return
    try:  # nothing else may be in the log
        serve(config)
    except PolluxError as error:
        logger.critical("%s", error)
        raise typer.Exit(EXIT_BAD_USAGE) from None
    except Exception:
        logger.critical("the server failed", exc_info=True)
        raise typer.Exit(EXIT_FAILED) from None


def _with_tables(config: ServiceConfig, path: Path) -> ServiceConfig:
    """With what a file says beside options. Raises InputFileError."""
    from pollux.server.notify.config import read_notify
    from pollux.server.oidc.config import read_oidc

    told = read_toml(path)
    notify, oidc = read_notify(path, told.get(NOTIFY)), read_oidc(path, told.get(OIDC))
    return dataclasses.replace(config, config_file=path.absolute(), notify=notify, oidc=oidc)


def make_config(
    directory: Path,
    cluster: ClusterOptions,
    decides: PolicyOptions,
    machines: ManyMachinesOptions,
    service: ServiceOptions,
) -> ServiceConfig:
    """Raises:
    InvalidValueError: an option makes no sense, or none without another.
    """
    from pollux.server.config import DEFAULT_HANG_S, DEFAULT_LOG_BYTES, LIVE_SETTINGS, ServiceConfig
    from pollux.server.storage.workdirs import DEFAULT_MAX_MIB

    config = ServiceConfig(
        data_directory=directory,
        database=service.database,
        host=service.host,
        port=service.port,
        tls_cert=None if service.tls_cert is None else service.tls_cert.absolute(),
        tls_key=None if service.tls_key is None else service.tls_key.absolute(),
        has_open_metrics=service.has_open_metrics,
        slots=cluster.slots,
        nodes=cluster.nodes,
        slots_per_gpu=cluster.slots_per_gpu,
        labels=tuple(cluster.label or ()),
        policy=cluster.policy,
        storage=cluster.storage,
        hang_timeout_s=cluster.hang_timeout_s(DEFAULT_HANG_S),
        max_workdir_mib=cluster.max_workdir or DEFAULT_MAX_MIB,
        max_log_bytes=cluster.max_log_bytes(DEFAULT_LOG_BYTES),
        settings=decides.settings(LIVE_SETTINGS),
        engine=machines.engine.value,
        address=machines.address,
        name=machines.name,
        resource=None if machines.resource is None else machines.resource.value,
        lost_after_s=machines.lost_after_s,
        autoscale=machines.sizing(),
        node_slots=machines.node_slots,
        node_price=machines.node_price,
    )
    return config if cluster.interval is None else dataclasses.replace(config, interval_s=cluster.interval)


def _say_how_to_reach(directory: Path) -> None:
    """Where the next command would look elsewhere."""
    if directory != find_data_directory() and not os.environ.get(URL_VARIABLE):
        quoted = shlex.quote(str(directory))
        say(f"Other commands find it by --data {quoted}, or all of them by: export {DATA_VARIABLE}={quoted}")


def _say_how_to_join(config: ServiceConfig) -> None:
    """The command for other machines, with the address by which they know the head of a Ray cluster."""
    if config.engine == "ray":
        from pollux.engines.ray.head import as_others_know_it, find_address

        if address := find_address(config.address, config.data_directory):
            say(f"Other machines join by: ray start --address={visible(as_others_know_it(address))}")


def _say_where(service: Service | Standby) -> None:
    if service.is_standby:
        say(f"Pollux stands by at {service.url}: it answers reads, and takes over when the leader is gone.")
        return
    data = shlex.quote(str(service.config.data_directory))
    option = "" if service.config.data_directory == find_data_directory() else f" --data {data}"
    say(f"Pollux runs at {service.url}, with its data in {data}.")
    # What is no terminal may be a log that others read.
    say(f"Dashboard: {link(service.url, service.token) if sys.stderr.isatty() else f'pollux dashboard{option}'}")
    _say_how_to_join(service.config)
    say(f"Submit a job: pollux submit{option} -- python train.py    Watch: pollux top{option}")
    say("Ctrl-C: jobs checkpoint and leave; they go on when it is started again.")


# In the background ----------------------------------------------------------------------------


def start_detached(config: ServiceConfig, log_format: LogFormat = LogFormat.TEXT) -> str:
    """The URL of a server in a session of its own, when it takes jobs. What it logs is in its data directory.

    Raises:
        typer.Exit: it ended instead, or was not ready in time and was ended; the end of its log has been shown.
    """
    from pollux.engines.logs import rotate
    from pollux.server.storage.files import make_directory

    log = config.data_directory / LOG_FILE
    make_directory(config.data_directory)  # before there is a log in it
    rotate(log)
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InputFileError(log, f"cannot be written: {error.strerror or error}") from error
    with open(file, "ab") as output:
        log_begin = os.fstat(file).st_size
        process = subprocess.Popen(
            [sys.executable, "-m", "pollux", *arguments_of(config, log_format)],
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
    from pollux.server.config import LIVE_SETTINGS

    options: dict[str, object] = {
        "--config": config.config_file,
        "--data": config.data_directory,
        "--database": config.database,
        "--host": config.host,
        "--port": config.port,
        "--tls-cert": config.tls_cert,
        "--tls-key": config.tls_key,
        "--slots": config.slots,
        "--nodes": config.nodes,
        "--slots-per-gpu": config.slots_per_gpu if config.slots_per_gpu > 1 else None,
        "--policy": config.policy,
        **said_settings(config.settings, LIVE_SETTINGS),
        "--interval": config.interval_s,
        "--storage": config.storage,
        "--max-workdir": str(config.max_workdir_mib),
        "--hang-timeout": "never" if config.hang_timeout_s is None else f"{config.hang_timeout_s!r}s",
        "--log-limit": "never" if config.max_log_bytes is None else config.max_log_bytes,
        "--engine": config.engine,
        "--address": config.address,
        "--name": config.name,
        "--slot": config.resource,
        "--lost-after": None if config.lost_after_s is None else f"{config.lost_after_s!r}s",
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
    words += [word for text in config.labels for word in ("--label", text)]
    words += [word for one in (() if size is None else size.types) for word in ("--node-type", str(one))]
    return ["up", *words, *(["--open-metrics"] if config.has_open_metrics else [])]


def _wait_until_ready(process: subprocess.Popen[bytes], directory: Path) -> str:
    ends_at = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None:
        if (told := read_server_file(directory, STANDBY_FILE) or {}).get("pid") == process.pid:
            say("another server leads: this one stands by")
            return str(told["url"])
        with contextlib.suppress(ServerNotFoundError), Client(data_directory=directory, timeout_s=5.0) as client:
            if client.address.pid == process.pid and client.is_ready():
                return client.address.url
        if time.monotonic() > ends_at:
            raise TimeoutError(f"it was not ready after {START_TIMEOUT_S:g} s")
        time.sleep(_POLL_S)
    raise TimeoutError(f"it ended with exit code {process.returncode}")


def _end(process: subprocess.Popen[bytes]) -> int:
    """Its exit code, if need be after it was ended: a server that no client can find must not stay."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()
