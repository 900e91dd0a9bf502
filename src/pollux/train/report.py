"""Where a run's reports go: to a file, or to a cluster's server.

The session sends a :class:`pollux.api.report.Report` now and then to its :class:`Reporter`, and asks it for advice.
:class:`FileReporter` appends JSON lines, for people and tests; :class:`pollux.train.http_report.HttpReporter` sends to
the server. A run without a reporter sends nothing.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from pollux.api.report import Report
from pollux.types import BatchConfig, ThroughputParams

__all__ = ["Advice", "FileReporter", "QuietReporter", "Report", "Reporter", "plain"]

logger = logging.getLogger(__name__)

Advice = BatchConfig | ThroughputParams
"""A batch to train with, or what is known of the job's speed, for it to choose one by."""


class Reporter(Protocol):
    def send(self, report: Report) -> None:
        """Take it and return at once; losing a report is no reason to stop training."""

    def advice(self) -> Advice | None:
        """What the scheduler has said since the last call. Never blocks."""

    def close(self) -> None:
        """The run is over: what is not sent yet may take a moment."""


class QuietReporter:
    """A reporter whose errors are logged and stop nothing; without one, nothing is sent."""

    def __init__(self, reporter: Reporter | None) -> None:
        self._reporter = reporter

    @property
    def is_there(self) -> bool:
        return self._reporter is not None

    def send(self, make: Callable[[], Report]) -> None:
        try:
            if self._reporter is not None:
                self._reporter.send(make())
        except Exception as error:
            logger.warning("a report could not be sent: %s", error)

    def advice(self) -> Advice | None:
        try:
            return None if self._reporter is None else self._reporter.advice()
        except Exception as error:
            logger.warning("the reporter gave no advice: %s", error)
            return None

    def close(self) -> None:
        try:
            if self._reporter is not None:
                self._reporter.close()
        except Exception as error:
            logger.warning("the last report may be lost: %s", error)


class FileReporter:
    """Appends each report to a file as a line of JSON."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def send(self, report: Report) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain(asdict(report)), allow_nan=False) + "\n")

    def advice(self) -> Advice | None:
        return None

    def close(self) -> None:
        """Everything is written."""


def plain(value: object) -> object:
    """As JSON, which has no NaN and no infinity: those become texts. Metrics of users may be any number-like object."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else str(number)
