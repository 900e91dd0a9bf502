"""Turns the scheduler's records into the messages of the HTTP interface: jobs, nodes, rounds.

:mod:`pollux.server.present.queries` calls these. The records belong to the scheduler thread, which may be writing:
single fields are read once each and lists are copied, so a view is at worst a moment old.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from pollux.api.access import OPERATOR
from pollux.api.cluster import ClusterSize, JobOnNode, NodeHealthName, NodeReading, NodeSummary
from pollux.api.job import FittedModel, JobResize, JobRow, JobSummary, NonFinite, StateChange
from pollux.api.report import Report
from pollux.api.request import JobRequest
from pollux.api.round import (
    Change,
    Decision,
    DecisionWithOptions,
    JobInRound,
    RoundDetail,
    RoundNode,
    RoundSummary,
)
from pollux.engines.live import NO_PHASE, JobPhase, UnusableNode
from pollux.scheduler.autoscale import AutoscaleConfig
from pollux.scheduler.device_memory import memory_by_type, misfits
from pollux.scheduler.lifecycle import PREEMPTED, JobState, Transition
from pollux.scheduler.loop import Scheduler
from pollux.scheduler.node_classes import no_node_reason
from pollux.scheduler.node_health import NodeCondition
from pollux.scheduler.node_types import Prices
from pollux.scheduler.nodes import slots_by_type
from pollux.scheduler.record import JobRecord, RoundRecord
from pollux.scheduler.shares import Standing
from pollux.server.present.deadlines import ended_in_words
from pollux.server.present.explanations import changes_of, explain
from pollux.server.storage.records import StoredResize, StoredRound
from pollux.types import NO_ALLOCATION, JobDecision, JobSpec, Node

_NONFINITE: dict[str, NonFinite] = {"nan": "nan", "inf": "inf", "-inf": "-inf"}
_ROW_FIELDS = tuple(one.name for one in dataclasses.fields(JobRow))
_BLANK = Report(
    generation=0,
    num_replicas=0,
    num_nodes=0,
    accelerator="",
    epoch=0,
    num_steps=0,
    progress=None,
    remaining_examples=None,
    stalled_s=0.0,
    batch=None,
    device_batch=0,
    accum_steps=0,
    total_batch=0,
    noise_scale=None,
    efficiency=None,
    gain=0.0,
    throughput=None,
    goodput=None,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownJob:
    """What is known of a job, from wherever: its record, what was asked for, what it reported last and when."""

    name: str
    sequence: int
    submitted_at: float
    record: JobRecord | None  # None: held back, the scheduler does not have it yet
    request: JobRequest | None
    report: Report | None
    reported_at: float | None
    team: str = ""
    standing: str = ""
    held_back: str = ""
    deadline: str = ""


def versions_in(request: Mapping[str, object]) -> dict[str, str]:
    """Of what a job runs, by name."""
    found = request.get("versions")
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, Mapping) else {}


def job_summary(
    job: KnownJob, now: float, *, reason: str = "", note: str = "", phase: JobPhase = NO_PHASE
) -> JobSummary:
    """A job as it is at ``now``. ``reason`` and ``note`` say why it waits; a reason replaces that of the record."""
    record, request, report = job.record, job.request, job.report or _BLANK
    has_report = job.report is not None
    spec = (
        record.spec if record is not None else None if request is None else request.to_spec(job.name, job.submitted_at)
    )
    allocation = NO_ALLOCATION if record is None else record.allocation
    state = JobState.PENDING if record is None else record.state
    running_s, lost_s = (0.0, 0.0) if record is None else spent_s(record, job.report, now)
    metric_name, metric = headline_metric(report.metrics, "" if request is None else request.metric)
    return JobSummary(
        name=job.name,
        state=state.value,
        kind="elastic" if request is None else request.kind,
        application="" if spec is None else spec.application,
        owner=(OPERATOR if request is None else request.owner) or OPERATOR,
        team=job.team,
        priority=0 if spec is None else spec.priority,
        command=() if request is None else request.command,
        cwd=None if request is None else request.cwd,
        sequence=job.sequence,
        submitted_at=job.submitted_at,
        started_at=None if record is None else record.started_at,
        finished_at=None if record is None else record.finished_at,
        reason=reason or ("" if record is None else record.reason.partition("\n")[0]),
        note=note,
        phase=phase.text,
        phase_since=phase.since,
        allocation=allocation.shares,
        num_replicas=allocation.num_replicas,
        min_replicas=1 if spec is None else spec.min_replicas,
        max_replicas=1 if spec is None else spec.max_replicas,
        weight=1.0 if spec is None else spec.weight,
        is_preemptible=True if spec is None else spec.is_preemptible,
        generation=0 if record is None else record.generation,
        num_resizes=0 if record is None else record.num_resizes or 0,
        num_crashes=0 if record is None else record.num_crashes,
        exit_code=None if record is None else record.exit_code,
        after=() if request is None else request.waits_for,
        standing=job.standing,
        held_back=job.held_back,
        time_limit_s=None if request is None else request.time_limit_s,
        deadline_at=None if spec is None else spec.deadline_at,
        deadline=job.deadline or ended_in_words(spec, record),
        budget_slot_s=None if spec is None else spec.budget_slot_s,
        array="" if request is None else request.array_of,
        study="" if request is None else request.study,
        used_slot_s=record.attained_slot_s if record is not None and state.is_final else None,
        progress=report.progress,
        epoch=report.epoch if has_report else None,
        num_steps=report.num_steps if has_report else None,
        total_batch=report.total_batch if has_report else None,
        device_batch=report.device_batch if has_report else None,
        accum_steps=report.accum_steps if has_report else None,
        gain=report.gain if has_report else None,
        noise_scale=report.noise_scale,
        noise_scale_error=report.noise_scale_error,
        efficiency=report.efficiency,
        throughput=report.throughput,
        goodput=report.goodput,
        metrics=dict(report.metrics),
        metric_name=metric_name,
        metric=metric,
        reported_at=job.reported_at,
        running_s=running_s,
        attained_slot_s=0.0 if record is None else record.attained_slot_s,
        lost_s=lost_s,
        lost_share=lost_s / running_s if running_s > 0 else None,
        remaining_s=_remaining_s(job.report) if state is JobState.RUNNING else None,
    )


def job_row(summary: JobSummary) -> JobRow:
    """Of a summary what does not change by itself as time goes on."""
    return JobRow(**{name: getattr(summary, name) for name in _ROW_FIELDS})


def number_or_name(value: object) -> float | NonFinite | None:
    """A finite number, or the name of another one; None for all else."""
    if isinstance(value, str):
        return _NONFINITE.get(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else _NONFINITE[str(value)]


def numbers_in(metrics: Mapping[str, object], path: str = "") -> Iterator[tuple[str, float | NonFinite]]:
    """Metrics that are numbers, also in objects within (``eval/accuracy``)."""
    for name, value in metrics.items():
        where = f"{path}{name}"
        if isinstance(value, Mapping):
            yield from numbers_in(value, f"{where}/")
        elif (number := number_or_name(value)) is not None:
            yield where, number


def headline_metric(metrics: Mapping[str, object], wanted: str = "") -> tuple[str, float | NonFinite | None]:
    """The number to show beside a job, with its name: ``wanted``, else a loss, else the first that was logged."""
    numbers = dict(numbers_in(metrics))
    losses = (name for name in numbers if name.endswith("loss"))
    name = next((one for one in (wanted, "loss", *losses, *numbers) if one in numbers), "")
    return name, numbers.get(name)


def _remaining_s(report: Report | None) -> float | None:
    if report is None or report.remaining_examples is None or not report.goodput:
        return None
    return report.remaining_examples / report.goodput


def spent_s(record: JobRecord, report: Report | None, now: float) -> tuple[float, float]:
    """Seconds in which the job held slots, and in how many of those it stood still, or trained what it had before."""
    running_s = record.attained_s
    if record.allocation and not record.state.is_final:
        running_s += max(now - record.accounted_at, 0.0)
    return running_s, lost_time_s(list(record.history), report) + record.set_back_s


def lost_time_s(history: Sequence[Transition], report: Report | None) -> float:
    """Seconds in which the job held slots but stood still: resizes as it measured them, and starts after the first."""
    lost_s = 0.0 if report is None else report.stalled_s
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
    most_slots: int | None = None  # that auto-scaling may bring it to; None: it does not scale
    unusable: tuple[UnusableNode, ...] = ()
    nodes: tuple[Node, ...] = ()
    memory: Mapping[str, int | None] = field(default_factory=dict)  # of a slot's device, by type; None: not known

    @classmethod
    def of(
        cls,
        nodes: Iterable[Node],
        draining: Collection[str] = (),
        *,
        most_slots: int | None = None,
        unusable: Sequence[UnusableNode] = (),
    ) -> Capacity:
        nodes = tuple(nodes)
        drained = slots_by_type(node for node in nodes if node.name in draining)
        return cls(slots_by_type(nodes), drained, most_slots, tuple(unusable), nodes, memory_by_type(nodes))

    def seen_by(self, spec: JobSpec) -> Capacity:
        """Without what the job's constraints, CPUs and memory leave it no use of."""
        if not spec.is_picky:
            return self
        there, all_there = slots_by_type(self.nodes, spec), self.num_slots
        drained = {kind: min(self.num_drained[kind], there[kind]) for kind in all_there}
        return dataclasses.replace(self, num_slots={kind: there[kind] for kind in all_there}, num_drained=drained)


