"""ElasticFlow (Gu et al., ASPLOS'23): deadlines by minimum satisfactory shares, the rest by diminishing returns.

Jobs are admitted if their deadline and all that were promised before can be met. Shares are powers of two. GPUs that no
deadline needs go one doubling at a time to the job whose speed grows most for each GPU. Differences to the paper:
a job that is not admitted is not dropped, it runs on what is left and is admitted later if that becomes possible;
defragmentation by migration is left to the placement that all baselines share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pollux.policy.base import Policy, PolicySettings
from pollux.policy.deadlines import DeadlineJob, Promises, planned_end
from pollux.policy.dense import may_use, place_counts, settle
from pollux.policy.estimates import largest_nodes, remaining_steps, step_s
from pollux.types import JobView, Plan, Snapshot

_RESIZE_S = 30.0  # a change of a job's share, until one was seen


class ElasticFlowPolicy(Policy):
    """Deadlines by minimum satisfactory shares; what is left goes where it speeds up most (ElasticFlow)."""

    name = "elasticflow"
    settings_read = frozenset()
    adapts_batch = False

    def __init__(self, settings: PolicySettings) -> None:
        self._promises: dict[str, Promises] = {}  # by accelerator type

    def reset(self) -> None:
        self._promises.clear()

    def decide(self, snapshot: Snapshot) -> Plan:
        counts, budget = settle(snapshot)
        largest = largest_nodes(snapshot.nodes)
        mine: dict[str, int] = {}
        types: dict[str, str] = {}
        for kind in sorted(budget.total, key=lambda kind: (-budget.total[kind], kind)):
            taken = counts.keys() | mine.keys()
            movable = [job for job in snapshot.jobs if job.name not in taken and may_use(job, kind)]
            known = {job.name: _known(job, snapshot.now, budget.left[kind], largest, kind) for job in movable}
            due = [known[job.name] for job in movable if _is_due(job, snapshot.now, largest, kind)]
            promises = self._promises.setdefault(kind, Promises())
            shares = promises.shares(snapshot.now, budget.left[kind], due)
            here = {name: count for name, count in shares.now.items() if count and promises.has(name)}
            _share_out(movable, known, here, budget.left[kind] - sum(here.values()))
            mine |= here
            types |= dict.fromkeys(here, kind)
        order = sorted(snapshot.jobs, key=lambda job: -mine.get(job.name, 0))  # large ones first: fewer fragments
        return Plan(allocations=place_counts(snapshot.nodes, order, counts | mine, types))


def _is_due(job: JobView, now: float, largest: Mapping[str, int], kind: str) -> bool:
    """Whether it has a deadline that can be planned for: one to come, of a job whose length and speed are known."""
    seconds = remaining_steps(job) * step_s(job, job.spec.min_replicas, largest, kind)
    return (job.spec.deadline_at or 0.0) > now and math.isfinite(seconds)


def _known(job: JobView, now: float, num_slots: int, largest: Mapping[str, int], kind: str) -> DeadlineJob:
    """Speeds at powers of two from the least to the most replicas; at the least alone if nothing was measured yet."""
    steps, most = remaining_steps(job), min(job.spec.max_replicas, num_slots)
    if job.spec.batch is not None:
        most = min(most, max(job.spec.batch.max_replicas, job.spec.min_replicas))
    deadline_at = job.spec.deadline_at or math.inf
    planned_at = planned_end(deadline_at, now) if math.isfinite(deadline_at) else deadline_at
    least = job.spec.min_replicas
    if most < least:
        return DeadlineJob(job.name, planned_at, (), ())
    work = steps if math.isfinite(steps) and steps > 0 else 1.0  # without a length only speeds are compared
    bounds = (least, max(1 << (most.bit_length() - 1), least))
    found = DeadlineJob.of(
        job.name,
        planned_at,
        bounds,
        lambda count: work * step_s(job, count, largest, kind),
        spare_s=deadline_at - planned_at if math.isfinite(deadline_at) else 0.0,
        resize_s=_RESIZE_S if job.resize_s is None else job.resize_s,
    )
    return found if found.is_known else DeadlineJob(job.name, planned_at, (least,), (1.0,))


def _share_out(jobs: list[JobView], known: Mapping[str, DeadlineJob], mine: dict[str, int], left: int) -> None:
    """Raise counts, step by step, where the relative gain in speed for each GPU is largest; jobs without any first."""
    while left > 0:
        best, best_gain, best_count = "", 0.0, 0
        for job in jobs:
            options = known[job.name]
            has = mine.get(job.name, 0)
            index = options.counts.index(has) + 1 if has in options.counts else 0
            if index >= len(options.counts) or options.counts[index] - has > left or options.counts[index] <= has:
                continue
            speed_before = 1 / options.finish_s[index - 1] if has else 0.0
            gain = (1 / options.finish_s[index] - speed_before) / (options.counts[index] - has)
            gain /= 1 / options.finish_s[0] / options.counts[0]  # in speeds of one replica
            if not has:
                gain += 1e3  # no job waits while another has more than it needs
            if gain > best_gain:
                best, best_gain, best_count = job.name, gain, options.counts[index]
        if not best:
            return
        left -= best_count - mine.get(best, 0)
        mine[best] = best_count
