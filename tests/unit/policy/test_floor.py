"""The floor that sharing policies plan on, and those policies over many rounds with guests on it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.policy import make_policy
from pollux.policy.floor import Floor
from pollux.policy.simulated import GuestAllocation, host_of
from pollux.scheduler.reconcile import verify_plan
from pollux.testing.examples import examples
from pollux.testing.snapshots import make_job, make_nodes
from pollux.types import Allocation, JobView, Node, Plan, Snapshot
from tests.oracles import SLOTS, Perfect

TWO = Allocation.of(("n0", 2))


def floor(*jobs: JobView, num_nodes: int = 2) -> Floor:
    return Floor(Snapshot(now=0, nodes=make_nodes(num_nodes, 2), jobs=jobs))


def test_a_host_that_leaves_leaves_its_guest_the_slots_they_shared():
    guest = GuestAllocation(Allocation.of(("n0", 1)).shares, "a")
    there = floor(make_job("a", allocation=TWO), make_job("b", allocation=guest))
    assert (there.guest_of("a"), there.free.on("gpu")) == ("b", 2)
    there.leave("a")
    assert there.held == {"b": Allocation.of(("n0", 1))}
    assert (there.guest_of("a"), there.free.on("gpu")) == (None, 3)


def test_small_jobs_go_where_least_is_free():
    there = floor(make_job("a", allocation=Allocation.of(("n1", 1))), make_job("b"), make_job("c"))
    assert there.place(there.jobs["b"], 1)
    assert there.held["b"] == Allocation.of(("n1", 1))
    assert not there.place(there.jobs["c"], 3)


def test_who_asks_for_more_than_there_is_holds_up_nobody():
    there = floor(make_job("a", requested_replicas=5), make_job("b", requested_replicas=4))
    assert [job.name for job in there.waiting] == ["b"]


def test_the_host_of_a_guest_that_must_stay_stays():
    guest = GuestAllocation(TWO.shares, "a")
    there = floor(make_job("a", allocation=TWO), make_job("b", allocation=guest, is_preemptible=False))
    assert there.is_fixed("a")


@pytest.mark.parametrize("name", ["antman", "gandiva", "lucid"])
def test_loads_are_asked_for_by_job_not_by_pair(name: str):
    """Everybody is too busy to share, so that each job that waits would have to look at all that run."""
    asked = []

    class Busy(Perfect):
        def load(self, num_replicas: int, accelerator: str = "gpu") -> float:
            asked.append(num_replicas)
            return 0.9

    jobs = [make_job(f"j{number}", requested_replicas=1, oracle=Busy()) for number in range(60)]
    plan = make_policy(name).decide(Snapshot(now=0, nodes=make_nodes(15, 2), jobs=tuple(jobs)))
    assert len(plan.allocations) == 30
    assert 0 < len(asked) < 5 * len(jobs)


NODES = (*make_nodes(2, 2), Node(name="m0", num_slots=3, accelerator="mini"))

jobs = st.builds(
    lambda number, replicas, load, kinds, is_preemptible: make_job(
        f"j{number}",
        requested_replicas=replicas,
        requested_batch_size=512,
        oracle=Perfect(share=load),
        accelerators=kinds,
        is_preemptible=is_preemptible,
        application=f"app{round(load * 10)}",
    ),
    st.just(0),
    st.integers(1, 4),
    st.floats(0, 1),
    st.sampled_from([None, frozenset({"gpu"}), frozenset({"mini"})]),
    st.sampled_from([True, True, True, False]),
)


def test_a_guest_that_must_not_be_moved_keeps_its_host_where_it_is():
    """The node has become too small for one of two jobs: the one that has such a guest stays."""
    node = Node(name="n0", num_slots=2)
    held = Allocation.of(("n0", 2))
    guest = make_job("guest", allocation=GuestAllocation(held.shares, "host"), is_pinned=True)
    for order in ("other", "host"), ("host", "other"):
        jobs = [guest, *(make_job(name, allocation=held) for name in order)]
        views = {job.name: job for job in SLOTS.snapshot(0.0, [node], jobs).jobs}
        assert views["host"].allocation == held
        assert host_of(views["guest"].allocation) == "host"
        assert not views["other"].allocation
    gone = {job.name: job.allocation for job in SLOTS.snapshot(0.0, [], jobs).jobs}
    assert not any(gone.values())


@pytest.mark.parametrize("name", ["antman", "gandiva", "lucid"])
@examples(30, deadline=None)
@given(data=st.data())
def test_rounds_with_guests_can_be_carried_out_and_settle(name: str, data: st.DataObject):
    """Jobs of two types come and go; every plan is sound, and deciding again at once moves nothing."""
    policy, present, number = make_policy(name), list[JobView](), 0
    for index in range(data.draw(st.integers(1, 8))):
        for job in data.draw(st.lists(jobs, max_size=3)):
            spec = dataclasses.replace(job.spec, name=f"j{number}")
            present.append(dataclasses.replace(job, spec=spec))
            number += 1
        now = 240.0 * index
        progress = data.draw(st.floats(0, 100))
        snapshot = SLOTS.snapshot(
            now, NODES, [dataclasses.replace(job, done_examples=progress * now, attained_s=now) for job in present]
        )
        plan = policy.decide(snapshot)
        verify_plan(snapshot, plan, SLOTS)
        applied = carried_out(snapshot, plan)
        assert policy.decide(applied).allocations == {
            job.name: job.allocation for job in applied.jobs if job.allocation
        }
        present = [job for job in applied.jobs if data.draw(st.integers(0, 3)) > 0]


def carried_out(snapshot: Snapshot, plan: Plan) -> Snapshot:
    held = [dataclasses.replace(job, allocation=plan.allocation_of(job.name)) for job in snapshot.jobs]
    return dataclasses.replace(snapshot, jobs=tuple(held))
