"""``pollux workload``: generates, imports and describes workloads. Data goes to stdout, everything else to stderr."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pollux.cli.job_table import plain
from pollux.cli.simulation_options import TracesOption
from pollux.errors import InvalidValueError
from pollux.simulator.application import Application, application_key
from pollux.simulator.generate import BUILTIN_WORKLOADS, generate_workload, training_s
from pollux.simulator.importers import FORMATS, import_trace
from pollux.simulator.result import write_text
from pollux.simulator.source import BUILTIN_PREFIX, load_applications, load_source
from pollux.simulator.step_tables import STEP_TIMES_FILE
from pollux.simulator.workload import Workload, workload_csv

app = typer.Typer(
    help="Generate workloads for the simulator, import production traces, or describe one.",
    no_args_is_help=True,
    add_completion=False,
)

_BAR_WIDTH = 40  # characters
_MAX_BARS = 48  # longer workloads are counted by several hours at a time
_BUILTIN_NAMES = ", ".join(BUILTIN_PREFIX + name for name in BUILTIN_WORKLOADS)

SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Same seed, same workload.")]


@app.command()
def generate(
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Number of jobs at load 1.")] = 160,
    hours: Annotated[float, typer.Option("--hours", help="They arrive within this many hours.")] = 8.0,
    load: Annotated[float, typer.Option("--load", help="Multiplies the number of jobs.")] = 1.0,
    seed: SeedOption = 0,
    mix: Annotated[
        str | None,
        typer.Option("--mix", metavar="APP=SHARE,...", help='Shares of applications, as in "cifar10=0.5,ncf=0.5".'),
    ] = None,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="No job asks for more GPUs than this.")] = 64,
    traces: TracesOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write here instead of to stdout.")
    ] = None,
) -> None:
    """Generate a workload: arrivals over the day, configurations as tuned by their users. Prints CSV."""
    workload = generate_workload(
        load_applications(traces),
        num_jobs=jobs,
        hours=hours,
        load=load,
        seed=seed,
        mix=None if mix is None else parse_mix(mix),
        max_replicas=gpus,
    )
    text = workload_csv(workload.jobs)
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_text(output, text)
        typer.echo(f"{len(workload.jobs)} jobs written to {output}", err=True)


@app.command(name="import")
def import_(
    kind: Annotated[str, typer.Argument(metavar="FORMAT", help=f"One of {', '.join(FORMATS)}.")],
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="The CSV file of its jobs.")],
    throughputs: Annotated[
        Path,
        typer.Option("--throughputs", metavar="PATH", help="Measured throughputs: a folder by model, or one file."),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Writes workload.csv and step_times.csv here.")],
    accelerator: Annotated[
        str | None, typer.Option("--gpu", metavar="TYPE", help="The GPU type to take; all: every one in the file.")
    ] = None,
    category: Annotated[
        str | None, typer.Option("--category", help="scale-gpus: GPUs may change; rigid: as the trace says.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Import a production trace: jobs with their lengths, and step times of their models."""
    imported, category = import_trace(kind, trace, throughputs, accelerator=accelerator, category=category)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "workload.csv", imported.workload_csv(category))
    write_text(out / STEP_TIMES_FILE, imported.step_times_csv())
    command = f"pollux compare --traces {out} --workload {out / 'workload.csv'}"
    if as_json:
        models = sorted({job.application for job in imported.jobs})
        typer.echo(json.dumps({"num_jobs": len(imported.jobs), "category": category, "applications": models}, indent=2))
    else:
        typer.echo(f"{len(imported.jobs)} jobs ({category}) written to {out}; next: {command}", err=True)


