"""Shockwave: a market that plans ahead for jobs whose batch sizes change (Zheng et al., NSDI'23).

Jobs keep the replicas they asked for. For a window of T rounds ahead the policy chooses how many of them each of the n
jobs runs, such that

    sum over jobs of w·log(share of its work done by the end of the window) / (n·T)  -  k·(longest time left then, in s)

is largest: the Nash welfare of a market in which all jobs have the same to spend, and the makespan. w is 1 for a job
that is in time and ρ^λ for one that will end later than its fair share would let it, with more for a job that a single
round would end. ρ is the time from submission to the expected end over the time that the whole run would take on one of
as many shares of the cluster as there were jobs. The plan is made again when jobs or nodes come and go, and at the
window's end.

What a round is worth depends on when it comes: batch sizes grow with the noise scale, and speed with them. The noise
scales seen so far, of a job or of earlier ones of its application, give their growth over the share of work done (a
line in the logarithm), and the work left is priced at the goodput of each stretch to come.

Constants are the authors': T = 20, k = 0.001 (the least of theirs), λ = 5, the logarithm as a line between six points.
Their first program, in which every job must end in time, is left out: it has no solution on a busy cluster, and then
they solve this one. ρ is of times since submission; theirs is of the clock's.

Simplifications: that line replaces the paper's regimes and their Bayesian durations. Batch sizes follow goodput,
not the user's own rule. The program is solved for each time left that the window can reach: jobs that are longer get
the rounds they need for it, and the others are dealt a round at a time to the job that gains most per slot, which is
exact but for the last rounds that do not fit. Within the window jobs that need every round left come first, then jobs
with the most weight for the slots they still need, as published; slots that are not planned for go to the jobs with
most left. Accelerator types make no difference to the plan, only to the speeds that it expects.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pollux.model.goodput import GoodputModel, GoodputTables
from pollux.policy.base import Policy, PolicySettings
from pollux.policy.dense import Budget, may_use
from pollux.policy.estimates import largest_nodes, remaining_steps, step_s
from pollux.policy.gangs import demand, gang_plan
from pollux.types import FloatArray, JobView, Plan, Snapshot

_WINDOW = 20  # T: rounds that are planned ahead
_LATE = 5.0  # λ: how steeply the weight of late jobs rises
_ENDING = 100.0  # the same for a late job that one round would end
_MAX_WEIGHT = 1e9  # more would make all other terms vanish in rounding
_MAKESPAN = 1e-3  # k, per second
_BASES = np.array([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])  # shares of work between which the logarithm is a line
_LOGS = np.log([1e-6, *_BASES[1:]])
_STRETCHES = 5  # of the work left, each with its own noise scale; tried: 1, 10
_UNKNOWN_S = 3600.0  # assumed work left of a job of which nothing is known; 600 and 14,400 give the same there
_ROUND_S = 60.0  # assumed length of a round until the second one has shown it: the default interval
_MAX_GROWTH = 10.0  # of the noise scale's logarithm over a run; a line through few points may be much steeper
_MAX_KNOWN = 2048  # applications that are remembered, the latest; bounds memory


@dataclass(frozen=True, slots=True)
class Outlook:
    """How a job will go on, if it runs: shares of its work done after so many seconds."""

    seconds: FloatArray  # (num_stretches + 1,) from 0
    done: FloatArray  # (num_stretches + 1,) up to 1

    @property
    def remaining_s(self) -> float:
        return float(self.seconds[-1])

    def after(self, seconds: FloatArray) -> FloatArray:
        done: FloatArray = np.interp(seconds, self.seconds, self.done)
        return done


@dataclass(slots=True)
class Line:
    """Least squares through points that come one by one and are not kept."""

    num_points: int = 0
    first: float = 0.0  # x
    last: float = 0.0
    _mean_x: float = 0.0
    _mean_y: float = 0.0
    _xx: float = 0.0  # sums of products of distances from the means
    _xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        """A point to the right of all before; others are passed over."""
        if self.num_points and x <= self.last:
            return
        self.num_points += 1
        self.first, self.last = (x if self.num_points == 1 else self.first), x
        from_mean = x - self._mean_x
        self._mean_x += from_mean / self.num_points
        self._mean_y += (y - self._mean_y) / self.num_points
        self._xx += from_mean * (x - self._mean_x)
        self._xy += from_mean * (y - self._mean_y)

    @property
    def slope(self) -> float | None:
        """None from fewer than three points, or too near to each other."""
        return self._xy / self._xx if self.num_points >= 3 and self.last - self.first >= 0.05 else None


class NodeTypes:
    """The accelerator types of a snapshot's nodes, looked up once for all jobs."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._type_of = Budget(snapshot).type_of
        self.largest = largest_nodes(snapshot.nodes)
        self.num_slots = snapshot.num_slots

    def likely_type(self, job: JobView) -> str:
        """The type that a job sits on; else one that it was measured on; else the first that it may use."""
        held = self._type_of(job.allocation)
        if held is not None:
            return held
        usable = [name for name in self.largest if may_use(job, name)] or list(self.largest)[:1]
        return next((name for name in usable if name in job.params), usable[0])


