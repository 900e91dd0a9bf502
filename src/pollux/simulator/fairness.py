"""Finish-time fairness: how long a job took, against how long it would have taken alone on its fair share.

ρ_j = JCT_j / JCT_j alone (Mahajan et al., NSDI'20; OSDI'21, section 5.2.2). The share is the cluster's GPUs divided by
the number of jobs present, averaged over the job's life. Alone means: by the application's true physics, with the
best batch size in every epoch, densely placed on the whole share, and started once. ρ ≤ 1: sharing cost nothing.

With several accelerator types, the time alone is the mean of the times on that many slots of each type, weighted by the
slots of the type: what a job can expect that gets its share without regard to types. Types that it cannot run on are
left out, and no share is larger than its type. Results (:mod:`pollux.simulator.result`) contain it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pollux.errors import InvalidValueError, SimulationError
from pollux.model.goodput import candidate_batches, total_of
from pollux.simulator.application import Application, dense_placement, limits_in
from pollux.simulator.physics import NodeGroup
from pollux.types import FloatArray


class SoloTimes:
    """How long applications take alone on a share of GPUs. Remembers every rate it has worked out."""

    def __init__(
        self, applications: Mapping[str, Application], groups: Sequence[NodeGroup], *, resize_s: float
    ) -> None:
        self._applications, self._groups, self._resize_s = applications, groups, resize_s
        self._rates: dict[tuple[str, int, str], FloatArray] = {}
        self._gains: dict[tuple[str, int], FloatArray] = {}
        self._work: dict[str, FloatArray] = {}

    def jct_s(self, application: str, share: float) -> float:
        """Seconds alone on ``share`` GPUs, one start included.

        Between whole numbers of GPUs the rate is interpolated; below one GPU (or the fewest that the application can
        do with) it is that part of one GPU's.

        Raises:
            InvalidValueError: the share is not a positive number.
            SimulationError: nothing is known of the application, or it cannot run on one GPU, or on no type there is.
        """
        if not (math.isfinite(share) and share > 0):
            raise InvalidValueError(f"a share of {share} GPUs; it must be a positive number")
        known = self._known(application)
        usable = [group for group in self._groups if not known.accelerators or group.accelerator in known.accelerators]
        if not usable:
            seen = ", ".join(group.accelerator for group in self._groups)
            raise SimulationError(f"application {application!r} runs on {', '.join(known.accelerators)}, not on {seen}")
        if len(self._groups) == 1:
            return self._on_type(application, share, usable[0])
        times_s = [self._on_type(application, min(share, group.num_slots), group) for group in usable]
        return float(np.average(times_s, weights=[group.num_slots for group in usable]))

    def _on_type(self, application: str, share: float, group: NodeGroup) -> float:
        known = self._known(application)
        share = min(share, float(min(known.max_replicas, known.limits.max_replicas)))
        least = known.min_replicas
        if share <= least:
            rates = share / least * self.rates(application, least, group)
        else:
            low = math.floor(share)
            rates, part = self.rates(application, low, group), share - low
            if part > 0:
                rates = (1 - part) * rates + part * self.rates(application, low + 1, group)
        start_s = self._resize_s if known.habits.start_s is None else known.habits.start_s
        return start_s + float((self._work_of(application) / rates).sum())

    def rates(self, application: str, num_replicas: int, group: NodeGroup) -> FloatArray:
        """(num_epochs,) progress per second on GPUs of a type with the best batch size of each epoch."""
        key = (application, num_replicas, group.accelerator)
        found = self._rates.get(key)
        if found is None:
            found = self._rates[key] = self._best_rates(application, num_replicas, group)
        return found

    def _best_rates(self, name: str, num_replicas: int, group: NodeGroup) -> FloatArray:
        application, accelerator = self._known(name), group.accelerator
        placement = dense_placement(num_replicas, group.slots_per_node)
        limits = limits_in(application, accelerator, placement)
        device, accum, allowed = candidate_batches(num_replicas, limits)
        configs = sorted(set(zip(device[allowed].tolist(), accum[allowed].tolist(), strict=True)))
        if not configs:
            raise SimulationError(f"application {name!r}: no batch within {limits} fits {num_replicas} GPUs")
        times_s = np.array([application.step_time(accelerator, placement, m).iteration_s(s) for m, s in configs])
        totals = [int(total_of(num_replicas, m, s, limits)) for m, s in configs]
        gains = np.array([self._gain(name, total) for total in totals])  # (configs, epochs)
        best: FloatArray = (gains / times_s[:, None]).max(axis=0)
        return best

    def _gain(self, name: str, total_batch: int) -> FloatArray:
        """(num_epochs,) progress of one step. Totals recur for other numbers of replicas, so they are kept."""
        key = (name, total_batch)
        found = self._gains.get(key)
        if found is None:
            application = self._known(name)
            scale = total_batch / application.limits.initial
            found = self._gains[key] = np.array(
                [application.gradient(epoch, total_batch).gain(scale) for epoch in range(application.num_epochs)]
            )
        return found

    def _work_of(self, name: str) -> FloatArray:
        """(num_epochs,) progress each epoch takes."""
        found = self._work.get(name)
        if found is None:
            application = self._known(name)
            ends = [application.epoch_end(epoch) for epoch in range(application.num_epochs)]
            found = self._work[name] = np.diff(ends, prepend=0.0)
        return found

    def _known(self, name: str) -> Application:
        application = self._applications.get(name)
        if application is None:
            raise SimulationError(f"nothing is known of application {name!r}")
        return application


def mean_jobs_present(submitted_at: npt.ArrayLike, finished_at: npt.ArrayLike) -> FloatArray:
    """(num_jobs,) jobs present during each job's life, itself included, weighted by time.

    A job is present from its submission to its end. One that ends as it is submitted sees those around then.
    """
    begins, ends = np.asarray(submitted_at, dtype=float), np.asarray(finished_at, dtype=float)
    if begins.size == 0:
        return np.zeros(0)
    times, which = np.unique(np.concatenate([begins, ends]), return_inverse=True)
    change = np.zeros(len(times))
    np.add.at(change, which[: len(begins)], 1.0)
    np.add.at(change, which[len(begins) :], -1.0)
    present = np.cumsum(change)  # from times[i] to times[i + 1]
    job_s = np.concatenate([[0.0], np.cumsum(present[:-1] * np.diff(times))])
    lives = ends - begins
    integral = np.interp(ends, times, job_s) - np.interp(begins, times, job_s)
    at_once = present[which[: len(begins)]] + 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        result: FloatArray = np.where(lives > 0, integral / lives, at_once)
    return np.maximum(result, 1.0)


def finish_time_fairness(
    solo: SoloTimes,
    applications: Sequence[str],
    submitted_at: npt.ArrayLike,
    finished_at: npt.ArrayLike,
    num_gpus: npt.ArrayLike,
) -> FloatArray:
    """(num_jobs,) ρ. ``applications`` and the times are by job; ``num_gpus`` is the cluster's size or one per job."""
    begins, ends = np.asarray(submitted_at, dtype=float), np.asarray(finished_at, dtype=float)
    shares = np.broadcast_to(np.asarray(num_gpus, dtype=float), begins.shape) / mean_jobs_present(begins, ends)
    alone_s = np.array([solo.jct_s(name, share) for name, share in zip(applications, shares.tolist(), strict=True)])
    result: FloatArray = (ends - begins) / alone_s
    return result
