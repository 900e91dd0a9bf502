"""``pollux doctor``: what is installed and found on this machine, what is missing, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import typer
from rich.table import Table
from rich.text import Text

from pollux.cli.connect import DataOption, JsonOption, connect, print_json, show
from pollux.client.address import DATA_VARIABLE, find_data_directory, is_alive, read_server_file
from pollux.engines.processes.gpus import find_gpus, visible_gpus
from pollux.errors import PolluxError
from pollux.version import __version__

OWN = "pollux-scheduler"
USER_EXTRAS = ("cli", "server", "train", "ray", "tune", "examples", "hf")
OLDEST_PYTHON = (3, 11)
USUAL_PORT = 7077
LEAST_FREE_GB, LEAST_SHARED_GB = 5.0, 1.0  # checkpoints of a small model; batches of a few loader workers
LEAST_OPEN_FILES = 4096  # a connection each for reports of a few hundred replicas, and logs
LEFT_EXIT_CODE = 1
_STYLES = {"fine": "green", "missing": "yellow", "problem": "red"}

State = Literal["fine", "missing", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """``missing`` is what some people need; ``problem`` what will go wrong. ``advice``: what to do about either."""

    subject: str
    state: State
    found: str
    advice: str = ""


def doctor(as_json: JsonOption = False, data: DataOption = None) -> None:
    """Say what is installed and found here, what is missing, and what to do. Ends with 1 if something is wrong."""
    findings = examine(find_data_directory(data))
    if as_json:
        print_json({"version": __version__, "findings": findings})
    else:
        table = Table(box=None, pad_edge=False, show_header=False)
        for one in findings:
            told = one.found if not one.advice else f"{one.found}\n{one.advice}"
            table.add_row(Text(one.state, style=_STYLES[one.state]), one.subject, Text(told))
        show(table)
    if any(one.state == "problem" for one in findings):
        raise typer.Exit(LEFT_EXIT_CODE)


def examine(directory: Path) -> list[Finding]:
    """All findings, with ``directory`` as the server's data directory."""
    checks: Sequence[Callable[[], Iterator[Finding]]] = (
        _python,
        _extras,
        _gpus,
        lambda: _disk(directory),
        _limits,
        lambda: _server(directory),
    )
    return [finding for check in checks for finding in check()]


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    if sys.version_info < OLDEST_PYTHON:
        yield Finding(subject="Python", state="problem", found=version, advice="Python 3.11 or newer is needed.")
    elif sys.platform != "linux":
        yield Finding(subject="system", state="problem", found=sys.platform, advice="Clusters and training need Linux.")
    else:
        yield Finding(subject="Python", state="fine", found=f"{version} on {platform.machine()} Linux")
    yield Finding(subject="pollux", state="fine", found=__version__)


def _extras() -> Iterator[Finding]:
    """Which extras are complete, by what the package's own record says that each needs."""
    try:
        needs = importlib.metadata.requires(OWN) or []
    except importlib.metadata.PackageNotFoundError:
        advice = "In a clone: make demo, or pip install -e '.[cli,server,train]'."
        yield Finding(subject="package", state="problem", found="pollux is not installed", advice=advice)
        return
    for extra in USER_EXTRAS:
        wanted = [
            match[1]
            for need in needs
            if re.search(rf"extra == ['\"]{extra}['\"]", need) and (match := re.match(r"([\w.-]+)", need)) is not None
        ]
        versions = {name: _version(name) for name in wanted if name != OWN}
        missing = sorted(name for name, version in versions.items() if version is None)
        if missing:
            advice = f'If you need it: pip install "{OWN}[{extra}]".'
            yield Finding(subject=extra, state="missing", found=f"not installed: {', '.join(missing)}", advice=advice)
        else:
            found = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
            yield Finding(subject=extra, state="fine", found=found)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_card() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _gpus() -> Iterator[Finding]:
    gpus = find_gpus()
    visible = visible_gpus(gpus, os.environ)
    if not gpus:
        has_card = _has_card()
        if has_card and _version("nvidia-ml-py") is None:
            advice = f'pip install "{OWN}[server]", which brings NVIDIA\'s library.'
            yield Finding(subject="GPUs", state="problem", found="a card, but no nvidia-ml-py to see it", advice=advice)
        elif has_card:
            advice = "Run nvidia-smi: its message says what is wrong with the driver."
            yield Finding(subject="GPUs", state="problem", found="a card, but no driver that answers", advice=advice)
        else:
            yield Finding(subject="GPUs", state="fine", found="none: slots are CPU cores")
        return
    names = ", ".join(f"{gpu.name} ({gpu.uuid[:12]})" for gpu in visible) or "none"
    if not visible:
        advice = "CUDA_VISIBLE_DEVICES hides all of them: unset it, or name them in it."
        yield Finding(subject="GPUs", state="problem", found=f"{len(gpus)}, none visible", advice=advice)
    else:
        yield Finding(subject="GPUs", state="fine", found=names)
    torch = _version("torch")
    if torch is not None and torch.endswith("+cpu"):
        advice = "Install torch for your driver, as pytorch.org says: the version in constraints.txt."
        yield Finding(subject="torch", state="problem", found=f"{torch} cannot use the GPUs", advice=advice)


