from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.policy import make_policy
from pollux.policy import themis as module
from pollux.policy.themis import LEASE_S, Bid
from pollux.testing.examples import examples
from pollux.testing.snapshots import make_job, make_nodes
from pollux.types import Allocation, JobView, Plan, Snapshot
from tests.oracles import Perfect


def job(name: str, *, left: float, age_s: float = 0.0, replicas: int = 4, **fields: object) -> JobView:
    return make_job(name, oracle=Perfect(left), age_s=age_s, requested_replicas=replicas, **fields)


def snapshot(*jobs: JobView, now: float = 0.0, num_nodes: int = 1) -> Snapshot:
    return Snapshot(now=now, nodes=make_nodes(num_nodes), jobs=jobs)


def counts(plan: Plan) -> dict[str, int]:
    return {name: allocation.num_replicas for name, allocation in plan.allocations.items()}


def bid(mine: JobView, *others: JobView, num_nodes: int = 1) -> Bid:
    return Bid.of(mine, {"gpu": 4 * num_nodes}, {"gpu": 4}, 1 + len(others))


class TestBid:
    def test_rho_is_time_under_sharing_over_time_alone_on_the_share(self):
        mine = job("a", left=1200, age_s=500, done_examples=100.0, remaining_examples=200.0)
        found = bid(mine, job("b", left=1))
        # Two of four slots are its share: half of 1800 steps in all, of which a third is done.
        assert found.ideal_s == pytest.approx(900)
        assert found.rho(4) == pytest.approx((500 + 300) / 900)
        assert found.rho(1) == pytest.approx((500 + 1200) / 900)
        assert found.rho(0) == pytest.approx((500 + LEASE_S + 300) / 900)

    def test_a_share_of_less_than_a_slot_is_a_part_of_the_time(self):
        jobs = [job(f"j{i}", left=1000) for i in range(8)]
        assert bid(*jobs).ideal_s == pytest.approx(2000)

    def test_of_unknown_length_it_has_as_much_left_as_it_has_had(self):
        unknown = make_job("a", measured=False, requested_replicas=2, age_s=100.0, attained_slot_s=400.0)
        assert bid(unknown).rho(2) == pytest.approx((100 + 200) / 400)

    def test_nobody_bids_for_more_than_there_is(self):
        """What is computed is bounded by the cluster, whatever is asked for."""
        assert bid(job("a", left=1000, replicas=1_000_000), num_nodes=2).most == 8
        jobs = (job("a", left=1000, replicas=1_000_000), job("b", left=1000, replicas=1))
        assert counts(make_policy("themis").decide(snapshot(*jobs, num_nodes=2))) == {"a": 7, "b": 1}


def test_the_worst_off_are_served_first():
    jobs = [job(f"j{i}", left=1000, age_s=100.0 * i) for i in range(3)]
    assert counts(make_policy("themis").decide(snapshot(*jobs))) == {"j2": 4}


def test_all_slots_are_given_away_and_nobody_gets_more_than_it_asked_for():
    jobs = [job(f"j{i}", left=1000, replicas=3) for i in range(3)]
    found = counts(make_policy("themis").decide(snapshot(*jobs, num_nodes=2)))
    assert sorted(found.values()) == [2, 3, 3]


def test_a_winner_pays_with_what_it_costs_the_others():
    """Ten alike, two of which bid for six slots: each would have four without the other, so neither gets its three.

    What they do not get is handed out from the worst off on, so that the first fills up before the second.
    """
    jobs = [job(f"j{i}", left=1000, age_s=1000.0 if i < 2 else 0.0) for i in range(10)]
    nodes = make_nodes(1, num_slots=6)
    found = counts(make_policy("themis").decide(Snapshot(now=0, nodes=nodes, jobs=tuple(jobs))))
    assert found == {"j0": 4, "j1": 2}


def test_a_lease_is_kept_and_then_goes_to_whoever_is_worse_off():
    policy = make_policy("themis")
    first = job("first", left=1e5)
    started = policy.decide(snapshot(first)).allocation_of("first")
    running = dataclasses.replace(first, allocation=started)
    second = job("second", left=100, age_s=LEASE_S / 2)
    assert counts(policy.decide(snapshot(running, second, now=LEASE_S - 1))) == {"first": 4}
    assert counts(policy.decide(snapshot(running, second, now=LEASE_S))) == {"second": 4}


def test_a_lease_that_nobody_else_wants_is_renewed_in_place():
    policy = make_policy("themis")
    held = Allocation.of(("n1", 4))
    alone = job("alone", left=1e5, allocation=held)
    for now in (0.0, LEASE_S, 1.5 * LEASE_S):
        assert policy.decide(snapshot(alone, now=now, num_nodes=2)).allocations == {"alone": held}
    late = job("late", left=10, age_s=1e4, replicas=8)
    assert counts(policy.decide(snapshot(alone, late, now=1.5 * LEASE_S, num_nodes=2))) == {"alone": 4, "late": 4}


def test_reset_forgets_leases():
    policy = make_policy("themis")
    running = job("running", left=1e5, allocation=Allocation.of(("n0", 4)))
    hasty = job("hasty", left=10, age_s=1e4)
    policy.decide(snapshot(running))
    assert counts(policy.decide(snapshot(running, hasty, now=LEASE_S))) == {"hasty": 4}
    policy.reset()
    assert counts(policy.decide(snapshot(running, hasty, now=LEASE_S))) == {"running": 4}


bidders = st.lists(st.tuples(st.floats(1, 1e5), st.floats(0, 1e5), st.integers(1, 9)), min_size=1, max_size=12)


@examples(50)
@given(bidders, st.integers(1, 6))
def test_payments_are_those_of_sharing_everything_out_again(found, num_nodes):
    """Slots of a bidder that is not there go to those next in turn, which need not be found out from the beginning."""
    jobs = [job(f"j{i}", left=left, age_s=age, replicas=most) for i, (left, age, most) in enumerate(found)]
    here = snapshot(*jobs, num_nodes=num_nodes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FILTER", 0.0)
        quick = make_policy("themis").decide(here)
        patch.setattr(module, "_are_settled", lambda *everybody: False)
        assert make_policy("themis").decide(here) == quick


def test_work_grows_with_jobs_not_with_their_pairs(monkeypatch):
    asked = []
    rho = Bid.rho
    monkeypatch.setattr(Bid, "rho", lambda self, num_replicas: asked.append(1) or rho(self, num_replicas))

    def num_asked(num_jobs: int) -> int:
        asked.clear()
        make_policy("themis").decide(snapshot(*(job(f"j{i}", left=1000) for i in range(num_jobs)), num_nodes=num_jobs))
        return len(asked)

    assert num_asked(200) < 3 * num_asked(100)
