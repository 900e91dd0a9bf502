"""Themis: finish-time fairness by partial-allocation auctions (Mahajan et al., NSDI'20).

A job's ρ is its completion time under sharing over its completion time alone on its share of the cluster, one part
in as many as there are jobs. Slots are leased. Those that are free, or whose lease has ended, are offered to the
``1 - FILTER`` of the jobs without a lease whose ρ is worst. Their bids say for every number of slots what 1/ρ they
would come to, and the auction maximises the product of these (proportional fairness). A winner i then gets only the
part c_i of its slots: the product of the others' values with i there, over what it would be without i. That hidden
payment is what makes honest bids the best ones. What is left over is given away as well, so that nothing is idle.

Simplifications: a job is an application of one job, between its least replicas and those asked for, at the batch size
asked for. Bids come from the oracle or the fitted model; where neither knows, a job is assumed to scale linearly and to
have as much left as it has had. The number of jobs is that of now, not the average so far. A job has one lease for all
its slots, and does not bid while it lasts. What is left over goes to all jobs without a lease, worst ρ first, and not
at random to those that were kept out of the auction, so that the same snapshot always has the same plan. Placement is
dense; where there are several accelerator types, a job bids for the one with the most slots for each bidder, and by its
speed on the fastest.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pollux.policy.base import Policy, PolicySettings
from pollux.policy.dense import Budget, may_use, place_counts, settle
from pollux.policy.estimates import largest_nodes, remaining_steps, step_s
from pollux.policy.gangs import demand
from pollux.policy.greedy import Gain, allot, turns
from pollux.types import JobView, Plan, Snapshot

# Chosen by hand: long against a resize of 30 s, short against jobs. On the OSDI'21 workloads 6 and 1, leases of 300 s
# lower the average JCT by 5 % for 40 % more resizes, leases of 1200 s raise it by 2 %.
LEASE_S = 600.0
FILTER = 0.8  # f. 0.5 raises the average JCT by 3 %, 0.95 hardly changes it
_LEAST_SERVICE_S = 60.0  # assumed service of a job of unknown length at the least: a round, so that ρ stays finite


class ThemisPolicy(Policy):
    name = "themis"
    settings_read = frozenset()
    adapts_batch = False

    def __init__(self, settings: PolicySettings) -> None:
        self._leased_at: dict[str, float] = {}  # by job: since when it has a lease

    def reset(self) -> None:
        self._leased_at = {}

    def decide(self, snapshot: Snapshot) -> Plan:
        now = snapshot.now
        # Slots that this policy has not leased are left to their jobs for as long as a lease.
        since = {job.name: self._leased_at.get(job.name, now) for job in snapshot.jobs if job.allocation}
        held, budget = settle(snapshot, lambda job: job.name in since and 0 <= now - since[job.name] < LEASE_S)
        total, largest, num_jobs = budget.total, largest_nodes(snapshot.nodes), len(snapshot.jobs)
        asking = [job for job in snapshot.jobs if job.name not in held]
        bids = {job.name: Bid.of(job, total, largest, num_jobs) for job in asking}
        asking.sort(key=lambda job: -bids[job.name].rho(bids[job.name].most))  # stable: ties go by submission
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
    def of(cls, job: JobView, total: Mapping[str, int], largest: Mapping[str, int], num_jobs: int) -> Bid:
        """``total``, ``largest``: slots of all nodes, and of the largest node, of each type."""
        usable = [name for name in total if may_use(job, name)]
        most = min(demand(job), max((total[name] for name in usable), default=1))  # no job can have more than there is
        share = min(max(sum(total.values()), 1) / num_jobs, most)
        steps = remaining_steps(job)
        left_s = tuple(
            steps * min((step_s(job, num, largest, name) for name in usable), default=math.inf)
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

    @property
    def most(self) -> int:
        return len(self.left_s)

    def rho(self, num_replicas: int) -> float:
        """If it has so many from now on; with none it waits for a lease and then has all."""
        wait_s = 0.0 if num_replicas else LEASE_S
        return max((self.age_s + wait_s + self.left_s[num_replicas - 1]) / self.ideal_s, 1e-9)


def _auction(
    asking: Sequence[JobView], bids: Mapping[str, Bid], budget: Budget
) -> tuple[dict[str, int], dict[str, str]]:
    """(replicas, type) by job. ``asking`` has the worst ρ first; takes slots from ``budget``."""
    bidders = asking[: math.ceil((1 - FILTER) * len(asking))]
    offered = dict(budget.left)

    @functools.cache
    def log_gain(name: str, count: int) -> float:
        return math.log(bids[name].rho(count) / bids[name].rho(count + 1)) if count < bids[name].most else 0.0

    def gain(job: JobView, count: int, accelerator: str) -> float:
        """Of the product's logarithm."""
        return log_gain(job.name, count)

    shares, types = allot(bidders, budget, gain)
    are_settled = _are_settled(bidders, types, offered)
    rank = {name: number for number, name in enumerate(shares)}
    following = {
        name: _Replay(turns([job for job in bidders if types.get(job.name) == name], shares, name, gain))
        for name in offered
    }
    won: dict[str, int] = {}
    for job in bidders:
        if job.name not in shares:
            continue
        if are_settled:
            changed = _next_in_turn(job, shares, rank, following[types[job.name]])
        else:
            budget.left = dict(offered)
            changed = _without(job, bidders, shares, budget, gain)
        part = math.prod(bids[name].rho(count) / bids[name].rho(shares.get(name, 0)) for name, count in changed)
        count = math.floor(min(part, 1.0) * shares[job.name])
        if count >= job.spec.min_replicas:
            won[job.name] = count
    budget.left = dict(offered)
    for name, count in won.items():
        budget.left[types[name]] -= count
    return _hand_out(asking, budget, won, types)


