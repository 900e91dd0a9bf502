"""How much faster than on its fair share every job would be, for each number of slots of each accelerator type.

A speedup is the best goodput of an allocation over that of the fair share: all slots divided by the number of jobs,
of each type in proportion to its slots. :mod:`pollux.policy.round` makes costs of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pollux.model.goodput import GoodputModel, GoodputTables
from pollux.policy.base import PolicySettings
from pollux.policy.dense import may_use, types_of
from pollux.policy.exploration import explored_replicas
from pollux.policy.gangs import demand
from pollux.policy.weights import entitled_weights
from pollux.types import FloatArray, JobSpec, JobView, Snapshot

_PLAN_STEP = 0.02  # relative change of a noise scale, or of the work left, below which a plan is kept; 0.005: same JCTs
# Relative changes of a noise scale below which a table is kept, with few jobs and with many. Goodput changes by less
# than half as much; the coarse step saves most of the time of a decision for thousands of jobs.
_STEP, _COARSE_STEP = 0.005, 0.05
_MANY_JOBS = 400
# How far above linear a job's scaling is believed. Caches and noise make a few per cent; more is an error or a lie.
_SUPER_LINEAR = 1.5
# Fair shares that a table reaches at most. A power mean with p <= 0 gives a job so many only if its weight is far above
# the others', which is accounted for.
_MOST_SHARES = 16
# The same with more than so many jobs, where tables are most of the memory. On 100,000 GPUs no job has had more than 4.
_VERY_MANY_JOBS, _FEWER_SHARES = 10_000, 8


@dataclass(frozen=True, slots=True)
class SpeedupTable:
    """One job's speedups over its fair share for 0..R replicas."""

    speedups: FloatArray  # (num_types, 2, R + 1): [on one node, spanning]; 0 where impossible
    max_replicas: int  # more than these may be kept, but not asked for
    fair_goodput: float  # useful examples per second on the fair share; nan if not known yet


def max_replicas(job: JobView, num_slots: int, settings: PolicySettings) -> int:
    """How many replicas the job may be given: its own bounds, and a few times what it has been profiled with."""
    most = min(job.spec.max_replicas, num_slots)
    if job.spec.batch is None:  # a command that does not adapt: what was asked for, no more
        return min(most, demand(job))
    return min(most, job.spec.batch.max_replicas, explored_replicas(job, settings))


class Speedups:
    """Tables of all jobs, kept from round to round; a table is computed again only if its job has changed enough."""

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._goodputs = GoodputTables()
        self._cluster: tuple[object, ...] = ()
        self._known: dict[str, _KnownTable] = {}  # by job

    def clear(self) -> None:
        self._goodputs.clear()
        self._known.clear()

    def tables(self, snapshot: Snapshot) -> list[SpeedupTable]:
        cluster = _Cluster.of(snapshot, self._settings)
        if cluster.basis != self._cluster:
            self._cluster = cluster.basis
            self._known.clear()
        known: dict[str, _KnownTable] = {}
        changed: list[JobView] = []
        for job in snapshot.jobs:
            found = self._known.get(job.name)
            if found is not None and found.is_valid(job, cluster):
                known[job.name] = found
            else:
                changed.append(job)
        for job, table in zip(changed, _compute(changed, cluster, self._goodputs), strict=True):
            known[job.name] = _KnownTable.of(job, cluster, table)
        self._known = known
        return [known[job.name].table for job in snapshot.jobs]


@dataclass(frozen=True, slots=True)
class _KnownTable:
    """A job's table, and all that it depends on."""

    spec: JobSpec
    params: object
    shape_factors: object
    noise: int | None  # rounded
    log_noise: float  # as it was
    max_profiled_replicas: int
    num_held: int  # if the table has to be wider for them
    table: SpeedupTable

    @classmethod
    def of(cls, job: JobView, cluster: _Cluster, table: SpeedupTable) -> _KnownTable:
        return cls(
            job.spec,
            job.params,
            job.shape_factors,
            rounded_log(job.noise_scale_low, cluster.step),
            _log(job.noise_scale_low),
            job.max_profiled_replicas,
            _beyond(job, table),
            table,
        )

    def is_valid(self, job: JobView, cluster: _Cluster) -> bool:
        """Whether the table is as good as a new one.

        Where noise scales are rounded coarsely, those near a border would cross it again and again: there the table is
        kept until the noise scale has moved by a whole step.
        """
        if not (
            (self.spec is job.spec or self.spec == job.spec)
            and self.max_profiled_replicas == job.max_profiled_replicas
            and (self.params is job.params or self.params == job.params)
            and (self.shape_factors is job.shape_factors or self.shape_factors == job.shape_factors)
            and self.num_held == _beyond(job, self.table)
        ):
            return False
        if cluster.step < _COARSE_STEP:
            return self.noise == rounded_log(job.noise_scale_low, cluster.step)
        now = _log(job.noise_scale_low)
        return abs(now - self.log_noise) < cluster.step or (math.isnan(now) and math.isnan(self.log_noise))


def _beyond(job: JobView, table: SpeedupTable) -> int:
    """The replicas that a job holds, if they are more than its table would have for others."""
    held = job.allocation.num_replicas
    return held if held > table.max_replicas else 0


def _log(value: float | None) -> float:
    return math.nan if value is None or math.isnan(value) else math.log(max(value, 1e-9))


def speedup_tables(snapshot: Snapshot, settings: PolicySettings | None = None) -> list[SpeedupTable]:
    """Speedups of all jobs, computed once."""
    return _compute(snapshot.jobs, _Cluster.of(snapshot, settings or PolicySettings()), GoodputTables())


