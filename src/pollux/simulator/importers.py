"""Imports production traces of ElasticFlow, Philly, Gavel and Shockwave as a workload with step times.

``pollux workload import`` calls :func:`import_trace`. Each format has its jobs in one CSV file, lengths included, and
measured throughputs beside it: a folder of one file for each model (ElasticFlow, Philly), or one file (Gavel,
Shockwave). What is written is read by :mod:`pollux.simulator.step_tables`.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pollux.errors import InputFileError, UnknownNameError
from pollux.simulator.csvfile import read_rows, to_float, to_int
from pollux.simulator.step_tables import COLUMNS as STEP_COLUMNS
from pollux.simulator.step_tables import StepTable
from pollux.simulator.workload import CATEGORIES
from pollux.simulator.workload import COLUMNS as JOB_COLUMNS

_UNCONSOLIDATED = "_unconsolidated"  # Gavel's mark of replicas on different machines
_NO_BATCH = 1  # of models whose batch is not given (A3C, CycleGAN)
_DEFAULT_NODE = 8  # GPUs of a node of ElasticFlow's A100 cluster: more replicas span nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedJob:
    """One job of a trace: ``steps`` of ``batch_size`` examples on all its replicas together."""

    name: str
    time_s: float  # after the first job
    application: str
    num_replicas: int
    batch_size: int
    steps: float
    deadline_s: float | None = None  # after its submission


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedTrace:
    jobs: tuple[ImportedJob, ...]
    tables: Mapping[str, StepTable]

    def workload_csv(self, category: str) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow((*JOB_COLUMNS, "category", "steps", "deadline_s"))
        for job in self.jobs:
            row = (job.name, f"{job.time_s:.12g}", job.application, job.num_replicas, job.batch_size)
            writer.writerow((*row, category, f"{job.steps:.12g}", "" if job.deadline_s is None else job.deadline_s))
        return text.getvalue()

    def step_times_csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(STEP_COLUMNS)
        for name, table in sorted(self.tables.items()):
            for (accelerator, spans), by_count in table.points.items():
                for count, times in sorted(by_count.items()):
                    for batch, step_s in sorted(times.items()):
                        writer.writerow((name, accelerator, int(spans), count, batch, f"{step_s:.9g}"))
        return text.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """How a format is read, and how free its jobs are if the user does not say."""

    summary: str
    read: Callable[[Path, Path, str], ImportedTrace]
    category: str
    accelerator: str


def import_trace(
    kind: str, trace: Path, throughputs: Path, *, accelerator: str | None = None, category: str | None = None
) -> tuple[ImportedTrace, str]:
    """The jobs of a trace with the step times of their models, and the category that its jobs are given.

    Raises:
        UnknownNameError: there is no such format or category.
        InputFileError: names file and row, and what is allowed.
    """
    found = FORMATS.get(kind)
    if found is None:
        raise UnknownNameError("trace format", kind, FORMATS)
    category = category or found.category
    if category not in CATEGORIES[1:]:
        raise UnknownNameError("category of imported jobs", category, CATEGORIES[1:])
    return found.read(trace, throughputs, accelerator or found.accelerator), category


# ElasticFlow and Philly -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """Names of what the two formats have in common."""

    time: str
    steps: str
    deadline: str


_ELASTICFLOW = _Columns(time="submission_time", steps="num_iteration", deadline="deadline")
_PHILLY = _Columns(time="submit_time", steps="real_iteration", deadline="ddl")


def _elasticflow_reader(columns: _Columns) -> Callable[[Path, Path, str], ImportedTrace]:
    def read(path: Path, throughputs: Path, accelerator: str) -> ImportedTrace:
        tables = throughput_tables(throughputs, accelerator)
        needed = ("job_id", columns.time, columns.steps, "model_name", columns.deadline, "batch_size", "num_gpu")
        jobs: list[ImportedJob] = []
        clock = _Clock(path)
        for number, row in read_rows(path, needed):
            time_s = clock.since_start(number, to_float(path, number, row, columns.time))
            deadline_s = to_float(path, number, row, columns.deadline) - to_float(path, number, row, columns.time)
            if deadline_s <= 0:
                problem = (
                    f"{columns.deadline} = {row[columns.deadline]}; later than {columns.time} = {row[columns.time]}"
                )
                raise InputFileError(path, f"{problem} is needed", number)
            job = ImportedJob(
                name=row["job_id"],
                time_s=time_s,
                application=row["model_name"],
                num_replicas=_positive(path, number, row, "num_gpu"),
                batch_size=_positive(path, number, row, "batch_size"),
                steps=_positive(path, number, row, columns.steps),
                deadline_s=deadline_s,
            )
            _require_measured(path, number, job.application, tables)
            jobs.append(job)
        return ImportedTrace(jobs=tuple(jobs), tables=tables)

    return read


def throughput_tables(folder: Path, accelerator: str) -> dict[str, StepTable]:
    """One CSV file for each model: ``global_batch_size``, then iterations per second on 1, 2, 4, ... GPUs."""
    files = sorted(folder.glob("*.csv")) if folder.is_dir() else []
    if not files:
        raise InputFileError(folder, "no folder with a CSV file of throughputs for each model")
    tables: dict[str, StepTable] = {}
    for path in files:
        table = StepTable(path.stem)
        for number, row in read_rows(path, ("global_batch_size",)):
            batch = _positive(path, number, row, "global_batch_size")
            for column in row:
                if column == "global_batch_size" or not row[column]:
                    continue
                if not column.isdigit():
                    raise InputFileError(path, f"column {column!r}; numbers of GPUs are needed", 1)
                per_s, count = to_float(path, number, row, column), int(column)
                if per_s > 0:  # 0: not measured
                    table.add(accelerator, count > _DEFAULT_NODE, count, max(batch // count, 1), 1 / per_s)
        if table.points:
            tables[path.stem] = table
    return tables


# Gavel and Shockwave --------------------------------------------------------------------------


def _read_gavel(path: Path, throughputs: Path, accelerator: str) -> ImportedTrace:
    """``total_steps`` and throughputs are summed over GPUs, as Gavel counts; here a step is one of all GPUs."""
    return _gavel_jobs(path, _file_tables(throughputs, accelerator), lambda number, row, step_s: None)


RUNS_FILE = "runs_jobs.csv"  # beside a trace of Shockwave: what its jobs took


def _read_shockwave(path: Path, throughputs: Path, accelerator: str) -> ImportedTrace:
    """Jobs that change their batch by a rule of their own: as long as they took, at the speed of their first batch.

    The time is that on their GPUs in the authors' runs, where ``runs_jobs.csv`` is beside the trace, else the trace's
    ``duration_s``. What the file says of replicas on several machines was measured on another cluster: left out.
    """
    tables = _file_tables(throughputs, accelerator, with_spans=False)
    took_s = _run_times(path.parent / RUNS_FILE, path) if (path.parent / RUNS_FILE).is_file() else {}

    def steps(number: int, row: dict[str, str], step_s: float) -> float:
        return (took_s.get(row["job"]) or to_float(path, number, row, "duration_s")) / step_s

    return _gavel_jobs(path, tables, steps, more=("duration_s",))


def _run_times(path: Path, trace: Path) -> dict[str, float]:
    """Seconds by job: the median over the authors' simulations, which have no restarts to pay for."""
    counts = {row["job"]: _positive(trace, number, row, "scale_factor") for number, row in read_rows(trace, ("job",))}
    found: dict[str, list[float]] = {}
    for number, row in read_rows(path, ("kind", "job", "gpu_time_s")):
        if row["kind"] == "simulation" and row["job"] in counts:
            found.setdefault(row["job"], []).append(to_float(path, number, row, "gpu_time_s") / counts[row["job"]])
    return {job: statistics.median(times) for job, times in found.items()}


