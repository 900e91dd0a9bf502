"""Gavel: shares of time on accelerator types by linear programs (Narayanan et al., OSDI'20).

Jobs keep the replicas and the batch size they asked for. X[j, t] is the share of time that job j should spend on type
t. The value of a job (section 4.1) is its throughput over time, divided by the one it would have if it spent its
time on all types in proportion to their slots, times its replicas, over its weight. The least value is made as large
as it can be. Then jobs that cannot improve are held there, and the least value of the others is raised (water
filling, section 4.3). That is ``max_min_fairness``, the authors' first objective. With ``max_sum_throughput`` the sum
of throughputs, each over that on the job's slowest type, is largest instead, and jobs that are worth the same on a type
share it evenly: what the Sia artifact runs as gavel. ``max_sum_steps`` is the same with steps per second as they are,
as the authors' own program has it, and ``finish_time_fairness`` makes the largest expected ρ least, which is Themis in
Gavel's formulation (section 4.2); Shockwave's authors ran both beside theirs. :mod:`pollux.policy.gavel_programs` has
the programs. A round (section 5) takes jobs in order of X over the time already received on that type, as long as they
fit; time is counted, not rounds, so that rounds may have any length. The programs are solved again only when jobs, what
they ask for, their weights, nodes or known throughputs have changed.

Simplifications: no space sharing; of the jobs that cannot improve only those are held that the program's prices name,
and after ``_MAX_LEVELS`` programs the rest goes where it adds up to most; time received is counted from a job's arrival
on, which lets newcomers catch up as in least attained service.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from pollux.policy.base import Policy, PolicySettings
from pollux.policy.dense import Budget, may_use, place_counts, types_of
from pollux.policy.estimates import largest_nodes, remaining_steps, step_s
from pollux.policy.gangs import demand
from pollux.policy.gavel_programs import Work, fair_finish_shares, isolated, max_min_shares, max_sum_shares
from pollux.types import FloatArray, IntArray, JobView, Plan, Snapshot

_LEAST_S = 60.0  # of work left of a job of unknown length, at the least: a round


class GavelPolicy(Policy):
    name = "gavel"
    settings_read = frozenset({"objective"})
    adapts_batch = False

    def __init__(self, settings: PolicySettings) -> None:
        self._objective = settings.objective
        self.reset()

    def reset(self) -> None:
        self._received_s: dict[str, dict[str, float]] = {}  # by job, then by type
        self._last_at: float | None = None
        self._solved_for: object = None
        self._shares: FloatArray = np.zeros((0, 0))  # (num_jobs, num_types) X of what it was solved for
        self._isolated: dict[str, tuple[float, float, float]] = {}  # by job: seconds alone so far, steps left, steps/s

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
            if self._objective == "finish_time_fairness":
                work = self._work(snapshot.jobs, isolated(throughputs, demands, capacity), throughputs)
                self._shares = fair_finish_shares(throughputs, demands, work, capacity)
            elif self._objective == "max_min_fairness":
                self._shares = max_min_shares(throughputs, demands, weights, capacity)
            else:
                is_plain = self._objective == "max_sum_steps"
                self._shares = max_sum_shares(throughputs, demands, weights, capacity, is_plain=is_plain)
            self._solved_for = key

    def _work(self, jobs: tuple[JobView, ...], rates: FloatArray, throughputs: FloatArray) -> Work:
        """What is left of each job, and how long the whole would take on its own part of the cluster.

        ``rates``: steps per second there. Steps that were made since the last program count at its rates.
        """
        before, self._isolated = self._isolated, {}
        steps_left, alone_s = np.zeros(len(jobs)), np.zeros(len(jobs))
        for row, job in enumerate(jobs):
            steps = remaining_steps(job)
            if not math.isfinite(steps):
                steps = max(job.attained_s, _LEAST_S) * float(throughputs[row].max())
            rate = max(float(rates[row]), 1e-12)
            so_far_s, had, at_rate = before.get(job.name, (0.0, steps, rate))
            so_far_s += max(had - steps, 0.0) / at_rate
            self._isolated[job.name] = (so_far_s, steps, rate)
            steps_left[row], alone_s[row] = max(steps, 1e-9), so_far_s + max(steps, 1e-9) / rate
        return Work(np.array([job.age_s for job in jobs]), steps_left, alone_s)

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
