"""Gandiva: turns, packing and its undoing, growing into idle GPUs and giving them back, defragmentation."""

from __future__ import annotations

import dataclasses

import pytest

from pollux.policy.base import PolicySettings
from pollux.policy.gandiva import QUANTUM_S, GandivaPolicy
from pollux.policy.simulated import GuestAllocation, host_of
from pollux.scheduler.reconcile import verify_plan
from pollux.testing.snapshots import make_job, make_nodes
from pollux.types import Allocation, BatchLimits, JobView, Node, Plan, Snapshot
from tests.oracles import Perfect

ROUND_S = 60.0


def job(name: str, replicas: int = 1, load: float = 1.0, **fields: object) -> JobView:
    fields = {"max_replicas": replicas, "requested_batch_size": 512} | fields
    return make_job(name, requested_replicas=replicas, oracle=Perfect(share=load), **fields)


class Cluster:
    """Decides round by round, and does what was decided."""

    def __init__(self, nodes: tuple[Node, ...], *jobs: JobView) -> None:
        self.policy = GandivaPolicy(PolicySettings())
        self.nodes, self.now = nodes, 0.0
        self.jobs = {job.name: job for job in jobs}

    def round(self, *newcomers: JobView, **speeds: float) -> Plan:
        """One more, a minute later; ``speeds``: examples a second that jobs made meanwhile."""
        self.now += ROUND_S
        self.jobs |= {job.name: job for job in newcomers}
        for name, speed in speeds.items():
            done = (self.jobs[name].done_examples or 0.0) + speed * ROUND_S
            self.jobs[name] = dataclasses.replace(self.jobs[name], done_examples=done)
        plan = self.policy.decide(Snapshot(now=self.now, nodes=self.nodes, jobs=tuple(self.jobs.values())))
        for name, view in self.jobs.items():
            self.jobs[name] = dataclasses.replace(view, allocation=plan.allocation_of(name))
        return plan

    def end(self, name: str) -> None:
        del self.jobs[name]
        for other, view in self.jobs.items():
            if host_of(view.allocation) == name:
                self.jobs[other] = dataclasses.replace(view, allocation=Allocation(view.allocation.shares))

    def after(self, seconds: float) -> Plan:
        for _ in range(int(seconds / ROUND_S) - 1):
            self.round()
        return self.round()


def test_jobs_take_turns():
    """Two of three fit: every quantum the one that ran longest goes out for the one that waits."""
    cluster = Cluster(make_nodes(1, 2), job("a"), job("b"), job("c"))
    turns = [set(cluster.round().allocations)]
    for _ in range(3):
        turns.append(set(cluster.after(QUANTUM_S).allocations))
    assert turns[0] == {"a", "b"}
    assert turns[1] == {"c", "a"} or turns[1] == {"c", "b"}
    assert turns[2] == {"a", "b", "c"} - (turns[1] & turns[0])
    assert len(turns[3]) == 2


def test_between_turns_nobody_is_suspended():
    cluster = Cluster(make_nodes(1, 1), job("a"))
    cluster.round()
    assert set(cluster.round(job("b")).allocations) == {"b"}  # the first turn comes at once
    for _ in range(int(QUANTUM_S / ROUND_S) - 1):
        assert set(cluster.round().allocations) == {"b"}
    assert set(cluster.round().allocations) == {"a"}


def test_a_large_job_gets_its_turn_among_small_ones():
    cluster = Cluster(make_nodes(1, 2), *(job(f"small{i}") for i in range(4)), job("large", 2))
    seen = [set(cluster.after(QUANTUM_S).allocations) for _ in range(4)]
    assert {"large"} in seen


def test_jobs_that_cannot_be_suspended_keep_their_slots():
    cluster = Cluster(make_nodes(1, 1), job("a", is_preemptible=False))
    cluster.round()
    cluster.jobs["b"] = job("b")
    assert set(cluster.after(3 * QUANTUM_S).allocations) == {"a"}


def test_who_waits_is_packed_onto_the_least_busy_job_of_its_size_and_unpacked_when_there_is_room():
    cluster = Cluster(make_nodes(2, 2), job("a", 1, 0.5), job("b", 1, 0.3), job("c", 2, 0.1))
    cluster.round()
    plan = cluster.round(job("d", 1, 0.4))
    assert plan.allocation_of("d") == GuestAllocation(plan.allocation_of("b").shares, "b")
    cluster.end("a")
    alone = cluster.round().allocation_of("d")
    assert alone and not host_of(alone)


def test_busy_jobs_are_not_packed():
    cluster = Cluster(make_nodes(1, 1), job("a", 1, 0.9), job("b", 1, 0.9))
    assert len(cluster.round().allocations) == 1