def _gavel_jobs(
    path: Path,
    tables: Mapping[str, StepTable],
    steps_of: Callable[[int, dict[str, str], float], float | None],
    more: tuple[str, ...] = (),
) -> ImportedTrace:
    """``steps_of``: of a row, given its number and the time of a step; None: as ``total_steps`` says."""
    columns = ("job", "model", "total_steps", "scale_factor", "arrival_s", *more)
    jobs = []
    clock = _Clock(path, may_go_back=True)
    for number, row in read_rows(path, columns):
        table = _require_measured(path, number, row["model"], tables)
        count = _positive(path, number, row, "scale_factor")
        device_batch = _positive(path, number, row, "batch_size") if row.get("batch_size") else _NO_BATCH
        steps = steps_of(number, row, table.step_s(table.accelerators[0], False, count, device_batch))
        if steps is None:
            steps = _positive(path, number, row, "total_steps") / count
        jobs.append(
            ImportedJob(
                name=f"job-{row['job']}",
                time_s=clock.since_start(number, to_float(path, number, row, "arrival_s")),
                application=row["model"],
                num_replicas=count,
                batch_size=count * device_batch,
                steps=max(steps, 1.0),
            )
        )
    return ImportedTrace(jobs=tuple(sorted(jobs, key=lambda job: job.time_s)), tables=tables)