@app.command()
def describe(
    workload: Annotated[str, typer.Argument(metavar="WORKLOAD", help=f"A CSV file, or one of {_BUILTIN_NAMES}.")],
    traces: TracesOption = None,
    seed: SeedOption = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what is in a workload: jobs, arrivals, and the work its jobs ask for."""
    summary = summarize(*load_source(workload, traces, seed))
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    else:
        _print(summary)


def parse_mix(text: str) -> dict[str, float]:
    """Shares by application from ``"cifar10=0.5,ncf=0.5"``.

    Raises:
        InvalidValueError: it is not of that form, or names an application twice.
    """
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, equals, share = (piece.strip() for piece in part.partition("="))
        if not (name and equals):
            raise InvalidValueError(f"mix: {part.strip()!r}; APPLICATION=SHARE is needed, as in cifar10=0.5,ncf=0.5")
        if name in shares:
            raise InvalidValueError(f"mix: {name} is named twice")
        try:
            shares[name] = float(share)
        except ValueError as error:
            raise InvalidValueError(f"mix: {name} = {share!r}; a number is needed") from error
    return shares


def summarize(workload: Workload, applications: Mapping[str, Application]) -> dict[str, Any]:
    """The workload in numbers. GPU-hours are those of each job alone, from start to end as it asks to run."""
    gpu_hours_of: dict[tuple[str, int, int], float] = {}
    by_application: dict[str, dict[str, float]] = {}
    last_s = max((job.submitted_at for job in workload.jobs), default=0.0)
    hours_per_bar = math.floor(last_s / 3600 / _MAX_BARS) + 1
    arrivals = [0] * (math.floor(last_s / 3600 / hours_per_bar) + 1)
    for job in workload.jobs:
        application = applications[application_key(applications, job)]
        replicas = job.requested_replicas or 1
        batch_size = job.requested_batch_size or application.limits.initial
        key = (application_key(applications, job), replicas, batch_size)
        if key not in gpu_hours_of:
            gpu_hours_of[key] = replicas * training_s(application, replicas, batch_size) / 3600
        entry = by_application.setdefault(job.application, {"num_jobs": 0, "num_gpus": 0, "gpu_hours": 0.0})
        entry["num_jobs"] += 1
        entry["num_gpus"] += replicas
        entry["gpu_hours"] += gpu_hours_of[key]
        arrivals[math.floor(job.submitted_at / 3600 / hours_per_bar)] += 1
    return {
        "name": workload.name,
        "num_jobs": len(workload.jobs),
        "span_s": last_s - min((job.submitted_at for job in workload.jobs), default=0.0),
        "gpu_hours": sum(entry["gpu_hours"] for entry in by_application.values()),
        "applications": dict(sorted(by_application.items(), key=lambda item: (-item[1]["num_jobs"], item[0]))),
        "arrivals": {"hours_per_bar": hours_per_bar, "num_jobs": arrivals},
    }


def _print(summary: Mapping[str, Any]) -> None:
    console = Console()
    num_jobs = summary["num_jobs"]
    title = f"{summary['name']}: {num_jobs} jobs, first to last arrival {summary['span_s'] / 3600:.1f} h"
    table = Table(title=Text(plain(title)))
    table.add_column("application")
    for column in ("jobs", "share", "GPUs asked for", "GPU-hours"):
        table.add_column(column, justify="right")
    for name, entry in summary["applications"].items():
        count = entry["num_jobs"]
        asked = f"{entry['num_gpus'] / count:.1f}"
        table.add_row(Text(plain(name)), str(count), f"{count / num_jobs:.0%}", asked, f"{entry['gpu_hours']:.1f}")
    table.add_section()
    asked = f"{sum(entry['num_gpus'] for entry in summary['applications'].values()) / num_jobs:.1f}"
    table.add_row("all", str(num_jobs), "100%", asked, f"{summary['gpu_hours']:.1f}")
    console.print(table)

    arrivals, hours_per_bar = summary["arrivals"]["num_jobs"], summary["arrivals"]["hours_per_bar"]
    scale = min(1.0, _BAR_WIDTH / max(arrivals))  # one mark per job while that fits
    mark = "█" if console.encoding.startswith("utf") else "#"
    sketch = Table("hour", "arrivals", "", box=None)
    for index, count in enumerate(arrivals):
        sketch.add_row(str(index * hours_per_bar), str(count), mark * (max(1, round(count * scale)) if count else 0))
    console.print(sketch)