def test_a_pair_takes_turns_together_and_a_guest_stays_when_its_host_ends():
    cluster = Cluster(make_nodes(1, 1), job("a", 1, 0.8), job("b", 1, 0.8))
    assert set(cluster.round().allocations) == {"a", "b"}
    assert set(cluster.round(job("c", 1, 1.0)).allocations) == {"c"}
    assert set(cluster.after(QUANTUM_S).allocations) == {"a", "b"}
    cluster.end("c")
    (guest,) = (name for name, view in cluster.jobs.items() if host_of(view.allocation))
    (host,) = cluster.jobs.keys() - {guest}
    shares = cluster.jobs[guest].allocation.shares
    cluster.end(host)
    assert cluster.round().allocation_of(guest) == Allocation(shares)


def test_a_pair_that_makes_less_progress_than_taking_turns_is_undone_for_good():
    cluster = Cluster(make_nodes(1, 1), job("a", 1, 0.2, application="x"))
    for _ in range(3):
        cluster.round(a=10.0)
    cluster.round(job("b", 1, 0.2, application="y"), a=10.0)
    assert host_of(cluster.round(a=10.0).allocation_of("b")) == "a"
    assert host_of(cluster.round(a=4.9, b=1.0).allocation_of("b")) == ""  # 4.9 of 10: less than half of its speed
    later = cluster.after(QUANTUM_S)
    assert not any(host_of(allocation) for allocation in later.allocations.values())


@pytest.mark.parametrize(("application", "is_remembered"), [("", False), ("y", True)])
def test_a_pair_of_a_job_that_is_gone_is_remembered_by_its_application(application: str, is_remembered: bool):
    """Its name says nothing of jobs to come."""
    cluster = Cluster(make_nodes(1, 1), job("a", 1, 0.2, application="x"))
    for _ in range(3):
        cluster.round(a=10.0)
    cluster.round(job("b", 1, 0.2, application=application), a=10.0)
    cluster.round(a=10.0)
    cluster.round(a=4.9, b=1.0)
    assert len(cluster.policy._misfits) == 1
    cluster.end("b")
    cluster.round()
    assert len(cluster.policy._misfits) == is_remembered


def test_a_pair_that_gains_stays():
    cluster = Cluster(make_nodes(1, 1), job("a", 1, 0.2), job("b", 1, 0.2))
    cluster.round()
    for _ in range(3):
        plan = cluster.round(a=10.0, b=10.0)
    assert len(plan.allocations) == 2


def test_jobs_grow_into_idle_slots_of_their_node_and_give_them_back():
    nodes = make_nodes(2, 4)
    cluster = Cluster(nodes, job("a", 2, max_replicas=8))
    assert cluster.round().allocation_of("a").num_replicas == 2
    grown = cluster.after(QUANTUM_S).allocation_of("a")
    assert grown.counts == (4,)  # no further than its node
    plan = cluster.round(job("b", 4), job("c", 2))
    assert plan.allocation_of("a") == Allocation.of((grown.shares[0].node, 2))
    assert {name: plan.allocation_of(name).counts for name in "bc"} == {"b": (4,), "c": (2,)}


def test_a_batch_too_small_for_one_device_does_not_grow():
    limits = BatchLimits(initial=8, maximum=512, device_min=16, device_max=64)
    for oracle in (Perfect(), None):
        small = make_job(
            "a", requested_replicas=1, batch=limits, requested_batch_size=None, max_replicas=4, oracle=oracle
        )
        cluster = Cluster(make_nodes(1), small)
        assert cluster.after(3 * QUANTUM_S).allocation_of("a").num_replicas == 1


def test_who_asks_for_fewer_than_it_runs_with_has_as_many_as_it_needs():
    cluster = Cluster(make_nodes(2), job("a", 2, min_replicas=5, max_replicas=8))
    for _ in range(int(2 * QUANTUM_S / ROUND_S)):
        snapshot = Snapshot(now=cluster.now, nodes=cluster.nodes, jobs=tuple(cluster.jobs.values()))
        plan = cluster.round()
        verify_plan(snapshot, plan)
        assert plan.allocation_of("a").num_replicas == 5


def test_spread_jobs_are_brought_together_when_there_is_room():
    spread = Allocation.of(("n0", 1), ("n1", 1))
    filler = [job(name, 1, allocation=Allocation.of((node, 1))) for name, node in (("x", "n0"), ("y", "n1"))]
    cluster = Cluster(make_nodes(2, 2), job("a", 2, allocation=spread), *filler)
    assert cluster.after(QUANTUM_S + ROUND_S).allocation_of("a") == spread
    cluster.end("x")
    assert cluster.round().allocation_of("a") == Allocation.of(("n0", 2))


def test_reset_forgets_turns_and_misfits():
    policy = GandivaPolicy(PolicySettings())
    jobs = (job("a", allocation=Allocation.of(("n0", 1))), job("b"))
    snapshot = Snapshot(now=0.0, nodes=make_nodes(1, 1), jobs=jobs)
    first = policy.decide(snapshot)
    assert first.allocations.keys() == {"b"}
    assert policy.decide(snapshot).allocations.keys() == {"a"}  # no turn at the same time again
    policy.reset()
    assert policy.decide(snapshot).allocations == first.allocations
