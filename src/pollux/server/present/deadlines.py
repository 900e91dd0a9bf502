"""Deadlines and budgets of jobs in words: at submission, while they run, and when they are over."""

from __future__ import annotations

from pollux.reports.numbers import duration
from pollux.scheduler.deadlines import DeadlineStanding, Verdict
from pollux.scheduler.record import JobRecord
from pollux.types import JobSpec


def ended_in_words(spec: JobSpec | None, record: JobRecord | None) -> str:
    """Whether a job that is over met its deadline; empty: it is not over, or has none."""
    if spec is None or spec.deadline_at is None or record is None or record.finished_at is None:
        return ""
    late_s = record.finished_at - spec.deadline_at
    return f"missed by {duration(late_s)}" if late_s > 0 else f"met, {duration(-late_s)} before it"


def deadline_in_words(spec: JobSpec, standing: DeadlineStanding | None, now: float) -> str:
    """How a job that is not over stands to its deadline. ``standing``: as of the last round; a past one has none."""
    if spec.deadline_at is not None and spec.deadline_at <= now:
        return f"missed {duration(now - spec.deadline_at)} ago"
    if standing is None:
        return ""
    slots = f"{standing.num_needed} slot{'s' * (standing.num_needed != 1)}"
    if standing.is_promised:
        return f"can be met, with at least {slots} now"
    if standing.best_at is None:
        return "not known yet whether it can be met: the job has to tell its speed and length first"
    if standing.ends_at is not None:
        return f"at risk: at best {duration(standing.ends_at - standing.deadline_at)} late, with {slots} now"
    if standing.best_at > standing.deadline_at:
        return f"cannot be met: {duration(standing.best_at - standing.deadline_at)} late with all slots that it can use"
    alone = duration(max(standing.best_at - now, 0.0))
    return f"at risk: no slots are reserved for it; it would take {alone} with all that it can use"


def verdict_in_words(verdict: Verdict, deadline_s: float, now: float) -> str:
    """The answer to a deadline at submission."""
    if verdict.is_possible is None:
        return "not known yet whether it can be met: no job of its application has told its speed and length"
    needed = f"{verdict.num_needed} slot{'s' * (verdict.num_needed != 1)} now"
    cost = f"leaves {verdict.num_left} to jobs without a deadline"
    if verdict.num_lost:
        cost += f", {verdict.num_lost} fewer than they hold"
    if verdict.is_possible:
        return f"can be met: it needs {needed}, which {cost}"
    if verdict.best_at is None:
        return f"cannot be met in {duration(deadline_s)}: never, if no deadline promised before is to be broken"
    return (
        f"cannot be met in {duration(deadline_s)}: at best {duration(verdict.best_at - now)}, if no deadline promised "
        f"before is to be broken; that takes {needed} and {cost}"
    )


def spent_in_words(record: JobRecord) -> str:
    """That a job has used up its budget; empty: it has not."""
    budget = record.spec.budget_slot_s
    if budget is None or not record.is_spent:
        return ""
    return (
        f"its budget of {budget / 3600:g} slot-hours is spent ({record.attained_slot_s / 3600:.3g} held): give it more "
        "with pollux update --budget, or cancel it"
    )
