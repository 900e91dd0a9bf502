from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pollux.errors import InvalidValueError
from pollux.policy import PolicySettings, make_policy
from pollux.policy.gavel import GavelPolicy
from pollux.policy.gavel_programs import Work, fair_finish_shares, isolated, max_min_shares, max_sum_shares
from pollux.testing.snapshots import make_job, make_mixed, make_nodes
from pollux.types import Allocation, JobView, Node, Plan, Snapshot


@dataclasses.dataclass
class Speeds:
    """Steps take so long, on any number of replicas."""

    seconds: dict[str, float]

    def iteration_s(self, num_replicas: int, accelerator: str = "gpu") -> float:
        return self.seconds[accelerator]

    def remaining_iterations(self) -> float:
        return 1000.0

    def loss(self, share_done: float) -> float | None:
        return None

    def load(self, num_replicas: int, accelerator: str = "gpu") -> float:
        return 1.0


def shares(throughputs: list[list[float]], demands: list[int], capacity: list[int], weights: object = None) -> object:
    num_jobs = len(demands)
    return max_min_shares(
        np.array(throughputs),
        np.array(demands),
        np.ones(num_jobs) if weights is None else np.array(weights),
        np.array(capacity),
    )


class TestShares:
    def test_everybody_is_equally_far_above_an_equal_split(self):
        """Three jobs and types, as in the paper's example: each spends its time where others would gain less."""
        throughputs = np.array([[4.0, 2.0, 1.0], [3.0, 2.0, 1.0], [2.0, 2.0, 1.0]])
        found = shares(throughputs.tolist(), [1, 1, 1], [1, 1, 1])
        gained = (found * throughputs).sum(axis=1) / throughputs.mean(axis=1)
        assert gained == pytest.approx(np.full(3, gained[0]))
        assert gained[0] > 1.02
        assert found[0, 0] > found[2, 0]

    def test_slots_are_what_is_shared_not_time(self):
        found = shares([[1.0], [1.0]], [4, 1], [4])
        # Equal slots would be 2 for each; the small job cannot use more than 1, so the large one has 3 of its 4.
        assert found[:, 0] == pytest.approx([0.75, 1.0])

    def test_weights(self):
        found = shares([[1.0], [1.0]], [4, 4], [4], weights=[3.0, 1.0])
        assert found[:, 0] == pytest.approx([0.75, 0.25])

    def test_whoever_is_held_back_does_not_hold_back_others(self):
        """A job that is confined to a crowded type leaves the other types' slots to the others."""
        found = shares([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0]], [1, 1, 1], [1, 1])
        assert found.sum(axis=1) == pytest.approx([0.5, 0.5, 1.0])

    def test_nobody_has_more_than_all_of_its_time_and_no_type_more_than_its_slots(self):
        rng = np.random.default_rng(3)
        demands = rng.integers(1, 9, size=30)
        found = max_min_shares(rng.uniform(0.1, 5, size=(30, 3)), demands, np.ones(30), np.array([24, 16, 24]))
        assert (found.sum(axis=1) <= 1 + 1e-6).all()
        assert (demands @ found <= np.array([24, 16, 24]) + 1e-6).all()
        assert demands @ found == pytest.approx([24, 16, 24], rel=1e-4)  # nothing lies idle while somebody could use it


def decide_rounds(jobs: list[JobView], nodes: tuple[Node, ...], num_rounds: int) -> list[Plan]:
    policy, plans = make_policy("gavel"), []
    for number in range(num_rounds):
        plans.append(policy.decide(Snapshot(now=60.0 * number, nodes=nodes, jobs=tuple(jobs))))
        jobs = [dataclasses.replace(job, allocation=plans[-1].allocation_of(job.name)) for job in jobs]
    return plans


def test_rounds_come_to_the_shares():
    jobs = [make_job(name, requested_replicas=4) for name in "abc"]
    plans = decide_rounds(jobs, make_nodes(1), 30)
    ran = {name: sum(bool(plan.allocation_of(name)) for plan in plans) for name in "abc"}
    assert ran == {"a": 10, "b": 10, "c": 10}


def test_jobs_go_where_they_gain_most():
    fast_gains = make_job("gains", requested_replicas=4, oracle=Speeds({"big": 0.1, "small": 1.0}))
    does_not = make_job("other", requested_replicas=4, oracle=Speeds({"big": 1.0, "small": 1.0}))
    plan = decide_rounds([does_not, fast_gains], make_mixed(big=4, small=4), 1)[0]
    assert plan.allocations == {"gains": Allocation.of(("big", 4)), "other": Allocation.of(("small", 4))}


