from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.model.fitting import fit
from pollux.model.profile import Configuration, Profile, Timing
from pollux.policy import PolicySettings, make_policy
from pollux.policy.configurations import Layout, Placer
from pollux.policy.sia import SiaPolicy, allowed_counts, move_factor
from pollux.testing.examples import examples
from pollux.testing.snapshots import PARAMS, make_job, make_mixed, make_nodes
from pollux.types import NO_ALLOCATION, Allocation, BatchLimits, JobSpec, JobView, Node, Plan, Snapshot

AS_PUBLISHED = PolicySettings(exploration=2.0, first_replicas=1)


def layout(*num_slots: int, fixed: tuple[Allocation, ...] = ()) -> Layout:
    nodes = [Node(name=f"n{number}", num_slots=slots) for number, slots in enumerate(num_slots)]
    return Layout.of(nodes, fixed)["gpu"]


def decide(*jobs: JobView, nodes: tuple[Node, ...] | None = None) -> Plan:
    return make_policy("sia").decide(Snapshot(now=0, nodes=nodes or make_nodes(2), jobs=jobs))


def counts(plan: Plan) -> dict[str, int]:
    return {name: allocation.num_replicas for name, allocation in plan.allocations.items()}


class TestConfigurations:
    def test_powers_of_two_then_whole_nodes(self):
        assert layout(4, 4, 4).counts == (1, 2, 4, 8, 12)
        assert layout(8, 8).counts == (1, 2, 4, 8, 16)
        assert layout(6, 6, 2).counts == (1, 2, 4, 6, 12)

    def test_equal_nodes_need_no_more_than_slots_to_be_counted(self):
        assert layout(8, 8).units == (1,)
        assert layout(8, 8, fixed=(Allocation.of(("n0", 1)),)).units == (1, 2, 4, 8)

    @examples(60)
    @given(st.lists(st.integers(1, 8), min_size=1, max_size=4), st.data())
    def test_whatever_the_blocks_allow_can_be_placed(self, sizes, data):
        """And nobody is on a node with more than it has, on two nodes, or on parts of several."""
        here = layout(*sizes)
        left = np.array(here.blocks)
        wanted: dict[str, int] = {}
        for number in range(data.draw(st.integers(0, 10))):
            count = data.draw(st.integers(1, 2 * max(sizes)))
            if (np.array(here.needs(count)) <= left).all() and count <= here.node_slots * here.num_whole:
                left -= here.needs(count)
                wanted[f"j{number}"] = count
        placed = Placer(here, dict.fromkeys(wanted, NO_ALLOCATION)).place(wanted)
        assert {name: allocation.num_replicas for name, allocation in placed.items()} == wanted
        used = dict.fromkeys(here.free, 0)
        for allocation in placed.values():
            assert here.is_regular(allocation)
            for node, count in allocation.shares:
                used[node] += count
        assert all(used[node] <= slots for node, slots in here.free.items())

    def test_who_keeps_its_count_stays(self):
        held = {"a": Allocation.of(("n1", 2)), "b": Allocation.of(("n0", 1))}
        placed = Placer(layout(4, 4), held).place({"a": 2, "b": 2})
        assert placed["a"] == held["a"]
        assert placed["b"] == Allocation.of(("n0", 2))  # on its own node, where there is room

    def test_small_jobs_make_room_for_a_whole_node(self):
        held = {"a": Allocation.of(("n0", 2)), "b": Allocation.of(("n1", 1)), "c": NO_ALLOCATION}
        placed = Placer(layout(4, 4), held).place({"a": 2, "b": 1, "c": 4})
        assert placed == {"a": held["a"], "b": Allocation.of(("n0", 1)), "c": Allocation.of(("n1", 4))}


