from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.policy import PolicySettings, make_policy
from pollux.policy.dense import FreeSlots
from pollux.policy.gangs import demand
from pollux.testing.snapshots import PARAMS, make_job, make_mixed, make_nodes
from pollux.types import Allocation, JobView, Node, Plan, Snapshot
from tests.oracles import Perfect


def decide(name: str, *jobs: JobView, nodes: tuple[Node, ...] | None = None) -> Plan:
    return make_policy(name, PolicySettings()).decide(Snapshot(now=0, nodes=nodes or make_nodes(2), jobs=jobs))


def counts(plan: Plan) -> dict[str, int]:
    return {name: allocation.num_replicas for name, allocation in plan.allocations.items()}


def test_dense_placement_takes_the_roomiest_node_first():
    free = FreeSlots(make_nodes(3), [Allocation.of(("n0", 3))])
    assert free.place(6) == Allocation.of(("n1", 4), ("n2", 2))
    assert free.place(3) == Allocation.of(("n2", 2), ("n0", 1))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.lists(st.tuples(st.integers(1, 6), st.booleans())))
def test_free_slots_are_found_as_if_all_nodes_were_looked_at(sizes, wanted):
    nodes = [Node(name=f"n{number}", num_slots=size) for number, size in enumerate(sizes)]
    free, slots, placed = FreeSlots(nodes), {node.name: node.num_slots for node in nodes}, []
    for count, tightly in wanted:
        if count > free.on("gpu"):
            with pytest.raises(ValueError, match="do not fit"):
                free.place(count)
            if placed:
                allocation = placed.pop(0)
                free.give(allocation)
                for node, number in allocation.shares:
                    slots[node] += number
            continue
        expected, left = [], count
        while left > 0:
            fitting = [node for node in slots if slots[node] >= left] if tightly else []
            node = min(fitting, key=slots.__getitem__) if fitting else max(slots, key=slots.__getitem__)
            expected.append((node, min(slots[node], left)))
            left -= expected[-1][1]
            slots[node] -= expected[-1][1]
        placed.append(free.place(count, tightly=tightly))
        assert placed[-1] == Allocation.of(*expected)
        assert free.on("gpu") == sum(slots.values())
        assert all(free.at(node) == number for node, number in slots.items())


class TestDemand:
    @pytest.mark.parametrize(("asked", "expected"), [(None, 2), (1, 2), (2, 2), (3, 3), (4, 4), (7, 4)])
    def test_it_lies_within_the_bounds(self, asked, expected):
        assert demand(make_job("a", requested_replicas=asked, min_replicas=2, max_replicas=4)) == expected

    @pytest.mark.parametrize("name", ["fifo", "slaq", "optimus", "themis", "sia", "gavel"])
    def test_nobody_has_more_than_its_most_because_it_asked_for_more(self, name):
        job = make_job("a", batch=None, requested_replicas=7, max_replicas=2, oracle=Perfect())
        assert counts(decide(name, job)) == {"a": 2}


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


class TestOptimus:
    def test_replicas_go_where_they_save_most(self):
        plan = decide(
            "optimus",
            make_job("short", oracle=Perfect(10), requested_batch_size=4096),
            make_job("long", oracle=Perfect(1000), requested_batch_size=4096),
        )
        assert counts(plan) == {"short": 1, "long": 7}

    def test_everybody_gets_one_before_anybody_gets_two(self):
        jobs = [make_job(f"j{i}", oracle=Perfect(10.0**i), requested_batch_size=4096) for i in range(10)]
        assert counts(decide("optimus", *jobs)) == {f"j{i}": 1 for i in range(8)}

    def test_batch_size_bounds_the_replicas(self):
        plan = decide("optimus", make_job("a", oracle=Perfect(10), requested_batch_size=32))
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
    long = make_job("long", oracle=Perfect(1e6), requested_replicas=8, allocation=held)
    short = make_job("short", oracle=Perfect(10), requested_replicas=8)
    assert counts(decide("srtf", long, short)) == {"short": 8}