class ShockwavePolicy(Policy):
    name = "shockwave"
    settings_read = frozenset()

    def __init__(self, settings: PolicySettings) -> None:
        self.reset()

    def reset(self) -> None:
        self._tables = GoodputTables()
        self._seen: dict[str, Line] = {}  # by job: log of the noise scale over the share of work done
        self._slopes: dict[str, tuple[int, float]] = {}  # by family: jobs that are over, sum of their slopes
        self._families: dict[str, str] = {}  # of jobs that are not
        self._rounds: dict[str, int] = {}  # by job, still to run in this window
        self._weights: dict[str, float] = {}  # by job, in this window's plan
        self._left_s: dict[str, float] = {}  # by job, work left when it was planned
        self._contention: dict[str, tuple[int, float]] = {}  # by job: decisions seen, sum of jobs per slot at them
        self._rounds_left = 0
        self._round_s = _ROUND_S
        self._last_at: float | None = None
        self._planned_for: object = None

    def decide(self, snapshot: Snapshot) -> Plan:
        if not snapshot.jobs or not snapshot.nodes:
            return Plan(allocations={})
        self._pass_time(snapshot)
        self._learn(snapshot.jobs)
        self._count(snapshot)
        basis = (tuple(job.name for job in snapshot.jobs), snapshot.nodes)
        if basis != self._planned_for or self._rounds_left <= 0:
            self._plan(snapshot)
            self._rounds_left, self._planned_for = _WINDOW, basis
        return gang_plan(snapshot, self._order(snapshot.jobs))

    def _pass_time(self, snapshot: Snapshot) -> None:
        """A round is over: it counts for those that ran."""
        if self._last_at is not None and snapshot.now > self._last_at:
            self._round_s = snapshot.now - self._last_at
            self._rounds_left -= 1
            for job in snapshot.jobs:
                if job.allocation and self._rounds.get(job.name, 0) > 0:
                    self._rounds[job.name] -= 1
        self._last_at = snapshot.now

    def _learn(self, jobs: Sequence[JobView]) -> None:
        """Keep noise scales, and of jobs that are over how they grew."""
        present = {job.name: job.spec.family for job in jobs}
        for name in [name for name in self._seen if name not in present]:
            slope = self._seen.pop(name).slope
            if slope is not None:
                number, total = self._slopes.pop(self._families[name], (0, 0.0))
                self._slopes[self._families[name]] = (number + 1, total + slope)
        while len(self._slopes) > _MAX_KNOWN:
            del self._slopes[next(iter(self._slopes))]
        self._families = present
        for job in jobs:
            done = share_done(job)
            if done is not None and job.noise_scale is not None and job.noise_scale > 0:
                self._seen.setdefault(job.name, Line()).add(done, math.log(job.noise_scale))

    def _growth(self, job: JobView) -> float:
        """Of the logarithm of its noise scale over its whole run."""
        slope = self._seen[job.name].slope if job.name in self._seen else None
        if slope is None:
            number, total = self._slopes.get(job.spec.family, (1, 0.0))
            slope = total / number
        return min(max(slope, 0.0), _MAX_GROWTH)

    def outlooks(self, jobs: Sequence[JobView], cluster: NodeTypes) -> list[Outlook]:
        """What is expected of jobs with the replicas they ask for."""
        ahead = [self._models_ahead(job, cluster) for job in jobs]
        # No job runs with more replicas than there are slots: tables need not be wider.
        counts = [min(demand(job), cluster.num_slots) for job in jobs]
        widths = [count for count, models in zip(counts, ahead, strict=True) for _ in models]
        tables = iter(self._tables.best([model for models in ahead for model in models], widths))
        found = []
        for job, count, models in zip(jobs, counts, ahead, strict=True):
            spans = int(count > cluster.largest[cluster.likely_type(job)])
            goodputs = [float(next(tables)[spans, count]) for _ in models]
            found.append(_outlook(job, cluster, goodputs))
        return found

    def _models_ahead(self, job: JobView, cluster: NodeTypes) -> list[GoodputModel]:
        """For each stretch of the work that is left; none if too little is known."""
        model = GoodputModel.of(job, cluster.likely_type(job))
        if model is None or job.remaining_examples is None:
            return []
        growth = self._growth(job)
        begun = _ends(job)[:-1]
        phis = [model.phi * math.exp(growth * float(start - begun[0])) for start in begun]
        return [GoodputModel(model.params, phi, model.limits, model.factors) for phi in phis]

    def _count(self, snapshot: Snapshot) -> None:
        """How many jobs there are for each slot, for the mean over each job's life."""
        now = max(len(snapshot.jobs) / snapshot.num_slots, 1.0)
        before = self._contention
        self._contention = {}
        for job in snapshot.jobs:
            number, total = before.get(job.name, (0, 0.0))
            self._contention[job.name] = (number + 1, total + now)

    def _plan(self, snapshot: Snapshot) -> None:
        """Rounds of the coming window for each job."""
        jobs = [job for job in snapshot.jobs if not (job.is_fixed and not job.allocation)]
        cluster = NodeTypes(snapshot)
        outlooks = self.outlooks(jobs, cluster)
        ahead = np.linspace(0.0, _WINDOW * self._round_s, _WINDOW + 1)
        contention = max(len(snapshot.jobs) / cluster.num_slots, 1.0)
        gains: dict[str, FloatArray] = {}
        self._left_s, self._weights = {}, {}
        for job, outlook in zip(jobs, outlooks, strict=True):
            number, total = self._contention[job.name]
            fair_s = (job.attained_s + outlook.remaining_s) * total / number
            rho = (job.age_s + outlook.remaining_s * contention) / fair_s
            weight = late_weight(rho, ends_soon=outlook.remaining_s < self._round_s)
            welfare = np.interp(outlook.after(ahead), _BASES, _LOGS)
            gains[job.name] = job.spec.weight * weight * np.diff(welfare) / (max(len(jobs), 1) * _WINDOW)
            self._left_s[job.name], self._weights[job.name] = outlook.remaining_s, job.spec.weight * weight
        demands = {job.name: demand(job) for job in jobs}
        self._rounds = plan_rounds(gains, self._left_s, demands, cluster.num_slots, self._round_s)

    def _order(self, jobs: Sequence[JobView]) -> list[JobView]:
        """The order of jobs this round; ties by submission."""

        def key(job: JobView) -> tuple[bool, bool, float]:
            rounds = self._rounds.get(job.name, 0)
            if rounds == 0:
                return True, True, -self._left_s.get(job.name, 0.0)
            return rounds < self._rounds_left, False, -self._weights[job.name] / (rounds * demand(job))

        return sorted(jobs, key=key)


