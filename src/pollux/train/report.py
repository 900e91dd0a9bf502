"""What a run tells the outside: one report at a time, to whoever listens.

Stands in ``train``. A :class:`Reporter` is where reports go and where advice comes from; without one a run keeps to
itself. :class:`FileReporter` appends JSON lines, for people and tests; a cluster's server is told by
:class:`pollux.train.http_report.HttpReporter`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pollux.model.profile import Configuration, Timing
from pollux.types import BatchConfig, BatchLimits, ThroughputParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A run as it stands now, by rank 0."""

    generation: int
    num_replicas: int
    num_nodes: int
    accelerator: str
    epoch: int
    num_steps: int
    progress: float | None  # share of the learning asked for, 0..1; None before ``epochs`` is called
    remaining_examples: float | None  # useful ones still to come
    stalled_s: float  # spent in resizes and recoveries since training began
    batch: BatchLimits | None
    device_batch: int
    accum_steps: int
    total_batch: int
    noise_scale: float | None
    noise_scale_error: float | None = None  # standard error of that, in examples
    efficiency: float | None
    gain: float
    throughput: float | None  # examples per second
    goodput: float | None  # useful ones
    timings: tuple[tuple[Configuration, Timing], ...] = ()  # new since the last report
    metrics: Mapping[str, Any] = field(default_factory=dict)  # the last ``run.log``
    notes: tuple[str, ...] = ()  # what the run decided since the last report, a sentence each

    def to_json(self) -> str:
        return json.dumps(plain(asdict(self)), allow_nan=False)


Advice = BatchConfig | ThroughputParams
"""A batch to train with, or what is known of the job's speed, for it to choose one by."""


class Reporter(Protocol):
    def send(self, report: Report) -> None:
        """Take it and return at once; losing a report is no reason to stop training."""

    def advice(self) -> Advice | None:
        """What the scheduler has said since the last call. Never blocks."""

    def close(self) -> None:
        """The run is over: what is not sent yet may take a moment."""


class FileReporter:
    """Appends each report to a file as a line of JSON."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def send(self, report: Report) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(report.to_json() + "\n")

    def advice(self) -> Advice | None:
        return None

    def close(self) -> None:
        """Everything is written."""


def plain(value: Any) -> Any:
    """JSON knows no NaN and no infinity; users' metrics may be any number-like thing."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else str(number)
