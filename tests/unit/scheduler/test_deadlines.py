"""The layer of deadlines: it leaves a plan that is good enough alone, and takes no more than is needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from pollux.policy import make_policy
from pollux.scheduler.deadlines import Deadlines, finish_s
from pollux.server.present.deadlines import verdict_in_words
from pollux.simulator.builtin import load_builtin
from pollux.simulator.config import SimulationConfig
from pollux.simulator.result import SimulationResult, summarise
from pollux.simulator.run import simulate
from pollux.simulator.workload import Workload, job_spec
from pollux.testing.snapshots import make_job, make_nodes
from pollux.types import Allocation, JobView, Plan, Snapshot

NODES = make_nodes(2)


def giving(**counts: Allocation) -> Callable[[Snapshot], Plan]:
    return lambda snapshot: Plan(allocations=counts)


def due_job(name: str, *, on: int, within_s: float, **more: object) -> JobView:
    """A job that needs ``on`` replicas to be through within so long."""
    examples = 1e6
    took_s = finish_s(make_job(name, remaining_examples=examples), on, {"gpu": 4}, "gpu")
    left = examples * within_s / took_s * 0.9
    return make_job(name, remaining_examples=left, deadline_at=within_s + 130.0, **more)  # type: ignore[arg-type]


def test_a_plan_that_is_enough_stays_as_it_is() -> None:
    job = due_job("due", on=2, within_s=10_000.0)
    snapshot = Snapshot(now=0.0, nodes=NODES, jobs=(job, make_job("other")))
    plan = Plan(allocations={"due": Allocation.of(("n0", 4)), "other": Allocation.of(("n1", 4))})
    deadlines = Deadlines()
    assert deadlines.decide(snapshot, lambda _: plan) is plan
    assert deadlines.standings["due"].is_promised


def test_a_job_that_is_short_gets_its_share_and_the_others_shrink() -> None:
    job = due_job("due", on=4, within_s=10_000.0)
    other = make_job("other", allocation=Allocation.of(("n0", 4), ("n1", 4)))
    snapshot = Snapshot(now=0.0, nodes=NODES, jobs=(other, job))
    deadlines = Deadlines()
    plan = deadlines.decide(snapshot, giving(other=other.allocation))
    needed = deadlines.standings["due"].num_needed
    assert needed >= 2
    assert plan.allocation_of("due").num_replicas == needed
    assert plan.allocation_of("other").num_replicas == 8 - needed


def test_pinned_jobs_stay_where_they_are() -> None:
    job = due_job("due", on=2, within_s=10_000.0)
    pinned = make_job("pinned", allocation=Allocation.of(("n0", 3)), is_pinned=True)
    other = make_job("other", allocation=Allocation.of(("n0", 1), ("n1", 4)))
    snapshot = Snapshot(now=0.0, nodes=NODES, jobs=(pinned, other, job))
    plan = Deadlines().decide(snapshot, giving(pinned=pinned.allocation, other=other.allocation))
    assert plan.allocation_of("pinned") == pinned.allocation
    assert plan.allocation_of("due").num_replicas >= 1
    used = {"n0": 0, "n1": 0}
    for allocation in plan.allocations.values():
        for node, count in allocation.shares:
            used[node] += count
    assert max(used.values()) <= 4


def test_what_cannot_be_met_is_not_promised_and_takes_nothing_away() -> None:
    job = due_job("due", on=8, within_s=10_000.0)
    hopeless = dataclasses.replace(job, remaining_examples=(job.remaining_examples or 0) * 100)
    other = make_job("other", allocation=Allocation.of(("n0", 4)))
    snapshot = Snapshot(now=0.0, nodes=NODES, jobs=(other, hopeless))
    deadlines = Deadlines()
    plan = deadlines.decide(snapshot, giving(other=other.allocation))
    assert plan.allocations == {"other": other.allocation}
    assert not deadlines.standings["due"].is_promised


def test_the_answer_names_the_best_that_could_be_promised() -> None:
    job = due_job("due", on=4, within_s=10_000.0)
    snapshot = Snapshot(now=0.0, nodes=NODES, jobs=())
    deadlines = Deadlines()
    good = deadlines.assess(snapshot, job)
    assert good.is_possible and good.num_needed >= 2 and good.num_left == 8 - good.num_needed
    hurried = dataclasses.replace(job, spec=dataclasses.replace(job.spec, deadline_at=1_000.0))
    bad = deadlines.assess(snapshot, hurried)
    assert bad.is_possible is False
    assert bad.best_at is not None and 1_000.0 < bad.best_at < 11_000.0
    assert 0 < bad.num_needed <= 8 and bad.num_left == 8 - bad.num_needed  # of that best one
    assert good.num_lost == bad.num_lost == 0  # no job holds anything
    unknown = make_job("unknown", measured=False, deadline_at=500.0)
    assert deadlines.assess(snapshot, unknown).is_possible is None


def test_the_answer_says_what_a_deadline_costs_the_others() -> None:
    job = due_job("due", on=4, within_s=10_000.0)
    other = make_job("other", allocation=Allocation.of(("n0", 4), ("n1", 3)))
    deadlines, snapshot = Deadlines(), Snapshot(now=0.0, nodes=NODES, jobs=(other,))
    good = deadlines.assess(snapshot, job)
    assert good.num_lost == 7 - good.num_left > 0
    assert f"leaves {good.num_left} to jobs without a deadline, {good.num_lost} fewer than they hold" in (
        verdict_in_words(good, 10_000.0, 0.0)
    )
    bad = deadlines.assess(snapshot, dataclasses.replace(job, spec=dataclasses.replace(job.spec, deadline_at=1_000.0)))
    assert bad.num_lost == 7 - bad.num_left >= good.num_lost
    told = verdict_in_words(bad, 1_000.0, 0.0)
    assert told.startswith("cannot be met in 16m40s: at best ") and told.endswith(
        f"{bad.num_lost} fewer than they hold"
    )


def run(policy: str, deadline_s: float | None, *, keeps_deadlines: bool) -> SimulationResult:
    """One job with a deadline among others that came before it, on four GPUs."""
    applications = load_builtin()
    cifar = applications["cifar10"]
    specs = [job_spec(cifar, name=f"j{i}", time_s=0.0, num_replicas=1, batch_size=256) for i in range(4)]
    due = job_spec(cifar, name="due", time_s=60.0, num_replicas=1, batch_size=256)
    if deadline_s is not None:
        due = dataclasses.replace(due, deadline_at=60.0 + deadline_s)
    config = SimulationConfig(num_nodes=1, gpus_per_node=4, keeps_deadlines=keeps_deadlines)
    return summarise(simulate(Workload("w", (*specs, due)), applications, make_policy(policy), config))


@pytest.mark.parametrize("policy", ["tiresias", "pollux"])
def test_a_deadline_is_met_that_the_policy_alone_misses(policy: str) -> None:
    free = run(policy, None, keeps_deadlines=True)
    took_s = next(job.jct_s for job in free.jobs if job.name == "due")
    assert run(policy, 0.7 * took_s, keeps_deadlines=False).deadlines_met == 0.0
    kept = run(policy, 0.7 * took_s, keeps_deadlines=True)
    assert kept.deadlines_met == 1.0
    assert kept.best_effort_jct_s is not None and free.best_effort_jct_s is None
