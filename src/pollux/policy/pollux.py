"""The Pollux policy: maximise the power mean of speedups over all jobs (OSDI'21, section 4.2).

speedup_j(A) = best goodput with A / best goodput with the fair share; a job that would have to change is
charged max(age - restarts·δ, 0)/(age + δ). Where the paper searches by a genetic algorithm, :mod:`pollux.policy.solver`
finds an allocation and a bound on all others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pollux.errors import InvalidValueError
from pollux.model.goodput import GoodputModel, GoodputTables
from pollux.policy.base import PolicySettings
from pollux.policy.fitness import costs, fitness
from pollux.policy.placement import PlacementProblem, Shares
from pollux.policy.solver import Solution, solve
from pollux.types import (
    NO_ALLOCATION,
    Allocation,
    Explanation,
    FloatArray,
    JobDecision,
    JobView,
    NodeShare,
    Plan,
    Snapshot,
)

_EXPLORATION = 2  # a job may ask for this many times the replicas it has been profiled with
_CHARGED_MOVES = 4.0  # a move is seldom the last one: where the work left is known, δ is charged so many times
_TIE = 1e-7  # of an idle job's cost: breaks ties, and is not seen otherwise
_REMAINING_EXPONENT = -0.5  # weight of a job by its remaining time


class PolluxPolicy:
    name = "pollux"
    adapts_batch = True
    needs_oracle = False

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._tables = GoodputTables()
        self._rng = np.random.default_rng(settings.seed)

    def reset(self) -> None:
        self._tables.clear()
        self._rng = np.random.default_rng(self._settings.seed)

    def decide(self, snapshot: Snapshot) -> Plan:
        if not snapshot.jobs or not snapshot.nodes:
            return Plan(allocations={}, explanation=Explanation(fitness_before=0, fitness=0, upper_bound=0))
        speedups = speedup_tables(snapshot, self._tables)
        round_ = Round.of(snapshot, speedups, self._settings)
        return round_.plan(solve(round_.problem, self._rng))


@dataclass(frozen=True, slots=True)
class SpeedupTable:
    """One job's speedups over its fair share for 0..R replicas."""

    speedups: FloatArray  # (2, R + 1): [on one node, spanning]; 0 where impossible
    max_replicas: int  # more than these may be kept, but not asked for
    fair_goodput: float  # useful examples per second on the fair share; nan if not known yet


def max_replicas(job: JobView, num_slots: int) -> int:
    """How many replicas the job may be given: its own bounds, and twice what it has been profiled with."""
    most = min(job.spec.max_replicas, num_slots)
    if job.spec.batch is None:  # a command that does not adapt: what was asked for, no more
        return min(most, job.spec.requested_replicas or job.spec.min_replicas)
    explored = max(_EXPLORATION * job.max_profiled_replicas, job.spec.min_replicas)
    return min(most, job.spec.batch.max_replicas, explored)


def speedup_tables(snapshot: Snapshot, tables: GoodputTables) -> list[SpeedupTable]:
    """Speedups of all jobs; a job never measured counts as scaling perfectly."""
    accelerators = {node.accelerator for node in snapshot.nodes}
    if len(accelerators) > 1:
        raise InvalidValueError(
            f"the pollux policy schedules one accelerator type at a time; seen: {', '.join(sorted(accelerators))}"
        )
    (accelerator,) = accelerators
    num_slots = snapshot.num_slots
    fair = math.ceil(num_slots / len(snapshot.jobs))
    known: list[tuple[int, GoodputModel, int]] = []
    result: list[SpeedupTable] = []
    for index, job in enumerate(snapshot.jobs):
        most = max_replicas(job, num_slots)
        width = max(most, job.allocation.num_replicas)
        model = GoodputModel.of(job, accelerator)
        if model is None:
            proportional = np.arange(width + 1) / fair
            pair = np.stack([proportional, proportional])
            pair[1, : min(2, width + 1)] = 0.0
            result.append(SpeedupTable(pair, most, math.nan))
        else:
            known.append((index, model, max(width, min(fair, model.limits.max_replicas))))
            result.append(SpeedupTable(np.zeros((2, width + 1)), most, math.nan))
    goodputs = tables.best([model for _, model, _ in known], [width for _, _, width in known])
    for (index, _, width), table in zip(known, goodputs, strict=True):
        base = float(table[0, min(fair, width)])
        if base > 0:
            shown = result[index].speedups.shape[1]
            result[index] = SpeedupTable(table[:, :shown] / base, result[index].max_replicas, base)
    return result


