"""What people and programs are shown of jobs, nodes and rounds: plain dictionaries, as the HTTP interface sends them.

Stands in ``server``, below :mod:`pollux.server.cluster`. Reads records of the scheduler, which another thread may be
writing: single fields are looked at, once each, and lists are copied, so that what is shown is at worst a moment old.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pollux.jobs import JobRequest
from pollux.scheduler.autoscale import AutoscaleConfig
from pollux.scheduler.lifecycle import JobState, Transition
from pollux.scheduler.loop import Scheduler
from pollux.scheduler.record import JobRecord, RoundRecord
from pollux.server.forms import StoredNote, StoredResize, StoredRound
from pollux.server.words import changes_of, words_of
from pollux.types import Allocation, JobDecision, Node
from pollux.wire import WireReport, allocation_to_list

_REPORTED = (
    *("progress", "epoch", "num_steps", "total_batch", "device_batch", "accum_steps", "noise_scale", "efficiency"),
    *("noise_scale_error", "gain", "throughput", "goodput"),
)


def job_view(
    record: JobRecord | None,
    request: JobRequest | None,
    report: tuple[float, WireReport] | None,
    *,
    name: str,
    sequence: int,
    submitted_at: float,
    now: float,
    reason: str = "",
    note: str = "",
) -> dict[str, Any]:
    """``reason`` replaces what the record says; a job that is held back has no record yet."""
    spec = record.spec if record is not None else None if request is None else request.to_spec(name, submitted_at)
    allocation = Allocation() if record is None else record.allocation
    state = JobState.PENDING if record is None else record.state
    told = None if report is None else report[1]
    running_s, lost_s = (0.0, 0.0) if record is None else spent_s(record, told, now)
    return {
        "name": name,
        "state": state.value,
        "kind": "elastic" if request is None else request.kind,
        "application": "" if spec is None else spec.application,
        "command": [] if request is None else list(request.command),
        "cwd": None if request is None else request.cwd,
        "sequence": sequence,
        "submitted_at": submitted_at,
        "started_at": None if record is None else record.started_at,
        "finished_at": None if record is None else record.finished_at,
        "reason": reason or ("" if record is None else record.reason.partition("\n")[0]),
        "note": note,
        "allocation": allocation_to_list(allocation),
        "num_replicas": allocation.num_replicas,
        "min_replicas": 1 if spec is None else spec.min_replicas,
        "max_replicas": 1 if spec is None else spec.max_replicas,
        "weight": 1.0 if spec is None else spec.weight,
        "is_preemptible": True if spec is None else spec.is_preemptible,
        "generation": 0 if record is None else record.generation,
        "num_restarts": 0 if record is None else record.num_restarts or 0,
        "num_crashes": 0 if record is None else record.num_crashes,
        "exit_code": None if record is None else record.exit_code,
        "after": [] if request is None else list(request.after),
        "time_limit_s": None if request is None else request.time_limit_s,
        **{field: None if told is None else getattr(told, field) for field in _REPORTED},
        "metrics": {} if told is None else dict(told.metrics),
        "reported_at": None if report is None else report[0],
        "running_s": running_s,
        "gpu_s": 0.0 if record is None else record.gpu_s,
        "lost_s": lost_s,
        "lost_share": lost_s / running_s if running_s > 0 else None,
        "remaining_s": _remaining_s(told) if state is JobState.RUNNING else None,
    }


def _remaining_s(told: WireReport | None) -> float | None:
    if told is None or told.remaining_examples is None or not told.goodput:
        return None
    return told.remaining_examples / told.goodput


def spent_s(record: JobRecord, told: WireReport | None, now: float) -> tuple[float, float]:
    """Seconds in which the job held slots, and in how many of those it stood still."""
    running_s = record.attained_s
    if record.allocation and not record.state.is_final:
        running_s += max(now - record.accounted_at, 0.0)
    return running_s, lost_time_s(list(record.history), told)


def lost_time_s(history: Sequence[Transition], told: WireReport | None) -> float:
    """Seconds in which the job held slots but stood still: resizes as it measured them, and starts after the first."""
    lost_s = 0.0 if told is None else told.stalled_s
    begun: float | None = None
    num_starts = 0
    for transition in history:
        if transition.target is JobState.STARTING and transition.source is JobState.PENDING:
            begun, num_starts = transition.at, num_starts + 1
        elif transition.target is JobState.RUNNING and begun is not None:
            if num_starts > 1 or history[0].at < begun:
                lost_s += max(transition.at - begun, 0.0)
            begun = None
    return lost_s


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many slots a cluster has of each type, and how many of those are on nodes that are being drained."""

    num_slots: Mapping[str, int]
    num_drained: Mapping[str, int]

    @classmethod
    def of(cls, nodes: Iterable[Node], draining: Collection[str] = ()) -> Capacity:
        slots: Counter[str] = Counter()
        drained: Counter[str] = Counter()
        for node in nodes:
            slots[node.accelerator] += node.num_slots
            drained[node.accelerator] += node.num_slots * (node.name in draining)
        return cls(slots, drained)


