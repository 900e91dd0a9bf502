"""Themis: finish-time fairness by partial-allocation auctions (Mahajan et al., NSDI'20).

A job's ρ is its completion time under sharing over its completion time alone on its share of the cluster, one part
in as many as there are jobs. Slots are leased. Those that are free, or whose lease has ended, are offered to the
``1 - FILTER`` of the jobs without a lease whose ρ is worst. Their bids say for every number of slots what 1/ρ they
would come to, and the auction maximises the product of these (proportional fairness). A winner i then gets only the
part c_i of its slots: the product of the others' values with i there, over what it would be without i. That hidden
payment is what makes honest bids the best ones. What is left over goes to jobs without a lease, worst ρ first.

Simplifications: a job is an application of one job, between its least replicas and those asked for, at the batch size
asked for. Bids come from the oracle or the fitted model; where neither knows, a job is taken to scale linearly and to
have as much left as it has had. The number of jobs is that of now, not the average so far. A job has one lease for all
its slots, and does not bid while it lasts. Placement is dense; where there are several accelerator types, a job bids
for the one with the most slots for each bidder, and by its speed on the fastest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pollux.policy.base import Policy, PolicySettings
from pollux.policy.dense import Budget, may_use, place_counts, settle, types_of
from pollux.policy.estimates import remaining_steps, step_s
from pollux.policy.gangs import demand
from pollux.policy.greedy import allot
from pollux.types import JobView, Plan, Snapshot

LEASE_S = 600.0
FILTER = 0.8
_LEAST_SERVICE_S = 60.0  # what a job of unknown length is taken to have had at the least


class ThemisPolicy(Policy):
    name = "themis"
    adapts_batch = False

    def __init__(self, settings: PolicySettings) -> None:
        self._leased_at: dict[str, float] = {}  # by job: since when it has a lease

    def reset(self) -> None:
        self._leased_at = {}

    def decide(self, snapshot: Snapshot) -> Plan:
        now = snapshot.now
        # Whoever holds slots that this policy has not leased is left alone for as long as a lease.
        since = {job.name: self._leased_at.get(job.name, now) for job in snapshot.jobs if job.allocation}
        held, budget = settle(snapshot, lambda job: job.name in since and 0 <= now - since[job.name] < LEASE_S)
        types_there = types_of(snapshot.nodes)
        bids = {job.name: Bid.of(job, snapshot, types_there) for job in snapshot.jobs if job.name not in held}
        asking = [job for job in snapshot.jobs if job.name in bids]
        asking.sort(key=lambda job: -bids[job.name].rho(demand(job)))  # stable: ties go by submission
        won, types = _auction(asking, bids, budget)
        self._leased_at = since | dict.fromkeys(won, now)
        order = [*(job for job in snapshot.jobs if job.name in held), *asking]
        return Plan(allocations=place_counts(snapshot.nodes, order, held | won, types))


@dataclass(frozen=True, slots=True)
class Bid:
    """What a job says about itself: seconds since it came, left at so many replicas, and alone on its share."""

    age_s: float
    ideal_s: float
    left_s: tuple[float, ...]  # with 1, 2, ... replicas

    @classmethod
    def of(cls, job: JobView, snapshot: Snapshot, types: Sequence[str]) -> Bid:
        most = demand(job)
        share = min(max(snapshot.num_slots, 1) / len(snapshot.jobs), most)
        steps = remaining_steps(job)
        usable = [name for name in types if may_use(job, name)]
        left_s = tuple(
            steps * min((step_s(job, num, snapshot.nodes, name) for name in usable), default=math.inf)
            for num in range(1, most + 1)
        )
        done = 0.0
        if job.done_examples is not None and job.remaining_examples:
            done = job.done_examples / job.remaining_examples
        if not all(1e-9 < left < math.inf for left in left_s):
            service = max(job.attained_slot_s, most * _LEAST_SERVICE_S)
            left_s, done = tuple(service / num for num in range(1, most + 1)), 1.0
        alone_s = left_s[math.floor(share) - 1] if share >= 1 else left_s[0] / share
        return cls(job.age_s, (1 + done) * alone_s, left_s)

    def rho(self, num_replicas: int) -> float:
        """If it has so many from now on; with none it waits for a lease and then has all."""
        wait_s = 0.0 if num_replicas else LEASE_S
        return max((self.age_s + wait_s + self.left_s[num_replicas - 1]) / self.ideal_s, 1e-9)


def _bounds(job: JobView) -> tuple[int, int]:
    """Fewest and most replicas: a user who asks for more or less than the bounds gets that, or nothing."""
    most = min(demand(job), job.spec.max_replicas)
    return (job.spec.min_replicas, most) if job.spec.min_replicas <= most else (demand(job), demand(job))


def _auction(
    asking: Sequence[JobView], bids: Mapping[str, Bid], budget: Budget
) -> tuple[dict[str, int], dict[str, str]]:
    """(replicas, type) by job. ``asking`` has the worst ρ first; takes slots from ``budget``."""
    bidders = asking[: math.ceil((1 - FILTER) * len(asking))]
    offered = dict(budget.left)

    def value_gain(job: JobView, count: int, accelerator: str) -> float:
        """Of the product's logarithm."""
        bid = bids[job.name]
        return math.log(bid.rho(count) / bid.rho(count + 1)) if count < _bounds(job)[1] else 0.0

    def least(job: JobView) -> int:
        return _bounds(job)[0]

    shares, types = allot(bidders, budget, value_gain, least=least)
    won: dict[str, int] = {}
    for job in bidders:
        if job.name in shares:
            budget.left = dict(offered)
            others = [other for other in bidders if other is not job]
            without, _ = allot(others, budget, value_gain, least=least)
            part = math.prod(
                bids[other.name].rho(without.get(other.name, 0)) / bids[other.name].rho(shares.get(other.name, 0))
                for other in others
            )
            count = math.floor(min(part, 1.0) * shares[job.name])
            if count >= least(job):
                won[job.name] = count
    budget.left = dict(offered)
    for name, count in won.items():
        budget.left[types[name]] -= count
    return _hand_out(asking, budget, won, types)


def _hand_out(
    asking: Sequence[JobView], budget: Budget, won: Mapping[str, int], types: Mapping[str, str]
) -> tuple[dict[str, int], dict[str, str]]:
    """What the auction left over, worst ρ first, to everybody up to what it asked for."""
    counts = dict(won)
    chosen = {name: types[name] for name in won}
    for job in asking:
        least, most = _bounds(job)
        if job.name not in won:
            name = budget.admit(job, least)
            if name is None:
                continue
            counts[job.name], chosen[job.name] = least, name
        name = chosen[job.name]
        more = min(most - counts[job.name], budget.left[name])
        counts[job.name] += more
        budget.left[name] -= more
    return counts, chosen
