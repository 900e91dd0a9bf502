"""``pollux export``: writes a job's curves and decisions for other tools, by :mod:`pollux.client.tensorboard`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from pollux.cli.connect import DataOption, JobArgument, JsonOption, ServerOption, connect, print_json, say
from pollux.client.tensorboard import export as export_run


def export(
    name: JobArgument,
    tensorboard: Annotated[
        Path, typer.Option("--tensorboard", metavar="DIR", help="Write its curves below this folder, for TensorBoard.")
    ],
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Export a job's curves and decisions. May be repeated while it trains: the same file is written anew."""
    with connect(data, server) as client:
        done = export_run(client.job(name), tensorboard)
    if as_json:
        print_json(
            {
                "job": done.job,
                "file": str(done.path),
                "num_reports": done.num_reports,
                "num_points": dict(done.num_points),
            }
        )
        return
    typer.echo(str(done.path))
    say(f"{done.num_reports} reports, {len(done.num_points)} curves. See them: {_viewer(tensorboard)}")


def _viewer(directory: Path) -> str:
    return f"tensorboard --logdir {shlex.quote(str(directory))}"