def _disk(directory: Path) -> Iterator[Finding]:
    there = next(one for one in (directory, *directory.parents) if one.exists())
    free = shutil.disk_usage(there).free / 1e9
    found = f"{directory}: {free:.0f} GB free"
    if not os.access(there, os.W_OK):
        advice = "Choose another one: --data DIR, or the variable POLLUX_DATA."
        yield Finding(subject="data", state="problem", found=f"{there} cannot be written to", advice=advice)
    elif free < LEAST_FREE_GB:
        advice = "Checkpoints and logs go there; jobs pause when it is full. Make room, or use --data or --storage."
        yield Finding(subject="data", state="problem", found=found, advice=advice)
    else:
        yield Finding(subject="data", state="fine", found=found)


def _limits() -> Iterator[Finding]:
    import resource

    shared = shutil.disk_usage("/dev/shm").total / 1e9 if Path("/dev/shm").exists() else 0.0
    if shared < LEAST_SHARED_GB:
        advice = "Loader workers pass batches through it: in a container, --shm-size=8g (or --ipc=host)."
        yield Finding(subject="/dev/shm", state="problem", found=f"{shared:.2f} GB", advice=advice)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most != resource.RLIM_INFINITY and most < LEAST_OPEN_FILES:
        advice = "Raise it (ulimit -Hn, LimitNOFILE= of a systemd unit) for clusters of many jobs."
        yield Finding(subject="open files", state="missing", found=f"at most {most}", advice=advice)


def _server(directory: Path) -> Iterator[Finding]:
    told = read_server_file(directory)
    if told is None or not is_alive(told.get("pid")):
        yield _port(directory)
        return
    try:
        with connect(directory, None, timeout_s=10.0) as client:
            status = client.status()
    except PolluxError as error:
        advice = f"Look into {directory / 'server.log'}; pollux down ends it, pollux up starts it again."
        yield Finding(subject="server", state="problem", found=" ".join(str(error).split()), advice=advice)
        return
    found = f"runs at {told.get('url')}: version {status.version}, {status.num_slots} slots"
    if status.version == __version__:
        yield Finding(subject="server", state="fine", found=found)
    else:
        advice = f"This is {__version__}. pollux down, then pollux up: jobs go on where they were."
        yield Finding(subject="server", state="problem", found=found, advice=advice)


def _port(directory: Path) -> Finding:
    none = f"no server runs with the data directory {directory} (for another: --data or ${DATA_VARIABLE})"
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("127.0.0.1", USUAL_PORT))
        except OSError:
            found = f"{none}; port {USUAL_PORT} is taken, so pollux up will use the next free one"
            return Finding(subject="server", state="fine", found=found)
    return Finding(subject="server", state="fine", found=f"{none}; port {USUAL_PORT} is free")
