"""Data for charts: a job's curves, its fitted model against what was measured, how much of its slots a job uses.

:mod:`pollux.server.present.queries` calls these. Columns rather than rows, as figures want them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from pollux.api.job import (
    AcceleratorModel,
    ChosenBatch,
    FittedLine,
    GoodputCurve,
    JobCurves,
    JobModel,
    MeasuredPoint,
    Numbers,
    SpeedupCurve,
)
from pollux.api.report import Report
from pollux.model.efficiency import efficiency
from pollux.model.fitting import Fit
from pollux.model.goodput import candidate_batches, corrected_times
from pollux.model.profile import Configuration, Timing
from pollux.model.throughput import grad_s, iteration_s
from pollux.scheduler.record import JobRecord
from pollux.server.present.views import finite, numbers_in
from pollux.types import BatchLimits, FloatArray, IntArray, JobDecision, Node

_CURVES = tuple(name for name in JobCurves.__dataclass_fields__ if name not in ("at", "metrics"))
_NUM_LINE_POINTS = 40


def job_curves(reports: Sequence[tuple[float, Report]]) -> JobCurves:
    """Columns of equal length. Of the metrics, those that ever were numbers; those that are not finite as texts."""
    told = [report for _, report in reports]
    metrics = [dict(numbers_in(report.metrics)) for report in told]
    names = dict.fromkeys(name for numbers in metrics for name in numbers)
    return JobCurves(
        at=tuple(at for at, _ in reports),
        **{field: tuple(getattr(report, field) for report in told) for field in _CURVES},
        metrics={name: tuple(numbers.get(name) for numbers in metrics) for name in names},
    )


# The model ------------------------------------------------------------------------------------


def job_model(
    record: JobRecord | None,
    report: Report | None,
    nodes: Iterable[Node],
    decision: tuple[JobDecision, int] | None,
) -> JobModel:
    """What was fitted to what was measured, and what follows from it. ``decision``: the last one, with its round."""
    fits = {} if record is None else dict(record.knowledge.fits)
    seen = {} if record is None else {kind: dict(record.knowledge.profile.timings(kind)) for kind in fits}
    limits = None if record is None else record.spec.batch
    return JobModel(
        accelerators={kind: _fitted(fit, seen[kind], limits) for kind, fit in fits.items()},
        goodput=None if record is None else _goodput_curve(record, report, nodes, fits, seen),
        speedups=None if decision is None else _speedup_curve(*decision),
    )


def _fitted(fit: Fit, seen: Mapping[Configuration, Timing], limits: BatchLimits | None) -> AcceleratorModel:
    shapes = sorted({(configuration.num_nodes, configuration.num_replicas) for configuration in seen})
    return AcceleratorModel(
        params=fit.params._asdict(),
        rmsle=finite(fit.rmsle_step),
        num_steps=sum(timing.num_steps for timing in seen.values()),
        points=tuple(
            MeasuredPoint(
                **configuration._asdict(),
                **timing._asdict(),
                predicted_grad_s=finite(float(grad_s(fit.params, configuration.device_batch))),
                predicted_step_s=finite(float(iteration_s(fit.params, *configuration))),
            )
            for configuration, timing in sorted(seen.items())
        ),
        lines=tuple(_line(fit, seen, limits, *shape) for shape in shapes),
    )


def _line(
    fit: Fit, seen: Mapping[Configuration, Timing], limits: BatchLimits | None, num_nodes: int, num_replicas: int
) -> FittedLine:
    """The fitted step time over all device batches that this shape may have, and those it had."""
    batches = [batch for nodes, replicas, batch in seen if (nodes, replicas) == (num_nodes, num_replicas)]
    if limits is not None:
        batches += [limits.device_min, min(limits.device_max, max(limits.maximum // num_replicas, limits.device_min))]
    steps = np.geomspace(min(batches), max(batches), _NUM_LINE_POINTS).round().astype(np.int64)
    device = np.unique(steps)
    return FittedLine(
        num_nodes=num_nodes,
        num_replicas=num_replicas,
        device_batch=tuple(device.tolist()),
        step_s=_numbers_of(iteration_s(fit.params, num_nodes, num_replicas, device)),
    )


def _goodput_curve(
    record: JobRecord,
    report: Report | None,
    nodes: Iterable[Node],
    fits: Mapping[str, Fit],
    seen: Mapping[str, Mapping[Configuration, Timing]],
) -> GoodputCurve | None:
    """Goodput over the total batch, as the job computes it itself: θ, corrected by what was measured in this shape."""
    limits, phi, allocation = record.spec.batch, record.noise_scale, record.allocation
    if limits is None or phi is None or not fits:
        return None
    if allocation:
        num_nodes, num_replicas = allocation.num_nodes, allocation.num_replicas
    elif report is not None:  # what it had last
        num_nodes, num_replicas = report.num_nodes, report.num_replicas
    else:
        return None
    on = {node.name: node.accelerator for node in nodes}
    names = (*(on.get(share.node) for share in allocation.shares), None if report is None else report.accelerator)
    accelerator = next((name for name in names if name in fits), next(iter(fits)))
    assert accelerator is not None
    params = fits[accelerator].params
    measured = {
        batch: timing for (n, k, batch), timing in seen[accelerator].items() if (n, k) == (num_nodes, num_replicas)
    }

    def rates(device: IntArray, accum: IntArray) -> tuple[IntArray, FloatArray, FloatArray]:
        total = num_replicas * device * (accum + 1)
        pass_s, step_s = corrected_times(params, num_nodes, num_replicas, device, measured)
        return total, total / (accum * pass_s + step_s), efficiency(phi, limits.initial, total)

    device, accum, allowed = candidate_batches(num_replicas, limits)
    if not allowed.any():
        return None
    device, accum = device[allowed], accum[allowed]
    _, first = np.unique(num_replicas * device * (accum + 1), return_index=True)
    device, accum = device[first], accum[first]
    total, throughput, useful = rates(device, accum)
    chosen = None
    if report is not None and report.num_replicas == num_replicas:
        its_total, its_rate, its_share = rates(np.array([report.device_batch]), np.array([report.accum_steps]))
        chosen = ChosenBatch(
            total_batch=int(its_total[0]),
            device_batch=report.device_batch,
            accum_steps=report.accum_steps,
            throughput=finite(its_rate[0]),
            efficiency=finite(its_share[0]),
            goodput=finite(its_rate[0] * its_share[0]),
        )
    return GoodputCurve(
        accelerator=accelerator,
        num_nodes=num_nodes,
        num_replicas=num_replicas,
        noise_scale=phi,
        noise_scale_error=record.noise_scale_error,
        total_batch=tuple(total.tolist()),
        device_batch=tuple(device.tolist()),
        accum_steps=tuple(accum.tolist()),
        throughput=_numbers_of(throughput),
        efficiency=_numbers_of(useful),
        goodput=_numbers_of(throughput * useful),
        chosen=chosen,
    )


def _speedup_curve(decision: JobDecision, round_id: int) -> SpeedupCurve:
    return SpeedupCurve(
        num_replicas=tuple(int(count) for count in decision.option_replicas),
        speedup=_numbers_of(decision.option_speedups),
        chosen=decision.after.num_replicas,
        round=round_id,
    )


def _numbers_of(values: FloatArray) -> Numbers:
    return tuple(finite(value) for value in values.tolist())


def known_speedups(decision: JobDecision) -> tuple[float, ...]:
    """With 1, 2, ... replicas over that with one, as far as they were weighed without a gap."""
    found: list[float] = []
    while (useful := useful_slots(decision, len(found) + 1)) is not None:
        found.append(useful)
    return tuple(found) if found[:1] == [1.0] else ()


def least_useful_slots(decision: JobDecision | None, num_replicas: int) -> float:
    """The same; what was not weighed counts as the most below it that was, and one slot always counts 1."""
    counts = range(num_replicas, 1, -1) if decision is not None else ()
    known = (useful_slots(decision, count) for count in counts if decision is not None)
    return next((useful for useful in known if useful is not None), 1.0)


def useful_slots(decision: JobDecision, num_replicas: int) -> float | None:
    """What a job does with so many replicas, if what it does with one counts 1; None: it was not weighed."""
    counts, speedups = decision.option_replicas, decision.option_speedups
    is_known = (counts > 0) & (speedups > 0) & np.isfinite(speedups)
    here = np.flatnonzero(is_known & (counts == num_replicas))
    if not here.size:
        return None
    least = int(np.flatnonzero(is_known)[0])  # one that must have more is reckoned from the fewest it may have
    return float(speedups[here[0]] * counts[least] / speedups[least])
