"""The fastest that a simulated job can train on each number of GPUs: over placements and batch sizes, by epoch.

:mod:`pollux.evaluation.jct_bound` calls it. Every configuration that the simulated engine can put a job into is among
those that are searched, so no simulated job is ever faster.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pollux.simulator.application import Application, application_key, limits_in
from pollux.simulator.config import SimulationConfig
from pollux.simulator.physics import NodeGroup
from pollux.types import BatchLimits, FloatArray, IntArray, JobSpec

_MORE_PASSES = 2  # no batch is cut into more passes than its devices need and so many: see model/goodput.py
ROUNDED_S = 0.5  # an epoch's last stretch is rounded to whole seconds: at most so much of it is not simulated


@dataclass(frozen=True, slots=True)
class RateCurves:
    """One kind of job: its work, and the progress per second that each option allows at best.

    An option is a number of GPUs of one type.
    """

    work: FloatArray  # (num_epochs,) progress
    gpus: FloatArray  # (num_options,)
    types: IntArray  # (num_options,) index into the cluster's groups
    rates: FloatArray  # (num_epochs, num_options), positive

    @property
    def shortest_s(self) -> float:
        """With all GPUs to itself."""
        return float((self.work / self.rates.max(axis=1)).sum())

    @property
    def longest_s(self) -> float:
        """Alone, on all that it can use of the worst type for each epoch."""
        best = [self.rates[:, self.types == kind].max(axis=1) for kind in np.unique(self.types)]
        return float((self.work / np.min(best, axis=0)).sum())

    def least_gpu_s(self, weights: FloatArray) -> float:
        """Fewest GPU-seconds that the job can take, each weighted by ``weights`` of its type."""
        cost = weights[self.types] * self.gpus / self.rates
        return float((self.work * cost.min(axis=1)).sum())


class CurveLibrary:
    """Curves of jobs on one cluster; jobs that are alike share them."""

    def __init__(
        self, applications: Mapping[str, Application], config: SimulationConfig, *, shares_slots: bool = False
    ) -> None:
        """``shares_slots``: two jobs may be on one slot."""
        self._config, self._shares_slots = config.full, shares_slots
        self._applications = self._config.physics.applied_to(applications)
        self._curves: dict[tuple[object, ...], RateCurves] = {}
        self._gains: dict[str, dict[int, FloatArray]] = {}

    def of(self, spec: JobSpec) -> RateCurves:
        """Curves of one job."""
        key = application_key(self._applications, spec)
        application = self._applications[key]
        limits = spec.batch or application.limits
        lowest = min(limits.minimum, spec.requested_batch_size or limits.initial)
        if not self._config.counts_efficiency:  # the batch that fits the devices, whatever was asked for
            lowest = 1
        kind = (key, limits, lowest, spec.min_replicas, spec.max_replicas, spec.accelerators)
        found = self._curves.get(kind)
        if found is None:
            found = self._curves[kind] = self._make(key, spec, lowest)
        return found

    def _make(self, key: str, spec: JobSpec, lowest: int) -> RateCurves:
        application = self._applications[key]
        gpus, types, columns = [], [], []
        for index, group in enumerate(self._config.groups):
            allowed = spec.accelerators or application.accelerators
            if allowed and group.accelerator not in allowed:
                continue
            for num_replicas in range(spec.min_replicas, min(spec.max_replicas, group.num_slots) + 1):
                times = _shortest_steps(application, spec, group, num_replicas, lowest)
                totals = np.flatnonzero(np.isfinite(times))
                if len(totals):
                    gains = self._gains_of(key, totals)
                    gpus.append(num_replicas)
                    types.append(index)
                    columns.append((gains / times[totals]).max(axis=1))
        rates = np.array(columns).T
        ends = [application.epoch_end(epoch) for epoch in range(application.num_epochs)]
        work = np.diff(ends, prepend=0.0)
        if self._config.rounds_epochs and application.habits.rounds_epochs:
            work, rates = self._rounded(application, work, rates)
        rates, where = np.unique(rates, axis=0, return_inverse=True)  # epochs that are alike count as one
        return RateCurves(np.bincount(where, work).astype(float), np.array(gpus, dtype=float), np.array(types), rates)

    def _rounded(self, application: Application, work: FloatArray, rates: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Work and rates that no simulated job beats although its epochs end on whole seconds (docs/bounds.md)."""
        shortest = (work[:, None] / rates).min(axis=1)
        work = np.where(shortest > ROUNDED_S, work, 0.0)  # an epoch of half a second may take none
        habits, config = application.habits, self._config
        delays = [config.resize_s if habits.resize_s is None else habits.resize_s]
        delays.append(next(s for s in (habits.start_s, config.start_s, config.resize_s) if s is not None))
        if min(delays) < ROUNDED_S or self._shares_slots:
            return np.maximum(work - ROUNDED_S * rates.max(axis=1), 0.0), rates
        is_left = work > 0
        rates[is_left] = work[is_left, None] / (work[is_left, None] / rates[is_left] - ROUNDED_S)
        return work, rates

    def _gains_of(self, key: str, totals: IntArray) -> FloatArray:
        """(num_epochs, num_totals): progress of one step with each total batch."""
        application = self._applications[key]
        known, initial = self._gains.setdefault(key, {}), application.limits.initial
        for total in totals.tolist():
            if total not in known:
                stats = [application.gradient(epoch, total) for epoch in range(application.num_epochs)]
                known[total] = np.array([found.gain(total / initial) for found in stats])
        return np.stack([known[total] for total in totals.tolist()], axis=1)


