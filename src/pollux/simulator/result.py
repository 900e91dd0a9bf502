"""The result of a simulation: one value per run that can be printed, plotted, written to a file and compared.

All commands that simulate make one by :func:`summarise`. Definitions. JCT: end of a job minus its submission. Makespan:
last end minus first submission. Utilisation: GPU-seconds held by jobs / GPU-seconds of the cluster while at least one
job was present. Efficiency: statistical efficiency of the batch sizes in use, weighted by replicas and time. ρ: see
:mod:`pollux.simulator.fairness`. Percentiles interpolate linearly.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pollux.errors import InputFileError, SimulationError
from pollux.policy.base import PolicySettings
from pollux.scheduler.node_types import Prices
from pollux.scheduler.record import JobRecord, RoundRecord
from pollux.simulator.application import application_key
from pollux.simulator.fairness import SoloTimes, finish_time_fairness
from pollux.simulator.run import SimulatedSample, SimulationRun
from pollux.types import FloatArray
from pollux.version import __version__

FORMAT = "pollux-result/1"
MAX_POINTS = 400  # of a series over time: more than the pixels of a plot


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How a number is distributed over rounds or jobs."""

    mean: float
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float] | FloatArray) -> Spread:
        if len(values) == 0:
            return cls(mean=0.0, p50=0.0, p99=0.0, max=0.0)
        p50, p99 = np.percentile(values, (50, 99))
        mean = math.fsum(values) / len(values)
        return cls(mean=mean, p50=float(p50), p99=float(p99), max=float(np.max(values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """One job: when it was there, what it used, and what it held when."""

    name: str
    application: str
    submitted_at: float
    finished_at: float
    num_resizes: int
    gpu_s: float
    rho: float
    allocations: tuple[tuple[float, float, int], ...]  # (from, to, replicas) in order of time
    deadline_at: float | None = None

    @property
    def jct_s(self) -> float:
        return self.finished_at - self.submitted_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The cluster over time: means over equal pieces of the makespan, at their middles. At most MAX_POINTS."""

    time_s: tuple[float, ...] = ()
    gpus: tuple[float, ...] = ()  # held by jobs
    gpus_total: tuple[float, ...] = ()
    waiting: tuple[float, ...] = ()  # jobs present that hold nothing
    efficiency: tuple[float, ...] = ()  # nan where nothing runs


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionSeries:
    """What the policy says of its decisions, if it explains them: thinned rounds."""

    time_s: tuple[float, ...] = ()
    fitness_before: tuple[float, ...] = ()  # of changing nothing
    fitness: tuple[float, ...] = ()
    upper_bound: tuple[float, ...] = ()
    gap: tuple[float, ...] = ()
    changes: tuple[int, ...] = ()  # jobs whose allocation was changed


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    policy: str
    workload: str
    jobs: tuple[JobOutcome, ...]  # in the workload's order
    rounds: int
    decision_s: Spread
    wall_s: float
    node_hours: float  # paid for: up, or on the way up
    slot_hours: float  # of these nodes
    utilisation_mean: float
    efficiency_mean: float
    series: Series
    decisions: DecisionSeries
    cluster: str = ""  # nodes by accelerator type: "aws:6x4,rtx:3x8"
    gpu_hours_by_type: Mapping[str, float] = field(default_factory=dict)  # held; empty where there is one type
    config: Mapping[str, Any] = field(default_factory=dict)
    pollux_version: str = __version__
    cost_by_type: Mapping[str, float] = field(default_factory=dict)  # of nodes, where types of them have prices
    bound_jct_s: float | None = None  # no schedule has a lower average JCT; None: not computed

    @property
    def num_jobs(self) -> int:
        return len(self.jobs)

    @property
    def jct_s(self) -> Spread:
        return Spread.of([job.jct_s for job in self.jobs])

    @property
    def avg_jct_s(self) -> float:
        return self.jct_s.mean

    @property
    def deadlines_met(self) -> float | None:
        """The share of jobs with a deadline that were through by then; None: no job has one."""
        due = [job.finished_at <= job.deadline_at for job in self.jobs if job.deadline_at is not None]
        return sum(due) / len(due) if due else None

    @property
    def best_effort_jct_s(self) -> float | None:
        """The average JCT of jobs without a deadline, where others have one."""
        rest = [job.jct_s for job in self.jobs if job.deadline_at is None]
        return math.fsum(rest) / len(rest) if rest and len(rest) < len(self.jobs) else None

    @property
    def above_bound(self) -> float | None:
        """By what share the average JCT is above the proven lower bound."""
        return None if self.bound_jct_s is None else self.avg_jct_s / max(self.bound_jct_s, 1e-9) - 1

    @property
    def rho(self) -> Spread:
        return Spread.of([job.rho for job in self.jobs])

    @property
    def makespan_s(self) -> float:
        return max(job.finished_at for job in self.jobs) - min(job.submitted_at for job in self.jobs)

    @property
    def resizes_mean(self) -> float:
        return sum(job.num_resizes for job in self.jobs) / len(self.jobs)

    @property
    def cost(self) -> float | None:
        """Of all node-hours, if prices of nodes are known."""
        if self.cost_by_type:
            return math.fsum(self.cost_by_type.values())
        price = self.config.get("node_price")
        return None if price is None else self.node_hours * price

    @property
    def gpu_hours(self) -> float:
        return math.fsum(job.gpu_s for job in self.jobs) / 3600

    def to_json(self, *, with_series: bool = True) -> dict[str, Any]:
        """Plain data for ``json``; what is not a number (an efficiency while nothing runs) becomes None."""
        jct, rho = self.jct_s, self.rho
        data: dict[str, object] = {
            "format": FORMAT,
            "pollux_version": self.pollux_version,
            "policy": self.policy,
            "workload": self.workload,
            "cluster": self.cluster,
            "num_jobs": self.num_jobs,
            "avg_jct_s": jct.mean,
            "p50_jct_s": jct.p50,
            "p99_jct_s": jct.p99,
            "bound_jct_s": self.bound_jct_s,
            "above_bound": self.above_bound,
            "deadlines_met": self.deadlines_met,
            "best_effort_jct_s": self.best_effort_jct_s,
            "makespan_s": self.makespan_s,
            "resizes_mean": self.resizes_mean,
            "gpu_hours": self.gpu_hours,
            "gpu_hours_by_type": dict(self.gpu_hours_by_type),
            "node_hours": self.node_hours,
            "slot_hours": self.slot_hours,
            "cost": self.cost,
            "utilisation_mean": self.utilisation_mean,
            "efficiency_mean": self.efficiency_mean,
            "rho": {
                "mean": rho.mean,
                "p99": rho.p99,
                "max": rho.max,
                "share_above_1": sum(job.rho > 1 for job in self.jobs) / len(self.jobs),
            },
            "rounds": self.rounds,
            "decision_s": dataclasses.asdict(self.decision_s),
            "wall_s": self.wall_s,
            "config": dict(self.config),
            "jobs": {
                job.name: {
                    "application": job.application,
                    "submitted_at_s": job.submitted_at,
                    "finished_at_s": job.finished_at,
                    "jct_s": job.jct_s,
                    "num_resizes": job.num_resizes,
                    "gpu_s": job.gpu_s,
                    "rho": job.rho,
                    "deadline_at_s": job.deadline_at,
                }
                for job in self.jobs
            },
        }
        if with_series:
            data["series"] = {
                **dataclasses.asdict(self.series),
                "allocations": {job.name: job.allocations for job in self.jobs},
                "decisions": dataclasses.asdict(self.decisions),
            }
        return {name: _finite(value) for name, value in data.items()}


def summarise(run: SimulationRun, settings: PolicySettings | None = None) -> SimulationResult:
    """Sum up a run. ``settings`` is what its policy was made with, for the record.

    Raises:
        SimulationError: it has no jobs, or one of them did not finish.
    """
    records = sorted(run.store.jobs.values(), key=lambda record: record.sequence)
    if not records:
        raise SimulationError(f"workload {run.workload.name!r} has no jobs")
    begins, ends = (np.array(values) for values in zip(*(_life(record) for record in records), strict=True))
    pieces = _Pieces.of(run.samples, {record.name: float(end) for record, end in zip(records, ends, strict=True)})
    slot_s = _Integral(np.array([sample.at for sample in run.samples]), _num_slots(run.samples))
    lives = np.maximum(ends - begins, 1e-9)
    rho = finish_time_fairness(
        SoloTimes(run.applications, run.config.groups, resize_s=run.config.resize_s),
        [application_key(run.applications, record.spec) for record in records],
        begins,
        ends,
        slot_s.between(begins, begins + lives) / lives,  # the cluster's size, which auto-scaling changes
    )
    allocations = pieces.intervals()
    jobs = tuple(
        JobOutcome(
            name=record.name,
            application=record.spec.application,
            submitted_at=float(begin),
            finished_at=float(end),
            num_resizes=record.num_resizes or 0,
            gpu_s=record.attained_slot_s,
            rho=float(fairness),
            allocations=allocations.get(record.name, ()),
            deadline_at=record.spec.deadline_at,
        )
        for record, begin, end, fairness in zip(records, begins, ends, rho, strict=True)
    )
    busy = _union(begins, ends)
    cluster_s = float(slot_s.between(busy[:, 0], busy[:, 1]).sum())
    held_s = float((pieces.replicas * pieces.durations).sum())
    weighted = float((pieces.efficiency * pieces.replicas * pieces.durations).sum())
    config = dataclasses.asdict(run.config)
    prices = Prices.of_types(run.config.node_types)
    if settings is not None:
        config["policy_settings"] = dataclasses.asdict(settings)
    return SimulationResult(
        policy=run.policy.name,
        workload=run.workload.name,
        jobs=jobs,
        rounds=len(run.store.rounds),
        decision_s=Spread.of([round_.decision_s for round_ in run.store.rounds]),
        wall_s=run.wall_s,
        node_hours=run.node_s / 3600,
        slot_hours=run.node_s / 3600 * run.config.mean_slots_per_node,
        utilisation_mean=math.fsum(job.gpu_s for job in jobs) / cluster_s if cluster_s > 0 else 0.0,
        efficiency_mean=weighted / held_s if held_s > 0 else 0.0,
        series=_series(begins, ends, pieces, slot_s),
        decisions=_decisions(run.store.rounds),
        cluster=run.config.cluster_text,
        gpu_hours_by_type=pieces.hours_by_type(run.config.accelerators),
        config=config,
        cost_by_type={kind: (prices.of(kind) or 0.0) * used_s / 3600 for kind, used_s in run.node_s_by_type.items()},
    )


def group_results(results: Iterable[SimulationResult]) -> dict[str, dict[str, list[SimulationResult]]]:
    """By workload, then by policy, each in order of appearance; what is left in one list are seeds."""
    groups: dict[str, dict[str, list[SimulationResult]]] = {}
    for result in results:
        groups.setdefault(result.workload, {}).setdefault(result.policy, []).append(result)
    return groups


def mean_of(results: Sequence[SimulationResult], name: str) -> float:
    """The mean of a number over results (seeds, say); dots in its name reach into spreads: "jct_s.p99"."""
    values = []
    for result in results:
        value: Any = result
        for part in name.split("."):
            value = getattr(value, part)
        values.append(float(value))
    return math.fsum(values) / len(values)


def half_range_s(results: Sequence[SimulationResult]) -> float:
    """Of the average JCT over the seeds of one policy on one workload: half of the largest less the smallest."""
    averages = [result.avg_jct_s for result in results]
    return (max(averages) - min(averages)) / 2


# Files ----------------------------------------------------------------------------------------


def write_json(path: str | Path, data: object) -> None:
    """Write ``data`` as JSON: the whole file or none of it.

    Raises:
        InputFileError: the file cannot be written.
    """
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write a whole file or none of it: beside it first, then under its name.

    Raises:
        InputFileError: the file cannot be written.
    """
    target = Path(os.path.realpath(path))  # a link stays a link
    data = text.encode()
    try:
        if target.exists() and not stat.S_ISREG(target.stat().st_mode):
            target.write_bytes(data)  # a pipe or a device cannot be replaced, only written to
            return
        beside = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            beside.write_bytes(data)
            os.replace(beside, target)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise InputFileError(path, f"cannot be written: {error.strerror or error}") from error


def _finite(data: object) -> object:
    if isinstance(data, Mapping):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data


# From samples and records ---------------------------------------------------------------------


def _life(record: JobRecord) -> tuple[float, float]:
    if record.finished_at is None:
        raise SimulationError(f"job {record.name!r} did not finish")
    return record.spec.submitted_at, record.finished_at


def _num_slots(samples: Sequence[SimulatedSample]) -> FloatArray:
    return np.array([sample.num_slots for sample in samples], dtype=float)


class _Integral:
    """Of a step function that has ``values[i]`` from ``times[i]`` on, and the first value before that."""

    def __init__(self, times: FloatArray, values: FloatArray) -> None:
        self._times, self._values = times, values
        self._sums = np.concatenate([[0.0], np.cumsum(values[:-1] * np.diff(times))])

    def at(self, when: FloatArray) -> FloatArray:
        index = np.clip(np.searchsorted(self._times, when, side="right") - 1, 0, len(self._times) - 1)
        result: FloatArray = self._sums[index] + self._values[index] * (when - self._times[index])
        return result

    def between(self, begins: FloatArray, ends: FloatArray) -> FloatArray:
        return self.at(ends) - self.at(begins)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Every (job, time between two samples) in which the job held replicas."""

    names: Sequence[str]
    begins: FloatArray
    ends: FloatArray
    replicas: FloatArray
    efficiency: FloatArray
    slots: FloatArray  # its own: none of a guest's
    types: Sequence[str]

    @classmethod
    def of(cls, samples: Sequence[SimulatedSample], finished_at: Mapping[str, float]) -> _Pieces:
        names: list[str] = []
        types: list[str] = []
        rows: list[tuple[float, float, int, float, int]] = []
        for index, sample in enumerate(samples):
            until = samples[index + 1].at if index + 1 < len(samples) else math.inf
            for name, count in sample.replicas.items():
                end = min(until, finished_at[name])
                if end > sample.at:
                    names.append(name)
                    types.append(sample.types.get(name, ""))
                    slots = 0 if name in sample.guests else count
                    rows.append((sample.at, end, count, sample.efficiency[name], slots))
        begins, ends, replicas, efficiency, own = np.array(rows, dtype=float).reshape(len(rows), 5).T
        return cls(names, begins, ends, replicas, efficiency, own, types)

    @property
    def durations(self) -> FloatArray:
        return self.ends - self.begins

    def hours_by_type(self, types: Sequence[str]) -> dict[str, float]:
        """Slot-hours held of each type, if there are several."""
        held_s = self.slots * self.durations
        mine = np.array(self.types)
        return {kind: float(held_s[mine == kind].sum()) / 3600 for kind in types} if len(types) > 1 else {}

    def intervals(self) -> dict[str, tuple[tuple[float, float, int], ...]]:
        """Per job (from, to, replicas), pieces that continue each other joined."""
        joined: dict[str, list[tuple[float, float, int]]] = {}
        for name, begin, end, count in zip(
            self.names, self.begins.tolist(), self.ends.tolist(), self.replicas.tolist(), strict=True
        ):
            mine = joined.setdefault(name, [])
            if mine and mine[-1][1] == begin and mine[-1][2] == count:
                mine[-1] = (mine[-1][0], end, int(count))
            else:
                mine.append((begin, end, int(count)))
        return {name: tuple(mine) for name, mine in joined.items()}


def _sum_of(begins: FloatArray, ends: FloatArray, heights: FloatArray) -> _Integral:
    """The sum of pieces that each have a height from their beginning to their end."""
    times = np.concatenate([begins, ends, [0.0]])
    change = np.concatenate([heights, -heights, [0.0]])
    order = np.argsort(times, kind="stable")
    return _Integral(times[order], np.cumsum(change[order]))


def _union(begins: FloatArray, ends: FloatArray) -> FloatArray:
    """(num_spans, 2): when at least one of the intervals was open."""
    spans: list[list[float]] = []
    for begin, end in sorted(zip(begins.tolist(), ends.tolist(), strict=True)):
        if spans and begin <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([begin, end])
    return np.array(spans)


def _series(begins: FloatArray, ends: FloatArray, pieces: _Pieces, slot_s: _Integral) -> Series:
    first, last = float(begins.min()), float(ends.max())
    if last <= first:
        return Series()
    edges = np.linspace(first, last, MAX_POINTS + 1)
    left, right = edges[:-1], edges[1:]

    def mean(integral: _Integral) -> FloatArray:
        return np.maximum(integral.between(left, right) / (right - left), 0.0)

    ones = np.ones(len(pieces.begins))
    gpus = mean(_sum_of(pieces.begins, pieces.ends, pieces.slots))
    replicas = mean(_sum_of(pieces.begins, pieces.ends, pieces.replicas))
    useful = mean(_sum_of(pieces.begins, pieces.ends, pieces.replicas * pieces.efficiency))
    present = mean(_sum_of(begins, ends, np.ones(len(begins))))
    running = mean(_sum_of(pieces.begins, pieces.ends, ones))
    with np.errstate(divide="ignore", invalid="ignore"):
        efficiency = np.where(replicas > 1e-9, useful / replicas, np.nan)
    return Series(
        time_s=_rounded((left + right) / 2, 3),
        gpus=_rounded(gpus, 3),
        gpus_total=_rounded(mean(slot_s), 3),
        waiting=_rounded(np.maximum(present - running, 0.0), 3),
        efficiency=_rounded(efficiency, 4),
    )


def _decisions(rounds: Sequence[RoundRecord]) -> DecisionSeries:
    explained = [(round_.at, e) for round_ in rounds if (e := round_.plan.explanation) is not None]
    if not explained:
        return DecisionSeries()
    chosen = np.unique(np.linspace(0, len(explained) - 1, min(MAX_POINTS, len(explained))).astype(int))
    thinned = [explained[index] for index in chosen]
    return DecisionSeries(
        time_s=tuple(at for at, _ in thinned),
        fitness_before=tuple(e.fitness_before for _, e in thinned),
        fitness=tuple(e.fitness for _, e in thinned),
        upper_bound=tuple(e.upper_bound for _, e in thinned),
        gap=tuple(e.gap for _, e in thinned),
        changes=tuple(sum(job.has_changed for job in e.jobs) for _, e in thinned),
    )


def _rounded(values: FloatArray, digits: int) -> tuple[float, ...]:
    return tuple(np.round(values, digits).tolist())
