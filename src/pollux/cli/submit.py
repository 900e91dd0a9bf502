"""``pollux submit``: a job for the server. Prints its name, and nothing else, on stdout."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pollux.cli.check import say_script_errors
from pollux.cli.connect import DataOption, ServerOption, connect, say
from pollux.cli.follow import exit_code_of, follow_jobs, outcome
from pollux.cli.job_options import CommandArgument, takes_job_options
from pollux.client import make_request


@takes_job_options
def submit(
    command: CommandArgument,
    options: dict[str, Any],
    waits: Annotated[bool, typer.Option("--wait", help="Wait until it has ended; end with its exit code.")] = False,
    follows: Annotated[bool, typer.Option("--follow", "-f", help="Print its logs as well; implies --wait.")] = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Submit a job; print its name (of an array: one per line).

    Options may also stand in the script, in lines as #POLLUX --max-replicas 4 before its first statement.
    """
    request = make_request(command, options, say)  # what is wrong with it needs no server to be seen
    say_script_errors(request)
    with connect(data, server) as client:
        jobs = client.submit_all(request)
        for job in jobs:
            typer.echo(job.name, err=follows)  # stdout is the logs'
            if job.last_seen is not None and job.last_seen.deadline:
                say(f"{job.name}: deadline {job.last_seen.deadline}")
        if follows:
            follow_jobs(jobs)
        if waits or follows:
            for job in jobs:
                job.wait()
                say(outcome(job))
            raise typer.Exit(exit_code_of(jobs))
