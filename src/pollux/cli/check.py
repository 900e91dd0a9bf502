"""``pollux check``: says what will go wrong with a training script, without running it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pollux.check import Finding, check_script
from pollux.cli.connect import JsonOption, print_json, say
from pollux.errors import InputFileError

EXIT_PROBLEMS = 1


def check(
    scripts: Annotated[list[Path], typer.Argument(metavar="SCRIPT...", help="Python files.")],
    as_json: JsonOption = False,
) -> None:
    """Read training scripts and say what will go wrong when they are resized, with line numbers and what to do.

    Ends with 0 if nothing was found, 1 if something was.
    """
    found = [finding for path in scripts for finding in _check(path)]
    if as_json:
        print_json({"findings": found})
    else:
        for one in found:
            typer.echo(f"{one.file}:{one.line}: {one.severity}: {one.problem}; {one.advice} ({one.rule})")
        num_errors = sum(one.severity == "error" for one in found)
        say(f"{len(scripts)} read: {num_errors} errors, {len(found) - num_errors} warnings")
    raise typer.Exit(EXIT_PROBLEMS if found else 0)


def _check(path: Path) -> list[Finding]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputFileError(path, error.strerror or str(error)) from error
    return check_script(text, str(path))
