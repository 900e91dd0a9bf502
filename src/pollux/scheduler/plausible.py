"""Clips what cannot be true in a job's reports, and says so once. The scheduler loop calls it with every report."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass

from pollux.errors import InvalidValueError
from pollux.scheduler.ports import JobReport, check_report
from pollux.scheduler.record import JobRecord
from pollux.types import BatchLimits

logger = logging.getLogger(__name__)

# At a noise scale of 1,000 times the largest batch, that batch has an efficiency of 99.9 %: more changes no decision.
MOST_NOISE = 1000
# Work may fall this many times as fast as the highest throughput that the job has told, and by this many seconds of it
# at once: reports are late, and throughputs are averages.
FASTER, AHEAD_S = 1.5, 60.0


@dataclass(slots=True)
class _Pace:
    """From when on the work left is compared with the throughput."""

    since: float
    remaining: float
    total: float | None  # examples of the whole run
    throughput: float  # the highest so far

    def least(self, now: float) -> float:
        """Examples that must be left at least."""
        return self.remaining - self.throughput * (FASTER * (now - self.since) + AHEAD_S)


class Plausibility:
    """Remembers of each job what its next report is compared with, and what has been told of it."""

    def __init__(self, save: Callable[[JobRecord], None]) -> None:
        """``save`` is called with a job whose history has something new."""
        self._save = save
        self._paces: dict[str, _Pace] = {}
        self._told: dict[str, set[str]] = {}

    def forget(self, job: str) -> None:
        """The job is over."""
        self._paces.pop(job, None)
        self._told.pop(job, None)

    def clip(self, report: JobReport, record: JobRecord, now: float) -> JobReport | None:
        """The report as far as it is believed; None: not at all. What was clipped is in the job's history."""
        try:
            check_report(report)
        except InvalidValueError as error:
            logger.warning("job %s: report refused: %s", record.name, error)
            return None
        report, noise = self._clip_noise(report, report.batch or record.spec.batch)
        report, progress = self._clip_progress(report, now)
        told = self._told.setdefault(report.job, set())
        news = [text for kind, text in (("noise", noise), ("progress", progress)) if text and kind not in told]
        told.update(kind for kind, text in (("noise", noise), ("progress", progress)) if text)
        if news:
            record.note(now, "; ".join(news))
            self._save(record)
        return report

    def _clip_noise(self, report: JobReport, batch: BatchLimits | None) -> tuple[JobReport, str]:
        if batch is None or report.noise_scale is None or report.noise_scale <= MOST_NOISE * batch.maximum:
            return report, ""
        most = float(MOST_NOISE * batch.maximum)
        error = None if report.noise_scale_error is None else min(report.noise_scale_error, most)
        text = f"reports a noise scale of {report.noise_scale:.3g}; {most:,.0f} counts, {MOST_NOISE:,} largest batches"
        return dataclasses.replace(report, noise_scale=most, noise_scale_error=error), text

    def _clip_progress(self, report: JobReport, now: float) -> tuple[JobReport, str]:
        remaining = report.remaining_examples
        if remaining is None or report.throughput is None:
            return report, ""
        pace = self._paces.get(report.job)
        if pace is None or remaining > pace.remaining:  # the first, or back at a checkpoint, or more work
            total = None if report.progress is None or report.progress >= 1 else remaining / (1 - report.progress)
            fastest = max(report.throughput, 0.0 if pace is None else pace.throughput)
            self._paces[report.job] = _Pace(now, remaining, total, fastest)
            return report, ""
        pace.throughput = max(pace.throughput, report.throughput)
        least = pace.least(now)
        if remaining >= least:
            return report, ""
        progress = report.progress
        if progress is not None and pace.total:
            progress = min(progress, max(1 - least / pace.total, 0.0))
        text = (
            f"reports {remaining:,.0f} examples left; {least:,.0f} counts: {pace.throughput:.3g} examples/s, the most "
            f"it told, cannot have done more in {now - pace.since:,.0f} s"
        )
        return dataclasses.replace(report, remaining_examples=least, progress=progress), text