def late_weight(rho: float, *, ends_soon: bool) -> float:
    """The weight of a job that would end at ``rho`` times its fair time."""
    if rho <= 1:
        return 1.0
    return math.exp(min((_ENDING if ends_soon else _LATE) * math.log(rho), math.log(_MAX_WEIGHT)))


def plan_rounds(
    gains: Mapping[str, FloatArray],
    left_s: Mapping[str, float],
    demands: Mapping[str, int],
    num_slots: int,
    round_s: float,
) -> dict[str, int]:
    """Rounds by job in the window that make welfare less the weighted longest time left largest.

    ``gains``: by job what each further round adds to the welfare; ``left_s``: the time each has left. What is gained is
    concave in the longest time that may be left, so that the search ends where it falls.
    """
    window = max((len(mine) for mine in gains.values()), default=0)
    left_s = {name: left for name, left in left_s.items() if demands[name] <= num_slots}  # others cannot run
    longest_s = max(left_s.values(), default=0.0)
    best: tuple[float, dict[str, int]] | None = None
    for shorter in range(window, -1, -1):  # by how many rounds the longest time left falls
        target_s = longest_s - shorter * round_s
        needed = {name: min(max(math.ceil((left - target_s) / round_s), 0), window) for name, left in left_s.items()}
        if sum(demands[name] * count for name, count in needed.items()) > num_slots * window:
            continue
        rounds = deal(gains, demands, num_slots, needed)
        after_s = max((left - rounds[name] * round_s for name, left in left_s.items()), default=0.0)
        worth = sum(float(gains[name][:count].sum()) for name, count in rounds.items())
        worth -= _MAKESPAN * max(after_s, 0.0)
        if best is not None and worth <= best[0]:
            break
        best = (worth, rounds)
    return best[1] if best is not None else {}


