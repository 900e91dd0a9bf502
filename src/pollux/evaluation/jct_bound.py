"""A proven lower bound on the average JCT of a workload: no schedule of it on that cluster can be faster.

``pollux compare --bound`` calls it. The proof is in docs/bounds.md; letters are as there. Jobs know the future, are
placed perfectly and resize for nothing. What is left, GPUs that two jobs cannot both have, is priced: for any prices
λ(t) >= 0 the dual value is below every schedule, so prices are only searched well, never trusted.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pollux.evaluation.rate_curves import ROUNDED_S, CurveLibrary, RateCurves
from pollux.simulator.application import Application
from pollux.simulator.config import SimulationConfig
from pollux.simulator.run import restricted
from pollux.simulator.workload import Workload
from pollux.types import FloatArray

_NUM_BINS = 300  # of time, in which a price is constant
_NUM_STEPS = 100  # of the search for prices
_NUM_STARTS = 9  # constant prices, from which the search takes the best
_STEP, _SLOWING = 0.3, 20.0  # relative change of a price per relative excess, and steps after which it is halved
_LEAST_PRICE = 1e-3  # from which a price that was 0 rises
_CHEAP = 0.02  # share of the highest price below which moments are not looked at one by one
_NUM_REFERENCES, _LAST_REFERENCES = 12, 64  # prices at which all epochs of a job are worth as much as each other
_WORTHS = np.array([0.3, 0.6, 0.8, 0.93, 1.0, 1.07, 1.25, 1.7, 3.5])  # κ: a second's worth at that price
_ROUNDING = 1e-9  # relative, taken off the result: sums of floating-point numbers are not exact
_SHARED_SLOTS = 2  # jobs on one slot, where a policy shares them


@dataclass(frozen=True, slots=True, kw_only=True)
class JctBound:
    """Lower bounds on the average JCT, in seconds, each proven on its own."""

    alone_s: float  # every job has the whole cluster to itself
    queue_s: float  # the cluster is one machine that trains every job at its best efficiency; shortest first
    priced_s: float  # the dual value of the prices that were found

    @property
    def avg_jct_s(self) -> float:
        return max(self.alone_s, self.queue_s, self.priced_s)


@dataclass(frozen=True, slots=True)
class BoundedJob:
    """When a job comes, and how fast it can be at best."""

    released_at: float
    curves: RateCurves


class Bounds:
    """Bounds of simulations with the same applications; what several of them need is computed once."""

    def __init__(self, applications: Mapping[str, Application]) -> None:
        self._applications = applications
        self._libraries: dict[tuple[object, ...], CurveLibrary] = {}
        self._found: dict[tuple[object, ...], JctBound] = {}

    def of(self, workload: Workload, config: SimulationConfig, *, shares_slots: bool = False) -> JctBound:
        """The bound for a simulation. ``shares_slots``: for policies that put two jobs on one slot.

        Raises:
            SimulationError: a job can run on no type of the cluster.
        """
        config = config.full
        delays = config.resize_s if config.start_s is None else min(config.resize_s, config.start_s)
        world = (config.groups, config.physics, config.counts_efficiency, config.rounds_epochs, delays < ROUNDED_S)
        key = (*world, shares_slots)
        if key not in self._libraries:
            self._libraries[key] = CurveLibrary(self._applications, config, shares_slots=shares_slots)
        library = self._libraries[key]
        if (*key, workload.jobs) not in self._found:
            allowed = restricted(workload, self._applications, config).jobs
            capacity = np.array([group.num_slots for group in config.groups], dtype=float)
            self._found[(*key, workload.jobs)] = bound_of(
                [BoundedJob(job.submitted_at, library.of(job)) for job in allowed],
                capacity * (_SHARED_SLOTS if shares_slots else 1),
            )
        return self._found[(*key, workload.jobs)]


def bound_of(jobs: Sequence[BoundedJob], capacity: FloatArray, num_steps: int = _NUM_STEPS) -> JctBound:
    """The bound for jobs on ``capacity`` GPUs of each type. More steps find better prices; any number is valid."""
    alone = sum(job.curves.shortest_s for job in jobs)
    queue = _shortest_first(jobs, capacity)
    priced = _Dual(jobs, capacity).search(num_steps)
    low = (1 - _ROUNDING) / len(jobs)
    return JctBound(alone_s=alone * low, queue_s=queue * low, priced_s=priced * low)


def _shortest_first(jobs: Sequence[BoundedJob], capacity: FloatArray) -> float:
    """Sum of JCTs on one machine that runs the job with the least left at any time."""
    weights = np.full(len(capacity), 1 / capacity.sum())
    arriving = sorted((job.released_at, job.curves.least_gpu_s(weights)) for job in jobs)
    left: list[float] = []
    now = total = 0.0
    for index, (released_at, length_s) in enumerate(arriving):
        now = max(now, released_at)
        heapq.heappush(left, length_s)
        until = arriving[index + 1][0] if index + 1 < len(arriving) else np.inf
        while left and now < until:
            first = heapq.heappop(left)
            if now + first > until:
                heapq.heappush(left, first - (until - now))
                now = until
            else:
                now += first
                total += now
    return total - sum(job.released_at for job in jobs)


@dataclass(frozen=True, slots=True)
class _Multipliers:
    """For one kind of job: some choices of what each epoch's progress is worth, and what follows at the prices."""

    worth: FloatArray  # (num_choices,) of all the work
    values: FloatArray  # (num_choices, num_options) of a second on an option, at its best epoch
    integrals: FloatArray  # (num_choices, num_edges) of h, the best net value of a second, from time 0


