"""Which jobs a policy is asked about, given the nodes there are."""

from __future__ import annotations

import pytest

from pollux.policy import make_policy
from pollux.scheduler.nodes import avoiding, placeable
from pollux.testing.snapshots import make_job, make_mixed, make_nodes
from pollux.types import Allocation, JobSpec, JobView, Plan, Snapshot


def needing(num: int, *, accelerators: frozenset[str] | None = None, held: Allocation | None = None) -> JobView:
    spec = JobSpec(name=f"needs-{num}", min_replicas=num, accelerators=accelerators)
    return JobView(spec=spec, age_s=60.0) if held is None else JobView(spec=spec, age_s=60.0, allocation=held)


def test_a_job_that_can_never_fit_changes_nothing_for_the_others() -> None:
    jobs = (make_job("a"), make_job("b"))
    nodes = make_nodes(2)
    alone = make_policy("pollux").decide(placeable(Snapshot(now=0.0, nodes=nodes, jobs=jobs)))
    beside = make_policy("pollux").decide(placeable(Snapshot(now=0.0, nodes=nodes, jobs=(*jobs, needing(1000)))))
    assert beside.allocations == alone.allocations
    assert alone.explanation is not None and beside.explanation is not None
    assert beside.explanation.fitness == pytest.approx(alone.explanation.fitness)


def test_slots_of_several_types_do_not_add_up() -> None:
    nodes = make_mixed(big=2, small=4)
    most = max(sum(node.num_slots for node in nodes if node.accelerator == kind) for kind in ("big", "small"))
    fits, too_many = needing(most), needing(most + 1)
    assert placeable(Snapshot(now=0.0, nodes=nodes, jobs=(fits, too_many))).jobs == (fits,)


def test_a_job_that_holds_slots_stays_however_few_there_are() -> None:
    held = needing(6, held=Allocation.of(("n0", 4)))  # its other node is gone
    assert placeable(Snapshot(now=0.0, nodes=make_nodes(1), jobs=(held,))).jobs == (held,)


def plan_of(**allocations: Allocation) -> Plan:
    return Plan(allocations=allocations)


def test_a_job_that_cannot_use_the_free_node_gets_a_slot_of_one_that_can_do_with_less() -> None:
    held = Allocation.of(("n0", 4))
    elastic = make_job("elastic", allocation=held)
    fixed = JobView(spec=JobSpec(name="fixed", min_replicas=1, max_replicas=1), age_s=60.0)
    snapshot = Snapshot(now=0.0, nodes=make_nodes(2), jobs=(elastic, fixed))
    plan = plan_of(elastic=held, fixed=Allocation.of(("n1", 1)))
    found = avoiding(snapshot, plan, {"fixed": {"n1": "no script"}, "elastic": {"n1": "no script"}})
    assert found.allocations["fixed"] == Allocation.of(("n0", 1))
    assert found.allocations["elastic"] == Allocation.of(("n0", 3))


def test_jobs_at_their_least_give_nothing() -> None:
    held = Allocation.of(("n0", 4))
    whole = make_job("whole", allocation=held, min_replicas=4)
    fixed = JobView(spec=JobSpec(name="fixed", min_replicas=1, max_replicas=1), age_s=60.0)
    snapshot = Snapshot(now=0.0, nodes=make_nodes(2), jobs=(whole, fixed))
    plan = plan_of(whole=held, fixed=Allocation.of(("n1", 1)))
    found = avoiding(snapshot, plan, {"fixed": {"n1": "no script"}})
    assert found.allocations["whole"] == held
    assert not found.allocations.get("fixed", Allocation.of()).shares
