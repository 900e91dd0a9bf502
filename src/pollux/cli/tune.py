"""``pollux tune``: begins a study, and lists, shows, stops and resumes studies. Trials are jobs of the server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from pollux.api.study import StudySummary, TrialView
from pollux.cli.connect import DataOption, JsonOption, ServerOption, connect, print_json, say, show
from pollux.cli.job_options import takes_job_options
from pollux.cli.job_table import plain
from pollux.client.study import Study, list_studies, make_study, parse_first, read_study
from pollux.errors import InvalidValueError

_PANEL = "Study"
_MOST_TRIALS = 40  # shown; --json and --csv have all
EXIT_FAILED = 1


class BeginsByDefault(TyperGroup):
    """``pollux tune train.py ...`` begins a study; a first word that is a command below is that command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["begin", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=BeginsByDefault,
    add_completion=False,
    no_args_is_help=True,
    help="Search for the best parameters of a script. pollux tune SCRIPT begins a study; its trials are jobs.",
)

StudyArgument = Annotated[str, typer.Argument(metavar="STUDY", help="Name of the study.")]


def _option(*names: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=_PANEL, show_default=False)


@app.command("begin", hidden=True)
@takes_job_options
def begin(
    options: dict[str, Any],
    command: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT", help="A script, or -- and a command; {NAME} is replaced.")
    ] = None,
    space: Annotated[
        list[str] | None,
        _option("--space", metavar="NAME=RANGE", help="lr=log:1e-4..1e-1, layers=1..8, model=choice:small,large."),
    ] = None,
    metric: Annotated[
        list[str] | None,
        _option("--metric", metavar="NAME[:min|max]", help="What run.log reports, to improve; may be repeated."),
    ] = None,
    limit: Annotated[
        list[str] | None,
        _option("--limit", metavar="NAME<=NUMBER", help="What the best trial keeps: 'latency<=20'; may be repeated."),
    ] = None,
    maximizes: Annotated[bool, _option("--maximize", help="The metric is to grow; it is to fall by default.")] = False,
    trials: Annotated[int | None, _option("--trials", metavar="N", help="How many in all; 20 by default.")] = None,
    parallel: Annotated[int | None, _option("--parallel", metavar="N", help="At most so many at a time.")] = None,
    sampler: Annotated[str | None, _option("--sampler", metavar="tpe|random|cmaes|gp", help="Optuna's.")] = None,
    pruner: Annotated[
        str | None, _option("--pruner", metavar="asha|hyperband|median|curve|pbt|none", help="By progress.")
    ] = None,
    eta: Annotated[
        int | None, _option("--eta", metavar="N", help="Of so many trials at a rung one goes on; 3.")
    ] = None,
    min_progress: Annotated[
        float | None, _option("--min-progress", metavar="SHARE", help="First rung: share of a trial's work; 0.1.")
    ] = None,
    branches: Annotated[
        int | None, _option("--branches", metavar="N", help="Trials that share an early part (late parameters); 3.")
    ] = None,
    first: Annotated[
        list[str] | None, _option("--first", metavar="NAME=VALUE,...", help="A trial to begin with; may be repeated.")
    ] = None,
    seed: Annotated[int | None, _option("--seed", metavar="N", help="Of the sampler; 0.")] = None,
    target: Annotated[float | None, _option("--target", metavar="VALUE", help="End when this is reached.")] = None,
    arguments: Annotated[bool, _option("--arguments", help="Pass parameters as --NAME VALUE, too.")] = False,
    file: Annotated[Path | None, _option("--file", metavar="TOML", help="All of this in a file.")] = None,
    waits: Annotated[bool, typer.Option("--wait", help="Wait until it is over; print its best trial.")] = False,
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Begin a study; print its name. Job options apply to every trial; --weight counts for the whole study."""
    if file is not None:
        if command or space or metric or limit:
            raise InvalidValueError(f"--file {file} beside a command, --space, --metric or --limit; say all in one")
        request = read_study(file)
    else:
        own = {
            "metric": metric or None,
            "limits": limit or None,
            "direction": "maximize" if maximizes else None,
            "trials": trials,
            "parallel": parallel,
            "sampler": sampler,
            "pruner": pruner,
            "eta": eta,
            "min_progress": min_progress,
            "branches": branches,
            "first": [parse_first(text) for text in first or []] or None,
            "seed": seed,
            "target": target,
            "arguments": arguments or None,
        }
        weight = options.pop("weight", None)
        if weight is not None:
            own["weight"] = _number("--weight", weight)
        request = make_study(command or [], space or [], {**options, **own})
    with connect(data, server) as client:
        study = Study.of(request, client).start()
        if not waits:
            print_json(study.describe()) if as_json else typer.echo(study.name)
            return
        if not as_json:
            say(f"study {study.name}: pollux tune show {study.name}, or the dashboard's page of it")
        _report(study.wait(), as_json)


def _number(what: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidValueError(f"{what} {text!r}; a number is needed") from None


def _report(found: StudySummary, as_json: bool) -> None:
    """What a study that is over has found; ends with 1 if it failed."""
    if as_json:
        print_json(found)
    else:
        show(Text(_short(found)))
        _say_warnings(found)
    if found.state == "failed":
        raise typer.Exit(EXIT_FAILED)


@app.command("ls")
def list_all(as_json: JsonOption = False, data: DataOption = None, server: ServerOption = None) -> None:
    """List studies: their state, their trials, their best value."""
    with connect(data, server) as client:
        found = list_studies(client)
    if as_json:
        print_json({"studies": found})
        return
    table = Table("study", "state", "trials", "best", "parameters", "slot-hours", box=None, pad_edge=False)
    for one in found:
        best = "-" if one.best_value is None else f"{one.metric} {one.best_value:.6g}"
        best = f"a front of {len(one.front)} trials" if one.front else best
        table.add_row(
            Text(plain(one.name)),
            one.state,
            _trials(one),
            Text(plain(best)),
            Text(_params(one.best_params)),
            f"{one.slot_s / 3600:.3g}",
        )
    show(table)


@app.command("show")
def show_one(
    name: StudyArgument,
    csv: Annotated[bool, typer.Option("--csv", help="Print its trials as CSV.")] = False,
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Show a study: its trials, the best of them, which parameters matter, what each rung cost."""
    with connect(data, server) as client:
        study = Study.attach(name, client)
        if csv:
            typer.echo("".join(f"{plain(line)}\n" for line in study.csv().splitlines()), nl=False)
            return
        found = study.describe()
    if as_json:
        print_json(found)
        return
    show(Text(_short(found)))
    watched = [one for one in found.watched if one != found.metric]
    named = [escape(plain(name)) for name in (found.metric, *watched)]
    table = Table("trial", "state", *named, "progress", "slots", "chance", "parameters", box=None, pad_edge=False)
    for one in found.trials[-_MOST_TRIALS:]:
        table.add_row(*_row(one, watched))
    show(table)
    if found.importance:
        say(plain("importance: " + ", ".join(f"{name} {value:.0%}" for name, value in found.importance.items())))
    _say_warnings(found)