def waiting_reason(record: JobRecord, capacity: Capacity) -> str:
    """Why a pending job does not run."""
    spec, there = record.spec, capacity.num_slots
    usable = [kind for kind in there if spec.accelerators is None or kind in spec.accelerators]
    if there and not usable:
        wanted = ", ".join(sorted(spec.accelerators or ()))
        return f"needs a slot of type {wanted}; the cluster has {', '.join(sorted(there))}"
    least = spec.requested_replicas or spec.min_replicas
    # A job sits on one type at a time: that with the most slots is its best chance.
    kind = max(usable, key=lambda kind: there[kind] - capacity.num_drained[kind], default="")
    num_slots = max((there[kind] for kind in usable), default=0)
    slots = f"{least} slot{'s at once' * (least > 1)}"
    if least > num_slots:
        if len(there) == 1:
            return f"needs {slots}; the cluster has {num_slots}"
        most = ", ".join(f"{there[kind]} of type {kind}" for kind in sorted(usable))
        return f"needs {slots}, all of one type; of those it may use the cluster has {most or 'none'}"
    num_slots, num_drained = there.get(kind, 0), capacity.num_drained.get(kind, 0)
    if least > num_slots - num_drained:
        return f"needs {slots}; {num_drained} of the cluster's {num_slots} are being drained"
    return record.reason.partition("\n")[0] if record.history else "waiting for slots"


def model_views(record: JobRecord) -> dict[str, Any]:
    """What was fitted to the job's measured speed, by accelerator."""
    knowledge = record.knowledge
    return {
        accelerator: {
            "params": found.params._asdict(),
            "num_configurations": len(knowledge.profile.timings(accelerator)),
            "max_replicas": knowledge.profile.max_replicas,
            "rmsle": _finite(found.rmsle_step),
        }
        for accelerator, found in list(knowledge.fits.items())
    }


def decision_view(decision: JobDecision, record: RoundRecord, id_: int, *, with_options: bool) -> dict[str, Any]:
    """``id_``: of the round; its number begins again with the server."""
    explanation = record.plan.explanation
    view = {
        "round": id_,
        "at": record.at,
        "trigger": record.trigger,
        "before": decision.before.num_replicas,
        "after": decision.after.num_replicas,
        "speedup_before": _finite(decision.speedup_before),
        "speedup_after": _finite(decision.speedup_after),
        "move_factor": _finite(decision.move_factor),
        "note": decision.note,
        "fitness": None if explanation is None else _finite(explanation.fitness),
        "upper_bound": None if explanation is None else _finite(explanation.upper_bound),
    }
    if with_options:
        view["option_replicas"] = [int(count) for count in decision.option_replicas]
        view["option_speedups"] = [_finite(speedup) for speedup in decision.option_speedups]
    return view