def waiting_reason(record: JobRecord, capacity: Capacity) -> str:
    """Why a pending job does not run."""
    spec = record.spec
    if no_node := no_node_reason(spec, capacity.nodes):
        return no_node
    capacity = capacity.seen_by(spec)
    there = capacity.num_slots
    usable = [kind for kind in there if spec.accelerators is None or kind in spec.accelerators]
    unfit = misfits(spec, record.unfit_types, {kind: capacity.memory.get(kind) for kind in usable})
    if unfit and len(unfit) == len(usable):
        return f"no slot has enough memory: {'; '.join(f'{kind} {why}' for kind, why in sorted(unfit.items()))}"
    usable = [kind for kind in usable if kind not in unfit]
    if there and not usable:
        wanted = ", ".join(sorted(spec.accelerators or ()))
        return f"needs a slot of type {wanted}; the cluster has {', '.join(sorted(there))}"
    least = spec.requested_replicas or spec.min_replicas
    # A job sits on one type at a time: that with the most slots is its best chance.
    kind = max(usable, key=lambda kind: there[kind] - capacity.num_drained[kind], default="")
    num_slots = max((there[kind] for kind in usable), default=0)
    slots = f"{least} slot{'s at once' * (least > 1)}"
    if capacity.most_slots is not None and least > max(capacity.most_slots, num_slots):
        return f"can never start: it needs {slots}, and auto-scaling may bring the cluster to {capacity.most_slots}"
    if not there and capacity.unusable:
        first = capacity.unusable[0]
        return f"no node can be used ({len(capacity.unusable)} joined); {first.name}: {first.reason}"
    if least > num_slots:
        if spec.is_picky:
            return f"needs {slots}; nodes that it may use have room for {num_slots} replicas of it"
        if len(there) == 1:
            return f"needs {slots}; the cluster has {num_slots}"
        most = ", ".join(f"{there[kind]} of type {kind}" for kind in sorted(usable))
        return f"needs {slots}, all of one type; of those it may use the cluster has {most or 'none'}"
    num_slots, num_drained = there.get(kind, 0), capacity.num_drained.get(kind, 0)
    if least > num_slots - num_drained:
        return f"needs {slots}; {num_drained} of the cluster's {num_slots} are being drained"
    if not record.history:
        return "waiting for slots"
    reason = record.reason.partition("\n")[0]
    if reason != PREEMPTED:
        return reason
    drained = f"; {num_drained} of the cluster's {num_slots} are being drained" * bool(num_drained)
    return f"waiting for {slots}{drained}; it was {PREEMPTED}"


