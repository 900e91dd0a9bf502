"""Translates a snapshot for the solvers, and their solution back into a plan with its explanation.

Jobs and nodes become indices, speedups become costs, one :class:`~pollux.policy.placement.PlacementProblem` for each
accelerator type; a job that would have to change is charged for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pollux.policy.base import PolicySettings
from pollux.policy.dense import may_use, types_of
from pollux.policy.fitness import costs, fitness
from pollux.policy.mixed import homes, keep_costs
from pollux.policy.placement import PlacementProblem, SettledCosts, Shares
from pollux.policy.solver import Solution
from pollux.policy.speedups import SpeedupTable
from pollux.policy.weights import job_weights, remaining_seconds
from pollux.types import (
    NO_ALLOCATION,
    Allocation,
    Explanation,
    FloatArray,
    IntArray,
    JobDecision,
    JobView,
    NodeShare,
    Plan,
    Snapshot,
)

# How many times δ is charged where the work left is known: a move is seldom the last one. Average JCT of four generated
# workloads (160 jobs in 8 hours, 64 GPUs, seeds 100 to 103) with declared lengths: 1,854 s with 4, 1,824 s with 8,
# 1,818 s with 16; of the OSDI'21 workloads 6, 1 and 3, in an earlier state: 2,002, 1,960 and 1,962 s. Seeds 200 to 202:
# 1,765 s without the charge by age, and 4.3 resizes a job; 1,712 s with it, and 2.8.
_CHARGED_MOVES = 8.0
_TIE = 1e-7  # of an idle job's cost; breaks ties, and is far below any other difference


def resize_cost_s(job: JobView, settings: PolicySettings) -> float:
    """δ: as measured of this job, or what the operator says."""
    return settings.resize_s if job.resize_s is None or not settings.charges_measured else job.resize_s


def move_factor(job: JobView, settings: PolicySettings) -> float:
    """What a change of allocation multiplies the speedup with.

    A first start costs δ whenever and wherever it happens, so charging it would only make the youngest jobs
    count for more than others, and leave one that arrives this instant no reason to start at all.
    """
    if not job.has_started and not settings.charges_starts:
        return 1.0
    resize_s = resize_cost_s(job, settings)
    return max(job.age_s - (job.num_resizes or 0) * resize_s, 0.0) / max(job.age_s + resize_s, 1e-9)


def _move_factors(
    jobs: Sequence[JobView], remaining_s: FloatArray, speedups: FloatArray, settings: PolicySettings
) -> FloatArray:
    """(num_jobs, num_types, 2, max_count + 1): what moving to an allocation multiplies its speedup with.

    Where the time left is known and counts, δ is weighed against it too: what takes t on the fair share takes t/s + k·δ
    instead of t/s, so that jobs about to end are not moved at all. k is ``_CHARGED_MOVES``. By that alone a long job
    would move for next to nothing, again and again: how often it has moved says for how long it will stay.
    """
    charged = np.array([move_factor(job, settings) for job in jobs])[:, None, None, None]
    if not np.isfinite(remaining_s).any():
        return np.broadcast_to(charged, speedups.shape)
    factors = np.empty_like(speedups)
    for row, (job, left_s) in enumerate(zip(jobs, remaining_s.tolist(), strict=True)):
        if math.isfinite(left_s) and job.has_started:
            lost = _CHARGED_MOVES * resize_cost_s(job, settings) * speedups[row] / max(left_s, 1e-9)
            factors[row] = charged[row] / (1.0 + lost)
        else:
            factors[row] = charged[row]
    return factors


@dataclass(frozen=True, slots=True)
class RoundProblem:
    """A snapshot translated for the solver, and its answer translated back."""

    snapshot: Snapshot
    settings: PolicySettings
    tables: Sequence[SpeedupTable]
    speedups: FloatArray  # (num_jobs, num_types, 2, max_count + 1) all tables
    factors: FloatArray  # (num_jobs, num_types, 2, max_count + 1) what moving there multiplies the speedup with
    problems: tuple[PlacementProblem, ...]  # one for each type, each with all jobs
    nodes: tuple[tuple[int, ...], ...]  # per type, which nodes of the snapshot its problem has

    @classmethod
    def of(
        cls,
        snapshot: Snapshot,
        tables: Sequence[SpeedupTable],
        settings: PolicySettings,
        learnt_s: FloatArray | None = None,
    ) -> RoundProblem:
        """``learnt_s``: see :func:`~pollux.policy.weights.remaining_seconds`."""
        jobs = snapshot.jobs
        types = types_of(snapshot.nodes)
        nodes = tuple(
            tuple(index for index, node in enumerate(snapshot.nodes) if node.accelerator == name) for name in types
        )
        width = max(table.speedups.shape[2] for table in tables)
        settled = np.zeros((len(jobs), len(types), 2, width))
        for row, table in enumerate(tables):
            settled[row, :, :, : table.speedups.shape[2]] = table.speedups
        allowed = _allowed(jobs, tables, width)
        fair_goodputs = np.array([table.fair_goodput for table in tables])
        remaining_s = remaining_seconds(jobs, fair_goodputs, settings, learnt_s)
        weights = job_weights(jobs, remaining_s, settings.p)
        factors = _move_factors(jobs, remaining_s, settled, settings)
        column = weights[:, None, None, None]
        moved_cost = costs(settled * factors, column, settings.p, settings.epsilon)
        # Where a move is charged everything, running is still better than not running: a tie goes to running.
        hopeless = (factors[:, 0, 0, 0] if factors.strides[1:] == (0, 0, 0) else factors.max(axis=(1, 2, 3))) < 1e-6
        moved_cost[hopeless, :, :, 1:] -= _TIE * np.abs(moved_cost[hopeless, :, :, :1])
        is_fixed = np.array([job.is_fixed for job in jobs])
        must_change = np.zeros(len(jobs), dtype=bool)
        must_change[_must_change(jobs, is_fixed, settings.avoid_interference)] = True

        def settled_cost(speedups: FloatArray, rows: IntArray) -> FloatArray:
            return costs(speedups, weights[rows], settings.p, settings.epsilon)

        problems = []
        for index, members in enumerate(nodes):
            capacity = np.array([snapshot.nodes[node].num_slots for node in members], dtype=np.int64)
            where = {snapshot.nodes[node].name: place for place, node in enumerate(members)}
            fits = np.repeat(allowed[:, None], 2, axis=1)
            fits[[not may_use(job, types[index]) for job in jobs]] = False
            fits[:, 0, int(capacity.max()) + 1 :] = False
            fits[:, 1, int(capacity.sum()) + 1 :] = False
            fits[:, 1, :2] = False
            if len(capacity) == 1:
                fits[:, 1] = False
            # An idle job has zero speedup whichever way one looks at it, and may always be idle.
            fits[:, :, 0] = True
            moved_cost[:, index][~fits] = np.inf
            problems.append(
                PlacementProblem(
                    capacity=capacity,
                    settled_cost=SettledCosts(settled[:, index], np.arange(len(jobs)), settled_cost),
                    moved_cost=moved_cost[:, index],
                    current=[
                        {where[node]: count for node, count in job.allocation.shares if node in where} for job in jobs
                    ],
                    is_fixed=is_fixed,
                    exclusive_spans=settings.avoid_interference,
                    must_change=must_change,
                )
            )
        return cls(snapshot, settings, tables, settled, factors, tuple(problems), nodes)

    @property
    def stay_cost(self) -> float:
        """Of leaving everything as it is."""
        return float(keep_costs(self.problems, homes(self.problems)).sum())

    def plan(self, solution: Solution) -> Plan:
        """The solution, in nodes of the snapshot, by name, with its explanation."""
        num_jobs, p, epsilon = len(self.snapshot.jobs), self.settings.p, self.settings.epsilon
        type_of = {node: index for index, members in enumerate(self.nodes) for node in members}
        options, home = self._options(), homes(self.problems)
        allocations: dict[str, Allocation] = {}
        decisions: list[JobDecision] = []
        for index, (job, shares) in enumerate(zip(self.snapshot.jobs, solution.shares, strict=True)):
            allocation = self._allocation(job, shares)
            if allocation:
                allocations[job.name] = allocation
            kind = type_of[next(iter(shares))] if shares else 0
            held_kind = max(int(home[index]), 0)
            decisions.append(self._decision(index, job, allocation, held_kind, kind, options[index]))
        return Plan(
            allocations=allocations,
            explanation=Explanation(
                fitness_before=fitness(self.stay_cost, num_jobs, p, epsilon),
                fitness=fitness(solution.cost, num_jobs, p, epsilon),
                upper_bound=fitness(solution.lower_bound, num_jobs, p, epsilon),
                jobs=tuple(decisions),
                method=solution.method,
            ),
        )

    def _allocation(self, job: JobView, shares: Shares) -> Allocation:
        """Shares by node name, ranks that stay first, so that survivors keep their rank."""
        if not shares:
            return NO_ALLOCATION
        named = {self.snapshot.nodes[node].name: count for node, count in shares.items()}
        if len(named) == len(job.allocation.shares) and all(named.get(node) == n for node, n in job.allocation.shares):
            return job.allocation
        staying = [node for node, _ in job.allocation.shares if node in named]
        arriving = [node for node in named if node not in staying]
        return Allocation(tuple(NodeShare(node, named[node]) for node in (*staying, *arriving)))

    def _options(self) -> FloatArray:
        """(num_jobs, max_count + 1): the best speedup that every number of slots would give, whatever their type."""
        best = np.zeros((len(self.tables), self.factors.shape[3]))
        for kind, problem in enumerate(self.problems):
            shown = np.where(np.isfinite(problem.moved_cost), self.speedups[:, kind], 0.0)
            np.maximum(best, shown.max(axis=1), out=best)
        return best

    def _decision(
        self, index: int, job: JobView, allocation: Allocation, held_kind: int, kind: int, options: FloatArray
    ) -> JobDecision:
        table = self.tables[index]
        before = float(table.speedups[held_kind, int(job.allocation.num_nodes > 1), job.allocation.num_replicas])
        where = (kind, int(allocation.num_nodes > 1), allocation.num_replicas)
        factor = float(self.factors[(index, *where)])
        after = before if allocation == job.allocation else float(table.speedups[where]) * factor
        best = options[: table.max_replicas + 1]
        return JobDecision(
            job=job.name,
            before=job.allocation,
            after=allocation,
            speedup_before=before,
            speedup_after=after,
            move_factor=factor,
            option_replicas=_first_counts(len(best)),
            option_speedups=best,
            note=self._note(job, table, kind),
        )

    def _note(self, job: JobView, table: SpeedupTable, kind: int) -> str:
        if math.isnan(table.fair_goodput):
            return "not measured yet: an estimate"
        accelerator = self.snapshot.nodes[self.nodes[kind][0]].accelerator
        if accelerator in job.guessed and accelerator in job.shape_factors:  # these come from measurements alone
            return f"measured on one replica of {accelerator} only: more are judged by other types"
        if accelerator in job.guessed or accelerator not in job.params:
            return f"not measured on {accelerator} yet: judged by other types"
        return ""


@lru_cache(maxsize=512)
def _first_counts(number: int) -> IntArray:
    counts = np.arange(number)
    counts.setflags(write=False)
    return counts


def _allowed(jobs: Sequence[JobView], tables: Sequence[SpeedupTable], width: int) -> npt.NDArray[np.bool_]:
    """(num_jobs, width): the counts that every job may be given."""
    least = np.array([job.spec.min_replicas for job in jobs])[:, None]
    most = np.array([table.max_replicas for table in tables])[:, None]
    counts = np.arange(width)
    found: npt.NDArray[np.bool_] = (least <= counts) & (counts <= most)
    return found


def _must_change(jobs: Sequence[JobView], is_fixed: npt.NDArray[np.bool_], exclusive_spans: bool) -> list[int]:
    """Jobs that cannot keep what they hold: out of their bounds, or spanning onto a node that another job spans."""
    spanned: set[str] = set()
    found = []
    for row in np.argsort(~is_fixed, kind="stable").tolist():
        job = jobs[row]
        nodes = [node for node, _ in job.allocation.shares]
        spans = len(nodes) > 1
        is_within = not nodes or job.spec.min_replicas <= job.allocation.num_replicas <= job.spec.max_replicas
        clashes = exclusive_spans and spans and not spanned.isdisjoint(nodes)
        if (not is_within or clashes) and not is_fixed[row]:
            found.append(row)
        elif spans:
            spanned.update(nodes)
    return found