class TestOptions:
    def test_at_most_twice_what_was_measured(self):
        here = layout(4, 4, 4)
        assert allowed_counts(make_job("a", max_profiled_replicas=2), here, AS_PUBLISHED) == [1, 2, 4]
        assert allowed_counts(make_job("a", measured=False), here, AS_PUBLISHED) == [1]

    def test_bounds_that_no_configuration_meets_leave_the_least(self):
        assert allowed_counts(make_job("a", min_replicas=3, max_replicas=3), layout(4, 4), AS_PUBLISHED) == [3]

    def test_commands_that_do_not_adapt_have_what_they_asked_for(self):
        assert allowed_counts(
            make_job("a", batch=None, requested_replicas=4, measured=False), layout(4, 4), AS_PUBLISHED
        ) == [4]

    def test_moves_are_charged_by_age_and_resizes(self):
        job = make_job("a", age_s=970.0, num_resizes=3)
        assert move_factor(job, PolicySettings(resize_s=30)) == pytest.approx((970 - 90) / 1000)
        measured = dataclasses.replace(job, resize_s=130.0)
        assert move_factor(measured, PolicySettings(resize_s=30)) == pytest.approx((970 - 390) / 1100)
        assert move_factor(make_job("a", age_s=29.0, num_resizes=9), PolicySettings(resize_s=30)) == 1.0


class TestDecisions:
    def test_the_first_round_is_one_replica_each(self):
        plan = decide(*(make_job(name, measured=False) for name in "abc"))
        assert counts(plan) == {"a": 1, "b": 1, "c": 1}

    def test_a_lone_measured_job_grows_to_twice_its_profile(self):
        plan = decide(make_job("a", max_profiled_replicas=2, allocation=Allocation.of(("n0", 2))))
        assert counts(plan) == {"a": 4}

    def test_who_scales_better_has_more(self):
        flat = PARAMS._replace(alpha_r=2.0, alpha_n=4.0)  # synchronisation takes longer than computing
        jobs = (make_job("flat", params={"gpu": flat}), make_job("steep"))
        found = counts(decide(*jobs))
        assert found["steep"] > found["flat"]

    def test_a_change_that_gains_little_is_not_made(self):
        held = Allocation.of(("n0", 4))
        flat = PARAMS._replace(alpha_n=1.0)
        tired = make_job("a", allocation=held, age_s=600.0, num_resizes=9, params={"gpu": flat})
        assert decide(tired).allocations == {"a": held}

    def test_each_job_has_the_type_that_it_gains_most_by(self):
        slow = PARAMS._replace(alpha_g=0.2, beta_g=0.006)
        one = {"max_profiled_replicas": 2, "max_replicas": 4, "min_replicas": 4}
        picky = make_job("picky", params={"big": PARAMS, "small": slow}, **one)
        easy = make_job("easy", params={"big": PARAMS, "small": PARAMS}, **one)
        plan = decide(easy, picky, nodes=make_mixed(big=4, small=4))
        assert plan.allocations == {"picky": Allocation.of(("big", 4)), "easy": Allocation.of(("small", 4))}

    def test_a_type_not_yet_run_on_is_judged_by_its_speed_on_one_replica(self):
        class OneReplica:
            def iteration_s(self, num_replicas: int, accelerator: str = "gpu") -> float:
                return {"big": 0.1, "small": 1.0}[accelerator]

        job = make_job("a", params={"small": PARAMS}, oracle=OneReplica(), allocation=Allocation.of(("small", 4)))
        assert decide(job, nodes=make_mixed(big=4, small=4)).allocations == {"a": Allocation.of(("big", 4))}

    def test_without_that_it_is_tried_last(self):
        jobs = [make_job(name, params={"small": PARAMS}, max_profiled_replicas=1) for name in "ab"]
        plan = decide(*jobs, nodes=make_mixed(big=4, small=2))
        assert sorted((share.node, share.num_replicas) for a in plan.allocations.values() for share in a.shares) == [
            ("big", 1),
            ("small", 2),
        ]

    def test_a_job_in_another_shape_is_brought_to_a_configuration(self):
        plan = decide(make_job("a", allocation=Allocation.of(("n0", 1), ("n1", 2))))
        assert plan.allocation_of("a").counts in ((4,), (4, 4))

    @pytest.mark.parametrize(
        "exact", [{"batch": None, "requested_replicas": 3}, {"min_replicas": 3, "max_replicas": 3}]
    )
    def test_who_sits_beside_a_job_of_three_replicas_stays_there(self, exact):
        """Three replicas would be set a block of four apart; the fourth slot is another's, and both run."""
        jobs = (
            make_job("a", allocation=Allocation.of(("n0", 3)), **exact),
            make_job("b", allocation=Allocation.of(("n0", 1)), max_replicas=1),
        )
        held = {job.name: job.allocation for job in jobs}
        assert decide(*jobs, nodes=make_nodes(1)).allocations == held
        assert decide(*jobs, nodes=make_nodes(2)).allocations == held  # nor does it move where there is room

    def test_it_takes_over_from_a_policy_with_other_shapes(self):
        jobs = [make_job(f"j{number}", min_replicas=number, max_replicas=number) for number in (1, 3)]
        snapshot = Snapshot(now=0, nodes=make_nodes(1), jobs=tuple(jobs))
        plan = make_policy("fifo").decide(snapshot)
        assert counts(plan) == {"j1": 1, "j3": 3}
        taken_over = [dataclasses.replace(job, allocation=plan.allocation_of(job.name)) for job in jobs]
        assert decide(*taken_over, nodes=make_nodes(1)).allocations == plan.allocations

    def test_who_needs_more_than_there_is_holds_up_nobody(self):
        assert counts(decide(make_job("a", min_replicas=1_000_000), make_job("b", max_replicas=4))) == {"b": 4}

    def test_more_jobs_than_slots(self):
        plan = decide(*(make_job(f"j{number}") for number in range(12)))
        assert sum(counts(plan).values()) == 8


