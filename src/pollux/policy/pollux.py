"""The Pollux policy: maximise the power mean of speedups over all jobs (OSDI'21, section 4.2).

speedup_j(A) = best goodput with A / best goodput with the fair share (:mod:`pollux.policy.speedups`); a job that would
have to change is charged for it (:mod:`pollux.policy.round`). Where the paper searches by a genetic algorithm,
:mod:`pollux.policy.solver` finds an allocation and a bound on all others, and :mod:`pollux.policy.mixed` does so where
there are several accelerator types.

A round in which nothing relevant has changed since the last plan was carried out keeps that plan without solving.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pollux.policy.ablation import ablated
from pollux.policy.base import Policy, PolicySettings
from pollux.policy.dense import types_of
from pollux.policy.lengths import Lengths
from pollux.policy.mixed import Memory, solve_mixed
from pollux.policy.round import RoundProblem
from pollux.policy.solver import solve
from pollux.policy.speedups import Speedups, SpeedupTable, rounded_log
from pollux.types import Allocation, Explanation, FloatArray, JobDecision, JobView, Node, Plan, Snapshot

# When a settled plan is looked at again. Between 0.05 and 0.5, and between 120 s and an hour, the average JCT of the
# OSDI'21 workloads does not change: a plan that was kept is nearly always the one that would be found again.
_OLDER = 0.2  # relative change of a job's age, with which moves become cheaper
_MAX_AGE_S = 600.0


class PolluxPolicy(Policy):
    name = "pollux"
    settings_read = frozenset(
        {
            *("p", "epsilon", "resize_s", "charges_measured", "charges_starts", "weights", "avoid_interference"),
            *("exploration", "first_replicas", "adapts_batch", "is_elastic", "counts_efficiency", "seed"),
        }
    )

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self.adapts_batch = settings.adapts_batch
        self._speedups = Speedups(settings)
        self._lengths = Lengths()
        self._rng = np.random.default_rng(settings.seed)
        self._types: tuple[str, ...] = ()
        self._memory: Memory | None = None  # of the last round, with these types
        self._settled: _Settled | None = None

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
            self._lengths.look(snapshot.now, snapshot.jobs)
        left = self._left(snapshot.jobs)
        settled = self._settled
        if settled is not None and 0 <= snapshot.now - settled.now < _MAX_AGE_S and settled.is_still(snapshot, left):
            return settled.unchanged
        plan = self._solve(snapshot)
        # Once the plan is carried out, and nothing else has changed much, there is nothing to decide.
        self._settled = _Settled(snapshot.now, snapshot.nodes, snapshot.jobs, left, plan)
        return plan

    def _left(self, jobs: tuple[JobView, ...]) -> list[float | None]:
        """The work left of each job: in examples as declared, or in slot-seconds as ended jobs have shown.

        None of all where it does not count.
        """
        if self._settings.weights == "equal":
            return [None] * len(jobs)
        examples = self._lengths.left_examples(jobs)
        learnt: list[float | None] = np.where(np.isnan(examples), self._lengths.left_slot_s(jobs), examples).tolist()
        if self._settings.weights == "learnt":
            return learnt
        declared = [job.remaining_examples for job in jobs]
        return [other if own is None else own for own, other in zip(declared, learnt, strict=True)]

    def _learnt_s(self, snapshot: Snapshot, tables: Sequence[SpeedupTable]) -> FloatArray | None:
        """(num_jobs,) seconds on the fair share that each is likely to need yet; nan: not known.

        Slots of several types are not worth the same, so that what was served there says little.
        """
        if self._settings.weights == "equal":
            return None
        jobs = snapshot.jobs
        found: FloatArray = self._lengths.left_examples(jobs) / np.array([table.fair_goodput for table in tables])
        if len(types_of(snapshot.nodes)) == 1:
            served = self._lengths.left_slot_s(jobs) * len(jobs) / snapshot.num_slots
            found = np.where(np.isnan(found), served, found)
        return found

    def _solve(self, snapshot: Snapshot) -> Plan:
        types, tables = types_of(snapshot.nodes), self._speedups.tables(snapshot)
        round_ = RoundProblem.of(snapshot, tables, self._settings, self._learnt_s(snapshot, tables))
        if len(types) == 1:
            return round_.plan(solve(round_.problems[0], self._rng))
        found = solve_mixed(round_.problems, round_.nodes, self._memory if types == self._types else None, self._rng)
        self._types, self._memory = types, found.memory
        return round_.plan(found.solution)


class _Settled:
    """A situation for which a plan was made, and the plan."""

    def __init__(
        self, now: float, nodes: tuple[Node, ...], jobs: tuple[JobView, ...], left: list[float | None], plan: Plan
    ) -> None:
        self.now, self._nodes, self._jobs, self._left, self._plan = now, nodes, jobs, left, plan

    def is_still(self, snapshot: Snapshot, left: list[float | None]) -> bool:
        """Whether nothing has changed but that the plan was carried out."""
        if self._nodes != snapshot.nodes or len(self._jobs) != len(snapshot.jobs):
            return False
        return all(
            _row(before, self._plan.allocation_of(before.name), length) == _row(job, job.allocation, now)
            for before, length, job, now in zip(self._jobs, self._left, snapshot.jobs, left, strict=True)
        )

    @property
    def unchanged(self) -> Plan:
        return _unchanged(self._plan)


def _row(job: JobView, allocation: Allocation, left: float | None) -> tuple[object, ...]:
    """What a plan depends on, rounded, of a job with this allocation."""
    return (
        job.spec,
        allocation,
        job.is_pinned,
        job.share,
        job.has_started or bool(allocation),
        job.max_profiled_replicas,
        job.params,
        job.shape_factors,
        rounded_log(job.noise_scale_low),
        rounded_log(left),
        round(math.log(job.age_s + 1.0) / _OLDER),  # moves get cheaper with age
    )


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
