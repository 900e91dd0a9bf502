"""AntMan: what is guaranteed stays, what is opportunistic makes room."""

from __future__ import annotations

from pollux.policy import make_policy
from pollux.policy.simulated import GuestAllocation
from pollux.testing.snapshots import make_job, make_nodes
from pollux.types import Allocation, JobView, Node, Snapshot
from tests.oracles import Perfect

NODES = make_nodes(2, 2)


def decide(*jobs: JobView, nodes: tuple[Node, ...] = NODES) -> dict[str, Allocation]:
    return dict(make_policy("antman").decide(Snapshot(now=0, nodes=nodes, jobs=jobs)).allocations)


def job(name: str, replicas: int, load: float = 1.0, **fields: object) -> JobView:
    return make_job(name, requested_replicas=replicas, oracle=Perfect(share=load), **fields)


def counts(plan: dict[str, Allocation]) -> dict[str, int]:
    return {name: allocation.num_replicas for name, allocation in plan.items()}


def test_the_quota_goes_in_order_and_gaps_to_whoever_fits():
    """The second is next and too large; the third fills the gap for now, the fourth finds none."""
    plan = decide(job("a", 3), job("b", 2), job("c", 1), job("d", 1))
    assert counts(plan) == {"a": 3, "c": 1}


def test_opportunistic_jobs_leave_idle_slots_to_a_guaranteed_one():
    late = job("c", 1, allocation=Allocation.of(("n0", 1)))
    last = job("d", 1, allocation=Allocation.of(("n0", 1)))
    plan = decide(job("b", 3), late, last)
    assert counts(plan) == {"b": 3, "c": 1}  # the last to come goes first
    assert plan["c"] == late.allocation


def test_a_job_that_comes_to_be_guaranteed_stays_on_the_slots_it_has_found():
    held = Allocation.of(("n1", 1))
    assert decide(job("c", 1, allocation=held), job("d", 1))["c"] == held


def test_guests_sit_beside_the_least_busy_job_that_hardly_notices():
    busy = job("a", 2, 0.6, allocation=Allocation.of(("n0", 2)))
    idle = job("b", 2, 0.3, allocation=Allocation.of(("n1", 2)))
    assert decide(busy, idle, job("c", 1, 0.4))["c"] == GuestAllocation(Allocation.of(("n1", 1)).shares, "b")
    assert "c" not in decide(busy, job("b", 2, 0.7, allocation=idle.allocation), job("c", 1, 0.6))
    assert "c" not in decide(busy, idle, job("c", 3, 0.4))  # larger than either


def test_a_guest_moves_off_when_slots_of_its_own_are_guaranteed():
    host = job("a", 2, 0.1, allocation=Allocation.of(("n0", 2)))
    guest = job("c", 2, 0.1, allocation=GuestAllocation(host.allocation.shares, "a"))
    other = job("b", 2, 0.1, allocation=Allocation.of(("n1", 2)))
    assert decide(host, other, guest)["c"] == guest.allocation
    assert decide(host, guest)["c"] == Allocation.of(("n1", 2))


def test_a_job_that_cannot_be_sent_away_waits_for_its_guarantee():
    assert counts(decide(job("a", 3), job("b", 2), job("c", 1, 0.1, is_preemptible=False))) == {"a": 3}


def test_types_have_their_own_quota():
    nodes = (Node(name="n0", num_slots=2), Node(name="m0", num_slots=2, accelerator="mini"))
    first = job("a", 2, accelerators=frozenset({"gpu"}))
    blocked = job("b", 2, accelerators=frozenset({"gpu"}))
    plan = decide(first, blocked, job("c", 2), job("d", 1), nodes=nodes)
    assert plan == {"a": Allocation.of(("n0", 2)), "c": Allocation.of(("m0", 2))}