def _shortest_steps(
    application: Application, spec: JobSpec, group: NodeGroup, num_replicas: int, lowest: int
) -> FloatArray:
    """(maximum + 1,): the shortest iteration with each total batch, over placements and passes; inf: there is none."""
    found: FloatArray = np.full((spec.batch or application.limits).maximum + 1, np.inf)
    accelerator = group.accelerator
    for placement in application.placements(accelerator, num_replicas, group.slots_per_node, group.num_nodes):
        limits = limits_in(application, accelerator, placement, spec.batch)
        totals, batches, passes = _batches(limits, num_replicas, lowest)
        used, place = np.unique(batches, return_inverse=True)
        times = [application.step_time(accelerator, placement, batch) for batch in used.tolist()]
        step_s, pass_s = np.array([time.step_s for time in times]), np.array([time.grad_s for time in times])
        np.minimum.at(found, totals, step_s[place] + (passes - 1) * pass_s[place])
    return found


@functools.lru_cache(maxsize=4096)
def _batches(limits: BatchLimits, num_replicas: int, lowest: int) -> tuple[IntArray, IntArray, IntArray]:
    """(totals, device batches, passes): every way to make up a batch that a job may choose."""
    found = []
    most = min(limits.device_max, -(-limits.maximum // num_replicas))
    for num_passes in range(1, math.ceil(limits.maximum / num_replicas / limits.device_max) + _MORE_PASSES + 2):
        batches = np.arange(1, most + 1)
        needed = -(-(batches * num_passes) // limits.device_max)
        batches = batches[num_passes <= needed + _MORE_PASSES]
        # A total beyond the maximum counts as the maximum; the smallest device batch that reaches it is the fastest.
        batches = batches[(batches - 1) * num_passes * num_replicas < limits.maximum]
        totals = np.minimum(batches * num_passes * num_replicas, limits.maximum)
        is_allowed = totals >= lowest
        if limits.accumulates_alone and num_replicas == 1 and num_passes == 1:
            is_allowed &= totals <= limits.initial
        found.append((totals[is_allowed], batches[is_allowed], np.full(int(is_allowed.sum()), num_passes)))
    totals, batches, passes = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return totals, batches, passes
