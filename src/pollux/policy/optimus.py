"""Optimus: greedy by marginal gain in completion time (Peng et al., EuroSys'18), with oracle, as in OSDI'21.

Everybody gets one replica (or the least it runs with) in order of submission, then one replica at a time
goes to the job whose estimated remaining time it shortens most. Simplifications: the oracle replaces
Optimus' convergence prediction; only workers are scheduled (the original also placed parameter servers). On
a live cluster the fitted model stands in for the oracle.
"""

from __future__ import annotations

import heapq
import math

from pollux.policy.base import PolicySettings
from pollux.policy.dense import FreeSlots
from pollux.policy.estimates import remaining_steps, step_s
from pollux.types import Allocation, JobView, Node, Plan, Snapshot


class OptimusPolicy:
    name = "optimus"
    adapts_batch = False
    needs_oracle = False

    def __init__(self, settings: PolicySettings) -> None:
        pass

    def reset(self) -> None:
        pass

    def decide(self, snapshot: Snapshot) -> Plan:
        fixed = {job.name: job.allocation for job in snapshot.jobs if job.is_fixed}
        jobs = [job for job in snapshot.jobs if job.name not in fixed]
        left = snapshot.num_slots - sum(allocation.num_replicas for allocation in fixed.values())
        remaining = [remaining_steps(job) for job in jobs]
        counts = [0] * len(jobs)
        queue: list[tuple[float, int]] = []  # (-gain, index): ties go to the job submitted first
        for index, job in enumerate(jobs):
            least = job.spec.min_replicas
            if left < least:
                continue
            counts[index] = least
            left -= least
            gain = _gain(job, least, remaining[index], snapshot.nodes) if left >= 1 else 0.0
            if gain > 0:
                queue.append((-gain, index))
        heapq.heapify(queue)
        while left > 0 and queue:
            _, index = heapq.heappop(queue)
            counts[index] += 1
            left -= 1
            gain = _gain(jobs[index], counts[index], remaining[index], snapshot.nodes)
            if gain > 0:
                heapq.heappush(queue, (-gain, index))

        allocations: dict[str, Allocation] = dict(fixed)
        order = sorted(range(len(jobs)), key=lambda index: counts[index])
        movers = []
        for index in order:
            job = jobs[index]
            if counts[index] == job.allocation.num_replicas:
                if job.allocation:
                    allocations[job.name] = job.allocation
            elif counts[index] > 0:
                movers.append(index)
        free = FreeSlots(snapshot.nodes, allocations.values())
        for index in movers:
            allocations[jobs[index].name] = free.place(counts[index])
        return Plan(allocations=allocations)


def _gain(job: JobView, count: int, remaining: float, nodes: tuple[Node, ...]) -> float:
    """Seconds of remaining time that one more replica saves; 0 beyond what the job can use."""
    if count + 1 > _max_replicas(job):
        return 0.0
    saved = step_s(job, count, nodes) - step_s(job, count + 1, nodes)
    return saved * remaining if math.isfinite(saved) and math.isfinite(remaining) else 0.0


def _max_replicas(job: JobView) -> int:
    limits = job.spec.batch
    if limits is None:
        return job.spec.requested_replicas or job.spec.min_replicas
    total = job.spec.requested_batch_size or limits.initial
    return min(job.spec.max_replicas, total // limits.device_min)