_MAX_UNMOVABLE = 3  # jobs that are named


def standing_in_words(standing: Standing | None) -> str:
    """As in: team vision has 12 of its 16 guaranteed slots, 4 lent to nlp since 10:02."""
    if standing is None or not standing.num_guaranteed:
        return ""
    held, promised = standing.num_held, standing.num_guaranteed
    title = f"user {standing.user}" if standing.user else f"team {standing.team}"
    if held > promised:
        return f"{title} has its {promised} guaranteed slots and {held - promised} more"
    text = f"{title} has {held} of its {promised} guaranteed slots"
    if 0 < standing.num_wanted <= held < promised:
        text += " (the policy finds no use for more)"
    if standing.lent_to and standing.since is not None:
        lent = " and ".join(f"{count} lent to {other}" for other, count in standing.lent_to.items())
        since = datetime.fromtimestamp(standing.since).astimezone().strftime("%H:%M")
        text = f"{text}, {lent} since {since}"
        if standing.unmovable:
            first, num_more = standing.unmovable[:_MAX_UNMOVABLE], len(standing.unmovable[_MAX_UNMOVABLE:])
            more = f" and {num_more} more" if num_more else ""
            text += f", also to jobs that must not be moved and keep theirs until they end: {', '.join(first)}{more}"
    return text


