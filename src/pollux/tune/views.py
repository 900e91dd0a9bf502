"""Studies as the HTTP interface shows them. :mod:`pollux.tune.studies` calls it; it changes nothing."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from typing import cast

from pollux.api.job import NonFinite
from pollux.api.study import (
    Improvement,
    RungCost,
    StudyCurves,
    StudyDetail,
    StudySummary,
    TrialPoint,
    TrialView,
    shown_study,
)
from pollux.tune.driver import StudyDriver
from pollux.tune.storage import StoredTrial


def summary(driver: StudyDriver) -> StudySummary:
    stored, best, sign = driver.stored, driver.best, driver.request.sign
    return StudySummary(
        name=driver.name,
        state=stored.state,  # type: ignore[arg-type]  # written by the driver alone
        reason=stored.reason,
        metric=driver.request.metric,
        direction=driver.request.direction,
        created_at=stored.created_at,
        ended_at=stored.ended_at,
        num_trials=driver.request.trials,
        counts=dict(Counter(one.state for one in driver.trials.values())),
        best_value=None if best is None or best.value is None else sign * best.value,
        best_trial=None if best is None else best.number,
        best_params={} if best is None else dict(best.params),
        slot_s=driver.slot_s,
        warnings=tuple(driver.warnings),
        further=driver.request.further,
        limits=driver.request.limits,
        front=driver.front,
    )


def unreadable(name: str, problem: str) -> StudySummary:
    """A study that this version cannot carry out."""
    return StudySummary(
        name=name,
        state="unreadable",
        reason=problem,
        metric="",
        direction="",
        created_at=0.0,
        ended_at=None,
        num_trials=0,
        counts={},
        best_value=None,
        best_trial=None,
        best_params={},
        slot_s=0.0,
        warnings=(),
    )


def detail(driver: StudyDriver, url: str) -> StudyDetail:
    short = summary(driver)
    return StudyDetail(
        **{name: getattr(short, name) for name in StudySummary.__dataclass_fields__},
        request=shown_study(driver.request),
        trials=tuple(trial_view(driver, one) for one in driver.trials.values()),
        improvements=tuple(
            Improvement(at=at, slot_s=slot_s, trial=trial, value=value)
            for at, slot_s, trial, value in driver.improvements
        ),
        rungs=rung_costs(driver),
        importance=driver.stored.importance(),
        storage=url,
    )


def trial_view(driver: StudyDriver, trial: StoredTrial) -> TrialView:
    job = driver.seen.get(trial.number)
    return TrialView(
        number=trial.number,
        job=driver.job_of(trial),
        state=trial.state,
        params=dict(trial.params),
        value=None if trial.value is None else driver.request.sign * trial.value,
        progress=max((progress for progress, _ in trial.points), default=None),
        rung=trial.num_decided,
        num_replicas=0 if job is None else job.num_replicas,
        chance=driver.chances.get(trial.number) if trial.state == "running" else None,
        slot_s=trial.slot_s,
        reason=trial.reason,
        copied=tuple(source for _, source in trial.copied),
        branch_of=trial.branch_of,
        values={name: _sent(value) for name, value in trial.values.items()},
        keeps_limits=_keeps_limits(driver, trial),
    )


def _keeps_limits(driver: StudyDriver, trial: StoredTrial) -> bool | None:
    limits = driver.request.limits
    is_known = bool(limits) and (driver.breaks_limits(trial) or all(one.name in trial.values for one in limits))
    return not driver.breaks_limits(trial) if is_known else None


def _sent(value: float) -> float | NonFinite:
    """JSON has no NaN."""
    return value if math.isfinite(value) else cast(NonFinite, str(value))


def rung_costs(driver: StudyDriver) -> tuple[RungCost, ...]:
    """What the trials cost that ended after each number of rungs."""
    rungs = (0.0, *driver.pruner.rungs)
    found = []
    for index, at in enumerate(rungs):
        ended = [one for one in driver.trials.values() if min(one.num_decided, len(rungs) - 1) == index]
        slot_s = sum(one.slot_s for one in ended)
        found.append(RungCost(rung=index, at_progress=at, num_trials=len(ended), slot_s=slot_s))
    return tuple(found)


def curves(driver: StudyDriver) -> StudyCurves:
    sign = driver.request.sign
    return StudyCurves(
        curves={
            str(one.number): tuple(
                TrialPoint(progress=at, value=sign * value, num_replicas=one.replicas_at(at))
                for at, value in sorted(one.points)
            )
            for one in driver.trials.values()
            if one.points
        }
    )


def as_csv(driver: StudyDriver) -> str:
    """One line for each trial, with its parameters in columns of their own."""
    names, request, best = [one.name for one in driver.request.space], driver.request, set(driver.front)
    watched = [name for name in request.watched if name != request.metric]
    own = [*(["keeps_limits"] if request.limits else []), *(["on_front"] if request.further else [])]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(
        ["trial", "job", "state", request.metric, *watched, *own, "progress", "slot_s", *names, "reason"]
    )  # fmt: skip
    for one in driver.trials.values():
        view = trial_view(driver, one)
        values = [one.params.get(name, "") for name in names]
        found = {"keeps_limits": _plain(view.keeps_limits), "on_front": one.number in best}
        row = [view.number, view.job, view.state, _plain(view.value), *(one.values.get(name, "") for name in watched)]
        row += [*(found[name] for name in own), _plain(view.progress), f"{view.slot_s:.3f}"]
        writer.writerow([*row, *values, view.reason])
    return file.getvalue()


def _plain(value: object) -> object:
    return "" if value is None else value
