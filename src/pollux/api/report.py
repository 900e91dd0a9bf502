"""What a job reports while it trains, and what the server answers.

``pollux.train`` writes reports, the server reads and stores them, the client reads them back. A report is checked when
it is written and when it is read, by the same rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from pollux.api.codec import (
    Codec,
    Json,
    Special,
    about,
    dumps,
    loads,
    located,
    read_integer,
    read_list,
    read_number,
    read_text,
    read_unicode,
    shown,
)
from pollux.api.job import NonFinite
from pollux.errors import InvalidValueError
from pollux.model.profile import Configuration, Timing, check_measurement
from pollux.types import BatchLimits, ThroughputParams

MAX_REPORT_BYTES = 256_000  # all the timings, metrics (a number each), values and notes below have 180,000
MAX_TIMINGS = 1024  # in one report
MAX_METRICS = 256  # in one report
MAX_OBSERVED = 256  # values of a study's metric, in one report
MAX_NOTES = 20  # in one report; of more the last ones are read
MAX_NOTE_LENGTH = 300  # characters; the rest of a longer one is cut off
MAX_NAME_LENGTH = 256  # of a job, an accelerator, a metric

_MAX_DEPTH = 8  # of a metric that is a list or an object
_MAX_METRIC_BITS = 64

Measurement = tuple[Configuration, Timing]
Observed = tuple[float, float | NonFinite]  # progress, and the metric's value there
_R = TypeVar("_R", bound="Report")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A run as it stands now, by rank 0. Null: not known yet."""

    VERSION: ClassVar[int] = 2

    job: str = field(  # empty until it is sent
        default="", metadata=about("The job; the one in the address.", min_length=1, max_length=MAX_NAME_LENGTH)
    )
    replica: str | None = field(
        default=None, metadata=about("The replica's POLLUX_REPLICA_ID.", min_length=1, max_length=MAX_NAME_LENGTH)
    )
    generation: int = field(metadata=about("Which membership of its replicas it trains with.", ge=0))
    num_replicas: int = field(metadata=about(ge=1))
    num_nodes: int = field(metadata=about(ge=1))
    accelerator: str = field(metadata=about(min_length=1, max_length=MAX_NAME_LENGTH))
    epoch: int = field(metadata=about(ge=0))
    num_steps: int = field(metadata=about(ge=0))
    progress: float | None = field(metadata=about("Share of its work that is done, 0 to 1.", ge=0, le=1))
    remaining_examples: float | None = field(metadata=about("Useful examples still to be trained on.", ge=0))
    stalled_s: float = field(metadata=about("Time lost to resizes and restarts since the job began.", ge=0))
    batch: BatchLimits | None = field(metadata=about("The batch sizes its script allows."))
    device_batch: int = field(metadata=about(ge=1))
    accum_steps: int = field(metadata=about(ge=0))
    total_batch: int = field(metadata=about(ge=1))
    noise_scale: float | None = field(metadata=about(ge=0))
    noise_scale_error: float | None = field(
        default=None, metadata=about("Standard error of the noise scale, in examples.", ge=0)
    )
    efficiency: float | None = field(metadata=about(ge=0, le=1))
    gain: float = field(metadata=about(ge=0))
    throughput: float | None = field(metadata=about("Examples per second.", ge=0))
    goodput: float | None = field(metadata=about("Useful examples per second.", ge=0))
    timings: tuple[Measurement, ...] = field(
        default=(),
        metadata=about(
            "Lists [num_nodes, num_replicas, device_batch, grad_s, step_s, num_steps].",
            schema={"items": {"type": "array", "items": {"type": "number"}, "minItems": 6, "maxItems": 6}},
            max_length=MAX_TIMINGS,
        ),
    )
    metrics: Mapping[str, object] = field(
        default_factory=dict, metadata=about("What the script logged: any JSON values.", max_length=MAX_METRICS)
    )
    observed: tuple[Observed, ...] = field(
        default=(),
        metadata=about(
            "In a study: progress and value of its metric, each time it was logged since the last report.",
            max_length=MAX_OBSERVED,
        ),
    )
    notes: tuple[str, ...] = field(
        default=(),
        metadata=about(
            "What the run decided since its last report, a sentence each: at most 20 of 300 characters are kept."
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportAnswer:
    params: Mapping[str, ThroughputParams] | None = field(
        metadata=about("Fitted throughput model by type of accelerator.")
    )
    report_every_s: float = field(metadata=about("How long to wait before the next report."))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredReport(Report):
    """A report as the server keeps it."""

    id: int = field(metadata=about("Goes up for ever."))
    at: float = field(metadata=about("When it came, in seconds since 1970."))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportList:
    reports: tuple[StoredReport, ...]


# Measurements ---------------------------------------------------------------------------------

_TIMING_FIELDS = (*Configuration._fields, *Timing._fields)


def encode_measurement(measurement: Measurement) -> list[Json]:
    """``[num_nodes, num_replicas, device_batch, grad_s, step_s, num_steps]``."""
    configuration, timing = measurement
    return [*map(int, configuration), float(timing.grad_s), float(timing.step_s), int(timing.num_steps)]


def decode_measurement(value: object, where: str) -> Measurement:
    """From such a list, or from the pair itself."""
    values = read_list(value, where)
    pair = [part for part in values if isinstance(part, tuple)]
    if len(values) == len(pair) == 2:
        values = [number for part in pair for number in part]
    read_list(values, where, length=len(_TIMING_FIELDS))
    numbers = [
        (read_number if name in ("grad_s", "step_s") else read_integer)(
            number, f"{where}.{name}", 0 if name in ("grad_s", "step_s") else 1
        )
        for name, number in zip(_TIMING_FIELDS, values, strict=True)
    ]
    num_nodes, num_replicas, device_batch, grad_s, step_s, num_steps = numbers
    configuration = Configuration(int(num_nodes), int(num_replicas), int(device_batch))
    timing = Timing(float(grad_s), float(step_s), int(num_steps))
    with located(where):
        check_measurement(configuration, timing)
    return configuration, timing


MEASUREMENTS: dict[object, Special] = {Measurement: Special(encode_measurement, decode_measurement)}
REPORTS = Codec(special=MEASUREMENTS, requires_all=True)
"""Writes and reads reports, and what holds them."""


# Reports --------------------------------------------------------------------------------------


def checked(report: Report) -> Report:
    """The same, if all of it can be true; notes are cut to what is kept.

    Raises:
        InvalidValueError: names the field, the value seen and what is allowed.
    """
    return _made(Report, {one.name: getattr(report, one.name) for one in dataclasses.fields(report)})


def decode_report(value: object) -> Report:
    return _made(Report, REPORTS.read_record(Report, value, "report"))


def decode_stored_report(value: object) -> StoredReport:
    return _made(StoredReport, REPORTS.read_record(StoredReport, value, "report"))


def stored(report: Report, id_: int, at: float) -> StoredReport:
    return StoredReport(id=id_, at=at, **{one.name: getattr(report, one.name) for one in dataclasses.fields(Report)})


def _made(kind: type[_R], values: Mapping[str, object]) -> _R:
    found = REPORTS.read_fields(kind, {**values, "notes": _clipped(values.get("notes", ()))}, "report")
    _check_metric(found.get("metrics", {}), "report.metrics", _MAX_DEPTH)
    report = kind(**found)
    if report.num_nodes > report.num_replicas:
        raise InvalidValueError(
            f"report.num_nodes = {report.num_nodes}; at most num_replicas = {report.num_replicas} is allowed"
        )
    return report


def encode_report(report: Report) -> dict[str, Json]:
    values = REPORTS.encode(dataclasses.replace(report, timings=()))
    assert isinstance(values, dict)
    timings: list[Json] = [encode_measurement(entry) for entry in report.timings]
    return {**values, "timings": timings}


def write_report(report: Report) -> str:
    """As JSON.

    Raises:
        InvalidValueError: it cannot be true, or is longer than a server takes.
    """
    text = dumps(encode_report(checked(report)), "report")
    if len(text) > MAX_REPORT_BYTES:
        raise InvalidValueError(f"report of {len(text)} bytes; at most {MAX_REPORT_BYTES} are allowed: log less")
    return text


def read_report(text: str | bytes) -> Report:
    """Of JSON.

    Raises:
        InvalidValueError: it is none, or cannot be true.
    """
    return decode_report(loads(text, "report", MAX_REPORT_BYTES))


def _clipped(notes: object) -> tuple[str, ...]:
    """Too many or too long notes are cut: a report is worth more than how a note of it is worded."""
    texts = [read_text(note, f"report.notes[{index}]") for index, note in enumerate(read_list(notes, "report.notes"))]
    lines = (" ".join(text.encode("utf-8", "replace").decode().split()) for text in texts[-MAX_NOTES:])
    return tuple(line[:MAX_NOTE_LENGTH].rstrip() for line in lines if line)


def _check_metric(value: object, where: str, depth: int) -> None:
    if isinstance(value, dict | list) and depth == 0:
        raise InvalidValueError(f"{where} is nested too deeply; at most {_MAX_DEPTH} levels are allowed")
    if isinstance(value, dict):
        for key, entry in value.items():
            read_unicode(read_text(key, f"a name in {where}", 1, MAX_NAME_LENGTH), f"a name in {where}")
            _check_metric(entry, f"{where}.{key}", depth - 1)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            _check_metric(entry, f"{where}[{index}]", depth - 1)
    elif isinstance(value, str):
        read_unicode(value, where)
    elif isinstance(value, float):
        read_number(value, where)
    elif isinstance(value, int):
        if value.bit_length() > _MAX_METRIC_BITS:
            raise InvalidValueError(f"{where} = {shown(value)}; at most {_MAX_METRIC_BITS} bits are allowed")
    elif value is not None:
        raise InvalidValueError(
            f"{where} = {shown(value)}; a number, text, true, false, null, list or object is needed"
        )