class TestEqual:
    def test_shares_are_equal_and_the_remainder_goes_to_the_oldest(self):
        assert counts(decide("equal", *(make_job(name) for name in "abc"))) == {"a": 3, "b": 3, "c": 2}

    def test_what_one_cannot_use_goes_to_the_others(self):
        assert counts(decide("equal", make_job("a", max_replicas=1), make_job("b"))) == {"a": 1, "b": 7}

    def test_more_jobs_than_slots(self):
        found = counts(decide("equal", *(make_job(f"j{i}") for i in range(12))))
        assert found == {f"j{i}": 1 for i in range(8)}


class TestOnSeveralTypes:
    NODES = make_mixed(big=4, small=8)

    def test_a_gang_sits_on_one_type_and_stays_on_its_own(self):
        held = Allocation.of(("big", 2))
        jobs = (
            make_job("wide", requested_replicas=6),
            make_job("running", requested_replicas=2, allocation=held),
            make_job("too wide", requested_replicas=9),
            make_job("next", requested_replicas=2),
        )
        for name in ("tiresias", "srtf", "las", "gittins"):
            plan = decide(name, *jobs, nodes=self.NODES)
            assert plan.allocation_of("wide") == Allocation.of(("small", 6))
            assert plan.allocation_of("running") == held
            assert counts(plan) == {"wide": 6, "running": 2, "next": 2}

    def test_who_waits_in_line_holds_up_only_those_who_want_its_type(self):
        jobs = (
            make_job("runs", requested_replicas=3, accelerators=frozenset({"big"})),
            make_job("waits", requested_replicas=3, accelerators=frozenset({"big"})),
            make_job("behind", requested_replicas=1, accelerators=frozenset({"big"})),
            make_job("elsewhere", requested_replicas=1),
            make_job("never", requested_replicas=9),
            make_job("last", requested_replicas=1, accelerators=frozenset({"small"})),
        )
        plan = decide("fifo", *jobs, nodes=self.NODES)
        assert counts(plan) == {"runs": 3, "elsewhere": 1, "last": 1}
        assert plan.allocation_of("elsewhere") == Allocation.of(("small", 1))

    def test_srtf_goes_by_the_fastest_type_a_job_may_use(self):
        fast = {"big": PARAMS, "small": PARAMS._replace(alpha_g=10.0)}
        known = {"params": fast, "remaining_examples": 1e5, "requested_replicas": 4}
        bound = make_job("bound", accelerators=frozenset({"small"}), **known)
        free = make_job("free", **known)
        plan = decide("srtf", bound, free, nodes=make_mixed(small=4))
        assert counts(plan) == {"bound": 4}  # as fast as the other there: the first goes first
        plan = decide("srtf", bound, free, nodes=make_mixed(small=4, big=1))
        assert counts(plan) == {"free": 4}

    def test_equal_shares_on_each_type(self):
        jobs = tuple(make_job(name) for name in "abc")
        assert counts(decide("equal", *jobs, nodes=self.NODES)) == {"a": 4, "b": 4, "c": 4}

    def test_a_job_leaves_a_crowded_type_only_for_a_much_roomier_one(self):
        def shares(big: int, small: int) -> dict[str, int]:
            running = make_job("a", allocation=Allocation.of(("big", 1)))
            return counts(decide("equal", running, nodes=make_mixed(big=big, small=small)))

        assert shares(big=4, small=8) == {"a": 4}
        assert shares(big=4, small=9) == {"a": 9}

    def test_optimus_counts_what_a_replica_saves_on_the_job_s_own_type(self):
        slow = PARAMS._replace(alpha_r=5.0)  # a second replica saves nothing there
        job = make_job("a", params={"big": PARAMS, "small": slow}, remaining_examples=1e6, requested_batch_size=4096)
        assert decide("optimus", job, nodes=self.NODES).allocations == {"a": Allocation.of(("small", 1))}
        bound = dataclasses.replace(job, spec=dataclasses.replace(job.spec, accelerators=frozenset({"big"})))
        assert counts(decide("optimus", bound, nodes=self.NODES)) == {"a": 4}
