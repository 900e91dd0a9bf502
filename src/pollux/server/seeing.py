"""What is drawn of a cluster: curves of a job, its fitted model against what was measured, who held what when.

Stands in ``server``, beside :mod:`pollux.server.views`. Plain dictionaries, as the HTTP interface sends them; columns
rather than rows where something is to be drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from pollux.model.efficiency import efficiency
from pollux.model.fitting import Fit
from pollux.model.goodput import candidate_batches, corrected_times
from pollux.model.profile import Configuration, Timing
from pollux.model.throughput import grad_s, iteration_s
from pollux.scheduler.record import JobRecord
from pollux.server.past import PastJob, Sample
from pollux.types import BatchLimits, FloatArray, IntArray, JobDecision, Node
from pollux.wire import WireReport, allocation_to_list

ROW_FIELDS = (
    *("name", "state", "kind", "application", "sequence", "submitted_at", "started_at", "finished_at", "reason"),
    *("note", "allocation", "num_replicas", "min_replicas", "max_replicas", "progress", "epoch", "total_batch"),
    *("device_batch", "accum_steps", "gain", "noise_scale", "efficiency", "throughput", "goodput", "remaining_s"),
    *("noise_scale_error", "num_restarts", "num_crashes", "reported_at"),
)
CURVES = (
    *("num_replicas", "total_batch", "device_batch", "accum_steps", "gain", "noise_scale", "efficiency"),
    *("noise_scale_error", "throughput", "goodput", "progress", "epoch"),
)
_NUM_LINE_POINTS = 40
_ODD = ("nan", "inf", "-inf")  # JSON has no such numbers; null is for what was not logged


def job_row(view: Mapping[str, Any]) -> dict[str, Any]:
    """A job in a list: of its view what does not change by itself as time goes on."""
    return {**{field: view[field] for field in ROW_FIELDS}, "loss": _number(view["metrics"].get("loss"))}


def sample_view(sample: Sample) -> dict[str, Any]:
    return asdict(sample)


def timeline_view(jobs: Iterable[PastJob], since: float, until: float, total: int) -> dict[str, Any]:
    return {
        "since": since,
        "until": until,
        "total": total,
        "jobs": [
            {
                "name": job.name,
                "sequence": job.sequence,
                "state": job.state.value,
                "submitted_at": job.submitted_at,
                "finished_at": job.finished_at,
                "spans": [
                    {
                        "from": span.since,
                        "to": span.until,
                        "num_replicas": span.allocation.num_replicas,
                        "allocation": allocation_to_list(span.allocation),
                    }
                    for span in job.spans
                ],
            }
            for job in jobs
        ],
    }


def curves_view(reports: Sequence[tuple[float, WireReport]]) -> dict[str, Any]:
    """Columns of equal length. Of the metrics, those that ever were numbers; those that are not finite as texts."""
    told = [report for _, report in reports]
    metrics = [dict(_numbers(report.metrics)) for report in told]
    names = dict.fromkeys(name for numbers in metrics for name in numbers)
    return {
        "at": [at for at, _ in reports],
        **{field: [getattr(report, field) for report in told] for field in CURVES},
        "metrics": {name: [numbers.get(name) for numbers in metrics] for name in names},
    }


def _numbers(metrics: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float | int | str]]:
    """Metrics that are numbers, also in objects within (``eval/accuracy``)."""
    for name, value in metrics.items():
        where = f"{path}{name}"
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{where}/")
        elif (number := _number(value)) is not None:
            yield where, number


def _number(value: object) -> float | int | str | None:
    """A finite number, or the name of another one; None for all else."""
    if isinstance(value, str):
        return value if value in _ODD else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else str(value)


# The model ------------------------------------------------------------------------------------


def model_view(
    record: JobRecord | None,
    report: WireReport | None,
    nodes: Iterable[Node],
    decision: tuple[JobDecision, int | None] | None,
) -> dict[str, Any]:
    """What was fitted to what was measured, and what follows from it. ``decision``: the last one, with its round."""
    fits = {} if record is None else dict(record.knowledge.fits)
    seen = {} if record is None else {kind: dict(record.knowledge.profile.timings(kind)) for kind in fits}
    limits = None if record is None else record.spec.batch
    return {
        "accelerators": {kind: _fit_view(fit, seen[kind], limits) for kind, fit in fits.items()},
        "goodput": None if record is None else _goodput_view(record, report, nodes, fits, seen),
        "speedups": None if decision is None else _speedups_view(*decision),
    }


def _fit_view(fit: Fit, seen: Mapping[Configuration, Timing], limits: BatchLimits | None) -> dict[str, Any]:
    shapes = sorted({(configuration.num_nodes, configuration.num_replicas) for configuration in seen})
    return {
        "params": fit.params._asdict(),
        "rmsle": fit.rmsle_step,
        "num_steps": sum(timing.num_steps for timing in seen.values()),
        "points": [
            {
                **configuration._asdict(),
                **timing._asdict(),
                "predicted_grad_s": float(grad_s(fit.params, configuration.device_batch)),
                "predicted_step_s": float(iteration_s(fit.params, *configuration)),
            }
            for configuration, timing in sorted(seen.items())
        ],
        "lines": [_line(fit, seen, limits, *shape) for shape in shapes],
    }


def _line(
    fit: Fit, seen: Mapping[Configuration, Timing], limits: BatchLimits | None, num_nodes: int, num_replicas: int
) -> dict[str, Any]:
    """The fitted step time over all device batches that this shape may have, and those it had."""
    batches = [batch for nodes, replicas, batch in seen if (nodes, replicas) == (num_nodes, num_replicas)]
    if limits is not None:
        batches += [limits.device_min, min(limits.device_max, max(limits.maximum // num_replicas, limits.device_min))]
    steps = np.geomspace(min(batches), max(batches), _NUM_LINE_POINTS).round().astype(np.int64)
    device = np.unique(steps)
    return {
        "num_nodes": num_nodes,
        "num_replicas": num_replicas,
        "device_batch": device.tolist(),
        "step_s": iteration_s(fit.params, num_nodes, num_replicas, device).tolist(),
    }


def _goodput_view(
    record: JobRecord,
    report: WireReport | None,
    nodes: Iterable[Node],
    fits: Mapping[str, Fit],
    seen: Mapping[str, Mapping[Configuration, Timing]],
) -> dict[str, Any] | None:
    """Goodput over the total batch, as the job itself reckons it: θ, corrected by what was measured in this shape."""
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
        chosen = {
            "total_batch": int(its_total[0]),
            "device_batch": report.device_batch,
            "accum_steps": report.accum_steps,
            "throughput": float(its_rate[0]),
            "efficiency": float(its_share[0]),
            "goodput": float(its_rate[0] * its_share[0]),
        }
    return {
        "accelerator": accelerator,
        "num_nodes": num_nodes,
        "num_replicas": num_replicas,
        "noise_scale": phi,
        "noise_scale_error": record.noise_scale_error,
        "total_batch": total.tolist(),
        "device_batch": device.tolist(),
        "accum_steps": accum.tolist(),
        "throughput": throughput.tolist(),
        "efficiency": useful.tolist(),
        "goodput": (throughput * useful).tolist(),
        "chosen": chosen,
    }


def _speedups_view(decision: JobDecision, round_id: int | None) -> dict[str, Any]:
    return {
        "num_replicas": [int(count) for count in decision.option_replicas],
        "speedup": [float(speedup) for speedup in decision.option_speedups],
        "chosen": decision.after.num_replicas,
        "round": round_id,
    }


def useful_slots(decision: JobDecision, num_replicas: int) -> float | None:
    """What a job does with so many replicas, if what it does with one counts 1; None: it was not weighed."""
    counts, speedups = decision.option_replicas, decision.option_speedups
    is_known = (counts > 0) & (speedups > 0) & np.isfinite(speedups)
    here = np.flatnonzero(is_known & (counts == num_replicas))
    if not here.size:
        return None
    least = int(np.flatnonzero(is_known)[0])  # one that must have more is reckoned from the fewest it may have
    return float(speedups[here[0]] * counts[least] / speedups[least])
