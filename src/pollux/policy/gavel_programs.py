"""The linear programs of Gavel: shares of time on accelerator types by one of its authors' objectives.

:mod:`pollux.policy.gavel` solves one of them when jobs come and go.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pollux.types import FloatArray, IntArray

# Programs of water filling; on the OSDI'21 workloads 30 change nothing, 4 cost 1 % of JCT, 1 costs 9 %
_MAX_LEVELS = 12
_TIE, _TIE_STEPS = 1e-3, 10  # what evenness is worth beside throughput, and into how many pieces a share is cut
_TOLERANCE = 1e-7  # the solver's own accuracy
_NEAR = 1e-3  # of the least largest ρ, relative


def max_min_shares(throughputs: FloatArray, demands: IntArray, weights: FloatArray, capacity: IntArray) -> FloatArray:
    """(num_jobs, num_types) X: shares of time by water filling over (num_jobs, num_types) throughputs."""
    usual = throughputs @ (capacity / capacity.sum())
    scale = np.divide(demands, usual * weights, out=np.zeros(len(demands)), where=usual > 0)
    return _fill(throughputs * scale[:, None], demands, capacity)


def _fill(values: FloatArray, demands: IntArray, capacity: IntArray, num_levels: int = _MAX_LEVELS) -> FloatArray:
    """(num_jobs, num_types) X that makes the least value largest, then that of the jobs that can still rise, ...

    ``values``: (num_jobs, num_types) what a whole share is worth to a job.
    """
    # Not above: importing it takes longer than everything else here together.
    from scipy.optimize import linprog
    from scipy.sparse import coo_array, hstack, vstack

    num_jobs, num_types = values.shape
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
    for level in range(num_levels + 1):
        if is_held.all():
            break
        is_last = level == num_levels
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


def isolated(throughputs: FloatArray, demands: IntArray, capacity: IntArray) -> FloatArray:
    """(num_jobs,) steps per second of each job on its own part of the cluster: one in as many as there are jobs."""
    shares = capacity[None, :] / len(demands) / demands[:, None]
    shares = shares / np.maximum(shares.sum(axis=1, keepdims=True), 1.0)
    rates: FloatArray = (throughputs * shares).sum(axis=1)
    return rates


@dataclass(frozen=True, slots=True)
class Work:
    """Jobs by row: seconds since submission, steps left, and seconds of the whole run on its own part."""

    ages_s: FloatArray
    steps_left: FloatArray
    alone_s: FloatArray

    def needed(self, rho: float) -> FloatArray:
        """(num_jobs,) steps per second with which each ends at ``rho`` times its time alone; inf if none is enough."""
        left_s = rho * self.alone_s - self.ages_s
        rates: FloatArray = np.divide(self.steps_left, left_s, out=np.full(len(left_s), np.inf), where=left_s > 0)
        return rates


def fair_finish_shares(throughputs: FloatArray, demands: IntArray, work: Work, capacity: IntArray) -> FloatArray:
    """(num_jobs, num_types) X with the least largest expected ρ; what is left goes to all in proportion to their need.

    Jobs that can run nowhere are left out of the largest ρ.
    """
    most = throughputs.max(axis=1)
    runs = most > 0

    def is_possible(rho: float) -> bool:
        needed = work.needed(rho)
        if (needed[runs] > most[runs] * (1 + _TOLERANCE)).any():
            return False
        if len(capacity) == 1:
            return bool((demands[runs] * needed[runs] / most[runs]).sum() <= capacity[0] * (1 + _TOLERANCE))
        values = np.where(runs[:, None], throughputs / needed[:, None], 0.0)
        reached = (_fill(values, demands, capacity, num_levels=1) * values).sum(axis=1)
        return bool((reached[runs] >= 1 - 1e-6).all())

    if not runs.any():
        return np.zeros(throughputs.shape)
    rates = np.where(runs, isolated(throughputs, demands, capacity), 1.0)
    low = float(((work.ages_s + work.steps_left / np.where(runs, most, 1.0)) / work.alone_s)[runs].max())
    high = max(float(((work.ages_s + work.steps_left / rates) / work.alone_s)[runs].max()), low)
    if not is_possible(low):
        while high - low > _NEAR * low:  # the parts that all have to themselves are a solution
            middle = (low + high) / 2
            low, high = (low, middle) if is_possible(middle) else (middle, high)
    else:
        high = low
    needed = np.where(runs, work.needed(high * (1 + _TOLERANCE)), 1.0)
    return _fill(np.where(runs[:, None], throughputs / needed[:, None], 0.0), demands, capacity)


def max_sum_shares(
    throughputs: FloatArray, demands: IntArray, weights: FloatArray, capacity: IntArray, *, is_plain: bool = False
) -> FloatArray:
    """(num_jobs, num_types) X with the largest sum of weighted throughputs over those on each job's slowest type.

    ``is_plain``: of steps per second of all replicas instead. The program has many solutions where jobs are worth the
    same; a small concave term, in ``_TIE_STEPS`` linear pieces, splits what there is evenly among them.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array, hstack, vstack

    num_jobs, num_types = throughputs.shape
    slowest = np.where(throughputs > 0, throughputs, np.inf).min(axis=1)
    unit = 1.0 / demands if is_plain else slowest
    values = throughputs * np.divide(weights, unit, out=np.zeros(num_jobs), where=np.isfinite(slowest))[:, None]
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
