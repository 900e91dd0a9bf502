"""What a run tells the outside: one report at a time, to whoever listens.

Stands in ``train``. A :class:`Reporter` is where reports go and where advice comes from; without one a run keeps to
itself. :class:`FileReporter` appends JSON lines, for people and tests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pollux.model.profile import Configuration, Timing
from pollux.types import BatchConfig


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
    device_batch: int
    accum_steps: int
    total_batch: int
    noise_scale: float | None
    efficiency: float | None
    gain: float
    throughput: float | None  # examples per second
    goodput: float | None  # useful ones
    timings: tuple[tuple[Configuration, Timing], ...] = ()  # new since the last report
    metrics: Mapping[str, Any] = field(default_factory=dict)  # the last ``run.log``

    def to_json(self) -> str:
        return json.dumps(_plain(asdict(self)), allow_nan=False)


class Reporter(Protocol):
    def send(self, report: Report) -> None:
        """Take it and return at once; losing a report is no reason to stop training."""

    def advice(self) -> BatchConfig | None:
        """The batch that the scheduler wants, if it has said so since the last call. Never blocks."""


class FileReporter:
    """Appends each report to a file as a line of JSON."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def send(self, report: Report) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(report.to_json() + "\n")

    def advice(self) -> BatchConfig | None:
        return None


def _plain(value: Any) -> Any:
    """JSON knows no NaN and no infinity; users' metrics may be any number-like thing."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else str(number)