def move_factor(job: JobView, settings: PolicySettings) -> float:
    """What a change of allocation multiplies the speedup with.

    A first start costs δ whenever and wherever it happens, so charging it would only make the youngest jobs
    count for more than others, and leave one that arrives this instant no reason to start at all.
    """
    if not job.has_started and not settings.charges_starts:
        return 1.0
    resize_s = settings.resize_s
    return max(job.age_s - (job.num_restarts or 0) * resize_s, 0.0) / max(job.age_s + resize_s, 1e-9)


def _move_factors(
    jobs: Sequence[JobView], tables: Sequence[SpeedupTable], speedups: FloatArray, settings: PolicySettings
) -> FloatArray:
    """(num_jobs, 2, max_count + 1): what moving to an allocation multiplies its speedup with.

    Where the work left is known and counts, δ is weighed against it: W examples at goodput g take W/g + k·δ
    instead of W/g. Long jobs then move for little and jobs about to end not at all. With k = 4 rather than
    1 the average JCT of the OSDI'21 workloads is 3 % lower: moves beget moves.
    """
    factors = np.empty_like(speedups)
    for row, (job, table) in enumerate(zip(jobs, tables, strict=True)):
        left = job.remaining_examples
        if settings.weights == "remaining" and left is not None and job.has_started and table.fair_goodput > 0:
            lost = _CHARGED_MOVES * settings.resize_s * table.fair_goodput * speedups[row] / max(left, 1.0)
            factors[row] = 1.0 / (1.0 + lost)
        else:
            factors[row] = move_factor(job, settings)
    return factors


