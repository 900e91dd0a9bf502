"""Exports a job's curves and decisions as a run of TensorBoard. ``pollux export`` calls it.

Reports are asked for page by page, and go into one event file. The step of a point is the number of steps the job had
made, its time that of the report.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pollux.api.report import StoredReport
from pollux.api.round import RoundSummary
from pollux.client import event_file
from pollux.client.client import Job
from pollux.errors import InputFileError, InvalidValueError

PAGE = 1000
_CURVES = {  # field of a report -> tag
    "num_replicas": "pollux/replicas",
    "total_batch": "pollux/total_batch",
    "device_batch": "pollux/device_batch",
    "accum_steps": "pollux/accumulation_steps",
    "gain": "pollux/gain",
    "noise_scale": "pollux/noise_scale",
    "noise_scale_error": "pollux/noise_scale_error",
    "efficiency": "pollux/efficiency",
    "throughput": "pollux/throughput",
    "goodput": "pollux/goodput",
    "progress": "pollux/progress",
    "epoch": "pollux/epoch",
}
_Numbered = TypeVar("_Numbered", StoredReport, RoundSummary)
DECISIONS, NOTES = "pollux/decisions", "pollux/notes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written, and where. ``num_points`` by tag; the texts of decisions and notes are among them."""

    job: str
    path: Path
    num_reports: int
    num_points: Mapping[str, int]


def export(job: Job, directory: str | Path) -> Exported:
    """Write a job's curves as a run of its name below ``directory``; an earlier export of the job is replaced.

    Raises:
        InvalidValueError: the job has told nothing yet.
        InputFileError: the file cannot be written.
    """
    view = job.describe()
    reports = list(_reports(job))
    if not reports:
        raise InvalidValueError(
            f"job {job.name!r} is {view.state} and has not reported anything, so there is nothing to export; "
            "jobs of kind elastic and restartable report while they train"
        )
    num_points: dict[str, int] = {}
    records = []
    for report in reports:
        for tag, value in _scalars(report):
            records.append(event_file.scalar(tag, value, report.num_steps, report.at))
            num_points[tag] = num_points.get(tag, 0) + 1
        for note in report.notes:
            records.append(event_file.text(NOTES, note, report.num_steps, report.at))
            num_points[NOTES] = num_points.get(NOTES, 0) + 1
    ats, steps = [report.at for report in reports], [report.num_steps for report in reports]
    for round_ in _decisions(job, view.submitted_at):
        # As of the report before it; the first decision comes before all of them.
        step = steps[max(bisect.bisect_right(ats, round_.at) - 1, 0)]
        records.append(event_file.text(DECISIONS, in_words(round_, job.name), step, round_.at))
        num_points[DECISIONS] = num_points.get(DECISIONS, 0) + 1
    # One name for each job, as TensorBoard reads all files of a run together.
    path = Path(directory) / job.name / f"events.out.tfevents.{int(view.submitted_at)}.pollux"
    _write(path, event_file.joined(records, ats[0]))
    return Exported(job=job.name, path=path, num_reports=len(reports), num_points=num_points)


def in_words(round_: RoundSummary, job: str) -> str:
    """What the server says of the job in a round; all of it where the round does not name the job."""
    named = re.compile(rf"(?<![\w.-]){re.escape(job)}(?![\w.-])")
    words = [sentence for sentence in round_.words if named.search(sentence)] or round_.words
    return f"#{round_.id} ({round_.trigger}): {'; '.join(words)}"


def _reports(job: Job) -> Iterator[StoredReport]:
    return _pages(lambda since: job.reports(since=since, limit=PAGE))


def _decisions(job: Job, since: float) -> Iterator[RoundSummary]:
    """Rounds that changed something for the job; none before the job was there."""
    for round_ in _pages(lambda last: job._client.rounds(since=last, limit=PAGE)):
        if round_.at >= since and any(change.job == job.name for change in round_.changes):
            yield round_


def _pages(ask: Callable[[int], list[_Numbered]]) -> Iterator[_Numbered]:
    """All that is kept, oldest first."""
    since = 0
    while page := ask(since):
        yield from page
        since = page[-1].id


def _scalars(report: StoredReport) -> Iterator[tuple[str, float]]:
    for field, tag in _CURVES.items():
        if (value := getattr(report, field)) is not None:
            yield tag, float(value)
    yield from _metrics(report.metrics, ("metrics",))


def _metrics(values: Mapping[str, object], path: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Those that are numbers, also in objects within."""
    for name, value in values.items():
        where = (*path, name)
        if isinstance(value, Mapping):
            yield from _metrics(value, where)
        elif (number := _number(value)) is not None:
            yield "/".join(where), number


def _number(value: object) -> float | None:
    """JSON has no NaN and no infinity: they come as texts."""
    if isinstance(value, bool | int | float):
        return float(value)
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else None


def _write(path: Path, data: bytes) -> None:
    """All of it or nothing: TensorBoard may be looking."""
    beside = path.with_name("new.partial")  # a name that TensorBoard does not take for one of its files
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(data)
        beside.replace(path)
    except OSError as error:
        raise InputFileError(path, f"cannot be written: {error.strerror or error}; name another directory") from error