def deal(
    gains: Mapping[str, FloatArray], demands: Mapping[str, int], num_slots: int, needed: Mapping[str, int]
) -> dict[str, int]:
    """Rounds by job: those it needs, then one at a time to the job that gains most per slot, until all slots are used.

    ``gains``: by job what each further round brings, falling. A job that needs more slots than there are gets none.
    """
    window = max((len(mine) for mine in gains.values()), default=0)
    rounds = {name: needed.get(name, 0) if demands[name] <= num_slots else 0 for name in gains}
    left = num_slots * window - sum(demands[name] * count for name, count in rounds.items())
    queue: list[tuple[float, int, str]] = []

    def offer(place: int, name: str) -> None:
        if rounds[name] < len(gains[name]):
            heapq.heappush(queue, (-float(gains[name][rounds[name]]) / demands[name], place, name))

    for place, name in enumerate(gains):
        offer(place, name)
    while queue:
        gain, place, name = heapq.heappop(queue)
        if gain >= 0 or demands[name] > min(left, num_slots):
            continue
        left -= demands[name]
        rounds[name] += 1
        offer(place, name)
    return rounds


def share_done(job: JobView) -> float | None:
    """Of the job's work; None if that is not known."""
    if job.done_examples is None or job.remaining_examples is None:
        return None
    return job.done_examples / max(job.done_examples + job.remaining_examples, 1e-9)


def _ends(job: JobView) -> FloatArray:
    """(_STRETCHES + 1,) shares of its work between which the stretches to come lie, from what is done on."""
    ends: FloatArray = np.linspace(share_done(job) or 0.0, 1.0, _STRETCHES + 1)
    return ends


def _outlook(job: JobView, cluster: NodeTypes, goodputs: Sequence[float]) -> Outlook:
    """``goodputs``: in each stretch; none if that is not known."""
    if not goodputs or job.remaining_examples is None:
        left_s = step_s(job, demand(job), cluster.largest, cluster.likely_type(job)) * remaining_steps(job)
        if not math.isfinite(left_s):
            left_s = max(job.attained_s, _UNKNOWN_S)
        return Outlook(np.array([0.0, max(left_s, 1.0)]), np.array([share_done(job) or 0.0, 1.0]))
    examples = job.remaining_examples / len(goodputs)
    took_s = [examples / goodput if goodput > 0 else _UNKNOWN_S for goodput in goodputs]
    seconds = np.cumsum([0.0, *took_s])
    seconds[-1] = max(seconds[-1], 1.0)
    return Outlook(np.maximum.accumulate(seconds), _ends(job))
