"""Workloads: which jobs arrive when. Read from CSV, written to CSV, described.

Columns: ``name,time,application,num_replicas,batch_size`` (the OSDI'21 artifact's format). The last two are what a user
would have asked for; policies that tune jobs themselves ignore them. The order of rows breaks ties. Four more columns
may be there, for jobs that a live cluster recorded: ``min_replicas,max_replicas,weight,is_preemptible``. And one of the
Sia artifact, ``category``: ``adaptive`` jobs are as without it, ``scale-gpus`` keep the batch size that they ask for,
``rigid`` ones the number of replicas too, whatever the policy. ``owner`` and ``priority`` may be there too, and
``deadline_s``: by when after its submission a job should be through.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pollux.errors import InputFileError, InvalidValueError
from pollux.simulator.application import Application, application_key
from pollux.simulator.csvfile import read_rows, to_float, to_int
from pollux.types import JobSpec

MAX_TIME_S = 1e8  # three years; a later submission is a typing error
COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")
CATEGORIES = ("adaptive", "scale-gpus", "rigid")
MORE_COLUMNS = ("min_replicas", "max_replicas", "weight", "is_preemptible")
OWNER_COLUMNS = ("owner", "priority")
DEADLINE_COLUMN = "deadline_s"


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs in the order of their file; ``name`` is for people."""

    name: str
    jobs: tuple[JobSpec, ...]


def job_spec(application: Application, *, name: str, time_s: float, num_replicas: int, batch_size: int) -> JobSpec:
    """A job of a known application, as a workload's row describes it."""
    return JobSpec(
        name=name,
        application=application.name,
        submitted_at=time_s,
        batch=application.limits,
        min_replicas=application.min_replicas,
        max_replicas=application.max_replicas,
        requested_replicas=num_replicas,
        requested_batch_size=batch_size,
    )


def load_workload(path: str | Path, applications: Mapping[str, Application]) -> Workload:
    """Read a workload.

    Raises:
        InputFileError: names the row and what is allowed.
    """
    path = Path(path)
    jobs: list[JobSpec] = []
    names: set[str] = set()
    for number, row in read_rows(path, COLUMNS):
        key = application_key(applications, JobSpec(name=row["name"], application=row["application"]))
        application = applications.get(key)
        if application is None:
            raise InputFileError(
                path, f"unknown application {row['application']!r}; known: {', '.join(sorted(applications))}", number
            )
        if row["name"] in names:
            raise InputFileError(path, f"job name {row['name']!r} is used twice; names must be unique", number)
        names.add(row["name"])
        time_s = to_float(path, number, row, "time")
        if not 0 <= time_s <= MAX_TIME_S:
            raise InputFileError(
                path, f"time = {row['time']}; seconds from the start, at least 0, at most {MAX_TIME_S:.0f}", number
            )
        num_replicas = to_int(path, number, row, "num_replicas")
        if num_replicas < 1:
            raise InputFileError(path, f"num_replicas = {num_replicas}; at least 1 is needed", number)
        batch_size = to_int(path, number, row, "batch_size")
        limits = application.limits
        if not limits.initial <= batch_size <= limits.maximum:
            raise InputFileError(
                path,
                f"batch_size = {batch_size}; {application.name} allows {limits.initial}..{limits.maximum}",
                number,
            )
        try:
            spec = job_spec(
                application, name=row["name"], time_s=time_s, num_replicas=num_replicas, batch_size=batch_size
            )
            spec = _categorised(path, number, row, spec)
            spec = replace(spec, application=row["application"], **_more(path, number, row))
            spec = replace(spec, deadline_at=_deadline(path, number, row, time_s))
        except InvalidValueError as error:
            raise InputFileError(path, str(error), number) from error
        jobs.append(spec)
    return Workload(path.stem, tuple(jobs))


def _categorised(path: Path, number: int, row: dict[str, str], spec: JobSpec) -> JobSpec:
    """The job with no more freedom than its category has."""
    category = row.get("category") or "adaptive"
    if category not in CATEGORIES:
        raise InputFileError(path, f"category = {category!r}; one of {', '.join(CATEGORIES)} is needed", number)
    replicas, total = spec.requested_replicas, spec.requested_batch_size
    if category == "adaptive" or spec.batch is None or replicas is None or total is None:
        return spec
    # What it asks for can run, however small the batch of each device is then.
    device_min = min(spec.batch.device_min, max(total // replicas, 1))
    batch = replace(spec.batch, minimum=total, maximum=total, device_min=device_min)
    if category == "rigid":
        return replace(spec, batch=batch, min_replicas=replicas, max_replicas=replicas)
    return replace(spec, batch=batch, max_replicas=min(spec.max_replicas, max(batch.max_replicas, spec.min_replicas)))


def _deadline(path: Path, number: int, row: dict[str, str], time_s: float) -> float | None:
    if row.get(DEADLINE_COLUMN) in (None, "", "None"):
        return None
    seconds = to_float(path, number, row, DEADLINE_COLUMN)
    if seconds <= 0:
        raise InputFileError(path, f"{DEADLINE_COLUMN} = {seconds:g}; seconds after the submission, above 0", number)
    return time_s + seconds


def _more(path: Path, number: int, row: dict[str, str]) -> dict[str, Any]:
    """Of the columns that may be there, those that say something."""
    given = {
        column: row[column] for column in (*MORE_COLUMNS, *OWNER_COLUMNS) if row.get(column) not in (None, "", "None")
    }
    found: dict[str, Any] = {}
    for column in given:
        if column == "owner":
            found[column] = row[column]
        elif column == "is_preemptible":
            if row[column] not in ("True", "False"):
                raise InputFileError(path, f"{column} = {row[column]!r}; True or False is needed", number)
            found[column] = row[column] == "True"
        else:
            found[column] = (to_float if column == "weight" else to_int)(path, number, row, column)
    return found


def workload_csv(jobs: Sequence[JobSpec], *, with_more: bool = False) -> str:
    """The jobs as the text of a workload file; ``with_more``: also what only jobs of a live cluster have."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS + MORE_COLUMNS * with_more)
    for job in jobs:
        time_s = int(job.submitted_at) if job.submitted_at == int(job.submitted_at) else job.submitted_at
        row = (job.name, time_s, job.application, job.requested_replicas, job.requested_batch_size)
        more = (job.min_replicas, job.max_replicas, job.weight, job.is_preemptible) if with_more else ()
        writer.writerow((*row, *more))
    return text.getvalue()
