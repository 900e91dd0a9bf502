"""Deadlines around any policy: jobs that were promised one get at least the share that meets it.

The planner (:mod:`pollux.scheduler.planner`) calls :meth:`Deadlines.decide`. The policy is asked with the minimum
shares of promised jobs as their least replicas, and divides the rest as it does without deadlines. If it gives one of
them less all the same, promised jobs get their share and the others keep what is left in proportion to what the policy
gave them: they shrink before they stop. Deadlines that are past or cannot be met any more count for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pollux.model.goodput import GoodputModel, best_batch
from pollux.policy.deadlines import DeadlineJob, Promises, Shares, can_admit, earliest_deadline, planned_end
from pollux.policy.dense import Budget, may_use
from pollux.policy.estimates import largest_nodes, remaining_steps, step_s
from pollux.policy.simulated import oracle_of
from pollux.scheduler.deadline_shares import is_enough, with_floors, with_shares
from pollux.scheduler.record import JobRecord
from pollux.types import BatchLimits, JobView, Plan, Snapshot

_RESIZE_S = 30.0  # a change of a job's share, until one was seen

Ask = Callable[[Snapshot], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineStanding:
    """How a job stands to its deadline, as of the last round."""

    deadline_at: float
    is_promised: bool
    num_needed: int  # replicas now
    ends_at: float | None  # with no more than it needs; None: nothing is reserved for it
    best_at: float | None  # when it could be through, with all slots that it can use; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer to a deadline: whether it can be met, and what that takes."""

    is_possible: bool | None  # None: nothing is known of the job's speed or length yet
    best_at: float | None = None  # the earliest deadline that could be promised
    num_needed: int = 0  # replicas now, for the deadline that was asked for, or else the earliest
    num_left: int = 0  # slots for all jobs without a promise meanwhile
    num_lost: int = 0  # of those that they hold, which they would have to give up


class Deadlines:
    """One for a scheduler. Unless it ``is_active``, deadlines count for nothing."""

    def __init__(self, *, is_active: bool = True) -> None:
        self._is_active, self._promises = is_active, Promises()
        self._lengths: dict[str, tuple[float, BatchLimits]] = {}  # by family: of its last job, and its batches
        self.standings: Mapping[str, DeadlineStanding] = {}  # by job, as of the last round

    def learn(self, record: JobRecord) -> None:
        """How long jobs of this application are."""
        left, progress, batch = record.remaining_examples, record.progress, record.spec.batch
        if record.spec.family and batch is not None and left and progress is not None and progress < 1:
            self._lengths[record.spec.family] = (left / (1 - progress), batch)

    def prepare(self, record: JobRecord) -> None:
        """Let a job with a deadline be as long as the last one of its application, until it tells its own length."""
        known = self._lengths.get(record.spec.family)
        if record.spec.deadline_at is not None and record.remaining_examples is None and known is not None:
            record.remaining_examples, batch = known
            record.spec = replace(record.spec, batch=record.spec.batch or batch)

    def decide(self, snapshot: Snapshot, ask: Ask) -> Plan:
        """A plan that keeps promises, by asking the policy once."""
        due = [job for job in snapshot.jobs if (job.spec.deadline_at or 0.0) > snapshot.now] if self._is_active else []
        if not due:
            self.standings = {}
            return ask(snapshot)
        jobs = [deadline_job(job, snapshot) for job in due]
        shares = self._promises.shares(snapshot.now, snapshot.num_slots, jobs)
        self.standings = {
            job.name: self._standing(job, shares, snapshot.now + min(known.finish_s, default=math.inf))
            for job, known in zip(due, jobs, strict=True)
        }
        floors = {name: count for name, count in shares.now.items() if count}
        for job, known in zip(due, jobs, strict=True):
            if not known.is_known and not job.has_started:  # it has to run before anything can be said of it
                floors[job.name] = job.spec.min_replicas
        plan = ask(with_floors(snapshot, floors))
        if is_enough(plan, floors):
            return plan
        held = Plan(allocations={job.name: job.allocation for job in snapshot.jobs if job.allocation})
        num_held = sum(allocation.num_slots for allocation in held.allocations.values())
        if num_held == snapshot.num_slots and is_enough(held, floors):
            # The policy would take back what deadlines were given before: each resize of that kind costs both sides.
            return replace(plan, allocations=held.allocations)
        return with_shares(snapshot, plan, floors)

    def assess(self, snapshot: Snapshot, job: JobView) -> Verdict:
        """Whether a job that is not in the snapshot could be promised its deadline now."""
        held = [one for one in snapshot.jobs if self._promises.has(one.name)]
        promised = [deadline_job(one, snapshot) for one in held]
        wanted = deadline_job(job, snapshot)
        now, num_slots = snapshot.now, snapshot.num_slots
        if not wanted.is_known:
            return Verdict(is_possible=None)
        best_at = earliest_deadline(now, num_slots, promised, wanted)
        spare_s = (job.spec.deadline_at or 0.0) - wanted.deadline_at
        is_possible = can_admit(now, num_slots, promised, wanted)
        if not is_possible and math.isfinite(best_at):
            wanted = replace(wanted, deadline_at=best_at)
        shares = Promises().shares(now, num_slots, [*promised, wanted])
        num_left = num_slots - sum(shares.now.values())
        others = (one.allocation.num_slots for one in snapshot.jobs if not self._promises.has(one.name))
        return Verdict(
            is_possible=is_possible,
            best_at=best_at + spare_s if math.isfinite(best_at) else None,
            num_needed=shares.now.get(job.name, 0),
            num_left=num_left,
            num_lost=max(sum(others) - num_left, 0),
        )

    def _standing(self, job: JobView, shares: Shares, best_at: float) -> DeadlineStanding:
        end = shares.ends_at.get(job.name, math.inf)
        return DeadlineStanding(
            deadline_at=job.spec.deadline_at or 0.0,
            is_promised=self._promises.has(job.name) and job.name not in shares.missed,
            num_needed=shares.now.get(job.name, 0) if self._promises.has(job.name) else 0,
            ends_at=end if math.isfinite(end) else None,
            best_at=best_at if math.isfinite(best_at) else None,
        )


