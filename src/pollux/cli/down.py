"""``pollux down``: end the server, and wait until it has gone."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Annotated

import typer

from pollux.api.request import parse_duration
from pollux.cli.connect import DataOption, ServerOption, say
from pollux.client import Client
from pollux.client.address import DATA_VARIABLE, URL_VARIABLE, Address, find_data_directory, is_alive, none_runs_in
from pollux.errors import PolluxError, ServerNotFoundError, ServerUnavailableError
from pollux.reports import numbers

EXIT_FAILED = 1
_POLL_S = 0.1
_WITH_SLOTS = ("starting", "running", "resizing")  # those that are stopping may have been cancelled


def down(
    keep_jobs: Annotated[
        bool, typer.Option("--keep-jobs", help="Replicas train on; the next server takes them over.")
    ] = False,
    timeout: Annotated[str, typer.Option("--timeout", metavar="TIME", help="Wait no longer than this.")] = "2m",
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """End the server. Its jobs checkpoint, leave, and go on at the next start."""
    ends_at = time.monotonic() + parse_duration(timeout)
    try:
        found = Client(url=server, data_directory=data)
    except ServerNotFoundError:
        from pollux.engines.ownership import end_jobs

        is_elsewhere = server is not None or (data is None and bool(os.environ.get(URL_VARIABLE)))
        # A server that was killed leaves its jobs training; "down" ends them, too.
        if not is_elsewhere and not keep_jobs and end_jobs(find_data_directory(data), parse_duration(timeout)):
            say("no server ran, but its jobs did: they have left, and go on at the next start")
            return
        if is_elsewhere:
            raise
        directory = find_data_directory(data)
        raise ServerNotFoundError(f"{none_runs_in(directory)}; another one: --data, ${DATA_VARIABLE}") from None
    with found as client:
        num_stopped = 0 if keep_jobs else _num_with_slots(client)
        with contextlib.suppress(ServerUnavailableError):  # it is ending already
            client.shutdown(keep_jobs=keep_jobs)
        address = client.address
        while _is_there(client, address):
            if time.monotonic() > ends_at:
                say(f"error: the server at {address.url} has not ended within {timeout}; it is still at it")
                raise typer.Exit(EXIT_FAILED)
            time.sleep(_POLL_S)
    rest = "; its jobs train on" if keep_jobs else ""
    if num_stopped:
        which = numbers.plural(num_stopped, "job was", "jobs were")
        rest = f"; {which} stopped, and {'goes' if num_stopped == 1 else 'go'} on with the next pollux up"
    say(f"the server has ended{rest}")


def _num_with_slots(client: Client) -> int:
    """Jobs that ending the server stops; 0 if it does not say."""
    try:
        jobs = client.status().jobs
    except PolluxError:
        return 0
    return sum(jobs.get(state, 0) for state in _WITH_SLOTS)


def _is_there(client: Client, address: Address) -> bool:
    if address.pid is not None:
        return is_alive(address.pid)
    try:
        client.status()
    except ServerNotFoundError:
        return False
    except ServerUnavailableError:
        return True
    return True
