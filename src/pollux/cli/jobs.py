"""``pollux logs`` and ``wait``: commands on jobs by name."""

from __future__ import annotations

import enum
import sys
import time
from collections.abc import Iterable
from typing import Annotated, TextIO

import typer

from pollux.api.request import parse_duration
from pollux.cli.connect import (
    DataOption,
    JobArgument,
    JobsArgument,
    JsonOption,
    ServerOption,
    connect,
    print_json,
    say,
)
from pollux.cli.follow import outcome
from pollux.cli.terminal import for_file

EXIT_DONE, EXIT_FAILED, EXIT_TIMED_OUT = 0, 1, 124


class Stream(enum.StrEnum):
    OUT = "out"
    ERR = "err"
    BOTH = "both"


def print_lines(lines: Iterable[str], file: TextIO | None = None) -> None:
    """As they come; a terminal gets no escape sequences. A reader that has enough (``| head``) ends it quietly."""
    to = file or sys.stdout
    for line in lines:
        to.write(f"{for_file(line, to)}\n")
        to.flush()


def logs(
    name: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", metavar="N", min=0, help="Only the last lines of each file.")
    ] = None,
    replica: Annotated[str | None, typer.Option("--replica", metavar="ID", help="Only this replica's.")] = None,
    stream: Annotated[Stream, typer.Option("--stream", help="Only stdout, or stderr.")] = Stream.BOTH,
    as_json: Annotated[bool, typer.Option("--json", help="List the files, in JSON.")] = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Print what a job has written, all replicas, from its first start on."""
    with connect(data, server) as client:
        job = client.job(name)
        if as_json:
            print_json({"job": name, "files": job.log_files()})
        else:
            print_lines(job.logs(follow=follow, tail=tail, replica=replica, stream=stream.value))


def wait(
    names: JobsArgument,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="TIME", help="Wait no longer: 90 (seconds), 10m, 2h30m.")
    ] = None,
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Wait until jobs have ended. Ends with 0 if all succeeded, 1 if one did not, 124 when the time is up."""
    timeout_s = None if timeout is None else parse_duration(timeout)
    ends_at = None if timeout_s is None else time.monotonic() + timeout_s
    states: dict[str, str] = {}
    with connect(data, server) as client:
        jobs = [client.job(name) for name in dict.fromkeys(names)]
        for job in jobs:
            try:
                states[job.name] = job.wait(None if ends_at is None else max(ends_at - time.monotonic(), 0.0))
            except TimeoutError as error:
                say(str(error))
                raise typer.Exit(EXIT_TIMED_OUT) from None
            if not as_json:
                typer.echo(outcome(job))
    if as_json:
        print_json({"jobs": [job.last_seen for job in jobs]})
    raise typer.Exit(EXIT_DONE if set(states.values()) == {"succeeded"} else EXIT_FAILED)
