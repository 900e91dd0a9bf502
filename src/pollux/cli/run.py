"""``pollux run``: a job in the foreground, on a cluster that lives as long as the job does."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pollux.api.request import JobRequest
from pollux.cli.check import say_script_errors
from pollux.cli.connect import say
from pollux.cli.follow import exit_code_of, follow_jobs, outcome
from pollux.cli.job_options import CommandArgument, takes_job_options
from pollux.cli.server_log import show_log
from pollux.cli.server_options import IntervalOption, NodesOption, SlotsOption
from pollux.cli.up import require_server_libraries
from pollux.client import Client, make_request
from pollux.client.address import find_data_directory
from pollux.engines.local.connection import end_supervisor
from pollux.errors import InvalidValueError

if TYPE_CHECKING:
    from pollux.server.config import ServiceConfig
    from pollux.server.service import Service

REMOVE_S = 5.0  # until what still writes into a folder that is removed has ended

logger = logging.getLogger(__name__)


class Ended(SystemExit):
    """This process received a signal to end; its code is that of a shell."""


@contextlib.contextmanager
def _handling(numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """SIGTERM and SIGHUP leave as Ctrl-C does: by way of every ``finally``."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise Ended(128 + number)

    with _handling((signal.SIGTERM, signal.SIGHUP), leave):
        yield


@contextlib.contextmanager
def undisturbed(hurry: Callable[[], None] = lambda: None) -> Iterator[None]:
    """While things are put away, which takes a bounded time, a second Ctrl-C must not leave some of them behind.

    It calls ``hurry`` instead.
    """
    with _handling((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), lambda number, frame: hurry()):
        yield


@contextlib.contextmanager
def data_directory(given: Path | None) -> Iterator[Path]:
    """The one given, which stays; else one that is removed afterwards."""
    if given is not None:
        yield find_data_directory(given)
        return
    made = Path(tempfile.mkdtemp(prefix="pollux-run-"))
    try:
        yield made
    finally:
        _remove(made)


def _remove(folder: Path) -> None:
    """With all that is in it. A process that is just ending may still write there, so one attempt is not enough."""
    ends_at = time.monotonic() + REMOVE_S
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
        if time.monotonic() > ends_at:
            logger.error("%s cannot be removed: remove it by hand", folder)
            return
        time.sleep(0.05)


@contextlib.contextmanager
def embedded_service(config: ServiceConfig) -> Iterator[Service]:
    """A server in this process. When it is left nothing of it stays, however far it had come."""
    from pollux.server.service import Service

    service = Service(config)
    try:
        yield service.start()
    finally:
        with undisturbed(service.hurry):
            try:
                service.stop()
            finally:
                end_supervisor(config.data_directory, config.stop_timeout_s)  # of a start that did not get further


def _check_that_it_fits(request: JobRequest, num_slots: int) -> None:
    """In a cluster that lasts as long as the job, what does not fit now never will.

    Raises:
        InvalidValueError: it needs more slots than there are.
    """
    least = request.replicas or request.min_replicas or 1
    if least > num_slots:
        raise InvalidValueError(
            f"the job needs {least} slots at once, and there are {num_slots} here: ask for fewer, or for more --slots"
        )


@takes_job_options
def run(
    command: CommandArgument,
    options: dict[str, Any],
    slots: SlotsOption = None,
    nodes: NodesOption = None,
    interval: IntervalOption = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="Keep logs and checkpoints here; nothing is kept if left out."),
    ] = None,
    is_verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also say what the scheduler does.")] = False,
) -> None:
    """Run a job here and now: a cluster of its own, its logs as they come, and its exit code at the end."""
    require_server_libraries()
    from pollux.server.config import ServiceConfig

    request = make_request(command, options, say)  # refused before anything is begun
    say_script_errors(request)
    show_log(logging.INFO if is_verbose else logging.ERROR)
    with signals_as_exceptions(), data_directory(data) as directory:
        config = ServiceConfig(data_directory=directory, port=0, slots=slots, nodes=nodes)
        if interval is not None:
            config = dataclasses.replace(config, interval_s=interval)
        with embedded_service(config) as service, Client(url=service.url, token=service.token) as client:
            jobs = []
            _check_that_it_fits(request, client.status().num_slots)
            try:
                jobs = client.submit_all(request)
                follow_jobs(jobs)
            except BaseException:
                # They are stopped with the server; where things are kept, the next one must not go on with them.
                with undisturbed(), contextlib.suppress(Exception):  # what matters now is to end
                    for job in jobs if data is not None else ():
                        service.cluster.cancel(job.name, "interrupted")
                raise
            code = exit_code_of(jobs)
            for job in jobs if code else ():
                say(outcome(job))
    raise typer.Exit(code)
