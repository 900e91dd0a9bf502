"""One replica at a time to whoever gains most by it: the frame of the elastic baselines.

Between :mod:`pollux.policy.dense` and the policies that say what a replica gains (equal, optimus, slaq, themis). The
baselines know one accelerator type; where there are several each job is put on one of them before it grows.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence

from pollux.policy.dense import Budget, may_use
from pollux.types import JobView

Gain = Callable[[JobView, int, str], float]
"""Of one replica more than so many, on slots of a type; 0 if it has no use for it."""

_WORTH_A_MOVE = 2.0  # a job changes to another type if its share of that one is this many times as large


def allot(
    jobs: Sequence[JobView],
    budget: Budget,
    gain: Gain,
    *,
    staying: Collection[str] = (),
    least: Callable[[JobView], int] = lambda job: job.spec.min_replicas,
) -> tuple[dict[str, int], dict[str, str]]:
    """(replicas, accelerator type) by name of every job that gets any; takes them from ``budget``.

    In the order of ``jobs`` everybody gets the least it runs with. What is left goes where ``gain`` is largest, among
    equals to the first. Those who are ``staying`` as they are have had theirs from the budget already; they are
    told because they count when it comes to which type is how crowded.
    """
    counts: dict[str, int] = {}
    types: dict[str, str] = {}
    num_on = dict.fromkeys(budget.total, 0)
    for job in jobs:
        own = budget.type_of(job.allocation)
        if job.name in staying:
            if own is not None:
                num_on[own] += 1
            continue
        # All slots there are over all jobs before this one: nothing that changes when this plan is carried out,
        # or the next one would put jobs elsewhere.
        share = {
            name: budget.total[name] / (num_on[name] + 1)
            for name, left in budget.left.items()
            if may_use(job, name) and least(job) <= left
        }
        if share:
            best = max(share, key=share.__getitem__)
            name = own if own in share and _WORTH_A_MOVE * share[own] >= share[best] else best
            budget.left[name] -= least(job)
            num_on[name] += 1
            counts[job.name], types[job.name] = least(job), name
    queue: list[tuple[float, int]] = []  # (-gain, index): ties go to the job that comes first
    for index, job in enumerate(jobs):
        if job.name in counts and budget.left[types[job.name]] > 0:
            _push(queue, gain(job, counts[job.name], types[job.name]), index)
    while queue:
        _, index = heapq.heappop(queue)
        job = jobs[index]
        name = types[job.name]
        if budget.left[name] > 0:
            budget.left[name] -= 1
            counts[job.name] += 1
            _push(queue, gain(job, counts[job.name], name), index)
    return counts, types


def _push(queue: list[tuple[float, int]], gain: float, index: int) -> None:
    if gain > 0:
        heapq.heappush(queue, (-gain, index))
