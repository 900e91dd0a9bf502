"""Prices for slots of each accelerator type, and the bound that they prove.

Forgetting where replicas sit leaves a multiple-choice knapsack with one capacity for each type: per job one option
(nothing, or a number of slots of one type) with a cost. With a price on each type's slots every job has a best option
of its own, and what all of them pay less what the slots are worth is a lower bound on the cost of any allocation,
whatever the prices (Lagrange). The best bound is that of the market's prices, at which about as much is asked for as
there is: a concave function of few variables, which L-BFGS-B climbs in few steps although it has corners. Prices of the
last round are nearly right for the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pollux.policy.knapsack import dual_bound
from pollux.types import FloatArray, IntArray

# Evaluations of the bound, from a guess and from the prices of the last round, which are nearly right. Most of a
# decision on a large mixed cluster is spent here. On Sia's Philly
# workload 20 and 200 cold evaluations give the same results as 60, and 5 warm ones as good ones as 12.
_COLD_EVALUATIONS = 60
WARM_EVALUATIONS = 12
_NEAR_ENOUGH = 1e-6  # of the bound; a step that gains less ends the search


@dataclass(frozen=True, slots=True)
class Response:
    """What jobs would take at some prices."""

    kinds: IntArray  # (num_jobs,) type, -1: nothing
    counts: IntArray  # (num_jobs,) slots
    values: FloatArray  # (num_jobs, num_types) cost and price of the best option on each type
    best_counts: IntArray  # (num_jobs, num_types) slots of that option
    usage: FloatArray  # (num_types,) slots asked for
    bound: float


class Market:
    """Jobs that choose among slots of several types. ``costs``: per type (num_jobs, most + 1), column 0 for nothing."""

    def __init__(self, costs: Sequence[FloatArray], capacity: Sequence[int]) -> None:
        self.costs, self.capacity = costs, np.array(capacity, dtype=float)
        self.idle = np.minimum.reduce([table[:, 0] for table in costs])
        self._sizes = [np.arange(1, table.shape[1], dtype=float) for table in costs]
        self._rows = np.arange(len(self.idle))

    def respond(self, prices: FloatArray) -> Response:
        values, counts = [], []
        for table, sizes, price in zip(self.costs, self._sizes, prices, strict=True):
            priced = table[:, 1:] + price * sizes
            pick = priced.argmin(axis=1)
            counts.append(pick + 1)
            values.append(priced[self._rows, pick])
        value, count = np.stack(values, axis=1), np.stack(counts, axis=1)
        kinds = value.argmin(axis=1)
        best = value[self._rows, kinds]
        waits: npt.NDArray[np.bool_] = ~(best < self.idle)
        chosen = np.where(waits, 0, count[self._rows, kinds])
        usage: FloatArray = np.bincount(kinds, weights=chosen, minlength=len(self.capacity)).astype(float)
        bound = dual_bound(np.minimum(best, self.idle), float(prices @ self.capacity))
        return Response(np.where(waits, -1, kinds), chosen, value, count, usage, bound)

    def clear(self, prices: FloatArray | None, evaluations: int = WARM_EVALUATIONS) -> tuple[FloatArray, Response]:
        """Prices whose bound is about the best, and the jobs' response. ``prices``: where to begin.

        ``evaluations``: how many may be spent from there.
        """
        from scipy.optimize import minimize  # slow to import, and not needed with one type

        guess = self._guess()
        begin = np.ones(len(guess)) if prices is None else prices / guess
        best: tuple[FloatArray, Response] | None = None

        def loss(scaled: FloatArray) -> tuple[float, FloatArray]:
            nonlocal best
            response = self.respond(scaled * guess)
            if best is None or response.bound > best[1].bound:
                best = scaled * guess, response
            return -response.bound, (self.capacity - response.usage) * guess

        loss(np.zeros(len(guess)))  # a bound too, and the best where slots abound
        minimize(
            loss,
            begin,
            jac=True,
            method="L-BFGS-B",
            bounds=[(0.0, None)] * len(guess),
            options={"maxfun": _COLD_EVALUATIONS if prices is None else evaluations, "ftol": _NEAR_ENOUGH},
        )
        assert best is not None
        return best

    def _guess(self) -> FloatArray:
        """What a slot would be worth if all jobs had equal shares, and costs fell as their inverse."""
        share = max(1, int(self.capacity.sum() // max(len(self.idle), 1)))
        guess = np.empty(len(self.costs))
        for kind, table in enumerate(self.costs):
            at = table[:, 1 : share + 1].min(axis=1, initial=np.inf)
            known = at[np.isfinite(at)]
            guess[kind] = max(float(np.abs(known).mean()) / share if known.size else 1.0, 1e-12)
        return guess