def deadline_job(job: JobView, snapshot: Snapshot) -> DeadlineJob:
    """What is known of a job's speed and length, on the type that it holds or the fastest it may use."""
    deadline_at = job.spec.deadline_at or 0.0
    planned_at = planned_end(deadline_at, snapshot.now)
    largest = largest_nodes(snapshot.nodes)
    slots: dict[str, int] = {}
    for node in snapshot.nodes:
        slots[node.accelerator] = slots.get(node.accelerator, 0) + node.num_slots
    types = [kind for kind in slots if may_use(job, kind)]
    held = Budget(snapshot).type_of(job.allocation)
    best: DeadlineJob | None = None
    for kind in [held] if held in types else types:
        assert kind is not None
        most = min(job.spec.max_replicas, slots[kind])
        if job.spec.batch is not None:
            most = min(most, max(job.spec.batch.max_replicas, job.spec.min_replicas))
        if most < job.spec.min_replicas:
            continue
        found = DeadlineJob.of(
            job.name,
            planned_at,
            (job.spec.min_replicas, most),
            lambda count, kind=kind: finish_s(job, count, largest, kind),  # type: ignore[misc]
            deadline_at - planned_at,
            _RESIZE_S if job.resize_s is None else job.resize_s,
        )
        if best is None or min(found.finish_s, default=math.inf) < min(best.finish_s, default=math.inf):
            best = found
    return best or DeadlineJob(job.name, planned_at, (), ())


def finish_s(job: JobView, count: int, largest: Mapping[str, int], accelerator: str) -> float:
    """Seconds to do all that is left with so many replicas; infinite if speed or length are not known."""
    if oracle_of(job) is None and (model := GoodputModel.of(job, accelerator)) is not None:
        if job.remaining_examples is None:
            return math.inf
        num_nodes = -(-count // max(largest.get(accelerator, 1), 1))
        _, goodput = best_batch(model.params, model.phi, model.limits, num_nodes, count)
        return job.remaining_examples / goodput if goodput > 0 else math.inf
    steps, time_s = remaining_steps(job), step_s(job, count, largest, accelerator)
    return steps * time_s if math.isfinite(steps) and math.isfinite(time_s) else math.inf