def _say_warnings(found: StudySummary) -> None:
    for warning in found.warnings:
        say(plain(f"warning: {warning}"))


@app.command("stop")
def stop(
    name: StudyArgument, as_json: JsonOption = False, data: DataOption = None, server: ServerOption = None
) -> None:
    """Stop a study: its trials end. Those that were not done begin again when it is resumed."""
    with connect(data, server) as client:
        _say_state(Study.attach(name, client).stop(), as_json)


@app.command("resume")
def resume(
    name: StudyArgument,
    trials: Annotated[int | None, typer.Option("--trials", metavar="N", help="So many in all from now on.")] = None,
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Resume a study that was stopped, or give one that has finished more trials."""
    with connect(data, server) as client:
        _say_state(Study.attach(name, client).resume(trials), as_json)


def _say_state(found: StudySummary, as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        typer.echo(_state(found))


def _state(found: StudySummary) -> str:
    return plain(f"{found.name} is {found.state}" + (f": {found.reason}" if found.reason else ""))


def _short(found: StudySummary) -> str:
    lines = [_state(found)]
    lines.append(f"trials: {_trials(found)}; {found.slot_s / 3600:.3g} slot-hours")
    if found.best_value is not None:
        best = f"{plain(found.metric)} {found.best_value:.6g} of trial {found.best_trial}"
        lines.append(f"best: {best}, {_params(found.best_params)}")
    if found.limits:
        lines.append(plain(f"limits: {', '.join(map(str, found.limits))}; * breaks one"))
    if found.front:
        names = " and ".join((found.metric, *(one.name for one in found.further)))
        lines.append(plain(f"front: {', '.join(map(str, found.front))}; no trial beats these in {names} together"))
    return "\n".join(lines)


def _trials(found: StudySummary) -> str:
    counts = ", ".join(f"{number} {state}" for state, number in sorted(found.counts.items()))
    return f"{counts or 'none yet'} of {found.num_trials}"


def _params(params: Any) -> str:
    """Without control characters: names and values are what any user wrote."""
    return plain(
        " ".join(
            f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in params.items()
        )
    )


def _row(one: TrialView, watched: Sequence[str]) -> tuple[str | Text, ...]:
    values = [_value(one.value), *(_value(one.values.get(name)) for name in watched)]
    progress = "-" if one.progress is None else f"{one.progress:.0%}"
    chance = "-" if one.chance is None else f"{one.chance:.0%}"
    slots = str(one.num_replicas) if one.state == "running" else "-"
    number = f"{one.number}{'*' if one.keeps_limits is False else ''}"
    return number, one.state, *values, progress, slots, chance, Text(_params(one.params))


def _value(value: float | str | None) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