def test_programs_are_solved_again_only_for_something_new(monkeypatch):
    solved = []

    def counted(*arguments: object) -> object:
        solved.append(arguments)
        return max_min_shares(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("pollux.policy.gavel.max_min_shares", counted)
    policy = make_policy("gavel")
    jobs = tuple(make_job(name, requested_replicas=4) for name in "abc")
    for now in (0.0, 60.0, 120.0):
        policy.decide(Snapshot(now=now, nodes=make_nodes(1), jobs=jobs))
    assert len(solved) == 1
    policy.decide(Snapshot(now=180.0, nodes=make_nodes(1), jobs=jobs[:2]))
    policy.decide(Snapshot(now=240.0, nodes=make_nodes(2), jobs=jobs[:2]))
    assert len(solved) == 3


def test_who_comes_to_weigh_more_or_to_ask_for_less_is_noticed():
    def shares_of(policy: GavelPolicy, **changed: object) -> list[float]:
        jobs = (make_job("a", requested_replicas=4, **changed), make_job("b", requested_replicas=4))
        policy.decide(Snapshot(now=0.0, nodes=make_nodes(1), jobs=jobs))
        return policy._shares[:, 0].tolist()

    for changed in ({"weight": 9.0}, {"max_replicas": 2, "oracle": Speeds({"gpu": 1.0})}):
        same_speed = {key: value for key, value in changed.items() if key == "oracle"}
        policy = make_policy("gavel")
        before = shares_of(policy, **same_speed)
        after = shares_of(policy, **changed)
        assert after != pytest.approx(before)
        assert after == pytest.approx(shares_of(make_policy("gavel"), **changed))


def test_unmeasured_jobs_on_types_nobody_knows_run():
    plan = decide_rounds([make_job("a", measured=False, requested_replicas=2)], make_mixed(big=4, small=4), 1)[0]
    assert plan.allocation_of("a").num_replicas == 2


def test_the_largest_sum_of_throughputs_goes_to_who_gains_most_and_ties_are_split():
    throughputs = np.array([[1.0, 4.0], [1.0, 2.0], [1.0, 2.0]])
    shares = max_sum_shares(throughputs, np.array([1, 1, 1]), np.ones(3), np.array([1, 1]))
    assert shares[0, 1] == pytest.approx(1.0, abs=1e-6)  # it loses most on the other type
    assert shares[1, 0] == pytest.approx(0.5, abs=0.1) and shares[2, 0] == pytest.approx(0.5, abs=0.1)
    assert (shares.sum(axis=0) <= 1 + 1e-6).all()


def test_an_unknown_objective_is_refused():
    with pytest.raises(InvalidValueError, match="max_sum_throughput"):
        PolicySettings(objective="makespan")


class TestFinishTimeFairness:
    def test_the_largest_rho_is_as_small_as_can_be(self):
        """Two jobs and one slot: who is older and has more left needs more; both then end equally late."""
        work = Work(
            ages_s=np.array([0.0, 600.0]), steps_left=np.array([100.0, 400.0]), alone_s=np.array([200.0, 900.0])
        )
        found = fair_finish_shares(np.ones((2, 1)), np.array([1, 1]), work, np.array([1]))
        rho = (work.ages_s + work.steps_left / found[:, 0]) / work.alone_s
        assert found.sum() == pytest.approx(1.0, rel=1e-3)
        assert rho[0] == pytest.approx(rho[1], rel=1e-2)

    def test_who_is_too_late_anyway_has_all_its_time_and_the_rest_is_shared(self):
        work = Work(
            ages_s=np.array([1e6, 0.0, 0.0]), steps_left=np.array([100.0, 100.0, 300.0]), alone_s=np.full(3, 900.0)
        )
        found = fair_finish_shares(np.ones((3, 1)), np.ones(3, dtype=int), work, np.array([2]))
        assert found[0, 0] == pytest.approx(1.0, rel=1e-3)
        assert found[1:, 0].sum() == pytest.approx(1.0, rel=1e-3) and found[2, 0] > 2 * found[1, 0]

    def test_several_types_are_used_where_they_are_fast(self):
        throughputs = np.array([[4.0, 1.0], [1.0, 1.0]])
        work = Work(ages_s=np.zeros(2), steps_left=np.full(2, 100.0), alone_s=np.full(2, 100.0))
        found = fair_finish_shares(throughputs, np.ones(2, dtype=int), work, np.array([1, 1]))
        assert found[0, 0] > 0.5 and found[1, 1] > 0.5
        assert (found.sum(axis=1) <= 1 + 1e-6).all() and (found.sum(axis=0) <= 1 + 1e-6).all()

    def test_a_job_that_can_run_nowhere_is_passed_over(self):
        work = Work(ages_s=np.zeros(2), steps_left=np.ones(2), alone_s=np.ones(2))
        found = fair_finish_shares(np.array([[0.0], [1.0]]), np.array([8, 1]), work, np.array([4]))
        assert found[:, 0] == pytest.approx([0.0, 1.0])

    def test_alone_means_one_part_in_as_many_as_there_are_jobs(self):
        assert isolated(np.full((4, 1), 2.0), np.array([1, 2, 4, 1]), np.array([4])) == pytest.approx(
            [2.0, 1.0, 0.5, 2.0]
        )

    def test_the_policy_lets_a_late_job_go_first(self):
        oracle = Speeds({"gpu": 1.0})
        settings = PolicySettings(objective="finish_time_fairness")
        late, new = (
            make_job(name, requested_replicas=4, oracle=oracle, age_s=age_s)
            for name, age_s in (("late", 90_000.0), ("new", 1.0))
        )
        plan = make_policy("gavel", settings).decide(Snapshot(now=0.0, nodes=make_nodes(1), jobs=(new, late)))
        assert plan.allocations.keys() == {"late"}


def test_most_steps_go_to_the_quickest_steps():
    """As the authors' program has it, a job of short steps has all its time before one of long ones has any."""
    found = max_sum_shares(np.array([[10.0], [1.0]]), np.ones(2, dtype=int), np.ones(2), np.array([1]), is_plain=True)
    assert found[:, 0] == pytest.approx([1.0, 0.0], abs=1e-6)
