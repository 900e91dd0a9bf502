"""``pollux backup`` and ``pollux restore``: a server's data as one file, and back.

Both work on the data directory itself, as the user that the server runs as. A backup can be made while the server runs.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from pollux.cli.connect import DataOption, JsonOption, moment, print_json, say
from pollux.cli.up import require_server_libraries
from pollux.client.address import find_data_directory
from pollux.errors import InvalidValueError
from pollux.reports import numbers

DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--database",
        metavar="URL",
        help="Of PostgreSQL, as of `up`; the one that the last server here used if left out.",
    ),
]


def backup(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="To write; pollux-DATE-TIME.tar in this folder if left out."),
    ] = None,
    has_logs: Annotated[bool, typer.Option("--logs", help="With what jobs have written.")] = False,
    has_checkpoints: Annotated[bool, typer.Option("--checkpoints", help="With the jobs' checkpoints.")] = False,
    database: DatabaseOption = None,
    data: DataOption = None,
    is_json: JsonOption = False,
) -> None:
    """Back up the server's data to one file: jobs, users, usage, studies, tokens. The server may run."""
    require_server_libraries()
    from pollux.server.storage.backup import STORE, Folder, database_of, write_backup

    directory = find_data_directory(data)
    place = database or database_of(directory) or directory / STORE
    if isinstance(place, Path) and not place.exists():
        raise InvalidValueError(
            f"{directory} holds no database: name the data directory of a server (--data DIR), or its database "
            "(--database URL)"
        )
    target = file or Path(time.strftime("pollux-%Y%m%d-%H%M%S.tar"))
    asked: dict[Folder, bool] = {"logs": has_logs, "checkpoints": has_checkpoints}
    made = write_backup(directory, place, target.absolute(), tuple(name for name, wanted in asked.items() if wanted))
    if is_json:
        about = {"file": str(target), "size_bytes": made.size, "left_out_bytes": made.left_out}
        print_json({**about, "pollux": made.manifest.pollux, "contents": made.manifest.contents})
        return
    jobs = numbers.plural(made.manifest.contents.num_jobs, "job")
    say(f"{jobs}, {made.manifest.contents.num_active} not over; {numbers.size(made.size)} in all")
    for name, size in made.left_out.items():
        if size:
            say(f"left out: {name} of jobs, {numbers.size(size)} (--{name})")
    typer.echo(str(target))


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="That `pollux backup` has written.")],
    database: DatabaseOption = None,
    is_forced: Annotated[
        bool, typer.Option("--force", help="Also over a database that is newer than the backup.")
    ] = False,
    data: DataOption = None,
) -> None:
    """Put a backup in the place of the server's data. No server may run. What was there before is kept beside it."""
    require_server_libraries()
    from pollux.server.storage.backup import database_of
    from pollux.server.storage.restore import restore as put_back

    directory = find_data_directory(data)
    place = database or database_of(directory)
    done = put_back(file.absolute(), directory, place, force=is_forced)
    contents = done.manifest.contents
    jobs = f"{numbers.plural(contents.num_jobs, 'job')}, {contents.num_active} not over"
    say(f"{directory} is as it was at {moment(done.manifest.created)}: {jobs}")
    if contents.num_active and "checkpoints" not in done.manifest.folders:
        say("no checkpoints are in this backup: jobs go on from those that are here, and begin anew without")
    if done.before is not None:
        say(f"what was there before is in {done.before}")
    if place is not None:
        say(f"start the server with its database: pollux up --database {place}")
