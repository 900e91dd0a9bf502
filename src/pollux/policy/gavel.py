"""Gavel: shares of time on accelerator types by linear programs (Narayanan et al., OSDI'20).

Jobs keep the replicas and the batch size they asked for. X[j, t] is the share of time that job j should spend on type
t. The value of a job (section 4.1) is its throughput over time, divided by the one it would have if it spent its
time on all types in proportion to their slots, times its replicas, over its weight. The least value is made as large
as it can be. Then jobs that cannot improve are held there, and the least value of the others is raised (water
filling, section 4.3). That is ``max_min_fairness``, the authors' first objective. With ``max_sum_throughput`` the sum
of throughputs, each over that on the job's slowest type, is largest instead, and jobs that are worth the same on a type
share it evenly: what the Sia artifact runs as gavel. A round (section 5) takes jobs in order of X over the time already
received on that type, as long as they fit; time is counted, not rounds, so that rounds may have any length. The
programs are solved again only when jobs, what they ask for, their weights, nodes or known throughputs have changed.

Simplifications: no space sharing; of the jobs that cannot improve only those are held that the program's prices name,
and after ``_MAX_LEVELS`` programs the rest goes where it adds up to most; time received is counted from a job's arrival
on, which lets newcomers catch up as in least attained service.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from pollux.policy.base import OBJECTIVES, Policy, PolicySettings
from pollux.policy.dense import Budget, may_use, place_counts, types_of
from pollux.policy.estimates import largest_nodes, step_s
from pollux.policy.gangs import demand
from pollux.types import FloatArray, IntArray, JobView, Plan, Snapshot

# Programs of water filling; on the OSDI'21 workloads 30 change nothing, 4 cost 1 % of JCT, 1 costs 9 %
_MAX_LEVELS = 12
_TIE, _TIE_STEPS = 1e-3, 10  # what evenness is worth beside throughput, and into how many pieces a share is cut
_TOLERANCE = 1e-7  # the solver's own accuracy


class GavelPolicy(Policy):
    name = "gavel"
    adapts_batch = False

    def __init__(self, settings: PolicySettings) -> None:
        self._objective = settings.objective
        self.reset()

    def reset(self) -> None:
        self._received_s: dict[str, dict[str, float]] = {}  # by job, then by type
        self._last_at: float | None = None
        self._solved_for: object = None
        self._shares: FloatArray = np.zeros((0, 0))  # (num_jobs, num_types) X of what it was solved for

    def decide(self, snapshot: Snapshot) -> Plan:
        budget = Budget(snapshot)
        self._account(snapshot, budget)
        types = types_of(snapshot.nodes)
        jobs = snapshot.jobs
        if not jobs or not types:
            return Plan(allocations={})
        self._solve(snapshot, types, np.array([budget.left[name] for name in types], dtype=np.int64))

        counts, chosen = {}, {}
        for job in jobs:
            if job.is_fixed:
                budget.take(job.allocation)
                counts[job.name] = job.allocation.num_replicas
        for row, column in self._order(jobs, types):
            job, accelerator = jobs[row], types[column]
            if job.name not in counts and may_use(job, accelerator) and demand(job) <= budget.left[accelerator]:
                budget.left[accelerator] -= demand(job)
                counts[job.name], chosen[job.name] = demand(job), accelerator
        return Plan(allocations=place_counts(snapshot.nodes, jobs, counts, chosen))

    def _account(self, snapshot: Snapshot, budget: Budget) -> None:
        """Time since the last decision was spent where jobs sit now."""
        passed = 0.0 if self._last_at is None else max(snapshot.now - self._last_at, 0.0)
        self._last_at = snapshot.now
        kept = {}
        for job in snapshot.jobs:
            received = self._received_s.get(job.name, {})
            accelerator = budget.type_of(job.allocation)
            if accelerator is not None:
                received = received | {accelerator: received.get(accelerator, 0.0) + passed}
            kept[job.name] = received
        self._received_s = kept

    def _solve(self, snapshot: Snapshot, types: tuple[str, ...], capacity: IntArray) -> None:
        demands = np.array([demand(job) for job in snapshot.jobs], dtype=np.int64)
        largest = largest_nodes(snapshot.nodes)
        throughputs = np.array([throughputs_of(job, largest, types, capacity) for job in snapshot.jobs])
        weights = np.array([job.spec.weight for job in snapshot.jobs])
        known = (capacity, throughputs, demands, weights)
        key = (tuple(job.name for job in snapshot.jobs), types, *(array.tobytes() for array in known))
        if key != self._solved_for:
            solve = max_min_shares if self._objective == OBJECTIVES[0] else max_sum_shares
            self._shares = solve(throughputs, demands, weights, capacity)
            self._solved_for = key

    def _order(self, jobs: tuple[JobView, ...], types: tuple[str, ...]) -> list[tuple[int, int]]:
        """(job, type) by falling priority; ties by submission. Those without any share are last."""
        keys = []
        for row, job in enumerate(jobs):
            for column, accelerator in enumerate(types):
                share = float(self._shares[row, column])
                received = self._received_s[job.name].get(accelerator, 0.0)
                priority = share / received if received > 0 else math.inf if share > 0 else 0.0
                keys.append((-priority, -share, row, column))
        return [(row, column) for _, _, row, column in sorted(keys)]


def throughputs_of(job: JobView, largest: Mapping[str, int], types: tuple[str, ...], capacity: IntArray) -> list[float]:
    """Steps per second by type; 0 where the job cannot run, and as on its other types where nothing is known."""
    found: list[float] = []
    for accelerator, num_slots in zip(types, capacity.tolist(), strict=True):
        if not may_use(job, accelerator) or demand(job) > num_slots:
            found.append(0.0)
        else:
            seconds = step_s(job, demand(job), largest, accelerator)
            found.append(1.0 / seconds if math.isfinite(seconds) and seconds > 0 else math.nan)
    known = [value for value in found if value > 0]
    usual = sum(known) / len(known) if known else 1.0
    return [usual if math.isnan(value) else value for value in found]


def max_min_shares(throughputs: FloatArray, demands: IntArray, weights: FloatArray, capacity: IntArray) -> FloatArray:
    """(num_jobs, num_types) X: shares of time by water filling over (num_jobs, num_types) throughputs."""
    # Not above: importing it takes longer than everything else here together.
    from scipy.optimize import linprog
    from scipy.sparse import coo_array, hstack, vstack

    num_jobs, num_types = throughputs.shape
    usual = throughputs @ (capacity / capacity.sum())
    scale = np.divide(demands, usual * weights, out=np.zeros(num_jobs), where=usual > 0)
    values = throughputs * scale[:, None]  # (num_jobs, num_types) what a whole share is worth
    most = values.max(axis=1)  # no job can have more than its whole time on its best type
    cells = np.arange(num_jobs * num_types)
    rows, columns = cells // num_types, cells % num_types
    ones = np.ones(len(cells))
    shape = (num_jobs, len(cells))
    worth = coo_array((values.ravel(), (rows, cells)), shape=shape)
    whole = coo_array((ones, (rows, cells)), shape=shape)
    used = coo_array((demands[rows].astype(float), (columns, cells)), shape=(num_types, len(cells)))
    bounds = [(0.0, 1.0 if value > 0 else 0.0) for value in values.ravel().tolist()]

    floor = np.zeros(num_jobs)
    is_held = most <= 0
    shares = np.zeros(len(cells))
    for level in range(_MAX_LEVELS + 1):
        if is_held.all():
            break
        is_last = level == _MAX_LEVELS
        # The last column is the least value of the jobs that are not held yet; or the sum of all values.
        rises = np.where(is_held | is_last, 0.0, 1.0)
        needs = hstack([-worth, coo_array(rises[:, None])])
        plain = hstack([vstack([whole, used]), coo_array((num_jobs + num_types, 1))])
        found = linprog(  # type: ignore[call-overload]  # the stubs do not know that matrices may be sparse
            c=np.append(-values.ravel() if is_last else np.zeros(len(cells)), -1.0),
            A_ub=vstack([needs, plain]).tocsr(),
            b_ub=np.concatenate([-floor * (1 - _TOLERANCE), np.ones(num_jobs), capacity]),
            bounds=[*bounds, (0.0, 0.0 if is_last else float(most[~is_held].max()))],
            method="highs",
        )
        if found.x is None:
            break  # rounding has closed the last gap: the solution before is final
        shares, least = found.x[:-1], float(found.x[-1])
        prices = -found.ineqlin.marginals[:num_jobs]
        reached = ~is_held & ((prices > _TOLERANCE) | (most <= least * (1 + _TOLERANCE)))
        floor[reached] = np.minimum(least, most[reached])
        if is_last or not reached.any():
            break
        is_held |= reached
    result: FloatArray = np.clip(shares, 0.0, 1.0).reshape(num_jobs, num_types)
    return result


def max_sum_shares(throughputs: FloatArray, demands: IntArray, weights: FloatArray, capacity: IntArray) -> FloatArray:
    """(num_jobs, num_types) X with the largest sum of weighted throughputs over those on each job's slowest type.

    The program has many solutions where jobs are worth the same; a small concave term, in ``_TIE_STEPS`` linear pieces,
    splits what there is evenly among them.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array, hstack, vstack

    num_jobs, num_types = throughputs.shape
    slowest = np.where(throughputs > 0, throughputs, np.inf).min(axis=1)
    values = throughputs * np.divide(weights, slowest, out=np.zeros(num_jobs), where=np.isfinite(slowest))[:, None]
    cells = np.arange(num_jobs * num_types)
    rows, columns = cells // num_types, cells % num_types
    whole = coo_array((np.ones(len(cells)), (rows, cells)), shape=(num_jobs, len(cells)))
    used = coo_array((demands[rows].astype(float), (columns, cells)), shape=(num_types, len(cells)))
    # Column blocks: X, then per job pieces of its total share, each worth a little less than the one before.
    pieces = num_jobs * _TIE_STEPS
    piece_rows = np.repeat(np.arange(num_jobs), _TIE_STEPS)
    sums = coo_array((np.ones(pieces), (piece_rows, np.arange(pieces))), shape=(num_jobs, pieces))
    worth = np.tile(_TIE * (1 - np.arange(_TIE_STEPS) / _TIE_STEPS), num_jobs)
    limits = vstack([hstack([whole, coo_array((num_jobs, pieces))]), hstack([used, coo_array((num_types, pieces))])])
    bounds = [(0.0, 1.0 if value > 0 else 0.0) for value in throughputs.ravel().tolist()]
    found = linprog(  # type: ignore[call-overload]  # the stubs do not know that matrices may be sparse
        c=-np.concatenate([values.ravel(), worth]),
        A_ub=vstack([limits, hstack([-whole, sums])]).tocsr(),
        b_ub=np.concatenate([np.ones(num_jobs), capacity, np.zeros(num_jobs)]),
        bounds=[*bounds, *[(0.0, 1.0 / _TIE_STEPS)] * pieces],
        method="highs",
    )
    shares = np.zeros(len(cells)) if found.x is None else found.x[: len(cells)]
    result: FloatArray = np.clip(shares, 0.0, 1.0).reshape(num_jobs, num_types)
    return result
