"""Workloads: which jobs arrive when. Read from CSV, written to CSV, described.

Columns: ``name,time,application,num_replicas,batch_size`` (the OSDI'21 artifact's format). The last two are what a user
would have asked for; policies that tune jobs themselves ignore them. The order of rows breaks ties.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pollux.errors import InputFileError, InvalidValueError
from pollux.simulator.application import Application
from pollux.simulator.csvfile import read_rows, to_float, to_int
from pollux.types import JobSpec

MAX_TIME_S = 1e8  # three years: further off is a slip of the pen
COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")


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
        application = applications.get(row["application"])
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
        except InvalidValueError as error:
            raise InputFileError(path, str(error), number) from error
        jobs.append(spec)
    return Workload(path.stem, tuple(jobs))


def workload_csv(jobs: Sequence[JobSpec]) -> str:
    """The jobs as the text of a workload file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for job in jobs:
        time_s = int(job.submitted_at) if job.submitted_at == int(job.submitted_at) else job.submitted_at
        writer.writerow((job.name, time_s, job.application, job.requested_replicas, job.requested_batch_size))
    return text.getvalue()