class _Replay:
    """Goes through the turns of jobs again and again, each time from the first on."""

    def __init__(self, jobs: Iterator[JobView]) -> None:
        self._jobs = jobs
        self._seen: list[JobView] = []

    def __iter__(self) -> Iterator[JobView]:
        for position in itertools.count():
            if position == len(self._seen):
                try:
                    self._seen.append(next(self._jobs))
                except StopIteration:
                    return
            yield self._seen[position]


def _are_settled(bidders: Sequence[JobView], types: Mapping[str, str], offered: Mapping[str, int]) -> bool:
    """Whether every job would have slots of the same type, or none, without any one of the other bidders.

    That holds if no job has a choice of types, and no job is left out that would fit alone.
    """
    for job in bidders:
        could_use = sum(may_use(job, name) and job.spec.min_replicas <= left for name, left in offered.items())
        if could_use > 1 or (could_use == 1 and job.name not in types):
            return False
    return True


Changed = list[tuple[str, int]]
"""Jobs that would have other counts without one of the bidders, in the order of bidders, and these counts."""


def _next_in_turn(job: JobView, shares: Mapping[str, int], rank: Mapping[str, int], following: _Replay) -> Changed:
    """The slots of a job go to the jobs whose turn would have been next."""
    others = (other.name for other in following if other is not job)
    more = Counter(itertools.islice(others, shares[job.name]))
    return [(name, shares[name] + more[name]) for name in sorted(more, key=rank.__getitem__)]


def _without(
    job: JobView, bidders: Sequence[JobView], shares: Mapping[str, int], budget: Budget, gain: Gain
) -> Changed:
    """All is shared out again among the others."""
    others = [other for other in bidders if other is not job]
    counts, _ = allot(others, budget, gain)
    now = [(other.name, counts.get(other.name, 0)) for other in others]
    return [(name, count) for name, count in now if count != shares.get(name, 0)]


def _hand_out(
    asking: Sequence[JobView], budget: Budget, won: Mapping[str, int], types: Mapping[str, str]
) -> tuple[dict[str, int], dict[str, str]]:
    """What the auction left over, worst ρ first, to each job up to what it asked for."""
    counts = dict(won)
    chosen = {name: types[name] for name in won}
    for job in asking:
        least, most = job.spec.min_replicas, demand(job)
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
