"""How much faster than on its fair share every job would be, for each number of slots of each accelerator type.

A speedup is the best goodput of an allocation over that of the fair share: as many slots as everybody would get if all
got the same, of each type as much as there is of it. Stands between :mod:`pollux.model.goodput` and
:mod:`pollux.policy.round`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pollux.model.goodput import GoodputModel, GoodputTables
from pollux.policy.dense import may_use, types_of
from pollux.types import FloatArray, JobView, Snapshot

_EXPLORATION = 4  # a job may ask for this many times the replicas it has been profiled with
_FIRST_REPLICAS = 4  # and for as many before it has been
_MOST_SHARES = 16  # fair shares; a power mean never gives anybody nearly so many, and tables stay narrow


@dataclass(frozen=True, slots=True)
class SpeedupTable:
    """One job's speedups over its fair share for 0..R replicas."""

    speedups: FloatArray  # (num_types, 2, R + 1): [on one node, spanning]; 0 where impossible
    max_replicas: int  # more than these may be kept, but not asked for
    fair_goodput: float  # useful examples per second on the fair share; nan if not known yet


def max_replicas(job: JobView, num_slots: int, fair: int | None = None) -> int:
    """How many replicas the job may be given: its own bounds, and a few times what it has been profiled with.

    ``fair``: as many slots as everybody would get if all got the same.
    """
    most = min(job.spec.max_replicas, num_slots)
    if fair is not None:
        most = min(most, max(_MOST_SHARES * fair, job.spec.min_replicas))
    if job.spec.batch is None:  # a command that does not adapt: what was asked for, no more
        return min(most, job.spec.requested_replicas or job.spec.min_replicas)
    explored = max(_EXPLORATION * job.max_profiled_replicas, _FIRST_REPLICAS, job.spec.min_replicas)
    return min(most, job.spec.batch.max_replicas, explored)


def speedup_tables(snapshot: Snapshot, tables: GoodputTables) -> list[SpeedupTable]:
    """Speedups of all jobs; a job never measured counts as scaling perfectly.

    On a type that nothing is known of, a job counts as doing as well as on the one it is known on: it has to be tried.
    """
    types = types_of(snapshot.nodes)
    slots = dict.fromkeys(types, 0)
    for node in snapshot.nodes:
        slots[node.accelerator] += node.num_slots
    widest = max(slots.values())
    fair = math.ceil(snapshot.num_slots / len(snapshot.jobs))
    models: list[GoodputModel] = []
    widths: list[int] = []
    found: list[list[tuple[int, int]]] = []  # per job: (type, where its table will be)
    mosts = [max_replicas(job, widest, fair) for job in snapshot.jobs]
    for job, most in zip(snapshot.jobs, mosts, strict=True):
        usable = [index for index, name in enumerate(types) if may_use(job, name)]
        known = {index: GoodputModel.of(job, types[index]) for index in usable}
        fallback = next((model for name in job.params if (model := GoodputModel.of(job, name)) is not None), None)
        found.append([])
        for index in usable:
            model = known[index] or fallback
            if model is not None:
                found[-1].append((index, len(models)))
                models.append(model)
                shown = max(min(most, slots[types[index]]), job.allocation.num_replicas)
                widths.append(max(shown, min(fair, model.limits.max_replicas)))
    goodputs = tables.best(models, widths)
    result = []
    for job, places, most in zip(snapshot.jobs, found, mosts, strict=True):
        width = max(most, job.allocation.num_replicas)
        bases = [(slots[types[index]], float(goodputs[at][0, min(fair, widths[at])])) for index, at in places]
        weight = sum(count for count, _ in bases)
        base = sum(count * goodput for count, goodput in bases) / weight if weight else 0.0
        values = np.zeros((len(types), 2, width + 1))
        if places and base > 0:
            for index, at in places:
                shown = min(width, widths[at]) + 1
                values[index, :, :shown] = goodputs[at][:, :shown] / base
        elif not places:
            for index, name in enumerate(types):
                if may_use(job, name):
                    values[index] = np.arange(width + 1) / fair
            values[:, 1, : min(2, width + 1)] = 0.0
        result.append(SpeedupTable(values, most, base if base > 0 else math.nan))
    return result
