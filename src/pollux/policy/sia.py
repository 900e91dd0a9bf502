"""Sia: an integer program over configurations and accelerator types (Jayaram Subramanya et al., SOSP'23).

A configuration is a type and a number of replicas: 1, 2, 4, ... on one node or whole nodes
(:mod:`pollux.policy.configurations`). For every job, G is its goodput in each configuration over the least of them.
With at most one configuration for a job and no more slots than a type has, a round minimises

    the sum over jobs of (r·G)^p for what a job is given, and of λ for a job that is given nothing,

with p = -0.5 and λ = 1.1, as in the published artifact; r = max(age - resizes·δ, 0)/(age + δ) for a change of what a
job holds, 1 otherwise and for jobs younger than δ. A job never measured counts as equally fast on one replica of
every type; how many replicas one may ask for is a setting of the cluster (:mod:`pollux.policy.exploration`; twice those
it was measured with in the paper). On a type where a job has not run, or
on one replica alone, its goodput is that on a type where it has run on more, times the ratio of speeds on one replica.
Sia profiles that when a job arrives: in a simulation the oracle knows it, elsewhere a guessed model
(``JobView.guessed``) does, and without either the type is worth the least goodput, on the least replicas.

As in the artifact, powers are rounded to two digits, so that jobs do not move for less. Simplifications: configurations
that are no better than a smaller one of the same type are left out of the program; hybrid-parallel jobs are not treated
apart; a job in another shape than configurations have (after the loss of a node, say) must change. A job that has been
stopped is not charged for starting again, as published, so that what follows a plan is not always to stay: within one
instant it is, by the policy's memory of it.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pollux.model.goodput import GoodputModel, GoodputTables
from pollux.policy.base import Policy, PolicySettings
from pollux.policy.configurations import Layout, Placer
from pollux.policy.dense import may_use
from pollux.policy.exploration import explored_replicas
from pollux.policy.gangs import demand
from pollux.policy.program import NOTHING, solve_program
from pollux.policy.round import resize_cost_s
from pollux.policy.simulated import oracle_of
from pollux.types import Allocation, FloatArray, JobView, Plan, Snapshot

_P = -0.5  # as in the artifact
_IDLE_COST = 1.1  # λ, as in the artifact: more than the worst configuration costs, so that no job waits for nothing
_DIGITS = 2  # to which powers are rounded, as in the artifact
_STAYING = 1e-6  # breaks ties in favour of what a job holds; far below the rounded powers
_WORTH_IT = 1e-9  # relative; a plan that gains less over staying is rounding


@dataclass(frozen=True, slots=True)
class Choice:
    """One configuration of one job."""

    accelerator: str
    count: int
    gain: float  # G
    is_held: bool = False


class SiaPolicy(Policy):
    name = "sia"
    settings_read = frozenset({"charges_measured", "exploration", "first_replicas", "resize_s"})

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self.reset()

    def reset(self) -> None:
        self._tables = GoodputTables()
        self._known: dict[tuple[str, str], tuple[GoodputModel, FloatArray]] = {}  # by job and type, as of last round
        self._decided: tuple[Snapshot, Plan] | None = None  # the last round

    def decide(self, snapshot: Snapshot) -> Plan:
        if self._decided is None or not _is_applied(*self._decided, snapshot):
            self._decided = (snapshot, self._plan(snapshot))
        return self._decided[1]

    def _plan(self, snapshot: Snapshot) -> Plan:
        fixed = {job.name: job.allocation for job in snapshot.jobs if job.is_fixed}
        jobs = [job for job in snapshot.jobs if job.name not in fixed]
        layouts = Layout.of(snapshot.nodes, fixed.values())
        names = {job.name for job in jobs}
        self._known = {key: value for key, value in self._known.items() if key[0] in names}
        num_free = sum(sum(layout.free.values()) for layout in layouts.values())
        options = [self._options(job, layouts) if job.spec.min_replicas <= num_free else [] for job in jobs]
        values = [option_values(job, mine, self._settings) for job, mine in zip(jobs, options, strict=True)]
        held = {job.name: job.allocation for job in jobs}
        wanted: dict[str, dict[str, Choice]] = {accelerator: {} for accelerator in layouts}
        for job, option in zip(jobs, choose(options, values, layouts), strict=True):
            if option is not None:
                wanted[option.accelerator][job.name] = option
        allocations: dict[str, Allocation] = dict(fixed)
        for accelerator, given in wanted.items():
            if all(option.is_held for option in given.values()):
                # Jobs that stay sit beside each other already, even where the blocks reserved for them would not fit.
                allocations |= {name: held[name] for name in given}
            else:
                counts = {name: option.count for name, option in given.items()}
                allocations |= Placer(layouts[accelerator], held).place(counts)
        return Plan(allocations=allocations)

    def _options(self, job: JobView, layouts: Mapping[str, Layout]) -> list[Choice]:
        """All configurations that the job may be given, what it holds among them."""
        measured = {
            accelerator: model
            for accelerator in job.params
            if accelerator not in job.guessed and (model := _model_of(job, accelerator)) is not None
        }
        found: list[Choice] = []  # with goodputs
        unknown: list[Choice] = []
        least = np.inf  # of what it may ask for: it must not change when the job gives up something that it may not
        for accelerator, layout in layouts.items():
            if not may_use(job, accelerator):
                continue
            asked = allowed_counts(job, layout, self._settings)
            held = job.allocation.num_replicas if _is_kept(job, layout, asked) else None
            counts = sorted({*asked, *([] if held is None else [held])})
            goodputs = self._goodputs(job, accelerator, counts, layouts, measured)
            if goodputs is None:
                # Not known: the least of this type, or what the job holds anyway.
                counts = sorted({*asked[:1], *([] if held is None else [held])})
                unknown += [Choice(accelerator, count, 1.0, count == held) for count in counts]
                continue
            for count, goodput in zip(counts, goodputs, strict=True):
                if goodput > 0:
                    found.append(Choice(accelerator, count, goodput, count == held))
                    least = min(least, goodput) if count in asked else least
        if not np.isfinite(least):
            least = min((option.gain for option in found), default=1.0)
        return [*(replace(option, gain=option.gain / least) for option in found), *unknown]

    def _goodputs(
        self,
        job: JobView,
        accelerator: str,
        counts: Sequence[int],
        layouts: Mapping[str, Layout],
        measured: Mapping[str, GoodputModel],
    ) -> list[float] | None:
        """Goodput of each count on a type, None if it is not known."""
        source, ratio = accelerator, 1.0
        model = measured.get(accelerator)
        oracle = oracle_of(job)
        if model is None and measured and oracle is not None:
            source, model = next(iter(measured.items()))
            ratio = oracle.iteration_s(1, source) / oracle.iteration_s(1, accelerator)
        elif model is None:
            model = _model_of(job, accelerator)
        if model is None or not counts:
            return None
        table = self._table(job.name, source, model, max(counts))
        layout = layouts.get(source, layouts[accelerator])
        return [ratio * float(table[int(layout.spans(count)), count]) for count in counts]

    def _table(self, job: str, accelerator: str, model: GoodputModel, most: int) -> FloatArray:
        """(2, >= most + 1) goodputs; computed again only if the model has changed."""
        known = self._known.get((job, accelerator))
        if known is None or known[0] != model or known[1].shape[1] <= most:
            known = (model, self._tables.best([model], [most])[0])
            self._known[job, accelerator] = known
        return known[1]


def _model_of(job: JobView, accelerator: str) -> GoodputModel | None:
    """By the noise scale that is certain: no job takes slots on a guess."""
    return GoodputModel.of(job, accelerator, phi=job.noise_scale_low)


def _is_applied(before: Snapshot, plan: Plan, now: Snapshot) -> bool:
    """Whether no time has passed since, every job holds what was planned, and nothing else has changed."""
    return (
        (before.now, before.nodes, len(before.jobs)) == (now.now, now.nodes, len(now.jobs))
        and all(job.allocation == plan.allocation_of(job.name) for job in now.jobs)
        and all(
            replace(was, allocation=job.allocation, num_resizes=job.num_resizes) == job
            for was, job in zip(before.jobs, now.jobs, strict=True)
        )
    )


def allowed_counts(job: JobView, layout: Layout, settings: PolicySettings) -> list[int]:
    """Replica counts of a type that the job may ask for; one that no configuration suits has its least count."""
    limits, low = job.spec.batch, job.spec.min_replicas
    if limits is None:  # a command that does not adapt: what was asked for
        low = high = demand(job)
    else:
        high = min(job.spec.max_replicas, limits.max_replicas, explored_replicas(job, settings))
    first, end = bisect.bisect_left(layout.counts, low), bisect.bisect_right(layout.counts, max(low, high))
    return list(layout.counts[first:end]) or [low]


def _is_kept(job: JobView, layout: Layout, asked: Sequence[int]) -> bool:
    """Whether what the job holds is a configuration of this type."""
    count = job.allocation.num_replicas
    is_within = job.spec.min_replicas <= count <= job.spec.max_replicas
    is_known = count in asked or (is_within and count in layout.counts)
    return bool(job.allocation) and is_known and layout.is_regular(job.allocation)


def option_values(job: JobView, options: Sequence[Choice], settings: PolicySettings) -> FloatArray:
    """(num_options,): how much better than idling each is, by the job's weight."""
    is_held = np.array([option.is_held for option in options], dtype=bool)
    # A job that holds nothing, or cannot keep it, has no choice but to move.
    factor = move_factor(job, settings) if is_held.any() else 1.0
    gains = np.array([option.gain for option in options]) * np.where(is_held, 1.0, factor)
    with np.errstate(divide="ignore"):
        costs = np.round(gains**_P, _DIGITS)
    values: FloatArray = job.spec.weight * (_IDLE_COST - costs + _STAYING * is_held)
    return values


