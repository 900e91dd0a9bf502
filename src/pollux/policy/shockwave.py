"""Shockwave: a market that plans ahead for jobs whose batch sizes change (Zheng et al., NSDI'23).

Jobs keep the replicas they asked for. For a window of rounds ahead the policy chooses how many of them each job runs,
such that the sum over jobs of

    (expected ρ)^k · log(share of its work done by the end of the window)

is largest. That is the Nash welfare of a market in which all jobs have the same to spend, with a weight that lifts jobs
about to end later than their fair share would let them. With weight λ comes the makespan that the window leaves:
rounds of jobs that will run longest count more. ρ is the time from submission to the expected end over the time that
the whole run would take on one of as many shares of the cluster as there are jobs. The plan is made again when jobs or
nodes come and go, and at the window's end.

What a round is worth depends on when it comes: batch sizes grow with the noise scale, and speed with them. The noise
scales seen so far, of a job or of earlier ones of its application, give their growth over the share of work done (a
line in the logarithm), and the work left is priced at the goodput of each stretch to come.

Simplifications: that line replaces the paper's regimes and their Bayesian durations. Batch sizes follow goodput,
not the user's own rule. The program is solved greedily, a round at a time to the job that gains most per slot, which
is exact but for the last rounds that do not fit. Only how many rounds a job runs matters to the market, so they are
dealt such that jobs run without a break and end early: first jobs that need every round left, then jobs that run
already, then those that need fewest; slots that are not planned for go to the others in this order. Accelerator
types make no difference to the plan, only to the speeds that it expects.
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

# Chosen by hand. On the OSDI'21 workloads 6 and 1 other values move average JCTs by up to 6 % for one workload, mostly
# the other way for the second: no value is better on both. Longer windows have fewer restarts.
_WINDOW = 20  # rounds that are planned ahead; tried: 10, 40
_FAIRNESS = 5.0  # k; tried: 1, 10
_MAKESPAN = 1e-3  # λ; tried: 0, 0.01
_STRETCHES = 5  # of the work left, each with its own noise scale; tried: 1, 10
_UNKNOWN_S = 3600.0  # assumed work left of a job of which nothing is known; 600 and 14,400 give the same there
_ROUND_S = 60.0  # assumed length of a round until the second one has shown it: the default interval
_LEAST_DONE = 1e-3  # share of work that counts as done at the least: the logarithm of 0 is -inf
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

    def __init__(self, settings: PolicySettings) -> None:
        self.reset()

    def reset(self) -> None:
        self._tables = GoodputTables()
        self._seen: dict[str, Line] = {}  # by job: log of the noise scale over the share of work done
        self._slopes: dict[str, tuple[int, float]] = {}  # by application: jobs that are over, sum of their slopes
        self._applications: dict[str, str] = {}  # of jobs that are not
        self._rounds: dict[str, int] = {}  # by job, still to run in this window
        self._rounds_left = 0
        self._round_s = _ROUND_S
        self._last_at: float | None = None
        self._planned_for: object = None

    def decide(self, snapshot: Snapshot) -> Plan:
        if not snapshot.jobs or not snapshot.nodes:
            return Plan(allocations={})
        self._pass_time(snapshot)
        self._learn(snapshot.jobs)
        basis = (tuple(job.name for job in snapshot.jobs), snapshot.nodes)
        if basis != self._planned_for or self._rounds_left <= 0:
            self._rounds = self._plan(snapshot)
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
        present = {job.name: job.spec.application for job in jobs}
        for name in [name for name in self._seen if name not in present]:
            slope = self._seen.pop(name).slope
            if slope is not None:
                number, total = self._slopes.pop(self._applications[name], (0, 0.0))
                self._slopes[self._applications[name]] = (number + 1, total + slope)
        while len(self._slopes) > _MAX_KNOWN:
            del self._slopes[next(iter(self._slopes))]
        self._applications = present
        for job in jobs:
            done = share_done(job)
            if done is not None and job.noise_scale is not None and job.noise_scale > 0:
                self._seen.setdefault(job.name, Line()).add(done, math.log(job.noise_scale))

    def _growth(self, job: JobView) -> float:
        """Of the logarithm of its noise scale over its whole run."""
        slope = self._seen[job.name].slope if job.name in self._seen else None
        if slope is None:
            number, total = self._slopes.get(job.spec.application, (1, 0.0))
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

    def _plan(self, snapshot: Snapshot) -> dict[str, int]:
        """Rounds of the coming window for each job."""
        jobs = [job for job in snapshot.jobs if not (job.is_fixed and not job.allocation)]
        cluster = NodeTypes(snapshot)
        outlooks = self.outlooks(jobs, cluster)
        longest = max((outlook.remaining_s for outlook in outlooks), default=1.0)
        ahead = np.linspace(0.0, _WINDOW * self._round_s, _WINDOW + 1)
        gains = {}
        for job, outlook in zip(jobs, outlooks, strict=True):
            whole_s = job.attained_s + outlook.remaining_s
            contention = max(demand(job) * len(jobs) / cluster.num_slots, 1.0)
            rho = (job.age_s + outlook.remaining_s * contention) / (whole_s * contention)
            welfare = np.log(outlook.after(ahead) + _LEAST_DONE)
            shorter = np.minimum(ahead, outlook.remaining_s) / longest * (outlook.remaining_s / longest)
            worth = job.spec.weight * rho**_FAIRNESS * welfare / len(jobs) + _MAKESPAN * shorter
            gains[job.name] = np.diff(worth) / demand(job)
        return deal(gains, {job.name: demand(job) for job in jobs}, cluster.num_slots)

    def _order(self, jobs: Sequence[JobView]) -> list[JobView]:
        """The order of jobs this round; ties by submission."""

        def key(job: JobView) -> tuple[bool, bool, bool, int]:
            rounds = self._rounds.get(job.name, 0)
            return rounds < self._rounds_left, rounds == 0 or not job.allocation, rounds == 0, rounds

        return sorted(jobs, key=key)


def deal(gains: Mapping[str, FloatArray], demands: Mapping[str, int], num_slots: int) -> dict[str, int]:
    """Rounds by job: one at a time to the job that gains most per slot, until the window's slots are used up.

    ``gains``: by job what each further round brings, falling.
    """
    left = num_slots * max((len(mine) for mine in gains.values()), default=0)
    rounds = dict.fromkeys(gains, 0)
    queue = [(-float(mine[0]), place, name) for place, (name, mine) in enumerate(gains.items()) if len(mine)]
    heapq.heapify(queue)
    while queue:
        gain, place, name = heapq.heappop(queue)
        if gain >= 0 or demands[name] > min(left, num_slots):
            continue
        left -= demands[name]
        rounds[name] += 1
        if rounds[name] < len(gains[name]):
            heapq.heappush(queue, (-float(gains[name][rounds[name]]), place, name))
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
