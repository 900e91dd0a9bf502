"""When will a waiting job start? Plays the queue on from a snapshot, with the policy that decides. The server calls it.

Ends of jobs are not known, so the queue is played several times with other ends each time, and the answer is a range.
A job that reports how much is left ends then, give or take an error; of any other only its age is known: it is as
likely to go on for as long again as not. Jobs that will be submitted later, jobs that limits hold back, and deadlines
are not foreseen.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pollux.errors import PolluxError
from pollux.model.goodput import best_batch
from pollux.types import NO_ALLOCATION, Allocation, JobView, Plan, Snapshot

REPORTED_ERROR = 0.2  # relative standard deviation of what jobs say is left
SHORTEST_AGE_S = 30.0  # a job that has just begun is not expected to end at once
HORIZON_S = 30 * 86400.0
NUM_RUNS, MOST_ENDS = 30, 500


@dataclass(frozen=True, slots=True, kw_only=True)
class StartForecast:
    """Seconds from now: in 1 of 10 plays the job started earlier than ``low_s``, in 1 of 10 later than ``high_s``.

    None: in so many plays it did not start at all, as far as they went.
    """

    low_s: float | None
    median_s: float | None
    high_s: float | None
    num_runs: int
    num_guessed: int  # jobs whose end is guessed by their age


def forecast_start(
    snapshot: Snapshot,
    job: str,
    make_decide: Callable[[], Callable[[Snapshot], Plan]],
    rng: np.random.Generator,
    *,
    limits_s: Mapping[str, float] | None = None,
    usual_s: float = 600.0,
    has_time: Callable[[], bool] = lambda: True,
) -> StartForecast:
    """``make_decide``: a policy without memory, for each play. ``limits_s``: time limits that jobs have left, by name.

    ``usual_s``: how long a job of which nothing is known takes. ``has_time``: asked before every decision; when it says
    no, the plays that are through are the answer.
    """
    starts: list[float] = []
    for _ in range(NUM_RUNS):
        found = _play(snapshot, job, make_decide(), rng, limits_s or {}, usual_s, has_time)
        if found is None:
            break
        starts.append(found)
        if found == 0.0:
            break  # it starts with the next decision, whatever ends when
    guessed = sum(view.remaining_examples is None for view in snapshot.jobs if view.name != job)
    low, median, high = (_quantile(starts, share) for share in (0.1, 0.5, 0.9))
    return StartForecast(low_s=low, median_s=median, high_s=high, num_runs=len(starts), num_guessed=guessed)


def _quantile(values: Sequence[float], share: float) -> float | None:
    if not values:
        return None
    found = sorted(values)[min(int(share * len(values)), len(values) - 1)]
    return found if math.isfinite(found) else None


def _play(
    snapshot: Snapshot,
    job: str,
    decide: Callable[[Snapshot], Plan],
    rng: np.random.Generator,
    limits_s: Mapping[str, float],
    usual_s: float,
    has_time: Callable[[], bool],
) -> float | None:
    """When it starts, seconds from now; infinite: not within the horizon. None: there was no time to find out."""
    kinds = {node.name: node.accelerator for node in snapshot.nodes}
    left = {view.name: _drawn_left(view, rng, limits_s.get(view.name), usual_s) for view in snapshot.jobs}
    views = {view.name: view for view in snapshot.jobs}
    passed_s = 0.0
    for _ in range(MOST_ENDS):
        if not has_time():
            return None
        now = snapshot.now + passed_s
        try:
            plan = decide(dataclasses.replace(snapshot, now=now, jobs=tuple(views.values())))
        except PolluxError:
            return math.inf  # of what the policy cannot decide, nothing can be said
        if plan.allocation_of(job):
            return passed_s
        ends: dict[str, float] = {}
        for name, view in views.items():
            allocation = plan.allocation_of(name)
            views[name] = dataclasses.replace(
                view, allocation=allocation, num_resizes=view.num_resizes if view.has_started or not allocation else 0
            )
            if allocation:
                ends[name] = left[name] / _speed(view, allocation, kinds)
        if not ends or passed_s > HORIZON_S:
            return math.inf
        first = min(ends, key=lambda name: ends[name])
        step_s = ends[first]
        passed_s += step_s
        for name in ends:
            left[name] -= step_s * _speed(views[name], views[name].allocation, kinds)
            views[name] = dataclasses.replace(
                views[name],
                age_s=views[name].age_s + step_s,
                attained_s=views[name].attained_s + step_s,
                attained_slot_s=views[name].attained_slot_s + step_s * views[name].allocation.num_slots,
            )
        del views[first], left[first]
    return math.inf


def _drawn_left(view: JobView, rng: np.random.Generator, limit_s: float | None, usual_s: float) -> float:
    """Work that is left: useful examples where the job's speed is known, else seconds."""
    if view.remaining_examples is not None and _has_model(view):
        return float(view.remaining_examples * rng.lognormal(0.0, REPORTED_ERROR))
    chance = rng.uniform(0.0, 0.95)  # beyond, a guess would be anything
    age_s = max(view.attained_s, SHORTEST_AGE_S) if view.has_started else usual_s
    found = float(age_s * chance / (1.0 - chance))
    return found if limit_s is None else min(found, max(limit_s, 0.0))


def _has_model(view: JobView) -> bool:
    return bool(view.params) and view.noise_scale is not None and view.spec.batch is not None


def _speed(view: JobView, allocation: Allocation, kinds: Mapping[str, str]) -> float:
    """Useful examples a second with these slots; 1 second a second where that is not known."""
    if view.remaining_examples is None or not _has_model(view) or allocation == NO_ALLOCATION:
        return 1.0
    assert view.noise_scale is not None and view.spec.batch is not None
    kind = kinds.get(allocation.shares[0].node, "")
    params = view.params.get(kind) or next(iter(view.params.values()))
    _, goodput = best_batch(params, view.noise_scale, view.spec.batch, allocation.num_nodes, allocation.num_replicas)
    return max(goodput, 1e-9)
