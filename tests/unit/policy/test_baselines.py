from __future__ import annotations

from dataclasses import dataclass

from pollux.policy import PolicySettings, make_policy
from pollux.policy.dense import FreeSlots
from pollux.types import Allocation, JobView, Node, Plan, Snapshot
from tests.snapshots import make_job, make_nodes


def decide(name: str, *jobs: JobView, nodes: tuple[Node, ...] | None = None) -> Plan:
    return make_policy(name, PolicySettings()).decide(Snapshot(now=0, nodes=nodes or make_nodes(2), jobs=jobs))


def counts(plan: Plan) -> dict[str, int]:
    return {name: allocation.num_replicas for name, allocation in plan.allocations.items()}


def test_dense_placement_takes_the_roomiest_node_first():
    free = FreeSlots(make_nodes(3), [Allocation.of(("n0", 3))])
    assert free.place(6) == Allocation.of(("n1", 4), ("n2", 2))
    assert free.place(3) == Allocation.of(("n2", 2), ("n0", 1))


class TestTiresias:
    def test_later_smaller_jobs_fill_the_gap(self):
        plan = decide(
            "tiresias",
            make_job("a", requested_replicas=6),
            make_job("b", requested_replicas=4),
            make_job("c", requested_replicas=2),
        )
        assert counts(plan) == {"a": 6, "c": 2}

    def test_a_job_that_has_had_its_share_goes_behind_newcomers(self):
        held = Allocation.of(("n0", 4), ("n1", 4))
        old = make_job("old", requested_replicas=8, attained_s=7200.0, allocation=held)
        assert counts(decide("tiresias", old, make_job("new", requested_replicas=8))) == {"new": 8}

    def test_below_the_threshold_it_keeps_running(self):
        held = Allocation.of(("n0", 4), ("n1", 4))
        old = make_job("old", requested_replicas=8, attained_s=7199.0, allocation=held)
        assert decide("tiresias", old, make_job("new", requested_replicas=8)).allocations == {"old": held}

    def test_order_of_falling_is_remembered_and_reset_forgets_it(self):
        policy = make_policy("tiresias")
        nodes = make_nodes(1)
        first = make_job("a", requested_replicas=4, attained_s=1e5)
        young = make_job("b", requested_replicas=4, attained_s=0.0)
        policy.decide(Snapshot(now=0, nodes=nodes, jobs=(young, first)))
        fallen = make_job("b", requested_replicas=4, attained_s=1e5)
        again = Snapshot(now=60, nodes=nodes, jobs=(fallen, first))
        assert counts(policy.decide(again)) == {"a": 4}  # a fell first, so it is ahead of b in the second queue
        policy.reset()
        assert counts(policy.decide(again)) == {"b": 4}


@dataclass
class Halving:
    """Time per step halves with each doubling, without end."""

    base_s: float
    steps: float

    def iteration_s(self, num_replicas: int) -> float:
        return self.base_s / num_replicas

    def remaining_iterations(self) -> float:
        return self.steps


class TestOptimus:
    def test_replicas_go_where_they_save_most(self):
        plan = decide(
            "optimus",
            make_job("short", oracle=Halving(1.0, 10), requested_batch_size=4096),
            make_job("long", oracle=Halving(1.0, 1000), requested_batch_size=4096),
        )
        assert counts(plan) == {"short": 1, "long": 7}

    def test_everybody_gets_one_before_anybody_gets_two(self):
        jobs = [make_job(f"j{i}", oracle=Halving(1.0, 10.0**i), requested_batch_size=4096) for i in range(10)]
        assert counts(decide("optimus", *jobs)) == {f"j{i}": 1 for i in range(8)}

    def test_batch_size_bounds_the_replicas(self):
        plan = decide("optimus", make_job("a", oracle=Halving(1.0, 10), requested_batch_size=32))
        assert counts(plan) == {"a": 2}  # 32 examples, at least 16 a replica

    def test_works_on_fitted_models_without_an_oracle(self):
        measured = make_job("a", remaining_examples=1e6, requested_batch_size=4096)
        unknown = make_job("b", measured=False, requested_batch_size=4096)
        found = counts(decide("optimus", measured, unknown))
        assert found["b"] == 1
        assert found["a"] > 1


class TestFifo:
    def test_nobody_overtakes(self):
        jobs = (
            make_job("a", requested_replicas=6),
            make_job("b", requested_replicas=4),
            make_job("c", requested_replicas=1),
        )
        assert counts(decide("fifo", *jobs)) == {"a": 6}

    def test_running_jobs_stay(self):
        running = make_job("late", requested_replicas=4, allocation=Allocation.of(("n0", 4)))
        assert counts(decide("fifo", make_job("early", requested_replicas=8), running)) == {"late": 4}


def test_srtf_prefers_the_job_that_ends_first():
    held = Allocation.of(("n0", 4), ("n1", 4))
    long = make_job("long", oracle=Halving(1.0, 1e6), requested_replicas=8, allocation=held)
    short = make_job("short", oracle=Halving(1.0, 10), requested_replicas=8)
    assert counts(decide("srtf", long, short)) == {"short": 8}


class TestEqual:
    def test_shares_are_equal_and_the_remainder_goes_to_the_oldest(self):
        assert counts(decide("equal", *(make_job(name) for name in "abc"))) == {"a": 3, "b": 3, "c": 2}

    def test_what_one_cannot_use_goes_to_the_others(self):
        assert counts(decide("equal", make_job("a", max_replicas=1), make_job("b"))) == {"a": 1, "b": 7}

    def test_more_jobs_than_slots(self):
        found = counts(decide("equal", *(make_job(f"j{i}") for i in range(12))))
        assert found == {f"j{i}": 1 for i in range(8)}
