"""``pollux down``: end the server, and wait until it has gone."""

from __future__ import annotations

import contextlib
import time
from typing import Annotated

import typer

from pollux.api.request import parse_duration
from pollux.cli.connect import DataOption, ServerOption, say
from pollux.client import Client
from pollux.client.address import Address, find_data_directory, is_alive
from pollux.errors import ServerNotFoundError, ServerUnavailableError

EXIT_FAILED = 1
_POLL_S = 0.1


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

        # A server that was killed leaves its jobs training; "down" ends them, too.
        if server is None and not keep_jobs and end_jobs(find_data_directory(data), parse_duration(timeout)):
            say("no server ran, but its jobs did: they have left, and go on at the next start")
            return
        raise
    with found as client:
        with contextlib.suppress(ServerUnavailableError):  # it is ending already
            client.shutdown(keep_jobs=keep_jobs)
        address = client.address
        while _is_there(client, address):
            if time.monotonic() > ends_at:
                say(f"error: the server at {address.url} has not ended within {timeout}; it is still at it")
                raise typer.Exit(EXIT_FAILED)
            time.sleep(_POLL_S)
    say("the server has ended" + ("; its jobs train on" if keep_jobs else ""))


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
