"""How much faster than on its fair share every job would be, for each number of slots of each accelerator type.

A speedup is the best goodput of an allocation over that of the fair share: as many slots as everybody would get if all
got the same, of each type as much as there is of it. Stands between :mod:`pollux.model.goodput` and
:mod:`pollux.policy.round`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pollux.model.goodput import GoodputModel, GoodputTables
from pollux.policy.dense import may_use, types_of
from pollux.policy.gangs import demand
from pollux.types import FloatArray, JobView, Snapshot

_EXPLORATION = 4  # a job may ask for this many times the replicas it has been profiled with
_FIRST_REPLICAS = 4  # and for as many before it has been
_OF_NOTE = 0.02  # relative change of a noise scale, or of the work left, that may change a plan
_STEP, _COARSE_STEP = 0.005, 0.05  # relative: noise scales that tables do not tell apart, of few jobs and of many
_MANY_JOBS = 400
_MOST_SHARES = 16  # fair shares: more than a power mean of p <= 0 gives anybody whose weight is not far above others'


@dataclass(frozen=True, slots=True)
class SpeedupTable:
    """One job's speedups over its fair share for 0..R replicas."""

    speedups: FloatArray  # (num_types, 2, R + 1): [on one node, spanning]; 0 where impossible
    max_replicas: int  # more than these may be kept, but not asked for
    fair_goodput: float  # useful examples per second on the fair share; nan if not known yet


def max_replicas(job: JobView, num_slots: int) -> int:
    """How many replicas the job may be given: its own bounds, and a few times what it has been profiled with."""
    most = min(job.spec.max_replicas, num_slots)
    if job.spec.batch is None:  # a command that does not adapt: what was asked for, no more
        return min(most, demand(job))
    explored = max(_EXPLORATION * job.max_profiled_replicas, _FIRST_REPLICAS, job.spec.min_replicas)
    return min(most, job.spec.batch.max_replicas, explored)


class Speedups:
    """Tables of all jobs, kept from round to round: only those are computed anew of which something of note changed."""

    def __init__(self, p: float) -> None:
        """``p``: of the power mean that they are for."""
        self._p = p
        self._goodputs = GoodputTables()
        self._cluster: tuple[object, ...] = ()
        self._known: dict[str, tuple[tuple[object, ...], SpeedupTable]] = {}  # by job, for what

    def clear(self) -> None:
        self._goodputs.clear()
        self._known.clear()

    def tables(self, snapshot: Snapshot) -> list[SpeedupTable]:
        cluster = _Cluster.of(snapshot, self._p)
        if cluster.basis != self._cluster:
            self._cluster = cluster.basis
            self._known.clear()
        known: dict[str, tuple[tuple[object, ...], SpeedupTable]] = {}
        changed: list[JobView] = []
        for job in snapshot.jobs:
            basis = _basis(job, cluster.step)
            found = self._known.get(job.name)
            if found is not None and found[0] == basis:
                known[job.name] = found
            else:
                changed.append(job)
        for job, table in zip(changed, _compute(changed, cluster, self._goodputs), strict=True):
            known[job.name] = (_basis(job, cluster.step), table)
        self._known = known
        return [known[job.name][1] for job in snapshot.jobs]


def speedup_tables(snapshot: Snapshot, p: float = -1.0) -> list[SpeedupTable]:
    """Speedups of all jobs, computed once."""
    return _compute(snapshot.jobs, _Cluster.of(snapshot, p), GoodputTables())


def of_note(value: float | None, step: float = _OF_NOTE) -> int | None:
    """Which step of a scale of ratios a noise scale is on, or the work left: those of one step are not told apart."""
    return None if value is None else round(math.log(max(value, 1e-9)) / step)


def _basis(job: JobView, step: float) -> tuple[object, ...]:
    """All that a job's table depends on."""
    noise, held = of_note(job.noise_scale_low, step), job.allocation.num_replicas
    return job.spec, job.params, job.shape_factors, noise, job.max_profiled_replicas, held


