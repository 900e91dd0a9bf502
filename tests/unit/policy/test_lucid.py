"""Lucid: nobody is moved, short jobs first, and which two may share GPUs."""

from __future__ import annotations

import pytest

from pollux.policy.base import PolicySettings
from pollux.policy.lucid import SHORT_QUEUE, LucidPolicy, score
from pollux.policy.simulated import GuestAllocation
from pollux.testing.snapshots import make_job, make_nodes
from pollux.types import Allocation, JobView, Node, Snapshot
from tests.oracles import Perfect

ONE_GPU = make_nodes(1, 1)


def decide(
    *jobs: JobView, nodes: tuple[Node, ...] = ONE_GPU, policy: LucidPolicy | None = None
) -> dict[str, Allocation]:
    plan = (policy or LucidPolicy(PolicySettings())).decide(Snapshot(now=0, nodes=nodes, jobs=jobs))
    return dict(plan.allocations)


def job(name: str, load: float = 1.0, **fields: object) -> JobView:
    return make_job(name, **({"requested_replicas": 1, "oracle": Perfect(share=load)} | fields))


def running(name: str, load: float, **fields: object) -> JobView:
    return job(name, load, allocation=Allocation.of(("n0", 1)), **fields)


def queue(load: float, length: int = SHORT_QUEUE + 1) -> list[JobView]:
    return [job(f"w{number}", load) for number in range(length)]


@pytest.mark.parametrize(("load", "expected"), [(0.0, 0), (0.34, 0), (0.35, 1), (0.69, 1), (0.7, 2), (1.0, 2)])
def test_scores_are_steps_of_the_load(load: float, expected: int):
    assert score(load) == expected


@pytest.mark.parametrize(("one", "other", "are_packed"), [(0.9, 0.1, True), (0.5, 0.6, True), (0.9, 0.4, False)])
def test_scores_of_a_pair_add_up_to_two_at_most(one: float, other: float, are_packed: bool):
    plan = decide(running("a", one), *queue(other))
    assert ("w0" in plan) is are_packed
    if are_packed:
        assert plan["w0"] == GuestAllocation(plan["a"].shares, "a")
        assert set(plan) == {"a", "w0"}  # one guest at most


def test_a_short_queue_is_not_packed():
    assert set(decide(running("a", 0.1), *queue(0.1, SHORT_QUEUE))) == {"a"}


def test_only_jobs_of_the_same_size_are_packed():
    nodes = make_nodes(1, 2)
    wide = job("a", 0.1, allocation=Allocation.of(("n0", 2)), requested_replicas=2)
    assert set(decide(wide, *queue(0.1), nodes=nodes)) == {"a"}


def test_nobody_is_preempted_or_moved():
    held = [job(name, allocation=Allocation.of((node, 1)), attained_s=1e5) for name, node in (("a", "n0"), ("b", "n1"))]
    plan = decide(*held, job("c", requested_replicas=2), nodes=make_nodes(2, 1))
    assert plan == {"a": held[0].allocation, "b": held[1].allocation}


def taught() -> LucidPolicy:
    """Has seen jobs of three applications end, after 10, 1000 and 100 GPU-seconds."""
    policy = LucidPolicy(PolicySettings())
    over = [running("s", 1.0, application="short", attained_s=10.0)]
    over += [job("l", application="long", attained_s=1000.0), job("m", application="medium", attained_s=100.0)]
    decide(*over, policy=policy)
    decide(policy=policy)
    return policy


def test_the_least_gpu_time_goes_first_as_learnt_from_jobs_that_ended():
    jobs = [job("a", application="long"), job("b", application="unheard of"), job("c", application="short")]
    policy = taught()
    order = []
    while jobs:
        (first,) = decide(*jobs, policy=policy)
        order.append(first)
        jobs = [entry for entry in jobs if entry.name != first]
    assert order == ["c", "b", "a"]  # the unknown one counts as the median: 100 s
    policy.reset()
    assert set(decide(job("a", application="long"), job("c", application="short"), policy=policy)) == {"a"}


def test_of_many_applications_those_are_remembered_of_which_a_job_ended_last(monkeypatch):
    monkeypatch.setattr("pollux.policy.lucid.MAX_KNOWN", 3)
    policy = LucidPolicy(PolicySettings())
    for name in ("a", "b", "c", "a", "d"):
        decide(job(name, application=name, attained_s=5.0), policy=policy)
    decide(policy=policy)
    assert set(policy._finished) == {"a", "c", "d"}


def test_a_long_job_is_not_packed_with_a_short_one():
    waiting = [job(f"w{number}", 0.1, application="long") for number in range(SHORT_QUEUE + 1)]
    for kind, are_packed in (("short", False), ("medium", False), ("long", True)):
        plan = decide(running("a", 0.1, application=kind), *waiting, policy=taught())
        assert ("w0" in plan) is are_packed
