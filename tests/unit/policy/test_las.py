from __future__ import annotations

from pollux.policy import make_policy
from pollux.policy.las import QUANTUM
from pollux.testing.snapshots import make_job, make_nodes
from pollux.types import Allocation, JobView, Snapshot

HELD = Allocation.of(("n0", 4))


def running_after(*jobs: JobView) -> set[str]:
    plan = make_policy("las").decide(Snapshot(now=0, nodes=make_nodes(1), jobs=jobs))
    return {name for name, allocation in plan.allocations.items() if allocation}


def test_whoever_has_had_least_goes_first():
    old = make_job("old", requested_replicas=4, attained_slot_s=200.0)
    young = make_job("young", requested_replicas=4, attained_slot_s=100.0)
    assert running_after(old, young) == {"young"}


def test_a_running_job_is_overtaken_only_by_a_whole_quantum():
    waiting = make_job("waiting", requested_replicas=4, attained_slot_s=100.0)
    for more, expected in ((QUANTUM - 1, "running"), (QUANTUM + 1, "waiting")):
        running = make_job("running", requested_replicas=4, attained_slot_s=100.0 + more, allocation=HELD)
        assert running_after(waiting, running) == {expected}


def test_smaller_jobs_fill_the_gap():
    jobs = (
        make_job("first", requested_replicas=3),
        make_job("second", requested_replicas=2, attained_slot_s=1.0),
        make_job("third", requested_replicas=1, attained_slot_s=2.0),
    )
    assert running_after(*jobs) == {"first", "third"}
