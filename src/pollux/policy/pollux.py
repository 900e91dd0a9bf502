"""The Pollux policy: maximise the power mean of speedups over all jobs (OSDI'21, section 4.2).

speedup_j(A) = best goodput with A / best goodput with the fair share (:mod:`pollux.policy.speedups`); a job that would
have to change is charged for it (:mod:`pollux.policy.round`). Where the paper searches by a genetic algorithm,
:mod:`pollux.policy.solver` finds an allocation and a bound on all others, and :mod:`pollux.policy.mixed` does so where
there are several accelerator types.

A round in which nothing relevant has changed since the last plan was carried out keeps that plan without solving.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from pollux.policy.ablation import ablated
from pollux.policy.base import Policy, PolicySettings
from pollux.policy.dense import types_of
from pollux.policy.lengths import Lengths
from pollux.policy.mixed import Memory, solve_mixed
from pollux.policy.round import RoundProblem
from pollux.policy.solver import solve
from pollux.policy.speedups import Speedups, rounded_log
from pollux.types import Explanation, JobDecision, JobView, Node, Plan, Snapshot

# When a settled plan is looked at again. Between 0.05 and 0.5, and between 120 s and an hour, the average JCT of the
# OSDI'21 workloads does not change: a plan that was kept is nearly always the one that would be found again.
_OLDER = 0.2  # relative change of a job's age, with which moves become cheaper
_MAX_AGE_S = 600.0


class PolluxPolicy(Policy):
    name = "pollux"

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self.adapts_batch = settings.adapts_batch
        self._speedups = Speedups(settings)
        self._lengths = Lengths()
        self._rng = np.random.default_rng(settings.seed)
        self._types: tuple[str, ...] = ()
        self._memory: Memory | None = None  # of the last round, with these types
        self._settled: tuple[float, tuple[object, ...], Plan] | None = None  # when, for which situation, and the plan

    def reset(self) -> None:
        self._speedups.clear()
        self._lengths.clear()
        self._rng = np.random.default_rng(self._settings.seed)
        self._types, self._memory, self._settled = (), None, None

    def decide(self, snapshot: Snapshot) -> Plan:
        if not snapshot.jobs or not snapshot.nodes:
            return Plan(allocations={}, explanation=Explanation(fitness_before=0, fitness=0, upper_bound=0))
        snapshot = ablated(snapshot, self._settings)
        if self._settings.weights != "equal":
            self._lengths.look(snapshot.jobs)
        if self._settled is not None:
            at, before, plan = self._settled
            if 0 <= snapshot.now - at < _MAX_AGE_S and before == self._situation(snapshot.nodes, snapshot.jobs):
                return plan
        plan = self._solve(snapshot)
        # Once the plan is carried out, and nothing else has changed much, there is nothing to decide.
        self._settled = (snapshot.now, self._situation(snapshot.nodes, snapshot.jobs, plan), _unchanged(plan))
        return plan

    def _situation(
        self, nodes: tuple[Node, ...], jobs: tuple[JobView, ...], after: Plan | None = None
    ) -> tuple[object, ...]:
        """What a plan depends on, rounded; now, or ``after`` a plan has been carried out."""
        left = [None] * len(jobs) if self._settings.weights == "equal" else self._left(jobs)
        held = [job.allocation if after is None else after.allocation_of(job.name) for job in jobs]
        rows = tuple(
            (
                job.spec,
                allocation,
                job.is_pinned,
                job.share,
                job.has_started or bool(allocation),
                job.max_profiled_replicas,
                job.params,
                job.shape_factors,
                rounded_log(job.noise_scale_low),
                rounded_log(length),
                round(math.log(job.age_s + 1.0) / _OLDER),  # moves get cheaper with age
            )
            for job, allocation, length in zip(jobs, held, left, strict=True)
        )
        return nodes, rows

    def _left(self, jobs: tuple[JobView, ...]) -> list[float | None]:
        """The work left of each job: in examples as declared, or in slot-seconds as ended jobs have shown."""
        learnt: list[float | None] = self._lengths.left(jobs).tolist()
        if self._settings.weights == "learnt":
            return learnt
        declared = [job.remaining_examples for job in jobs]
        return [other if own is None else own for own, other in zip(declared, learnt, strict=True)]

    def _learns(self, types: tuple[str, ...]) -> bool:
        """Whether ended jobs say how long others are.

        Slots of several types are not worth the same: with "auto" what was served there is not compared. On the Sia
        artifact's cluster "learnt" costs 9 % of JCT, on clusters of one type it saves some.
        """
        weights = self._settings.weights
        return weights in ("learnt", "remaining") or (weights == "auto" and len(types) == 1)

    def _solve(self, snapshot: Snapshot) -> Plan:
        learnt_s, types = None, types_of(snapshot.nodes)
        if self._learns(types):
            learnt_s = self._lengths.left(snapshot.jobs) * len(snapshot.jobs) / snapshot.num_slots
        round_ = RoundProblem.of(snapshot, self._speedups.tables(snapshot), self._settings, learnt_s)
        if len(types) == 1:
            return round_.plan(solve(round_.problems[0], self._rng))
        found = solve_mixed(round_.problems, round_.nodes, self._memory if types == self._types else None, self._rng)
        self._types, self._memory = types, found.memory
        return round_.plan(found.solution)


def _unchanged(plan: Plan) -> Plan:
    """The same plan for the next rounds, in which it has been carried out and no other was searched for."""
    explanation = plan.explanation
    if explanation is None:
        return plan
    jobs = tuple(
        job
        if job.before == job.after
        else replace(job, before=job.after, speedup_before=(speedup := _settled_speedup(job)), speedup_after=speedup)
        for job in explanation.jobs
    )
    return replace(
        plan, explanation=replace(explanation, jobs=jobs, fitness_before=explanation.fitness, method="unchanged")
    )


def _settled_speedup(decision: JobDecision) -> float:
    """The speedup of a job's new allocation, without the charge for the move."""
    return decision.speedup_after / decision.move_factor if decision.move_factor > 0 else decision.speedup_after