ALL_TYPES = "all"


def _file_tables(path: Path, accelerator: str, *, with_spans: bool = True) -> dict[str, StepTable]:
    """One file: ``gpu,model,batch_size,scale_factor,steps_per_s``, the last summed over GPUs."""
    tables: dict[str, StepTable] = {}
    seen: set[str] = set()
    for number, row in read_rows(path, ("gpu", "model", "scale_factor", "steps_per_s")):
        kind, spans = row["gpu"].removesuffix(_UNCONSOLIDATED), row["gpu"].endswith(_UNCONSOLIDATED)
        seen.add(kind)
        per_s = to_float(path, number, row, "steps_per_s")
        if accelerator not in (ALL_TYPES, kind) or (spans and not with_spans):
            continue
        if per_s <= 0:  # 0: it does not fit, or was not measured
            continue
        count = _positive(path, number, row, "scale_factor")
        batch = _positive(path, number, row, "batch_size") if row.get("batch_size") else _NO_BATCH
        tables.setdefault(row["model"], StepTable(row["model"])).add(kind, spans, count, batch, count / per_s)
    if not tables:
        raise UnknownNameError(f"GPU type of {path}", accelerator, {*seen, ALL_TYPES})
    return tables


# Checks ---------------------------------------------------------------------------------------


class _Clock:
    """Times of submission: seconds after the first one."""

    def __init__(self, path: Path, *, may_go_back: bool = False) -> None:
        self._path, self._may_go_back = path, may_go_back
        self._first: float | None = None
        self._last = 0.0

    def since_start(self, number: int, time_s: float) -> float:
        if self._first is None:
            self._first = self._last = time_s
        if time_s < self._first or (time_s < self._last and not self._may_go_back):
            raise InputFileError(
                self._path, f"submitted at {time_s:g} s, the row before at {self._last:g} s: sort it by time", number
            )
        self._last = time_s
        return time_s - self._first


def _positive(path: Path, number: int, row: dict[str, str], column: str) -> int:
    value = to_int(path, number, row, column)
    if value < 1:
        raise InputFileError(path, f"{column} = {value}; at least 1 is needed", number)
    return value


def _require_measured(path: Path, number: int, model: str, tables: Mapping[str, StepTable]) -> StepTable:
    table = tables.get(model)
    if table is None:
        raise InputFileError(
            path, f"no throughput of model {model!r} was measured; measured: {', '.join(sorted(tables))}", number
        )
    return table


FORMATS: Mapping[str, TraceFormat] = {
    "elasticflow": TraceFormat(
        summary="job_id, submission_time, num_iteration, model_name, deadline, batch_size, num_gpu",
        read=_elasticflow_reader(_ELASTICFLOW),
        category="scale-gpus",
        accelerator="gpu",
    ),
    "philly": TraceFormat(
        summary="job_id, submit_time, real_iteration, model_name, ddl, batch_size, num_gpu",
        read=_elasticflow_reader(_PHILLY),
        category="scale-gpus",
        accelerator="gpu",
    ),
    "gavel": TraceFormat(
        summary="job, model, batch_size (per GPU), total_steps, scale_factor, arrival_s",
        read=_read_gavel,
        category="rigid",
        accelerator=ALL_TYPES,
    ),
    "shockwave": TraceFormat(
        summary="the same, with duration_s alone on its GPUs; runs_jobs.csv beside it has what jobs took",
        read=_read_shockwave,
        category="rigid",
        accelerator="v100",
    ),
}