def move_factor(job: JobView, settings: PolicySettings) -> float:
    """r: what a change multiplies the goodput with."""
    resize_s = resize_cost_s(job, settings)
    if job.age_s < resize_s:
        return 1.0
    return max(job.age_s - (job.num_resizes or 0) * resize_s, 0.0) / max(job.age_s + resize_s, 1e-9)


def choose(
    options: Sequence[Sequence[Choice]], values: Sequence[FloatArray], layouts: Mapping[str, Layout]
) -> list[Choice | None]:
    """Which option each job is given (None: none), such that the sum of values is largest and everything fits.

    Where nothing is worth more than to stay, every job keeps what it holds, and that is all that is known to fit: a job
    of three replicas holds three slots, and would be given a block of four.
    """
    configurations = sorted({(option.accelerator, option.count) for mine in options for option in mine})
    column = {configuration: number for number, configuration in enumerate(configurations)}
    first_row, num_rows = {}, 0
    for accelerator, layout in layouts.items():
        first_row[accelerator] = num_rows
        num_rows += len(layout.units)
    capacity = np.array([blocks for layout in layouts.values() for blocks in layout.blocks], dtype=np.int64)
    needs = np.zeros((len(configurations), num_rows), dtype=np.int64)
    for number, (accelerator, count) in enumerate(configurations):
        needed, row = layouts[accelerator].needs(count), first_row[accelerator]
        needs[number, row : row + len(needed)] = needed
    table = np.full((len(options), len(configurations)), -np.inf)
    by_column: list[dict[int, Choice]] = []
    for job, (mine, worth) in enumerate(zip(options, values, strict=True)):
        by_column.append({column[option.accelerator, option.count]: option for option in mine})
        for index in _worthwhile(mine, worth):
            table[job, column[mine[index].accelerator, mine[index].count]] = worth[index]

    chosen = solve_program(table, needs, capacity)
    gained = sum(float(table[job, pick]) for job, pick in enumerate(chosen.tolist()) if pick != NOTHING)
    kept = [
        next(((option, float(value)) for option, value in zip(mine, worth, strict=True) if option.is_held), (None, 0.0))
        for mine, worth in zip(options, values, strict=True)
    ]
    if gained <= sum(value for _, value in kept) * (1 + _WORTH_IT):
        return [option for option, _ in kept]
    return [by_column[job].get(pick) for job, pick in enumerate(chosen.tolist())]


def _worthwhile(options: Sequence[Choice], values: FloatArray) -> list[int]:
    """Options that are better than idling and than any with fewer replicas of the same type."""
    kept: list[int] = []
    best: dict[str, float] = {}
    for index in sorted(range(len(options)), key=lambda index: options[index].count):
        accelerator, value = options[index].accelerator, float(values[index])
        if value > best.get(accelerator, 0.0):
            best[accelerator] = value
            kept.append(index)
    return kept