def model_views(record: JobRecord) -> dict[str, FittedModel]:
    """What was fitted to the job's measured speed, by accelerator."""
    profile, views = record.knowledge.profile, {}
    for accelerator, found in list(record.knowledge.fits.items()):
        seen = list(profile.timings(accelerator))
        views[accelerator] = FittedModel(
            params=found.params._asdict(),
            num_configurations=len(seen),
            max_replicas=profile.max_replicas,
            max_on_a_node=max((one.num_replicas for one in seen if one.num_nodes == 1), default=0),
            max_nodes=max((one.num_nodes for one in seen), default=0),
            rmsle=finite(found.rmsle_step),
        )
    return views


def decision_view(decision: JobDecision, record: RoundRecord, id_: int) -> Decision:
    """``id_``: of the round; its number begins again with the server."""
    explanation = record.plan.explanation
    return Decision(
        round=id_,
        at=record.at,
        trigger=record.trigger,
        before=decision.before.num_replicas,
        after=decision.after.num_replicas,
        speedup_before=finite(decision.speedup_before),
        speedup_after=finite(decision.speedup_after),
        move_factor=finite(decision.move_factor),
        note=decision.note,
        fitness=None if explanation is None else finite(explanation.fitness),
        upper_bound=None if explanation is None else finite(explanation.upper_bound),
    )


def decision_with_options(decision: JobDecision, record: RoundRecord, id_: int) -> DecisionWithOptions:
    view = decision_view(decision, record, id_)
    return DecisionWithOptions(
        **{one.name: getattr(view, one.name) for one in dataclasses.fields(view)},
        option_replicas=tuple(int(count) for count in decision.option_replicas),
        option_speedups=tuple(finite(speedup) for speedup in decision.option_speedups),
    )


def round_summary(round_: StoredRound) -> RoundSummary:
    record = round_.record
    explanation = record.plan.explanation
    changes = changes_of(record)
    return RoundSummary(
        id=round_.id,
        number=record.number,
        at=record.at,
        trigger=record.trigger,
        decision_s=record.decision_s,
        num_jobs=record.num_jobs,
        num_slots=record.num_slots,
        error=record.error,
        fitness_before=None if explanation is None else finite(explanation.fitness_before),
        fitness=None if explanation is None else finite(explanation.fitness),
        upper_bound=None if explanation is None else finite(explanation.upper_bound),
        gap=None if explanation is None else finite(explanation.gap),
        words=tuple(explain(record, changes)),
        changes=tuple(
            Change(
                job=change.job,
                before=change.before.num_replicas,
                after=change.after.num_replicas,
                speedup_before=finite(change.speedup_before),
                speedup_after=finite(change.speedup_after),
                note=change.note,
            )
            for change in changes
        ),
    )