class _Dual:
    """The Lagrangian of the capacity constraints. ``prices`` are (num_types, num_bins), per GPU-second."""

    def __init__(self, jobs: Sequence[BoundedJob], capacity: FloatArray) -> None:
        self._jobs, self._capacity = jobs, capacity
        self._kinds = {id(job.curves): job.curves for job in jobs}
        released = np.array([job.released_at for job in jobs])
        self._first = float(released.min())
        # Nothing need run after this: a schedule that never wastes GPUs is through by then (docs/bounds.md).
        self._last = float(released.max()) + sum(job.curves.longest_s for job in jobs) + 1.0
        weights = np.full(len(capacity), 1 / capacity.sum())
        busy_s = sum(job.curves.least_gpu_s(weights) for job in jobs)
        longest_s = max(job.curves.shortest_s for job in jobs)
        priced = min(max(float(released.max()), self._first + busy_s) + busy_s + longest_s, self._last - 0.5)
        self._edges = np.append(np.linspace(self._first, priced, _NUM_BINS + 1), self._last)
        self._widths = np.diff(self._edges)

    def search(self, num_steps: int) -> float:
        """The best dual value seen on the way; the best prices are judged once more with more multipliers."""
        shape = (len(self._capacity), len(self._widths))
        is_priced = np.append(np.ones(shape[1] - 1), 0.0)
        starts = [price * is_priced * np.ones(shape) for price in (0.0, *np.geomspace(1e-3, 10.0, _NUM_STARTS))]
        values = [self.evaluate(prices)[0] for prices in starts]
        best = max(values)
        prices = best_prices = starts[values.index(best)]
        for step in range(num_steps):
            value, usage = self.evaluate(prices)
            if value > best:
                best, best_prices = value, prices
            # Where more GPUs are wanted than there are the price goes up, and down where fewer are.
            excess = usage / self._capacity[:, None] - 1.0
            factor = np.exp(np.clip(_STEP / (1 + step / _SLOWING) * excess, -1.0, 1.0))
            prices = np.maximum(prices, _LEAST_PRICE) * factor * is_priced
        return max(best, self.evaluate(best_prices, _LAST_REFERENCES)[0])

    def evaluate(self, prices: FloatArray, num_references: int = _NUM_REFERENCES) -> tuple[float, FloatArray]:
        """The dual value, and the GPUs (num_types, num_bins) that jobs would take at these prices."""
        usage = np.zeros_like(prices)
        total = -float((self._capacity[:, None] * prices * self._widths).sum())
        references = self._references(prices, num_references)
        known = {key: self._multipliers(curves, prices, references) for key, curves in self._kinds.items()}
        for job in self._jobs:
            total += self._add_job(job, known[id(job.curves)], prices, usage)
        return total, usage

    def _references(self, prices: FloatArray, num_references: int) -> FloatArray:
        """(num_references, num_types): prices of some moments, from the cheapest to the dearest, and none."""
        sums = prices.sum(axis=0)
        order = np.argsort(sums)
        order = order[np.searchsorted(sums[order], _CHEAP * sums.max()) :]
        chosen = order[np.linspace(0, len(order) - 1, num_references).astype(int)]
        return np.concatenate([prices[:, chosen].T, np.zeros((1, len(prices)))])

    def _multipliers(self, curves: RateCurves, prices: FloatArray, references: FloatArray) -> _Multipliers:
        cost = references[:, curves.types] * curves.gpus  # (num_references, num_options) per second
        costs = (_WORTHS[:, None, None] + cost).reshape(-1, len(curves.gpus))
        # μ of an epoch: what makes its best option worth κ more than it costs, at the reference price.
        mu = np.array([(costs / rates).min(axis=1) for rates in curves.rates]).T  # (num_choices, num_epochs)
        mu = np.concatenate([mu, np.zeros((1, mu.shape[1]))])
        values = np.array([(mu * rates).max(axis=1) for rates in curves.rates.T]).T  # (num_choices, num_options)
        net = np.zeros((len(mu), len(self._widths)))  # idle: nothing gained, nothing paid
        for option, (kind, gpus) in enumerate(zip(curves.types, curves.gpus, strict=True)):
            np.maximum(net, values[:, option, None] - gpus * prices[kind], out=net)
        integrals = np.concatenate([np.zeros((len(mu), 1)), np.cumsum(net * self._widths, axis=1)], axis=1)
        return _Multipliers(mu @ curves.work, values, integrals)

    def _add_job(self, job: BoundedJob, known: _Multipliers, prices: FloatArray, usage: FloatArray) -> float:
        """The job's part of the dual value; adds the GPUs that it takes to ``usage``."""
        begin = job.released_at
        earliest = begin + job.curves.shortest_s
        at_begin = self._integrals_at(known.integrals, begin)
        after = int(np.searchsorted(self._edges, earliest, side="right"))
        ends = np.append(earliest, self._edges[after:])
        taken = np.concatenate(
            [self._integrals_at(known.integrals, earliest)[:, None], known.integrals[:, after:]], axis=1
        )
        lagrangian = known.worth[:, None] + (ends - begin) - (taken - at_begin[:, None])  # (num_choices, num_ends)
        # For each choice it is linear in the end between two edges, so its least is at one of them.
        between = np.minimum(lagrangian[:, :-1], lagrangian[:, 1:]).max(axis=0)
        where = int(between.argmin())
        choice = int(np.minimum(lagrangian[:, where], lagrangian[:, where + 1]).argmax())
        end = ends[where] if lagrangian[choice, where] <= lagrangian[choice, where + 1] else ends[where + 1]
        self._add_usage(job.curves, known.values[choice], prices, (begin, float(end)), usage)
        return float(between[where])

    def _integrals_at(self, integrals: FloatArray, when: float) -> FloatArray:
        index = min(max(int(np.searchsorted(self._edges, when, side="right")) - 1, 0), len(self._widths) - 1)
        share = (when - self._edges[index]) / self._widths[index]
        found: FloatArray = integrals[:, index] + share * (integrals[:, index + 1] - integrals[:, index])
        return found

    def _add_usage(
        self, curves: RateCurves, values: FloatArray, prices: FloatArray, life: tuple[float, float], usage: FloatArray
    ) -> None:
        net = values[:, None] - curves.gpus[:, None] * prices[curves.types]  # (num_options, num_bins)
        option = net.argmax(axis=0)
        share = np.clip((np.minimum(self._edges[1:], life[1]) - np.maximum(self._edges[:-1], life[0])), 0, None)
        taken = curves.gpus[option] * (net.max(axis=0) > 0) * share / self._widths
        np.add.at(usage, (curves.types[option], np.arange(len(taken))), taken)