def test_a_policy_explores_as_the_cluster_says():
    """Neither ``sia`` nor ``pollux`` has a rule of its own."""
    job = make_job("a", noise_scale=1e6, max_profiled_replicas=1)
    snapshot = Snapshot(now=0, nodes=make_nodes(4, 4), jobs=(job,))
    for name in ("sia", "pollux"):
        given = [
            make_policy(name, PolicySettings(exploration=factor, first_replicas=1)).decide(snapshot)
            for factor in (1.0, 2.0, 4.0)
        ]
        assert [plan.allocation_of("a").num_replicas for plan in given] == [1, 2, 4], name


def test_a_long_job_grows_beyond_the_replicas_it_was_measured_with():
    """ElasticFlow's deepspeech2 job of 231 h stayed on 4 of 128 GPUs: a line through K <= 4 says that 8 are slower."""
    profile = Profile()
    for replicas, pass_s, step_s in ((1, 0.3308, 0.3308), (2, 0.175, 0.1864), (4, 0.0926, 0.1326)):
        profile.add("gpu", Configuration(1, replicas, 32 // replicas), Timing(pass_s, step_s))
    limits = BatchLimits(initial=32, maximum=32, device_max=32)
    held = Allocation.of((make_nodes(1)[0].name, 4))

    def decided(is_published: bool) -> int:
        theta = fit(profile.observations("gpu"), is_published=is_published).params
        job = JobView(
            spec=JobSpec(name="long", batch=limits, max_replicas=32),
            allocation=held,
            age_s=1e5,
            num_resizes=2,
            params={"gpu": theta},
            noise_scale=32.0,
            max_profiled_replicas=4,
        )
        plan = SiaPolicy(AS_PUBLISHED).decide(Snapshot(now=1e5, nodes=make_nodes(16, 8), jobs=(job,)))
        return plan.allocation_of("long").num_replicas

    assert decided(is_published=True) == 4
    assert decided(is_published=False) == 8
