"""Gives one replica at a time to the job that gains most by it: the frame of the elastic baselines.

Used by the policies that say what a replica gains (equal, optimus, slaq, themis). The baselines know one accelerator
type; where there are several, each job is put on one of them before it grows.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice

from pollux.policy.dense import Budget, may_use
from pollux.types import JobView

Gain = Callable[[JobView, int, str], float]
"""Of one replica more than so many, on slots of a type; 0 if it has no use for it."""

# A job moves to another type only for a share this many times as large as on its own, or jobs that come and go would
# move others back and forth. For ``equal`` on Sia's Philly workload: 5.8 resizes per job and an average JCT of 2,354 s
# with 1, 4.3 and 2,778 s with 2, 3.6 and 2,716 s with 4. The baselines are meant for one type; chosen by hand.
_WORTH_A_MOVE = 2.0


def allot(
    jobs: Sequence[JobView],
    budget: Budget,
    gain: Gain,
    *,
    staying: Collection[str] = (),
    least: Callable[[JobView], int] = lambda job: job.spec.min_replicas,
) -> tuple[dict[str, int], dict[str, str]]:
    """(replicas, accelerator type) by name of every job that gets any; takes them from ``budget``.

    In the order of ``jobs`` each job gets its least replicas. What is left goes where ``gain`` is largest, among
    equals to the first. Those who are ``staying`` as they are have had theirs from the budget already; they are
    told because they count when it comes to which type is how crowded.
    """
    types = admit(jobs, budget, staying=staying, least=least)
    counts = {job.name: least(job) for job in jobs if job.name in types}
    for name, left in budget.left.items():
        members = [job for job in jobs if types.get(job.name) == name]
        for job in islice(turns(members, counts, name, gain), max(left, 0)):
            counts[job.name] += 1
            budget.left[name] -= 1
    return counts, types


def admit(
    jobs: Sequence[JobView], budget: Budget, *, staying: Collection[str], least: Callable[[JobView], int]
) -> dict[str, str]:
    """The type on which a job gets the least it runs with, of those that get any; takes that from ``budget``."""
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
            types[job.name] = name
    return types


def turns(jobs: Sequence[JobView], counts: Mapping[str, int], accelerator: str, gain: Gain) -> Iterator[JobView]:
    """The jobs that get one more replica, one after the other, without end; all sit on one type.

    The turns of a job do not depend on the other jobs: without one of them, the others keep their order.
    """
    counts = dict(counts)
    queue: list[tuple[float, int]] = []  # (-gain, index): ties go to the job that comes first
    for index, job in enumerate(jobs):
        _push(queue, gain(job, counts[job.name], accelerator), index)
    while queue:
        _, index = heapq.heappop(queue)
        job = jobs[index]
        yield job
        counts[job.name] += 1
        _push(queue, gain(job, counts[job.name], accelerator), index)


def _push(queue: list[tuple[float, int]], gain: float, index: int) -> None:
    if gain > 0:
        heapq.heappush(queue, (-gain, index))
