"""Limits, guarantees and priorities around any policy: what teams are entitled to becomes shares and caps of jobs.

The planner (:mod:`pollux.scheduler.planner`) calls :meth:`Quotas.decide`. The policy is asked first. Where its plan
breaks a limit, leaves a guarantee unmet, or lets a job wait for one of lower priority, jobs that have too much are
capped and the policy is asked again, so that it divides what they give back. A cap shrinks jobs to their minimum first;
only where that is not enough, jobs stop: those of least priority, then the youngest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pollux.policy.dense import may_use
from pollux.policy.gangs import demand
from pollux.scheduler.caps import Demand, allot, first_of
from pollux.scheduler.promises import Promises, limit_in_words
from pollux.scheduler.shares import ANY_TYPE, Entitlements, Quota, Standing
from pollux.scheduler.usage import Usage, with_shares
from pollux.types import NO_ALLOCATION, UNBOUNDED_REPLICAS, Allocation, JobView, Plan, Snapshot

_MAX_PASSES = 8

NO_PLAN = Plan(allocations={})

Ask = Callable[[Snapshot], Plan]


class Quotas:
    """One for a scheduler. ``entitlements`` is asked in every round: an operator may have changed something."""

    def __init__(self, entitlements: Callable[[], Entitlements], usage: Usage | None = None) -> None:
        """``usage``: another one's, which is only read."""
        self._entitlements = entitlements
        self.usage = Usage() if usage is None else usage
        self.reasons: Mapping[str, str] = {}  # by job: why it is held back, as of the last round
        self.standings: tuple[Standing, ...] = ()  # as of the last round

    def decide(self, snapshot: Snapshot, ask: Ask) -> Plan:
        """A plan that keeps limits, guarantees and priorities, by asking the policy one or more times."""
        entitled = self._entitlements()
        if not entitled.teams and not any(job.spec.priority for job in snapshot.jobs):
            self.reasons, self.standings = {}, ()
            return ask(snapshot)
        round_ = _Round(snapshot, entitled, self.usage)
        plan = round_.run(ask)
        self.reasons = {job: reason for job, reason in round_.all_reasons().items() if round_.is_short(job, plan)}
        self.standings = round_.standings(plan, {(one.team, one.user): one for one in self.standings})
        return _noted(plan, self.reasons)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """How a job that must not be moved may start: on these types, with no more slots than that."""

    types: frozenset[str]
    most: int = UNBOUNDED_REPLICAS
    reason: str = ""


_FREE = _Bound(types=frozenset())


@dataclass(frozen=True, slots=True)
class _Group:
    """Jobs that share a quota: those of a team, or of a user."""

    title: str  # as in "team vision"
    quota: Quota
    jobs: tuple[JobView, ...]