def rounded_log(value: float | None, step: float = _PLAN_STEP) -> int | None:
    """A noise scale, or the work left, in steps of a logarithmic scale: the same step counts as unchanged."""
    return None if value is None or math.isnan(value) else round(math.log(max(value, 1e-9)) / step)


@dataclass(frozen=True, slots=True)
class _Cluster:
    """What tables depend on besides the job."""

    types: tuple[str, ...]
    slots: tuple[int, ...]  # by type
    node_slots: tuple[int, ...]  # by type, of the largest node
    fair: int  # slots of each job if all got the same
    most: int  # replicas that any job might be given; tables need not be wider
    step: float  # of noise scales
    settings: PolicySettings

    @classmethod
    def of(cls, snapshot: Snapshot, settings: PolicySettings) -> _Cluster:
        slots = dict.fromkeys(types_of(snapshot.nodes), 0)
        largest = dict(slots)
        for node in snapshot.nodes:
            slots[node.accelerator] += node.num_slots
            largest[node.accelerator] = max(largest[node.accelerator], node.num_slots)
        fair = math.ceil(sum(slots.values()) / max(len(snapshot.jobs), 1))
        step = _STEP if len(snapshot.jobs) <= _MANY_JOBS else _COARSE_STEP
        most = _most(snapshot.jobs, tuple(slots.values()), settings)
        return cls(tuple(slots), tuple(slots.values()), tuple(largest.values()), fair, most, step, settings)

    @property
    def basis(self) -> tuple[object, ...]:
        return self.types, self.slots, self.node_slots, self.fair, self.most, self.step


def _most(jobs: Sequence[JobView], slots: Sequence[int], settings: PolicySettings) -> int:
    """A number of replicas that no job would exceed.

    Slots that some jobs cannot use are there for the others. A sum of w·s^p, s being about linear, divides slots as
    w^(1/(1-p)); with p > 0 one job may get everything.
    """
    largest, p = max(slots), settings.p
    if p > 0 or not jobs:
        return largest
    able = sorted(max_replicas(job, largest, settings) for job in jobs)
    left, level = sum(slots), math.inf
    for index, number in enumerate(able):
        level = left / (len(able) - index)  # for each job that can use more than all before
        if level <= number:
            break
        left -= number
    else:
        return able[-1]
    weights = entitled_weights(jobs, p)
    favour = float(weights.max() / weights.mean()) ** (1 / (1 - p))
    shares = _MOST_SHARES if len(jobs) <= _VERY_MANY_JOBS else _FEWER_SHARES
    most = shares * math.ceil(level) * favour
    return largest if most >= largest else math.ceil(most)


def _plausible(goodputs: FloatArray) -> FloatArray:
    """Goodputs, (2, R + 1), of which none is far above that of as many single replicas.

    A job reports its own step times. One that says it is useless below 4 replicas would otherwise get 4 before all
    others, for ever: nothing is worth more to a power mean than its speedup.
    """
    count = np.arange(goodputs.shape[1])
    possible = np.flatnonzero(goodputs[0] > 0)
    if len(possible) == 0:
        return goodputs
    least = int(possible[0])
    bound: FloatArray = _SUPER_LINEAR * goodputs[0, least] * count / least
    return np.minimum(goodputs, bound) if bool((goodputs > bound).any()) else goodputs


def _compute(jobs: Sequence[JobView], cluster: _Cluster, goodputs: GoodputTables) -> list[SpeedupTable]:
    """A job never measured counts as scaling perfectly.

    Noise scales are those that are certain (:attr:`JobView.noise_scale_low`): no job takes slots on a guess.
    On a type that nothing is known of, a job counts as doing as well as on the one it is known on: it has to be tried.
    """
    types, slots, fair = cluster.types, cluster.slots, cluster.fair
    models: list[GoodputModel] = []
    widths: list[int] = []
    found: list[list[tuple[int, int]]] = []  # per job: (type, where its table will be)
    allowed = [max_replicas(job, max(slots), cluster.settings) for job in jobs]
    mosts = [min(number, max(cluster.most, job.spec.min_replicas)) for job, number in zip(jobs, allowed, strict=True)]
    held = [job.allocation.num_replicas for job in jobs]
    for job, most, holds in zip(jobs, mosts, held, strict=True):
        found.append([])
        if not job.params or job.noise_scale is None or job.spec.batch is None:
            continue
        phi = math.exp(cluster.step * (rounded_log(job.noise_scale_low, cluster.step) or 0))
        places = found[-1]
        for index, name in enumerate(types):
            if may_use(job, name):
                model = GoodputModel.of(job, name, phi) or GoodputModel.of(job, next(iter(job.params)), phi)
                assert model is not None
                places.append((index, len(models)))
                models.append(model)
                widths.append(max(min(most, slots[index]), holds, min(fair, model.limits.max_replicas)))
    values = [_plausible(found) for found in goodputs.best(models, widths)]
    result = []
    for job, places, most, holds in zip(jobs, found, mosts, held, strict=True):
        width = max(most, holds)
        weight, base = 0, 0.0
        for index, at in places:
            weight += slots[index]
            share = min(fair, widths[at])
            base += slots[index] * float(values[at][int(share > cluster.node_slots[index]), share])
        base = base / weight if weight else 0.0
        table = np.zeros((len(types), 2, width + 1))
        if places and base > 0:
            for index, at in places:
                shown = min(width, widths[at]) + 1
                table[index, :, :shown] = values[at][:, :shown] / base
        elif not places:
            for index, name in enumerate(types):
                if may_use(job, name):
                    table[index] = np.arange(width + 1) / fair
            table[:, 1, : min(2, width + 1)] = 0.0
        result.append(SpeedupTable(table, most, base if base > 0 else math.nan))
    return result
