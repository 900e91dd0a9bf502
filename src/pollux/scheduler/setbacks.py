"""What a crash costs a job: the pause, and the work since its last checkpoint, which it trains again.

:class:`pollux.scheduler.record.JobRecord` compares each report with the one before. A job trained at least up to the
last report before a crash, and goes on from the step of its checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

from pollux.scheduler.ports import JobReport

KEPT = 32  # setbacks of a job that are told in full; all of them count


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What of a report is compared with the next one."""

    at: float
    replica: str
    generation: int
    num_steps: int
    stalled_s: float
    step_s: float | None

    @classmethod
    def of(cls, report: JobReport) -> Told | None:
        """None: the report does not say when it came, or how far the job was."""
        if report.at is None or report.num_steps is None:
            return None
        step_s = report.total_batch / report.throughput if report.total_batch and report.throughput else None
        return cls(
            at=report.at,
            replica=report.replica,
            generation=report.generation,
            num_steps=report.num_steps,
            stalled_s=report.stalled_s,
            step_s=step_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """Replicas ended without being asked to. ``keeps_slots``: the job held its slots meanwhile."""

    at: float
    cause: str
    keeps_slots: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Setback:
    """A job went on from a checkpoint, or began anew."""

    at: float
    cause: str
    pause_s: float
    step: int  # from which it went on
    num_steps: int  # that are trained again, at least
    again_s: float | None  # what those took; None: not known
    lost_s: float  # of the time in which it held slots


def setback_between(before: Told, told: Told, resumed_at: int | None, broken: Break) -> Setback | None:
    """What happened between two reports; None: other replicas went on, or the job had saved all it had done.

    ``resumed_at``: the step that the job itself says it went on from.
    """
    step = told.num_steps if resumed_at is None else min(resumed_at, told.num_steps)
    num_steps = max(before.num_steps - step, 0)
    if resumed_at is None and not num_steps:
        return None
    step_s = before.step_s or told.step_s
    pause_s = max(told.at - broken.at - (told.num_steps - step) * (step_s or 0.0), 0.0)
    again_s = None if step_s is None else num_steps * step_s
    # What it had stood still since its checkpoint, it does not remember.
    forgotten_s = max(before.stalled_s - told.stalled_s, 0.0)
    lost_s = (again_s or 0.0) + forgotten_s + (pause_s if broken.keeps_slots else 0.0)
    return Setback(
        at=broken.at,
        cause=broken.cause,
        pause_s=pause_s,
        step=step,
        num_steps=num_steps,
        again_s=again_s,
        lost_s=lost_s,
    )