class _Round:
    """One decision: the jobs by team and user, and the caps that were found so far."""

    def __init__(self, snapshot: Snapshot, entitled: Entitlements, usage: Usage) -> None:
        self._entitled = entitled
        self._type_of = {node.name: node.accelerator for node in snapshot.nodes}
        self._slots: dict[str, int] = {}
        for node in snapshot.nodes:
            self._slots[node.accelerator] = self._slots.get(node.accelerator, 0) + node.num_slots
        self._snapshot = replace(snapshot, jobs=with_shares(snapshot.jobs, entitled, usage))
        self._position = {job.name: place for place, job in enumerate(snapshot.jobs)}
        self._teams = self._grouped(lambda job: entitled.team_of(job.spec.owner), self._team_quota, "team")
        self._users = self._grouped(lambda job: job.spec.owner, self._user_quota, "user")
        self._caps: dict[str, int] = {}
        self._bounds: dict[str, _Bound] = {}  # of waiting jobs that must not be moved; found anew for every plan
        self._gave: dict[str, int] = {}  # by job that slots were taken from, what it had before
        self._declined: dict[str, int] = {}  # by claimant: more than so many slots it has no use for
        self._preferred: tuple[str, dict[str, int], dict[str, str]] | None = None  # last: a job; caps, reasons before
        self._placed: dict[str, Allocation] = {}  # jobs that the policy alone would have let wait
        self._unplaceable: set[str] = set()  # jobs that slots were freed for, and that the policy could not place
        self.reasons: dict[str, str] = {}

    def _team_quota(self, name: str) -> Quota:
        return self._entitled.teams.get(name, Quota())

    def _user_quota(self, name: str) -> Quota:
        member = self._entitled.users.get(name)
        return Quota() if member is None else member.quota

    def _grouped(self, key: Callable[[JobView], str], quota: Callable[[str], Quota], kind: str) -> dict[str, _Group]:
        found: dict[str, list[JobView]] = {}
        for job in self._snapshot.jobs:
            found.setdefault(key(job), []).append(job)
        return {name: _Group(f"{kind} {name}", quota(name), tuple(jobs)) for name, jobs in found.items()}

    # Passes -----------------------------------------------------------------------------------

    def run(self, ask: Ask) -> Plan:
        self._bind(NO_PLAN)
        plan = ask(self._capped())
        for _ in range(_MAX_PASSES + len(self._teams) + len(self._users)):
            if not self._tighten(plan):
                break
            plan = ask(self._capped())
        plan = self._filled(plan, ask)
        if self._return_idle(plan):
            plan = self._filled(ask(self._capped()), ask)
        return self._unbroken(plan)

    def _return_idle(self, plan: Plan) -> bool:
        """Raise caps of jobs that gave slots which the claimant then did not use; whether there were any."""
        free = {each: self._free(plan, [each]) for each in self._slots}
        is_raised = False
        for job in self._snapshot.jobs:
            kind = self._type(plan, job)
            if kind is None or job.name not in self._gave:
                continue
            back = min(free[kind], self._gave[job.name] - self._caps[job.name])
            if back > 0:
                self._caps[job.name] += back
                free[kind] -= back
                is_raised = True
                if self._caps[job.name] == self._gave[job.name]:
                    self.reasons.pop(job.name, None)  # it keeps all that it had
        return is_raised

    def _filled(self, plan: Plan, ask: Ask) -> Plan:
        """With waiting jobs on free slots, as far as their team or user is guaranteed these.

        A policy may leave slots free behind its next job. It is asked to place these alone, all others being pinned.
        """
        failed: set[str] = set()
        for _ in range(_MAX_PASSES):
            wanted = self._below_guarantee(plan, failed)
            if not wanted:
                break
            answer = ask(self._all_but(wanted, plan))
            placed = {job: answer.allocation_of(job) for job in wanted if answer.allocation_of(job)}
            placed = {job: one for job, one in placed.items() if self._fits(plan, one)}
            # Of several that wait, the first may hold up the others.
            failed |= set() if placed else {next(iter(wanted))}
            for job, allocation in placed.items():
                if self._fits(plan, allocation):
                    plan = replace(plan, allocations={**plan.allocations, job: allocation})
                    self._placed[job] = allocation
                    for told in (self._caps, self._bounds, self.reasons):
                        told.pop(job, None)
        return plan

    def _below_guarantee(self, plan: Plan, failed: Collection[str]) -> dict[str, _Bound]:
        """Waiting jobs that could start within what their team or user is guaranteed, with how they may start."""
        found: dict[str, _Bound] = {}
        if not self._free(plan, self._slots):
            return found
        promises = Promises(self._entitled, self._slots)
        for job in self._snapshot.jobs:
            if not job.spec.is_preemptible and (kind := self._type(plan, job)) is not None:
                promises.add(job.spec.owner, kind, self._count(plan, job))
        spare = self._spare(plan)
        for group in (*self._teams.values(), *self._users.values()):
            for kind, guaranteed in group.quota.guarantee.items():
                types = [each for each in self._slots if kind in (each, ANY_TYPE)]
                room = guaranteed - sum(self._count(plan, job) for job in group.jobs if self._is_on(plan, job, kind))
                starts = (bound for job in group.jobs if (bound := found.get(job.name)) is not None)
                room -= sum(bound.most for bound in starts if not bound.types.isdisjoint(types))
                for job in sorted(group.jobs, key=lambda job: -job.spec.priority) if room > 0 else ():
                    if self._count(plan, job) or job.is_pinned or job.name in found or job.name in failed:
                        continue
                    bound = self._start_of(job, types, room, spare, promises)
                    if bound is not None:
                        found[job.name] = bound
                        room -= bound.most
        return found

    def _spare(self, plan: Plan) -> dict[tuple[str, str], int]:
        """Free slots, under the title "", and what groups have left of their limits; by title and type."""
        spare = {("", each): self._free(plan, [each]) for each in self._slots}
        for group in (*self._teams.values(), *self._users.values()):
            for kind, limit in group.quota.limit.items():
                held = sum(self._count(plan, job) for job in group.jobs if self._is_on(plan, job, kind))
                spare[group.title, kind] = limit - held
        return spare

    def _start_of(
        self, job: JobView, types: Iterable[str], room: int, spare: dict[tuple[str, str], int], promises: Promises
    ) -> _Bound | None:
        """On which one type, and with how many slots, a waiting job may start; these are spare no more then."""
        owner, least = job.spec.owner, job.spec.min_replicas
        titles = ("", self._teams[self._entitled.team_of(owner)].title, self._users[owner].title)
        for each in types:
            keys = [(title, kind) for title in titles for kind in (each, ANY_TYPE) if (title, kind) in spare]
            most = min(demand(job), room, *(spare[key] for key in keys))
            if most < least or not may_use(job, each):
                continue
            if not job.spec.is_preemptible:
                fits = (one for one in range(most, least - 1, -1) if not promises.why_not(owner, each, one))
                if not (most := next(fits, 0)):
                    continue
                promises.add(owner, each, most)
            for key in keys:
                spare[key] -= most
            return _Bound(types=frozenset({each}), most=most)
        return None

    def _all_but(self, wanted: Mapping[str, _Bound], plan: Plan) -> Snapshot:
        """The snapshot with all jobs as the plan has them, and not to be changed, but these."""
        jobs = []
        for job in self._snapshot.jobs:
            if (bound := wanted.get(job.name)) is None:
                jobs.append(replace(job, allocation=plan.allocation_of(job.name), is_pinned=True))
                continue
            spec = replace(job.spec, accelerators=bound.types, max_replicas=min(job.spec.max_replicas, bound.most))
            held = first_of(job.allocation, bound.most)
            is_there = self._fits(plan, held) and {self._type_of[share.node] for share in held.shares} <= bound.types
            jobs.append(replace(job, spec=spec, allocation=held if is_there else NO_ALLOCATION))
        return replace(self._snapshot, jobs=tuple(jobs))

    def _fits(self, plan: Plan, allocation: Allocation) -> bool:
        """Whether these slots are free in the plan."""
        free = {node.name: node.num_slots for node in self._snapshot.nodes}
        for job in self._snapshot.jobs:
            for node, count in plan.allocation_of(job.name).shares:
                free[node] -= count
        return all(free[node] >= count for node, count in allocation.shares)

    def _tighten(self, plan: Plan) -> bool:
        """Cap jobs for the first rule that the plan breaks; whether there was one."""
        if self._take_back(plan):
            return True
        for groups in (self._users, self._teams):
            if any([self._keep_limit(group, plan) for group in groups.values()]):
                return True
        if self._bind(plan):
            return True
        if self._claim(self._teams, plan):
            return True
        for team in self._teams.values():
            owners = {job.spec.owner for job in team.jobs}
            if len(owners) > 1 and self._claim({owner: self._users[owner] for owner in owners}, plan):
                return True
        return any(self._prefer(team, plan) for team in self._teams.values())

    def _capped(self) -> Snapshot:
        """The snapshot with the caps; a job that cannot run within its cap holds nothing, and stays so.

        One that must shrink is shown as if it had: the resize is not the policy's to weigh, and policies that leave
        running jobs alone must not leave it as it was.
        """
        jobs = []
        for job in self._snapshot.jobs:
            if (placed := self._placed.get(job.name)) is not None:
                jobs.append(replace(job, allocation=placed, is_pinned=True))
                continue
            cap, bound = self._cap_of(job), self._bounds.get(job.name)
            if bound is not None and bound.types:
                job = replace(job, spec=replace(job.spec, accelerators=bound.types))
            if not job.is_fixed and cap < job.spec.max_replicas:
                if cap < job.spec.min_replicas:
                    job = replace(job, allocation=NO_ALLOCATION, is_pinned=True)
                else:
                    held = job.allocation if job.allocation.num_replicas <= cap else first_of(job.allocation, cap)
                    job = replace(job, allocation=held, spec=replace(job.spec, max_replicas=cap))
            jobs.append(job)
        return replace(self._snapshot, jobs=tuple(jobs))

    def _cap_of(self, job: JobView) -> int:
        bound = self._bounds.get(job.name)
        cap = self._caps.get(job.name, UNBOUNDED_REPLICAS)
        return cap if bound is None else min(cap, bound.most)

    def _cap(self, caps: Mapping[str, int], why: str, plan: Plan | None = None) -> bool:
        """Whether that changes anything. ``plan``: jobs that it gives no more than the cap are told nothing."""
        news = {job: cap for job, cap in caps.items() if cap < self._caps.get(job, UNBOUNDED_REPLICAS)}
        self._caps.update(news)
        for job, cap in news.items():
            if plan is None or cap < plan.allocation_of(job).num_slots:
                self.reasons[job] = why
        return bool(news)

    # Rules ------------------------------------------------------------------------------------

    def _bind(self, plan: Plan) -> bool:
        """Let jobs that must not be moved start only beside all guarantees; whether the plan is to be made anew.

        Those that the plan starts come first. Room is counted for them alone: a job that waits for another reason, as
        its user's limit, takes none from others.
        """
        if not any(quota.guarantee for quota in self._entitled.teams.values()):
            return False
        promises, waiting = Promises(self._entitled, self._slots), list[JobView]()
        for job in self._snapshot.jobs:
            if job.spec.is_preemptible:
                continue
            if job.allocation:
                promises.add(job.spec.owner, self._type_of[job.allocation.shares[0].node], job.allocation.num_slots)
            else:
                waiting.append(job)
        before, self._bounds, is_broken = self._bounds, {}, False
        for job in sorted(waiting, key=lambda job: (not self._count(plan, job), -job.spec.priority)):
            kind, count = self._type(plan, job), self._count(plan, job)
            least, owner = job.spec.min_replicas, job.spec.owner
            if kind is not None:
                fits = next((one for one in range(count, least - 1, -1) if not promises.why_not(owner, kind, one)), 0)
                is_broken |= fits < count
                if 0 < fits < count or (fits and job.name in before and before[job.name].most == fits):
                    why = promises.why_not(owner, kind, fits + 1)  # also if it was held to that before
                    self._bounds[job.name] = _Bound(types=frozenset({kind}), most=fits, reason=why)
                if fits:
                    promises.add(owner, kind, fits)
                    continue
            told = {each: promises.why_not(owner, each, least) for each in self._slots if may_use(job, each)}
            types = frozenset(each for each, reason in told.items() if not reason)
            if len(types) < len(told):
                most = UNBOUNDED_REPLICAS if types else 0
                self._bounds[job.name] = _Bound(types=types, most=most, reason=next(filter(None, told.values())))
        freed = (job for job in waiting if job.name in before and not before[job.name].most and self._cap_of(job))
        return is_broken or any(self._free(plan, self._slots) >= job.spec.min_replicas for job in freed)

    def _unbroken(self, plan: Plan) -> Plan:
        """Without what must not start: it could not be undone."""
        if not self._bind(plan):
            return plan
        allowed = dict(plan.allocations)
        for job in self._snapshot.jobs:
            bound = self._bounds.get(job.name)
            if bound is not None and (kind := self._type(plan, job)) is not None:
                allowed[job.name] = first_of(plan.allocation_of(job.name), bound.most if kind in bound.types else 0)
        return replace(plan, allocations=allowed)

    def _keep_limit(self, group: _Group, plan: Plan) -> bool:
        for kind, limit in group.quota.limit.items():
            held = [job for job in group.jobs if self._is_on(plan, job, kind)]
            if sum(self._count(plan, job) for job in held) > limit:
                caps = allot([self._demand(plan, job) for job in held], limit)
                waiting = {job.name: 0 for job in group.jobs if not self._count(plan, job)} if kind == ANY_TYPE else {}
                if self._cap({**waiting, **caps}, limit_in_words(group.title, kind, limit)):
                    return True
        return False

    def _claim(self, groups: Mapping[str, _Group], plan: Plan) -> bool:
        """Let groups that hold less than their guarantee have it back from those that hold more than theirs.

        Those that may use the same types do so at once, so that a round for thirty teams is not thirty plans.
        """
        missing: dict[frozenset[str], dict[str, int]] = {}  # by types that they may use, and by group
        for name, group in groups.items():
            for kind, guaranteed in group.quota.guarantee.items():
                types = [each for each in self._slots if kind in (each, ANY_TYPE)]
                used = sum(self._count(plan, job) for job in group.jobs if self._is_on(plan, job, kind))
                wanted = sum(self._useful(job, types) for job in group.jobs)
                wanted = min(guaranteed, wanted, self._declined.get(group.title, UNBOUNDED_REPLICAS))
                reach = frozenset(each for each in types if any(may_use(job, each) for job in group.jobs))
                if wanted <= used or not reach:
                    continue
                if wanted - used <= self._free(plan, reach):  # the policy had them for it, and found no use for them
                    self._declined[group.title] = used
                    continue
                claims = missing.setdefault(reach, {})
                claims[name] = max(claims.get(name, 0), wanted - used)
        claimants = {name for claims in missing.values() for name in claims}
        for reach, claims in missing.items():
            # A group that is short of another type may well borrow these: only those that claim them give none.
            donors = {name: group for name, group in groups.items() if name not in claims}
            to = " and ".join(groups[name].title for name in claims)
            number = sum(claims.values()) - self._free(plan, reach)
            if self._take(number, donors, reach, plan, to, claimants):
                return True
        return False

    def _take(
        self, number: int, donors: Mapping[str, _Group], reach: Collection[str], plan: Plan, to: str,
        claimants: Collection[str],
    ) -> bool:  # fmt: skip
        """Cap donors so that ``number`` slots of these types become free, most from those that borrow most.

        Their other jobs that could take these slots stay as they are. But what waits of a claimant, of other types, may
        still have what the claimant is guaranteed.
        """
        left: dict[str, int] = {}
        movable: dict[str, int] = {}
        for name, group in donors.items():
            held = [job for job in group.jobs if self._type(plan, job) in reach]
            left[name] = sum(self._count(plan, job) for job in held)
            movable[name] = sum(self._count(plan, job) for job in held if not job.is_fixed)
        borrowed = {
            name: min(left[name] - self._promised(group, reach), movable[name]) for name, group in donors.items()
        }
        taken = dict.fromkeys(donors, 0)
        for _ in range(number):
            if not donors:
                break
            name = max(donors, key=lambda one: borrowed[one] / donors[one].quota.weight)
            if borrowed[name] <= 0:
                break
            borrowed[name] -= 1
            taken[name] += 1
        caps = {
            job.name: self._count(plan, job)
            for name, group in donors.items()
            for job in group.jobs
            if (self._count(plan, job) or name not in claimants) and any(may_use(job, each) for each in reach)
        }
        for name, count in taken.items():
            held = [job for job in donors[name].jobs if self._type(plan, job) in reach]
            kept = allot([self._demand(plan, job) for job in held], left[name] - count)
            # A job that cannot shrink so far stops as a whole: the donor's other jobs may have what it is guaranteed.
            room = self._promised(donors[name], reach) - sum(kept.values())
            waiting = [job.name for job in donors[name].jobs if not self._count(plan, job) and job.name in caps]
            caps |= kept | dict.fromkeys(waiting, max(room, 0))
        if not any(taken.values()):
            return False
        self._gave |= {
            job.name: self._count(plan, job) for group in donors.values() for job in group.jobs if job.name in caps
        }
        return self._cap(caps, f"slots go back to {to}, which they are guaranteed to", plan)

    def _prefer(self, team: _Group, plan: Plan) -> bool:
        """Let a job that waits have its minimum from jobs of less priority in its team."""
        waiting = [job for job in team.jobs if not self._count(plan, job) and self._cap_of(job)]
        for job in sorted(waiting, key=lambda job: -job.spec.priority):
            reach = {each for each in self._slots if may_use(job, each)}
            lower = [
                other
                for other in team.jobs
                if other.spec.priority < job.spec.priority and not other.is_fixed and self._type(plan, other) in reach
            ]
            number = job.spec.min_replicas - self._free(plan, reach)
            held = sum(self._count(plan, other) for other in lower)
            if not lower or number <= 0 or held < number or job.name in self._unplaceable:
                continue
            before = job.name, dict(self._caps), dict(self.reasons)
            caps = {other.name: self._count(plan, other) for other in self._snapshot.jobs if other is not job}
            caps |= allot([self._demand(plan, other) for other in lower], held - number)
            if self._cap(caps, f"slots go to {job.name}, which has priority {job.spec.priority}", plan):
                self._preferred = before
                return True
        return False

    def _take_back(self, plan: Plan) -> bool:
        """Undo the caps by which slots were freed for a job of higher priority if it still waits; whether that is so.

        It may fit on no nodes, or not under a limit. Then the slots are for the others.
        """
        if self._preferred is None:
            return False
        name, caps, reasons = self._preferred
        if plan.allocation_of(name):
            return False
        self._caps, self.reasons, self._preferred = caps, reasons, None
        self._unplaceable.add(name)
        return True

    # What a plan gives ------------------------------------------------------------------------

    def _type(self, plan: Plan, job: JobView) -> str | None:
        allocation = plan.allocation_of(job.name)
        return self._type_of.get(allocation.shares[0].node) if allocation else None

    def _is_on(self, plan: Plan, job: JobView, kind: str) -> bool:
        own = self._type(plan, job)
        return own is not None and kind in (own, ANY_TYPE)

    def _count(self, plan: Plan, job: JobView) -> int:
        return plan.allocation_of(job.name).num_slots

    def _demand(self, plan: Plan, job: JobView) -> Demand:
        count = self._count(plan, job)
        return Demand(
            job=job.name,
            count=count,
            least=count if job.is_fixed else min(job.spec.min_replicas, count),
            is_bound=job.is_fixed,
            order=(-job.spec.priority, not job.allocation, self._position[job.name]),
            weight=job.spec.weight,
        )

    def _useful(self, job: JobView, types: Iterable[str]) -> int:
        """Slots that a job could use at most."""
        cap = self._cap_of(job)
        if cap < job.spec.min_replicas:
            return 0
        most = min(job.spec.max_replicas, sum(self._slots[each] for each in types if may_use(job, each)))
        if job.spec.batch is not None:
            most = min(most, max(job.spec.batch.max_replicas, job.spec.min_replicas))
        return min(most, cap)

    def _free(self, plan: Plan, types: Collection[str]) -> int:
        used = sum(self._count(plan, job) for job in self._snapshot.jobs if (self._type(plan, job) or "") in types)
        return sum(self._slots[each] for each in types) - used

    def _promised(self, group: _Group, types: Iterable[str]) -> int:
        kinds = {*types, ANY_TYPE}
        return sum(number for kind, number in group.quota.guarantee.items() if kind in kinds)

    # What is told of it -----------------------------------------------------------------------

    def is_short(self, job: str, plan: Plan) -> bool:
        """Whether a cap holds the job back: it has no more than the cap allows."""
        cap = min(self._caps.get(job, UNBOUNDED_REPLICAS), self._bounds.get(job, _FREE).most)
        return plan.allocation_of(job).num_slots >= cap or not plan.allocation_of(job)

    def all_reasons(self) -> dict[str, str]:
        """Why jobs are held back, as the last plan found."""
        found = {job: bound.reason for job, bound in self._bounds.items() if bound.reason} | self.reasons
        for group in (*self._teams.values(), *self._users.values()):
            if (limit := group.quota.limit.get(ANY_TYPE)) is not None:
                too_large = [job for job in group.jobs if job.spec.min_replicas > limit and not job.is_fixed]
                for job in too_large:
                    found[job.name] = limit_in_words(group.title, ANY_TYPE, limit, job.spec.min_replicas)
        return found

    def standings(self, plan: Plan, before: Mapping[tuple[str, str], Standing]) -> tuple[Standing, ...]:
        """Of all teams, and of the users that are guaranteed something."""
        promised = {name: sum(self._team_quota(name).guarantee.values()) for name in self._entitled.teams}
        found = self._standings(plan, promised, self._teams, sum(self._slots.values()))
        for team in self._entitled.teams:
            own = {name: member for name, member in self._entitled.users.items() if member.team == team}
            inside = {name: sum(member.quota.guarantee.values()) for name, member in own.items()}
            if any(inside.values()):
                whole = max(promised[team], sum(self._count(plan, job) for job in self._jobs_of(self._teams, team)))
                users = self._standings(plan, inside, self._users, whole)
                found += [replace(one, team=team, user=one.team) for one in users if one.num_guaranteed]
        told = []
        for one in found:
            old = before.get((one.team, one.user))
            since = self._snapshot.now if old is None or old.since is None else old.since
            told.append(replace(one, since=since if one.lent_to else None))
        return tuple(told)

    def _standings(
        self, plan: Plan, promised: Mapping[str, int], groups: Mapping[str, _Group], whole: int
    ) -> list[Standing]:
        """By name of the group. ``whole``: slots that they share."""
        held = {name: sum(self._count(plan, job) for job in self._jobs_of(groups, name)) for name in promised}
        borrowed = {name: max(held[name] - promised[name], 0) for name in held}
        unpromised = max(whole - sum(promised.values()), 0)
        # Slots that are promised to no group are borrowed from none.
        for name in sorted(borrowed, key=lambda one: borrowed[one]):
            own = min(borrowed[name], unpromised)
            borrowed[name] -= own
            unpromised -= own
        found = []
        for name, number in promised.items():
            lent: dict[str, int] = {}
            idle = number - held[name]
            for other in sorted(borrowed, key=lambda one: -borrowed[one]):
                count = min(idle, borrowed[other])
                if count > 0 and other != name:
                    lent[other] = count
                    idle -= count
                    borrowed[other] -= count
            borrowers = [job for other in lent for job in self._jobs_of(groups, other) if self._count(plan, job)]
            standing = Standing(
                team=name,
                num_guaranteed=number,
                num_held=held[name],
                num_wanted=min(max(self._wanted(groups.get(name)), held[name]), number),
                lent_to=lent,
                unmovable=tuple(job.name for job in borrowers if not job.spec.is_preemptible),
            )
            found.append(standing)
        return found

    @staticmethod
    def _jobs_of(groups: Mapping[str, _Group], name: str) -> Sequence[JobView]:
        return groups[name].jobs if name in groups else ()

    def _wanted(self, group: _Group | None) -> int:
        """Slots of its guarantee that its jobs could use; fewer if the policy had them free and left them so."""
        if group is None:
            return 0
        wanted = 0
        for kind, number in group.quota.guarantee.items():
            types = [each for each in self._slots if kind in (each, ANY_TYPE)]
            wanted += min(number, sum(self._useful(job, types) for job in group.jobs))
        return min(wanted, self._declined.get(group.title, wanted))


def _noted(plan: Plan, reasons: Mapping[str, str]) -> Plan:
    """With why jobs are held back in its explanation, which is all that a round keeps."""
    explanation = plan.explanation
    if explanation is None or not reasons:
        return plan
    jobs = tuple(
        replace(decision, note="; ".join(filter(None, (decision.note, reasons.get(decision.job)))))
        for decision in explanation.jobs
    )
    return replace(plan, explanation=replace(explanation, jobs=jobs))
