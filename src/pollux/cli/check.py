"""``pollux check``: says what will go wrong with a training script, without running it.

``pollux submit`` and ``run`` say the errors among it, too.
"""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import Annotated

import typer

from pollux.api.request import JobRequest, find_script
from pollux.check import Finding, check_script
from pollux.cli.connect import JsonOption, print_json, say
from pollux.errors import InputFileError
from pollux.reports import numbers

EXIT_PROBLEMS = 1
MAX_ERRORS = 5  # that a submission shows

logger = logging.getLogger(__name__)


def check(
    scripts: Annotated[list[Path], typer.Argument(metavar="SCRIPT...", help="Python files.")],
    as_json: JsonOption = False,
) -> None:
    """Read training scripts and say what will go wrong when they are resized, with line numbers and what to do.

    Ends with 0 if nothing was found but hints, 1 if something was.
    """
    found = [finding for path in scripts for finding in _check(path)]
    problems = [one for one in found if one.severity != "hint"]
    if as_json:
        print_json({"findings": found})
    else:
        for one in found:
            typer.echo(_line(one))
        num_errors = sum(one.severity == "error" for one in found)
        num_hints = len(found) - len(problems)
        counts = [numbers.plural(num_errors, "error"), numbers.plural(len(problems) - num_errors, "warning")]
        counts += [numbers.plural(num_hints, "hint")] if num_hints else []
        say(f"{len(scripts)} read: {', '.join(counts)}")
    raise typer.Exit(EXIT_PROBLEMS if problems else 0)


def say_script_errors(request: JobRequest) -> None:
    """What ``pollux submit`` and ``run`` say of a script that will go wrong. Never keeps a job from being submitted."""
    script = find_script(request.command)
    if script is None or not script.endswith(".py"):
        return
    try:
        text = Path(request.workdir or request.cwd or ".", script).read_text(encoding="utf-8", errors="replace")
        errors = [one for one in check_script(text, script) if one.severity == "error"]
    except Exception:  # a file that went away, or a rule that a strange script defeats
        logger.debug("%s was not checked", script, exc_info=True)
        return
    for one in errors[:MAX_ERRORS]:
        say(_line(one))
    if errors:
        rest = f", and {len(errors) - MAX_ERRORS} more" if len(errors) > MAX_ERRORS else ""
        what = f"{numbers.plural(min(len(errors), MAX_ERRORS), 'error')}{rest}, by: pollux check {shlex.quote(script)}"
        say(f"({what}; submitted all the same: mend {'it' if len(errors) == 1 else 'them'} and submit again)")


def _line(one: Finding) -> str:
    return f"{one.file}:{one.line}: {one.severity}: {one.problem}; {one.advice} ({one.rule})"


def _check(path: Path) -> list[Finding]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputFileError(path, error.strerror or str(error)) from error
    return check_script(text, str(path))
