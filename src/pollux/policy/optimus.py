"""Optimus: greedy by marginal gain in completion time (Peng et al., EuroSys'18), with oracle, as in OSDI'21.

Each job gets its least replicas in order of submission; then one replica at a time goes to the job whose estimated
remaining time it shortens most. Simplifications: the oracle replaces Optimus' convergence prediction; only workers are
scheduled (the original also placed parameter servers). On a live cluster the fitted model replaces the oracle.
"""

from __future__ import annotations

import math

from pollux.policy.base import StatelessPolicy
from pollux.policy.dense import place_counts, settle
from pollux.policy.estimates import largest_nodes, remaining_steps, step_s
from pollux.policy.gangs import demand
from pollux.policy.greedy import allot
from pollux.types import JobView, Plan, Snapshot


class OptimusPolicy(StatelessPolicy):
    name = "optimus"
    adapts_batch = False

    def decide(self, snapshot: Snapshot) -> Plan:
        held, budget = settle(snapshot)
        largest = largest_nodes(snapshot.nodes)
        remaining = {job.name: remaining_steps(job) for job in snapshot.jobs}

        def saved_s(job: JobView, count: int, accelerator: str) -> float:
            """Seconds of remaining time that one more replica saves; 0 beyond what the job can use."""
            if count + 1 > max_replicas(job):
                return 0.0
            now_s, then_s = (step_s(job, num, largest, accelerator) for num in (count, count + 1))
            gain = (now_s - then_s) * remaining[job.name]
            return gain if math.isfinite(gain) else 0.0

        counts, types = allot(snapshot.jobs, budget, saved_s, staying=held)
        order = sorted(snapshot.jobs, key=lambda job: counts.get(job.name, 0))
        return Plan(allocations=place_counts(snapshot.nodes, order, counts, types))


def max_replicas(job: JobView) -> int:
    """What the job can use at its requested batch size."""
    limits = job.spec.batch
    if limits is None:
        return demand(job)
    total = job.spec.requested_batch_size or limits.initial
    return min(job.spec.max_replicas, total // limits.device_min)
