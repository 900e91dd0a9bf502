"""Several accelerator types: the bound holds, what is found is near the best, and nothing of one type changes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given

from pollux.policy.base import PolicySettings
from pollux.policy.market import Market
from pollux.policy.mixed import _solve_once, solve_mixed
from pollux.policy.placement import PlacementProblem
from pollux.policy.pollux import PolluxPolicy
from pollux.policy.round import RoundProblem
from pollux.policy.speedups import speedup_tables
from pollux.testing.examples import examples
from pollux.testing.snapshots import PARAMS, make_job, make_mixed, snapshots
from pollux.types import NO_ALLOCATION, Allocation, Snapshot
from tests.property.brute_force import least_cost


def problems_of(snapshot: Snapshot) -> RoundProblem:
    return RoundProblem.of(snapshot, speedup_tables(snapshot), PolicySettings())


def part(problem: PlacementProblem, jobs: Sequence[int]) -> PlacementProblem:
    return problem.of_jobs(np.array(jobs, dtype=np.int64))


def least_mixed_cost(problems: Sequence[PlacementProblem]) -> float:
    """Every job on every type, every allocation there."""
    best = math.inf
    num_jobs = problems[0].num_jobs
    for kinds in itertools.product(range(len(problems)), repeat=num_jobs):
        on = [[job for job in range(num_jobs) if kinds[job] == kind] for kind in range(len(problems))]
        homes = [[job for job in range(num_jobs) if problem.current[job]] for problem in problems]
        if any(problems[0].is_fixed[job] and job not in on[kind] for kind, home in enumerate(homes) for job in home):
            continue
        best = min(best, sum(least_cost(part(problem, jobs)) for problem, jobs in zip(problems, on, strict=True)))
    return best


@examples(60)
@given(snapshots(mixed=True, max_nodes=3, max_slots=2, max_jobs=3))
def test_the_bound_holds_and_what_is_found_is_no_better_than_the_best(snapshot):
    if not snapshot.jobs or len({node.accelerator for node in snapshot.nodes}) < 2:
        return
    round_ = problems_of(snapshot)
    found = solve_mixed(round_.problems, round_.nodes, None, np.random.default_rng(0)).solution
    best = least_mixed_cost(round_.problems)
    slack = 1e-6 * max(1.0, abs(best))
    assert found.lower_bound <= best + slack
    assert found.cost >= best - slack
    assert found.cost <= round_.stay_cost + slack


@pytest.mark.parametrize("weights", ["equal", "remaining"])
@pytest.mark.parametrize("p", [-20.0, -10.0, -6.0, -3.0, 0.0, 0.5, 1.0])
def test_the_bound_holds_where_waiting_costs_more_than_numbers_can_hold(p, weights):
    """A job that waits costs 250^-p: prices of that size nearly cancel what is paid, but for rounding."""
    rules = PolicySettings(p=p, weights=weights)
    for num_jobs, num_held in itertools.product((2, 4, 8), (0, 1, 2)):
        held = [Allocation.of(("gpu", 8)), Allocation.of(("big", 2))][:num_held]
        jobs = tuple(
            make_job(
                f"j{i}",
                params={"gpu": PARAMS},
                remaining_examples=10.0 ** (3 + i),
                allocation=held[i] if i < len(held) else NO_ALLOCATION,
                resize_s=1e4,
                age_s=1220.0,
            )
            for i in range(num_jobs)
        )
        snapshot = Snapshot(now=0, nodes=make_mixed(gpu=8, big=6), jobs=jobs)
        problems = RoundProblem.of(snapshot, speedup_tables(snapshot, rules), rules).problems
        found, _, bound = _solve_once(problems, None, np.random.default_rng(0))
        assert bound <= found.cost + 1e-9 * max(1.0, abs(found.cost))
        plan = PolluxPolicy(rules).decide(snapshot)
        assert plan.explanation is not None
        assert plan.explanation.fitness <= plan.explanation.upper_bound * (1 + 1e-9) + 1e-9


def test_almost_always_optimal_on_small_clusters():
    rng = np.random.default_rng(3)
    ratios = []
    for _ in range(60):
        nodes = make_mixed(gpu=int(rng.integers(1, 4)), big=int(rng.integers(1, 3)))
        jobs = []
        for index in range(int(rng.integers(1, 4))):
            slow = PARAMS._replace(alpha_n=float(rng.uniform(0.01, 1)), alpha_g=float(rng.uniform(0.01, 0.3)))
            speed = float(rng.uniform(1, 5))
            fast = slow._replace(alpha_g=slow.alpha_g / speed, beta_g=slow.beta_g / speed)
            phi = float(10 ** rng.uniform(1, 5))
            jobs.append(make_job(f"j{index}", params={"gpu": slow, "big": fast}, noise_scale=phi))
        round_ = problems_of(Snapshot(now=0, nodes=nodes, jobs=tuple(jobs)))
        found = solve_mixed(round_.problems, round_.nodes, None, rng).solution
        ratios.append(least_mixed_cost(round_.problems) / found.cost)
    assert np.mean(ratios) > 0.97
    assert np.mean(np.array(ratios) > 1 - 1e-6) > 0.6


def test_prices_clear_a_market_of_many_jobs():
    """Costs 1/k on one type and 1/(speed·k) on the other: a slot of the second is worth more."""
    rng = np.random.default_rng(0)
    sizes = np.arange(1, 9)
    weights = rng.uniform(0.5, 2, size=400)[:, None]
    idle = np.full((400, 1), 250.0)
    costs = [np.hstack([idle, weights / (speed * sizes)]) for speed in (1.0, 3.0)]
    prices, response = Market(costs, [600, 300]).clear(None)
    assert response.usage == pytest.approx([600, 300], rel=0.05)
    assert prices[1] > 1.5 * prices[0] > 0
    again, warm = Market(costs, [600, 300]).clear(prices)
    assert warm.bound >= response.bound
    assert again == pytest.approx(prices, rel=0.2)


def test_slots_that_nobody_needs_are_free():
    costs = [np.array([[250.0, 1.0, 0.6, 0.7]]), np.array([[250.0, 2.0, 1.5, 1.4]])]
    prices, response = Market(costs, [50, 50]).clear(None)
    assert prices == pytest.approx([0, 0], abs=1e-6)
    assert (int(response.kinds[0]), int(response.counts[0])) == (0, 2)
    assert response.bound == pytest.approx(0.6)


class TestBehaviour:
    SLOW = PARAMS
    FAST = PARAMS._replace(alpha_g=PARAMS.alpha_g / 6, beta_g=PARAMS.beta_g / 6)

    def decide(self, *jobs, **num_slots):
        snapshot = Snapshot(now=0, nodes=make_mixed(**num_slots), jobs=jobs)
        plan = PolluxPolicy(PolicySettings()).decide(snapshot)
        kind = {node.name: node.accelerator for node in snapshot.nodes}
        return plan, {
            name: (kind[allocation.shares[0].node], allocation.num_replicas)
            for name, allocation in plan.allocations.items()
        }

    def test_who_gains_most_from_the_fast_type_gets_it(self):
        keen = make_job("keen", params={"gpu": self.SLOW, "big": self.FAST})
        easy = make_job("easy", params={"gpu": self.SLOW, "big": self.SLOW})
        _, found = self.decide(easy, keen, gpu=2, big=2)
        assert found["keen"][0] == "big" and found["easy"][0] == "gpu"

    def test_restrictions_are_kept_even_if_everything_else_is_better(self):
        picky = make_job("picky", params={"gpu": self.SLOW, "big": self.FAST}, accelerators=frozenset({"gpu"}))
        _, found = self.decide(picky, gpu=1, big=4)
        assert found == {"picky": ("gpu", 1)}

    def test_a_job_leaves_its_type_only_for_more_than_the_move_costs(self):
        held = Allocation.of(("gpu", 2))
        params = {"gpu": self.SLOW, "big": self.SLOW._replace(alpha_g=0.95 * self.SLOW.alpha_g)}
        stays = make_job("stays", params=params, allocation=held, age_s=300.0)
        plan, _ = self.decide(stays, gpu=2, big=2)
        assert plan.allocation_of("stays") == held
        goes = make_job("goes", params={"gpu": self.SLOW, "big": self.FAST}, allocation=held, age_s=1e5)
        _, found = self.decide(goes, gpu=2, big=2)
        assert found["goes"][0] == "big"

    def test_a_type_that_nobody_was_measured_on_is_used_and_said_to_be_a_guess(self):
        job = make_job("new", params={"gpu": self.SLOW}, accelerators=frozenset({"big"}))
        plan, found = self.decide(job, gpu=2, big=2)
        assert found["new"][0] == "big"
        assert plan.explanation is not None
        assert plan.explanation.jobs[0].note == "not measured on big yet: judged by other types"

    def test_the_speedup_of_a_job_that_was_never_measured_is_said_to_be_an_estimate(self):
        plan, _ = self.decide(make_job("new", measured=False), gpu=2)
        assert plan.explanation is not None
        assert plan.explanation.jobs[0].note == "not measured yet: an estimate"

    def test_a_type_that_a_job_ran_on_alone_is_said_to_be_half_a_guess(self):
        params = {"gpu": self.SLOW, "big": self.FAST}
        measured = {"gpu": (), "big": ()}
        job = make_job(
            "new", params=params, shape_factors=measured, guessed=frozenset({"big"}), accelerators=frozenset({"big"})
        )
        plan, _ = self.decide(job, gpu=2, big=2)
        assert plan.explanation is not None
        assert plan.explanation.jobs[0].note == "measured on one replica of big only: more are judged by other types"

    def test_a_new_type_at_run_time_is_used(self):
        """As on a live cluster, where a node of another type joins between two rounds."""
        policy = PolluxPolicy(PolicySettings())
        jobs = tuple(make_job(f"j{i}", params={"gpu": self.SLOW}) for i in range(4))
        first = policy.decide(Snapshot(now=0, nodes=make_mixed(gpu=2), jobs=jobs))
        assert sum(allocation.num_replicas for allocation in first.allocations.values()) == 2
        running = tuple(dataclasses.replace(job, allocation=first.allocation_of(job.name)) for job in jobs)
        second = policy.decide(Snapshot(now=60, nodes=make_mixed(gpu=2, big=4), jobs=running))
        assert len(second.allocations) == 4


@examples(100)
@given(snapshots(mixed=True))
def test_explanations_of_mixed_clusters_add_up(snapshot):
    explanation = PolluxPolicy(PolicySettings()).decide(snapshot).explanation
    assert explanation is not None
    tolerance = 1e-6 * max(1.0, abs(explanation.upper_bound))
    assert explanation.fitness <= explanation.upper_bound + tolerance
    assert explanation.fitness >= explanation.fitness_before - tolerance
    for decision in explanation.jobs:
        assert np.isfinite(decision.speedup_after) and decision.speedup_after >= 0
