"""The Pollux policy: maximise the power mean of speedups over all jobs (OSDI'21, section 4.2).

speedup_j(A) = best goodput with A / best goodput with the fair share (:mod:`pollux.policy.speedups`); a job that would
have to change is charged for it (:mod:`pollux.policy.round`). Where the paper searches by a genetic algorithm,
:mod:`pollux.policy.solver` finds an allocation and a bound on all others, and :mod:`pollux.policy.mixed` does so where
there are several accelerator types.
"""

from __future__ import annotations

import numpy as np

from pollux.model.goodput import GoodputTables
from pollux.policy.base import PolicySettings
from pollux.policy.dense import types_of
from pollux.policy.mixed import solve_mixed
from pollux.policy.round import Round
from pollux.policy.solver import solve
from pollux.policy.speedups import speedup_tables
from pollux.types import Explanation, FloatArray, Plan, Snapshot


class PolluxPolicy:
    name = "pollux"
    adapts_batch = True
    needs_oracle = False
    shares_slots = False

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._tables = GoodputTables()
        self._rng = np.random.default_rng(settings.seed)
        self._types: tuple[str, ...] = ()
        self._prices: FloatArray | None = None  # of a slot of each of these types, in the last round

    def reset(self) -> None:
        self._tables.clear()
        self._rng = np.random.default_rng(self._settings.seed)
        self._types, self._prices = (), None

    def decide(self, snapshot: Snapshot) -> Plan:
        if not snapshot.jobs or not snapshot.nodes:
            return Plan(allocations={}, explanation=Explanation(fitness_before=0, fitness=0, upper_bound=0))
        speedups = speedup_tables(snapshot, self._tables)
        round_ = Round.of(snapshot, speedups, self._settings)
        types = types_of(snapshot.nodes)
        if len(types) == 1:
            return round_.plan(solve(round_.problems[0], self._rng))
        found = solve_mixed(round_.problems, round_.nodes, self._prices if types == self._types else None, self._rng)
        self._types, self._prices = types, found.prices
        return round_.plan(found.solution)