def round_view(round_: StoredRound) -> dict[str, Any]:
    record = round_.record
    explanation = record.plan.explanation
    changes = changes_of(record, round_.snapshot)
    return {
        "id": round_.id,
        "number": record.number,
        "at": record.at,
        "trigger": record.trigger,
        "decision_s": record.decision_s,
        "num_jobs": record.num_jobs,
        "num_slots": record.num_slots,
        "error": record.error,
        "fitness_before": None if explanation is None else _finite(explanation.fitness_before),
        "fitness": None if explanation is None else _finite(explanation.fitness),
        "upper_bound": None if explanation is None else _finite(explanation.upper_bound),
        "gap": None if explanation is None else _finite(explanation.gap),
        "words": words_of(record, changes),
        "changes": [
            {
                "job": change.job,
                "before": change.before.num_replicas,
                "after": change.after.num_replicas,
                "speedup_before": _finite(change.speedup_before),
                "speedup_after": _finite(change.speedup_after),
                "note": change.note,
            }
            for change in changes
        ],
    }


def round_detail(round_: StoredRound) -> dict[str, Any]:
    """A round with every decision that is kept of it, and the nodes it was about, where those are."""
    explanation = round_.record.plan.explanation
    nodes = None if round_.snapshot is None else round_.snapshot.get("nodes")
    return {
        **round_view(round_),
        "method": "" if explanation is None else explanation.method,
        "jobs": [
            {
                "job": decision.job,
                "before": allocation_to_list(decision.before),
                "after": allocation_to_list(decision.after),
                "speedup_before": _finite(decision.speedup_before),
                "speedup_after": _finite(decision.speedup_after),
                "move_factor": _finite(decision.move_factor),
                "note": decision.note,
                "option_replicas": [int(count) for count in decision.option_replicas],
                "option_speedups": [_finite(speedup) for speedup in decision.option_speedups],
            }
            for decision in (() if explanation is None else explanation.jobs)
        ],
        "nodes": nodes,
    }


def transition_view(transition: Transition) -> dict[str, Any]:
    return {
        "at": transition.at,
        "source": transition.source.value,
        "target": transition.target.value,
        "reason": transition.reason.partition("\n")[0],
    }


def training_note_view(note: StoredNote) -> dict[str, Any]:
    return {"id": note.id, "at": note.at, "text": note.text}


def resize_view(resize: StoredResize) -> dict[str, Any]:
    return {
        "generation": resize.generation,
        "at": resize.at,
        "before": allocation_to_list(resize.before),
        "after": allocation_to_list(resize.after),
        "runs_at": resize.runs_at,
        "took_s": None if resize.runs_at is None else resize.runs_at - resize.at,
    }


def node_views(
    nodes: Iterable[Node], draining: Collection[str], leaving: Collection[str], allocations: Mapping[str, Allocation]
) -> list[dict[str, Any]]:
    jobs: dict[str, list[dict[str, Any]]] = {}
    for name, allocation in allocations.items():
        for node, count in allocation.shares:
            jobs.setdefault(node, []).append({"name": name, "num_replicas": count})
    return [
        {
            "name": node.name,
            "num_slots": node.num_slots,
            "accelerator": node.accelerator,
            "is_draining": node.name in draining,
            "is_leaving": node.name in leaving,
            "used": sum(job["num_replicas"] for job in jobs.get(node.name, ())),
            "jobs": jobs.get(node.name, []),
        }
        for node in nodes
    ]


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def sizing_view(
    scheduler: Scheduler | None, config: AutoscaleConfig | None, node_price: float | None
) -> dict[str, Any]:
    """How large the cluster should be, why, and what its nodes have cost."""
    node_hours = {} if scheduler is None else {kind: used_s / 3600.0 for kind, used_s in scheduler.node_s.items()}
    size = None if scheduler is None else scheduler.last_size
    return {
        "min_nodes": None if config is None else config.min_nodes,
        "max_nodes": None if config is None else config.max_nodes,
        "budget_slots": None if config is None else config.budget_slots,
        "num_wanted": None if size is None else size.num_nodes,
        "utility": None if size is None else size.utility,
        "reason": "" if size is None else size.reason,
        "node_hours": node_hours,
        "node_price": node_price,
        "cost": None if node_price is None else node_price * sum(node_hours.values()),
    }