def round_detail(round_: StoredRound) -> RoundDetail:
    """A round with every decision that is kept of it, and the nodes it was about, where those are."""
    summary, explanation = round_summary(round_), round_.record.plan.explanation
    return RoundDetail(
        **{one.name: getattr(summary, one.name) for one in dataclasses.fields(summary)},
        method="" if explanation is None else explanation.method,
        jobs=tuple(
            JobInRound(
                job=decision.job,
                before=decision.before.shares,
                after=decision.after.shares,
                speedup_before=finite(decision.speedup_before),
                speedup_after=finite(decision.speedup_after),
                move_factor=finite(decision.move_factor),
                note=decision.note,
                option_replicas=tuple(int(count) for count in decision.option_replicas),
                option_speedups=tuple(finite(speedup) for speedup in decision.option_speedups),
            )
            for decision in (() if explanation is None else explanation.jobs)
        ),
        nodes=None if round_.snapshot is None else round_nodes(round_.snapshot.nodes),
    )


def round_nodes(nodes: Iterable[Node]) -> tuple[RoundNode, ...]:
    return tuple(RoundNode(name=one.name, num_slots=one.num_slots, accelerator=one.accelerator) for one in nodes)


def state_change(transition: Transition) -> StateChange:
    return StateChange(
        at=transition.at,
        source=transition.source.value,
        target=transition.target.value,
        reason=transition.reason.partition("\n")[0],
    )


def job_resize(resize: StoredResize) -> JobResize:
    return JobResize(
        generation=resize.generation,
        at=resize.at,
        before=resize.before.shares,
        after=resize.after.shares,
        runs_at=resize.runs_at,
        took_s=None if resize.runs_at is None else resize.runs_at - resize.at,
    )


def node_summaries(
    nodes: Iterable[Node],
    draining: Collection[str],
    leaving: Collection[str],
    records: Iterable[JobRecord],
    conditions: Mapping[str, NodeCondition],
    unusable: Iterable[UnusableNode] = (),
    readings: Mapping[str, NodeReading] | None = None,
) -> list[NodeSummary]:
    """Nodes that are there, then those that get no work and those that are lost, without slots."""
    jobs: dict[str, list[JobOnNode]] = {}
    for record in records:
        for node, count in record.allocation.shares:
            job = JobOnNode(name=record.name, num_replicas=count, may_move=record.spec.is_preemptible)
            jobs.setdefault(node, []).append(job)
    found = [
        NodeSummary(
            name=node.name,
            num_slots=node.num_slots,
            accelerator=node.accelerator,
            is_draining=node.name in draining,
            is_leaving=node.name in leaving or bool(node.notice),
            used=sum(job.num_replicas for job in jobs.get(node.name, ())),
            jobs=tuple(jobs.get(node.name, ())),
            health=conditions[node.name].state if node.name in conditions else "ok",
            problem=conditions[node.name].reason if node.name in conditions else node.notice,
            reading=(readings or {}).get(node.name),
            labels=dict(node.labels),
            cpus=node.cpus,
            memory_bytes=node.memory_bytes,
        )
        for node in nodes
    ]
    absent: dict[str, tuple[NodeHealthName, str]] = {node.name: ("unusable", node.reason) for node in unusable}
    for name, condition in conditions.items():
        if condition.state == "lost":
            absent.setdefault(name, ("lost", condition.reason))
    there = {summary.name for summary in found}
    return found + [
        NodeSummary(
            name=name,
            num_slots=0,
            accelerator="",
            is_draining=name in draining,
            is_leaving=False,
            used=0,
            jobs=(),
            health=health,
            problem=problem,
        )
        for name, (health, problem) in absent.items()
        if name not in there
    ]


def finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def cluster_size(scheduler: Scheduler | None, config: AutoscaleConfig | None, prices: Prices) -> ClusterSize:
    """How large the cluster should be, why, and what its nodes have cost."""
    node_hours = {} if scheduler is None else {kind: used_s / 3600.0 for kind, used_s in scheduler.node_s.items()}
    size = None if scheduler is None else scheduler.last_size
    return ClusterSize(
        min_nodes=None if config is None else config.min_nodes,
        max_nodes=None if config is None else config.max_nodes,
        budget_slots=None if config is None else config.budget_slots,
        num_wanted=None if size is None else size.num_nodes,
        utility=None if size is None else size.utility,
        reason="" if size is None else size.reason,
        node_hours=node_hours,
        node_price=prices.any,
        prices=dict(prices.by_type),
        cost=prices.cost({} if scheduler is None else scheduler.node_s),
    )