@dataclass(frozen=True, slots=True)
class _Cluster:
    """What tables depend on besides the job."""

    types: tuple[str, ...]
    slots: tuple[int, ...]  # by type
    fair: int  # slots that everybody would get if all got the same
    most: int  # replicas that anybody might be given; tables need not be wider
    step: float  # of noise scales

    @classmethod
    def of(cls, snapshot: Snapshot, p: float) -> _Cluster:
        slots = dict.fromkeys(types_of(snapshot.nodes), 0)
        for node in snapshot.nodes:
            slots[node.accelerator] += node.num_slots
        fair = math.ceil(sum(slots.values()) / max(len(snapshot.jobs), 1))
        step = _STEP if len(snapshot.jobs) <= _MANY_JOBS else _COARSE_STEP
        most = _most(snapshot.jobs, tuple(slots.values()), p)
        return cls(tuple(slots), tuple(slots.values()), fair, most, step)

    @property
    def basis(self) -> tuple[object, ...]:
        return self.types, self.slots, self.fair, self.most, self.step


def _most(jobs: Sequence[JobView], slots: Sequence[int], p: float) -> int:
    """A number of replicas that nobody would be given more of.

    What some cannot use is there for the others. A sum of w·s^p, s being about linear, divides slots as w^(1/(1-p));
    with p > 0 one job may get everything.
    """
    largest = max(slots)
    if p > 0 or not jobs:
        return largest
    able = sorted(max_replicas(job, largest) for job in jobs)
    left, level = sum(slots), math.inf
    for index, number in enumerate(able):
        level = left / (len(able) - index)  # for each of those who can use more than all before
        if level <= number:
            break
        left -= number
    else:
        return able[-1]
    mean = math.fsum(job.spec.weight for job in jobs) / len(jobs)
    favour = (max(job.spec.weight for job in jobs) / mean) ** (1 / (1 - p))
    most = _MOST_SHARES * math.ceil(level) * favour
    return largest if most >= largest else math.ceil(most)


def _compute(jobs: Sequence[JobView], cluster: _Cluster, goodputs: GoodputTables) -> list[SpeedupTable]:
    """A job never measured counts as scaling perfectly.

    Noise scales are those that are certain (:attr:`JobView.noise_scale_low`): no job takes slots on a guess.
    On a type that nothing is known of, a job counts as doing as well as on the one it is known on: it has to be tried.
    """
    types, slots, fair = cluster.types, cluster.slots, cluster.fair
    models: list[GoodputModel] = []
    widths: list[int] = []
    found: list[list[tuple[int, int]]] = []  # per job: (type, where its table will be)
    mosts = [min(max_replicas(job, max(slots)), max(cluster.most, job.spec.min_replicas)) for job in jobs]
    held = [job.allocation.num_replicas for job in jobs]
    for job, most, holds in zip(jobs, mosts, held, strict=True):
        found.append([])
        if not job.params or job.noise_scale is None or job.spec.batch is None:
            continue
        phi = math.exp(cluster.step * (of_note(job.noise_scale_low, cluster.step) or 0))
        places = found[-1]
        for index, name in enumerate(types):
            if may_use(job, name):
                model = GoodputModel.of(job, name, phi) or GoodputModel.of(job, next(iter(job.params)), phi)
                assert model is not None
                places.append((index, len(models)))
                models.append(model)
                widths.append(max(min(most, slots[index]), holds, min(fair, model.limits.max_replicas)))
    values = goodputs.best(models, widths)
    result = []
    for job, places, most, holds in zip(jobs, found, mosts, held, strict=True):
        width = max(most, holds)
        weight, base = 0, 0.0
        for index, at in places:
            weight += slots[index]
            base += slots[index] * float(values[at][0, min(fair, widths[at])])
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
