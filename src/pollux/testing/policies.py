"""What every policy must do. A test class inherits :class:`PolicyConformance` and says how its policy is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from hypothesis import HealthCheck, currently_in_test_context, given, note
from hypothesis import strategies as st

from pollux.policy import Policy
from pollux.scheduler.nodes import SlotRules
from pollux.scheduler.reconcile import verify_plan
from pollux.testing.examples import examples
from pollux.testing.snapshots import make_job, make_mixed, make_nodes, snapshots
from pollux.types import Plan, Snapshot

CASES = st.one_of(snapshots(), snapshots(mixed=True))
# Differing executors: several classes inherit one test, each with policies of its own.
ALLOWED = [HealthCheck.too_slow, HealthCheck.differing_executors]


def apply_plan(snapshot: Snapshot, plan: Plan) -> Snapshot:
    """The snapshot after the plan was carried out, with nothing else changed."""
    jobs = []
    for job in snapshot.jobs:
        allocation, num_resizes = plan.allocation_of(job.name), job.num_resizes
        if allocation != job.allocation:
            num_resizes = 0 if num_resizes is None else num_resizes + 1
        jobs.append(dataclasses.replace(job, allocation=allocation, num_resizes=num_resizes))
    return dataclasses.replace(snapshot, jobs=tuple(jobs))


class PolicyConformance:
    """Provide :meth:`make_policy`. ``slot_rules``: set it if plans let jobs share slots; None: one job per slot."""

    slot_rules: SlotRules | None = None

    def make_policy(self) -> Policy:
        raise NotImplementedError

    def make_policies(self) -> Sequence[Policy]:
        """Those that each example is given to. Making an example takes longer than deciding on it."""
        return [self.make_policy()]

    # ------------------------------------------------------------------------------------------

    def fresh_policies(self, number: int = 0) -> Iterator[Policy]:
        """Made once per test and number, reset for each example: making some policies takes longer than deciding."""
        made: dict[int, Sequence[Policy]] = vars(self).setdefault("_made", {})
        if number not in made:
            made[number] = self.make_policies()
        for policy in made[number]:
            if currently_in_test_context():
                note(f"policy {policy.name}")  # the last one printed is the one that failed
            policy.reset()
            yield policy

    @examples(150, deadline=None, suppress_health_check=ALLOWED)
    @given(CASES)
    def test_plans_can_be_carried_out(self, snapshot: Snapshot) -> None:
        """No node over capacity, bounds and types kept, nodes known, pinned and non-preemptible jobs untouched."""
        for policy in self.fresh_policies():
            verify_plan(snapshot, policy.decide(snapshot), self.slot_rules)

    @examples(100, deadline=None, suppress_health_check=ALLOWED)
    @given(CASES)
    def test_deciding_again_on_an_applied_plan_moves_nothing(self, snapshot: Snapshot) -> None:
        for policy in self.fresh_policies():
            applied = apply_plan(snapshot, policy.decide(snapshot))
            again = policy.decide(applied)
            assert {job.name: again.allocation_of(job.name) for job in applied.jobs} == {
                job.name: job.allocation for job in applied.jobs
            }, policy.name

    @examples(40, deadline=None, suppress_health_check=ALLOWED)
    @given(CASES)
    def test_same_snapshot_same_plan(self, snapshot: Snapshot) -> None:
        """Two instances, so that nothing outside of them is used: no clock, no global random state."""
        for first, second in zip(self.fresh_policies(0), self.fresh_policies(1), strict=True):
            assert first.decide(snapshot).allocations == second.decide(snapshot).allocations, first.name

    @examples(40, deadline=None, suppress_health_check=ALLOWED)
    @given(CASES, CASES)
    def test_other_snapshots_before_do_no_harm_and_are_forgotten(self, before: Snapshot, snapshot: Snapshot) -> None:
        """A policy may remember jobs and nodes that are gone: its plans stay valid, and reset clears its memory."""
        for policy in self.fresh_policies():
            expected = policy.decide(snapshot).allocations
            policy.reset()
            policy.decide(before)
            verify_plan(snapshot, policy.decide(snapshot), self.slot_rules)
            policy.reset()
            assert policy.decide(snapshot).allocations == expected, policy.name

    def test_an_idle_cluster_and_an_empty_one(self) -> None:
        for policy in self.fresh_policies():
            idle = Snapshot(now=0, nodes=make_nodes(2), jobs=())
            assert not any(policy.decide(idle).allocations.values()), policy.name
            policy.reset()
            empty = Snapshot(now=0, nodes=(), jobs=(make_job("a", requested_replicas=1),))
            assert not any(policy.decide(empty).allocations.values()), policy.name

    def test_a_lone_job_gets_something(self) -> None:
        jobs = (make_job("a", requested_replicas=2, requested_batch_size=512),)
        for policy in self.fresh_policies():
            plan = policy.decide(Snapshot(now=0, nodes=make_nodes(2), jobs=jobs))
            assert plan.allocation_of("a").num_replicas >= 1, policy.name

    def test_restricted_jobs_get_the_type_that_they_may_use(self) -> None:
        jobs = (
            make_job("picky", requested_replicas=2, accelerators=frozenset({"big"}), max_replicas=2),
            make_job("other", requested_replicas=2, accelerators=frozenset({"small"}), max_replicas=2),
            make_job("third", requested_replicas=2, max_replicas=2),
        )
        for policy in self.fresh_policies():
            plan = policy.decide(Snapshot(now=0, nodes=make_mixed(big=2, small=4), jobs=jobs))
            assert plan.allocation_of("picky").as_mapping().keys() == {"big"}, policy.name
            assert plan.allocation_of("other").as_mapping().keys() == {"small"}, policy.name
