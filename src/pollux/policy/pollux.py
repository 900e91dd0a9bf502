"""The Pollux policy: maximise the power mean of speedups over all jobs (OSDI'21, section 4.2).

speedup_j(A) = best goodput with A / best goodput with the fair share (:mod:`pollux.policy.speedups`); a job that would
have to change is charged for it (:mod:`pollux.policy.round`). Where the paper searches by a genetic algorithm,
:mod:`pollux.policy.solver` finds an allocation and a bound on all others, and :mod:`pollux.policy.mixed` does so where
there are several accelerator types.

A round in which nothing of note has changed since one that left everything as it was does so too, without solving
anything.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from pollux.policy.base import Policy, PolicySettings
from pollux.policy.dense import types_of
from pollux.policy.mixed import Memory, solve_mixed
from pollux.policy.round import Round
from pollux.policy.solver import solve
from pollux.policy.speedups import Speedups, of_note
from pollux.types import Explanation, JobView, Node, Plan, Snapshot

_OLDER = 0.2  # relative change of a job's age that is
_MAX_AGE_S = 600.0  # of a plan that is not looked at again


class PolluxPolicy(Policy):
    name = "pollux"

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._speedups = Speedups(settings.p)
        self._rng = np.random.default_rng(settings.seed)
        self._types: tuple[str, ...] = ()
        self._memory: Memory | None = None  # of the last round, with these types
        self._settled: tuple[float, tuple[object, ...], Plan] | None = (
            None  # when, for what, and that it changed nothing
        )

    def reset(self) -> None:
        self._speedups.clear()
        self._rng = np.random.default_rng(self._settings.seed)
        self._types, self._memory, self._settled = (), None, None

    def decide(self, snapshot: Snapshot) -> Plan:
        if not snapshot.jobs or not snapshot.nodes:
            return Plan(allocations={}, explanation=Explanation(fitness_before=0, fitness=0, upper_bound=0))
        situation = self._situation(snapshot.nodes, snapshot.jobs)
        if self._settled is not None:
            at, before, plan = self._settled
            if 0 <= snapshot.now - at < _MAX_AGE_S and before == situation:
                return plan
        plan = self._solve(snapshot)
        stays = all(plan.allocation_of(job.name) == job.allocation for job in snapshot.jobs)
        self._settled = (snapshot.now, situation, _unchanged(plan)) if stays else None
        return plan

    def _situation(self, nodes: tuple[Node, ...], jobs: tuple[JobView, ...]) -> tuple[object, ...]:
        """What a plan depends on, as far as it is of note."""
        by_length = self._settings.weights == "remaining"
        rows = tuple(
            (
                job.spec,
                job.allocation,
                job.is_pinned,
                job.has_started,
                job.max_profiled_replicas,
                job.params,
                job.shape_factors,
                of_note(job.noise_scale),
                of_note(job.remaining_examples) if by_length else None,
                round(math.log(job.age_s + 1.0) / _OLDER),  # moves get cheaper with age
            )
            for job in jobs
        )
        return nodes, rows

    def _solve(self, snapshot: Snapshot) -> Plan:
        round_ = Round.of(snapshot, self._speedups.tables(snapshot), self._settings)
        types = types_of(snapshot.nodes)
        if len(types) == 1:
            return round_.plan(solve(round_.problems[0], self._rng))
        found = solve_mixed(round_.problems, round_.nodes, self._memory if types == self._types else None, self._rng)
        self._types, self._memory = types, found.memory
        return round_.plan(found.solution)


def _unchanged(plan: Plan) -> Plan:
    """The same plan for the next rounds, which will not have looked for another."""
    return (
        plan if plan.explanation is None else replace(plan, explanation=replace(plan.explanation, method="unchanged"))
    )
