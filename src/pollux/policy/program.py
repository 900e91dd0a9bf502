"""The integer program of :mod:`pollux.policy.sia`: at most one option for each job, few capacities.

Small programs are solved exactly, by dynamic programming over what is left of the capacities. In large ones a price for
each capacity (Lagrange; the best prices are found by cutting planes) decides most jobs: one that would lose much by
any other option gets its best one. The jobs that lose least share what is left, exactly again.

A general solver for integer programs is slower here, and the one in scipy at times writes to standard output.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pollux.types import FloatArray, IntArray

NOTHING = -1

# States of dynamic programming. On Sia's Philly workload 4,000 cost 4 % of the average JCT, 400,000 gain nothing.
_MAX_STATES = 40_000
_MAX_CUTS = 40  # cutting planes for the prices; 10 change the same average by 0.4 %, 100 change nothing
_PRICES_GAP = 1e-4  # relative, of the bound that prices prove; below the two digits to which Sia rounds powers


def solve_program(values: FloatArray, needs: IntArray, capacity: IntArray) -> IntArray:
    """(num_jobs,) the option that each job is given, or ``NOTHING``, such that the sum of values is largest.

    ``values``: (num_jobs, num_options), -inf where a job must not have an option, and anything above 0 better than
    nothing; ``needs``: (num_options, num_capacities); ``capacity``: (num_capacities,).
    """
    best = values.argmax(axis=1) if values.size else np.zeros(len(values), dtype=np.int64)
    wanted = np.where(values.max(axis=1, initial=-np.inf) > 0, best, NOTHING)
    if (_usage(wanted, needs) <= capacity).all():
        return wanted
    jobs = np.arange(len(values))
    if _num_states(jobs, values, needs, capacity) <= _MAX_STATES:
        return _share_out(jobs, values, needs, capacity)

    chosen, order = _by_price(values, needs, capacity, _prices(values, needs, capacity))
    sharing = order[: _num_that_may_share(order, chosen, needs, capacity)]
    chosen[sharing] = NOTHING
    left = capacity - _usage(chosen, needs)
    chosen[sharing] = _share_out(sharing, values, needs, left)[sharing]
    return chosen


def _by_price(values: FloatArray, needs: IntArray, capacity: IntArray, prices: FloatArray) -> tuple[IntArray, IntArray]:
    """The option that each job would choose at these prices, and the jobs by how little another one costs them.

    Where too much is asked for, or too little, jobs that care least have their second choice; where that does not help
    they have nothing.
    """
    nothing = len(needs)
    jobs = np.arange(len(values))
    values = np.hstack([values, np.zeros((len(jobs), 1))])
    needs = np.vstack([needs, np.zeros_like(needs[:1])])
    priced = values - needs @ prices
    best = priced.argmax(axis=1)
    gain = priced[jobs, best]
    priced[jobs, best] = -np.inf
    second = priced.argmax(axis=1)
    order = np.argsort(gain - priced[jobs, second], kind="stable")
    left = capacity - needs[best].sum(axis=0)
    for fallback in (second, np.full(len(jobs), nothing)):
        for job in order.tolist():
            then = left + needs[best[job]] - needs[fallback[job]]
            lacks = left < 0
            if lacks.any():
                is_better = (then > left)[lacks].any() and (then >= np.minimum(left, 0)).all()
            else:
                is_better = (then >= 0).all() and values[job, fallback[job]] > values[job, best[job]]
            if is_better:
                left, best[job] = then, fallback[job]
    return np.where(best == nothing, NOTHING, best), order


def _usage(chosen: IntArray, needs: IntArray) -> IntArray:
    usage: IntArray = needs[chosen[chosen != NOTHING]].sum(axis=0)
    return usage


def _binding(jobs: IntArray, values: FloatArray, needs: IntArray, left: IntArray) -> npt.NDArray[np.bool_]:
    """(num_capacities,) those of which the jobs could want more than there is."""
    most = (np.isfinite(values[jobs])[:, :, None] * needs).max(axis=1, initial=0).sum(axis=0)
    result: npt.NDArray[np.bool_] = most > left
    result[:1] |= not result.any()  # one at least, to have something to go by
    return result


def _num_states(jobs: IntArray, values: FloatArray, needs: IntArray, left: IntArray) -> float:
    is_binding = _binding(jobs, values, needs, left)
    return float(np.prod(np.maximum(left, 0)[is_binding] + 1.0))


def _num_that_may_share(order: IntArray, chosen: IntArray, needs: IntArray, capacity: IntArray) -> int:
    """How many jobs of ``order`` can share what the others leave, without too many states."""
    held = np.where((chosen != NOTHING)[:, None], needs[chosen], 0)[order]  # (num_jobs, num_capacities)
    left = capacity - held.sum(axis=0) + np.cumsum(held, axis=0)  # after each job that joins
    states = np.prod(np.maximum(left, 0) + 1.0, axis=1)
    return max(1, int(np.searchsorted(np.maximum.accumulate(states), _MAX_STATES)))


def _share_out(jobs: IntArray, values: FloatArray, needs: IntArray, left: IntArray) -> IntArray:
    """The best options of ``jobs`` within ``left``; of all others nothing. Exact."""
    is_binding = _binding(jobs, values, needs, left)
    shape = tuple((np.maximum(left, 0)[is_binding] + 1).tolist())
    needs = needs[:, is_binding]
    best = np.zeros(shape)  # by what is left, over the jobs so far
    picks = np.full((len(jobs), *shape), NOTHING, dtype=np.int16)
    for number, job in enumerate(jobs.tolist()):
        before = best.copy()
        for option in np.flatnonzero(values[job] > 0).tolist():
            need = needs[option].tolist()
            if any(taken >= size for taken, size in zip(need, shape, strict=True)):
                continue
            target = tuple(slice(taken, None) for taken in need)
            source = tuple(slice(None, size - taken) for taken, size in zip(need, shape, strict=True))
            reached = before[source] + values[job, option]
            is_better = reached > best[target]
            np.copyto(best[target], reached, where=is_better)
            np.copyto(picks[number][target], option, where=is_better)
    chosen = np.full(len(values), NOTHING, dtype=np.int64)
    state = tuple(size - 1 for size in shape)
    for number in range(len(jobs) - 1, -1, -1):
        option = int(picks[(number, *state)])
        if option != NOTHING:
            chosen[jobs[number]] = option
            state = tuple(now - taken for now, taken in zip(state, needs[option].tolist(), strict=True))
    return chosen


def _prices(values: FloatArray, needs: IntArray, capacity: IntArray) -> FloatArray:
    """(num_capacities,) at which jobs, each by itself, want about what there is.

    They minimise the bound: the sum over jobs of the best priced value, plus prices·capacity. Each point tried gives a
    plane below it; the next one lies half way from the best so far to where all planes together are lowest.
    """
    # Not above: importing it takes longer than everything else here together.
    from scipy.optimize import linprog

    num_capacities = len(capacity)
    jobs = np.arange(len(values))
    highest = float(values.max())
    best_bound, best = np.inf, np.zeros(num_capacities)
    tried = best
    planes, offsets = [], []
    for _ in range(_MAX_CUTS):
        priced = values - needs @ tried
        wanted = priced.argmax(axis=1)
        gain = priced[jobs, wanted]
        slope = capacity - _usage(np.where(gain > 0, wanted, NOTHING), needs)
        bound = float(np.maximum(gain, 0.0).sum() + tried @ capacity)
        if bound < best_bound:
            best_bound, best = bound, tried
        planes.append(np.append(slope, -1.0))
        offsets.append(float(slope @ tried) - bound)
        found = linprog(
            np.append(np.zeros(num_capacities), 1.0),
            A_ub=np.array(planes),
            b_ub=np.array(offsets),
            bounds=[*[(0.0, highest)] * num_capacities, (0.0, None)],
        )
        if found.x is None or best_bound - float(found.x[-1]) <= _PRICES_GAP * best_bound:
            break
        tried = (found.x[:num_capacities] + best) / 2
    return best
