"""Answers two questions of people who wait: when will a job start, and why are slots free?

:mod:`pollux.server.present.queries` calls these. A start is found by playing the queue on with the cluster's own policy
(:mod:`pollux.scheduler.forecast`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import median

import numpy as np

from pollux.api.job import JobForecast
from pollux.policy import PolicySettings, make_policy
from pollux.reports import numbers
from pollux.scheduler.forecast import StartForecast, forecast_start
from pollux.scheduler.nodes import placeable, usable
from pollux.scheduler.quotas import Quotas
from pollux.scheduler.record import JobRecord
from pollux.types import JobDecision, Node, Plan, Snapshot

PATIENCE_S = 2.0  # for all plays together; a caller waits for the answer
MOST_NAMED = 3


def job_forecast(
    name: str,
    nodes: Sequence[Node],
    records: Sequence[JobRecord],
    *,
    leaving: Collection[str],
    policy: str,
    settings: PolicySettings,
    quotas: Callable[[], Quotas],
    limits_s: Mapping[str, float],
    now: float,
) -> JobForecast:
    """``records``: jobs that the scheduler may give slots to, this one among them. ``quotas``: new ones for a play."""
    views = [record.view(now) for record in records]
    there, views = usable(leaving, nodes, views)
    snapshot = placeable(Snapshot.of(now, there, views))
    if name not in {view.name for view in snapshot.jobs}:
        return no_forecast("it does not fit the cluster as it is")
    usual_s = median([record.attained_s for record in records if record.attained_s > 0] or [600.0])
    ends_at = time.monotonic() + PATIENCE_S

    def make_decide() -> Callable[[Snapshot], Plan]:
        ask, kept = make_policy(policy, settings).decide, quotas()
        return lambda snapshot: kept.decide(snapshot, ask)

    found = forecast_start(
        snapshot,
        name,
        make_decide,
        np.random.default_rng(0),
        limits_s=limits_s,
        usual_s=usual_s,
        has_time=lambda: time.monotonic() < ends_at,
    )
    return JobForecast(
        words=_words(found),
        low_s=found.low_s,
        median_s=found.median_s,
        high_s=found.high_s,
        num_runs=found.num_runs,
        num_guessed=found.num_guessed,
    )


def no_forecast(reason: str) -> JobForecast:
    return JobForecast(
        words=f"no estimate: {reason}", low_s=None, median_s=None, high_s=None, num_runs=0, num_guessed=0
    )


def _words(found: StartForecast) -> str:
    if not found.num_runs:
        return f"no estimate: the queue is too long to be played on within {PATIENCE_S:g} s"
    if found.median_s is None:
        return "no start is foreseen: no job ends that would make room for it"
    if found.median_s == 0.0:
        return "starts with the next decision"
    low, middle = numbers.duration(found.low_s), numbers.duration(found.median_s)
    high = "later than can be foreseen" if found.high_s is None else numbers.duration(found.high_s)
    text = f"starts in about {middle} ({low} to {high}, 8 of 10 times)"
    guessed = found.num_guessed
    if guessed:
        jobs = numbers.plural(guessed, "job")
        text = f"{text}; of {jobs} the end is guessed, as {'it does' if guessed == 1 else 'they do'} not report it"
    return text


# Free slots -----------------------------------------------------------------------------------


def free_slot_reasons(
    num_free: int,
    running: Iterable[tuple[JobRecord, JobDecision | None]],
    waiting: Sequence[tuple[str, str]],
) -> tuple[str, ...]:
    """Why so many slots of nodes that may be used are free, in words; empty: none is.

    ``running``: jobs that hold slots, with what was last decided about each; ``waiting``: name and reason of each.
    """
    if num_free <= 0:
        return ()
    words = [_waiting_words(waiting)]
    groups: dict[str, list[str]] = {}
    for record, decision in running:
        groups.setdefault(_why_not_more(record, decision), []).append(record.name)
    if not groups:
        words.append("no job runs")
    words += [f"{_named(names)}: {reason}" for reason, names in sorted(groups.items(), key=lambda one: -len(one[1]))]
    return tuple(words)


def _waiting_words(waiting: Sequence[tuple[str, str]]) -> str:
    if not waiting:
        return "no job waits"
    reasons: dict[str, list[str]] = {}
    for name, reason in waiting:
        reasons.setdefault(reason or "waiting for the next decision", []).append(name)
    told = [f"{_named(names)}: {reason}" for reason, names in list(reasons.items())[:MOST_NAMED]]
    more = len(reasons) - len(told)
    return (
        f"{numbers.plural(len(waiting), 'job')} waiting ({'; '.join(told)}{f'; and {more} more reasons' * (more > 0)})"
    )


def _why_not_more(record: JobRecord, decision: JobDecision | None) -> str:
    held, spec = record.allocation.num_replicas, record.spec
    if spec.min_replicas == spec.max_replicas or spec.requested_replicas == held:
        return "runs with the number of replicas it was submitted with"
    if held >= spec.max_replicas:
        return "has as many replicas as it may have"
    if decision is None or not decision.option_replicas.size:
        return "the next decision may give it more"
    larger = decision.option_replicas > held
    if not larger.any():
        return "grows step by step, as far as its speed has been measured"
    here = decision.option_speedups[decision.option_replicas == held]
    if here.size and decision.option_speedups[larger].max() <= here[0] * 1.01:
        return "would not be faster with more replicas"
    return "would gain less from more replicas than the resize costs"


def _named(names: Sequence[str]) -> str:
    if len(names) <= MOST_NAMED:
        return ", ".join(names)
    return f"{', '.join(names[:MOST_NAMED])} and {len(names) - MOST_NAMED} more"