@dataclass(frozen=True, slots=True)
class Round:
    """A snapshot translated for the solver, and its answer translated back."""

    snapshot: Snapshot
    settings: PolicySettings
    tables: Sequence[SpeedupTable]
    factors: FloatArray  # (num_jobs, 2, max_count + 1) what moving there multiplies the speedup with
    problem: PlacementProblem

    @classmethod
    def of(cls, snapshot: Snapshot, tables: Sequence[SpeedupTable], settings: PolicySettings) -> Round:
        jobs = snapshot.jobs
        node_index = {node.name: index for index, node in enumerate(snapshot.nodes)}
        capacity = np.array([node.num_slots for node in snapshot.nodes], dtype=np.int64)
        weights = _weights(jobs, tables, settings)

        width = max(table.speedups.shape[1] for table in tables)
        settled = np.zeros((len(jobs), 2, width))
        allowed = np.zeros((len(jobs), 2, width), dtype=bool)
        for row, (job, table) in enumerate(zip(jobs, tables, strict=True)):
            settled[row, :, : table.speedups.shape[1]] = table.speedups
            allowed[row, :, job.spec.min_replicas : table.max_replicas + 1] = True
        allowed[:, 0, int(capacity.max()) + 1 :] = False
        allowed[:, 1, :2] = False
        if len(capacity) == 1:
            allowed[:, 1] = False
        # An idle job has zero speedup whichever way one looks at it, and may always be idle.
        allowed[:, :, 0] = True
        factors = _move_factors(jobs, tables, settled, settings)
        column = weights[:, None, None]
        settled_cost = costs(settled, column, settings.p, settings.epsilon)
        moved_cost = costs(settled * factors, column, settings.p, settings.epsilon)
        # Where a move is charged everything, running is still better than not running: a tie goes to running.
        hopeless = factors.max(axis=(1, 2)) < 1e-6
        moved_cost[hopeless, :, 1:] -= _TIE * np.abs(moved_cost[hopeless, :, :1])
        moved_cost = np.where(allowed, moved_cost, np.inf)
        for row in _must_change(jobs, settings.avoid_interference):
            settled_cost[row, :, jobs[row].allocation.num_replicas] = np.inf
        problem = PlacementProblem(
            capacity=capacity,
            settled_cost=settled_cost,
            moved_cost=moved_cost,
            current=[{node_index[node]: count for node, count in job.allocation.shares} for job in jobs],
            is_fixed=np.array([job.is_fixed for job in jobs]),
            exclusive_spans=settings.avoid_interference,
        )
        return cls(snapshot, settings, tables, factors, problem)

    def plan(self, solution: Solution) -> Plan:
        """The solution by name, with its explanation."""
        num_jobs, p, epsilon = len(self.snapshot.jobs), self.settings.p, self.settings.epsilon
        allocations: dict[str, Allocation] = {}
        decisions: list[JobDecision] = []
        for index, (job, shares) in enumerate(zip(self.snapshot.jobs, solution.shares, strict=True)):
            allocation = self._allocation(job, shares)
            if allocation:
                allocations[job.name] = allocation
            decisions.append(self._decision(index, job, allocation))
        return Plan(
            allocations=allocations,
            explanation=Explanation(
                fitness_before=fitness(float(self.problem.keep_cost.sum()), num_jobs, p, epsilon),
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
        if named == job.allocation.as_mapping():
            return job.allocation
        staying = [node for node, _ in job.allocation.shares if node in named]
        arriving = [node for node in named if node not in staying]
        return Allocation(tuple(NodeShare(node, named[node]) for node in (*staying, *arriving)))

    def _decision(self, index: int, job: JobView, allocation: Allocation) -> JobDecision:
        table = self.tables[index]
        before = float(table.speedups[int(job.allocation.num_nodes > 1), job.allocation.num_replicas])
        where = (int(allocation.num_nodes > 1), allocation.num_replicas)
        factor = float(self.factors[index, where[0], where[1]])
        after = before if allocation == job.allocation else float(table.speedups[where]) * factor
        reachable = np.isfinite(self.problem.moved_cost[index, :, : table.max_replicas + 1])
        best = np.where(reachable, table.speedups[:, : table.max_replicas + 1], 0.0).max(axis=0)
        return JobDecision(
            job=job.name,
            before=job.allocation,
            after=allocation,
            speedup_before=before,
            speedup_after=after,
            move_factor=factor,
            option_replicas=np.arange(len(best)),
            option_speedups=best,
            note="" if not math.isnan(table.fair_goodput) else "not measured yet: assumed to scale perfectly",
        )


def _must_change(jobs: Sequence[JobView], exclusive_spans: bool) -> list[int]:
    """Jobs that cannot keep what they hold: out of their bounds, or spanning onto a node that another job spans."""
    spanned: set[str] = set()
    found = []
    for row, job in sorted(enumerate(jobs), key=lambda item: not item[1].is_fixed):
        nodes = [node for node, _ in job.allocation.shares]
        spans = len(nodes) > 1
        is_within = not nodes or job.spec.min_replicas <= job.allocation.num_replicas <= job.spec.max_replicas
        clashes = exclusive_spans and spans and not spanned.isdisjoint(nodes)
        if (not is_within or clashes) and not job.is_fixed:
            found.append(row)
        elif spans:
            spanned.update(nodes)
    return found


def _weights(jobs: Sequence[JobView], tables: Sequence[SpeedupTable], settings: PolicySettings) -> FloatArray:
    weights = np.array([job.spec.weight for job in jobs])
    if settings.weights == "remaining":
        remaining_s = np.array(
            [
                job.remaining_examples / table.fair_goodput if job.remaining_examples is not None else math.nan
                for job, table in zip(jobs, tables, strict=True)
            ]
        )
        if np.any(np.isfinite(remaining_s)):
            # A job of unknown length counts as a typical one.
            typical = float(np.nanmedian(remaining_s))
            filled = np.maximum(np.where(np.isfinite(remaining_s), remaining_s, typical), 1.0)
            weights = weights * (filled / max(typical, 1.0)) ** _REMAINING_EXPONENT
    return weights
