from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.policy import PolicySettings, make_policy
from pollux.policy.fitness import EPSILON, costs, fitness
from pollux.policy.placement import Placement, PlacementProblem, SettledCosts, place
from pollux.policy.pollux import PolluxPolicy
from pollux.policy.round import RoundProblem, move_factor
from pollux.policy.solver import solve
from pollux.policy.speedups import max_replicas, speedup_tables
from pollux.testing.examples import examples
from pollux.testing.snapshots import LIMITS, PARAMS, make_job, make_mixed, make_nodes, snapshots
from pollux.types import Allocation, Plan, Snapshot
from tests.property.brute_force import least_cost

settings_of_interest = st.builds(
    PolicySettings,
    p=st.sampled_from([-1.0, -1.0, -3.0, 0.0, 0.5, 1.0]),
    weights=st.sampled_from(["equal", "remaining"]),
    resize_s=st.sampled_from([0.0, 5.0, 30.0]),
    avoid_interference=st.booleans(),
    charges_starts=st.booleans(),
)


def obvious_fitness(snapshot: Snapshot, plan: Plan, rules: PolicySettings) -> float:
    """The formula of the objective, job by job, for p = -1 and equal weights."""
    tables = speedup_tables(snapshot)
    total = 0.0
    for job, table in zip(snapshot.jobs, tables, strict=True):
        allocation = plan.allocation_of(job.name)
        speedup = float(table.speedups[0, int(allocation.num_nodes > 1), allocation.num_replicas])
        if allocation != job.allocation:
            speedup *= move_factor(job, rules)
        total += job.spec.weight / (speedup + EPSILON)
    return len(snapshot.jobs) / total - EPSILON


@examples(200)
@given(snapshots(), settings_of_interest)
def test_fitness_never_exceeds_its_bound_nor_falls_below_staying(snapshot, rules):
    explanation = PolluxPolicy(rules).decide(snapshot).explanation
    assert explanation is not None
    tolerance = 1e-9 * max(1.0, abs(explanation.upper_bound))
    assert explanation.fitness <= explanation.upper_bound + tolerance
    assert explanation.fitness >= explanation.fitness_before - tolerance
    assert 0 <= explanation.gap <= 1 + 1e-9


@examples(100)
@given(snapshots())
def test_the_reported_fitness_is_the_formula(snapshot):
    if not snapshot.jobs:
        return
    rules = PolicySettings()
    plan = PolluxPolicy(rules).decide(snapshot)
    assert plan.explanation is not None
    assert plan.explanation.fitness == pytest.approx(obvious_fitness(snapshot, plan, rules), rel=1e-6, abs=1e-9)


@examples(150)
@given(snapshots())
def test_at_most_one_spanning_job_per_node(snapshot):
    plan = PolluxPolicy(PolicySettings()).decide(snapshot)
    spans: dict[str, int] = {}
    for allocation in plan.allocations.values():
        if allocation.num_nodes > 1:
            for node, _ in allocation.shares:
                spans[node] = spans.get(node, 0) + 1
    assert all(count == 1 for count in spans.values())


@examples(150)
@given(snapshots())
def test_nobody_is_given_more_than_four_times_what_was_profiled(snapshot):
    plan = PolluxPolicy(PolicySettings()).decide(snapshot)
    for job in snapshot.jobs:
        given_now = plan.allocation_of(job.name).num_replicas
        assert given_now <= max(max_replicas(job, snapshot.num_slots, PolicySettings()), job.allocation.num_replicas)


@examples(150)
@given(snapshots(max_nodes=3, max_slots=3, max_jobs=3), settings_of_interest)
def test_against_brute_force(snapshot, rules):
    """The bound holds, and what is found is the best there is, or very near it."""
    if not snapshot.jobs:
        return
    round_ = RoundProblem.of(snapshot, speedup_tables(snapshot, rules), rules)
    solution = solve(round_.problems[0], np.random.default_rng(0))
    best = least_cost(round_.problems[0])
    slack = 1e-9 * max(1.0, abs(best))
    assert solution.lower_bound <= best + slack
    assert solution.cost >= best - slack
    if rules.p == -1.0:
        num_jobs = len(snapshot.jobs)
        assert fitness(solution.cost, num_jobs, rules.p) + EPSILON >= 0.3 * (fitness(best, num_jobs, rules.p) + EPSILON)


def test_almost_always_optimal_on_small_clusters():
    """Brute force over a fixed sample: the mean ratio of fitness to the optimum."""
    rng = np.random.default_rng(7)
    ratios = []
    for _ in range(150):
        nodes = make_nodes(int(rng.integers(1, 4)), int(rng.integers(1, 4)))
        free = {node.name: node.num_slots for node in nodes}
        jobs = []
        for index in range(int(rng.integers(1, 4))):
            node = nodes[int(rng.integers(len(nodes)))]
            count = int(rng.integers(0, free[node.name] + 1))
            free[node.name] -= count
            held = Allocation.of((node.name, count)) if count else Allocation()
            theta = PARAMS._replace(alpha_n=float(rng.uniform(0.01, 1)), alpha_g=float(rng.uniform(0.01, 0.3)))
            jobs.append(
                make_job(
                    f"j{index}",
                    allocation=held,
                    params={"gpu": theta},
                    noise_scale=float(10 ** rng.uniform(1, 5)),
                    age_s=float(rng.uniform(30, 5000)),
                )
            )
        snapshot = Snapshot(now=0, nodes=nodes, jobs=tuple(jobs))
        round_ = RoundProblem.of(snapshot, speedup_tables(snapshot), PolicySettings())
        found = solve(round_.problems[0], rng).cost
        ratios.append(least_cost(round_.problems[0]) / found)
    assert np.mean(ratios) > 0.99
    assert np.mean(np.array(ratios) > 1 - 1e-9) > 0.95


class TestObjective:
    @given(st.lists(st.floats(0, 10), min_size=1, max_size=6), st.sampled_from([-2.0, -1.0, 0.5, 1.0]))
    def test_costs_sum_up_to_the_power_mean(self, speedups, p):
        total = float(costs(np.array(speedups), 1.0, p).sum())
        shifted = np.array(speedups) + EPSILON
        assert fitness(total, len(speedups), p) == pytest.approx(
            float(np.mean(shifted**p) ** (1 / p)) - EPSILON, rel=1e-9, abs=1e-12
        )

    def test_p_zero_is_the_geometric_mean(self):
        total = float(costs(np.array([1.0, 4.0]), 1.0, 0.0).sum())
        assert fitness(total, 2, 0.0) == pytest.approx(2.0, rel=0.01)

    def test_smaller_p_is_fairer(self):
        """With one job that scales badly, a fairer mean gives it more."""
        good = PARAMS._replace(alpha_r=1e-4, beta_r=1e-6, alpha_n=1e-4, beta_n=1e-6)
        bad = PARAMS._replace(alpha_r=0.5, beta_r=0.2, alpha_n=1.0, beta_n=0.3)
        jobs = (
            make_job("bad", params={"gpu": bad}, noise_scale=10.0),
            make_job("good", params={"gpu": good}, noise_scale=1e6),
        )
        snapshot = Snapshot(now=0, nodes=make_nodes(2), jobs=jobs)
        given_to_good = {
            p: PolluxPolicy(PolicySettings(p=p)).decide(snapshot).allocation_of("good").num_replicas
            for p in (-4.0, 1.0)
        }
        assert given_to_good[1.0] >= given_to_good[-4.0]


class TestBehaviour:
    def test_a_job_that_arrives_this_instant_starts(self):
        snapshot = Snapshot(now=0, nodes=make_nodes(1), jobs=(make_job("new", measured=False, age_s=0.0),))
        assert PolluxPolicy(PolicySettings()).decide(snapshot).allocation_of("new").num_replicas == 4

    def test_a_young_job_is_not_worth_moving_for_little(self):
        held = Allocation.of(("n0", 4))
        young = make_job("young", allocation=held, age_s=40.0, num_resizes=1)
        snapshot = Snapshot(now=0, nodes=make_nodes(2), jobs=(young,))
        assert PolluxPolicy(PolicySettings()).decide(snapshot).allocations == {"young": held}

    def test_short_remaining_work_weighs_more_if_asked_to(self):
        def share(weights: str) -> int:
            jobs = tuple(
                make_job(name, remaining_examples=examples) for name, examples in (("short", 1e5), ("long", 1e9))
            )
            snapshot = Snapshot(now=0, nodes=make_nodes(1, 8), jobs=jobs)
            return PolluxPolicy(PolicySettings(weights=weights)).decide(snapshot).allocation_of("short").num_replicas

        assert share("remaining") > share("equal")

    def test_survivors_keep_their_rank(self):
        held = Allocation.of(("n1", 4))
        job = make_job("a", allocation=held, noise_scale=1e6, age_s=1e6)
        snapshot = Snapshot(now=0, nodes=make_nodes(2), jobs=(job,))
        after = PolluxPolicy(PolicySettings()).decide(snapshot).allocation_of("a")
        assert after.num_replicas == 8
        assert after.shares[0].node == "n1"

    def test_the_plan_explains_itself(self):
        jobs = (make_job("a", allocation=Allocation.of(("n0", 1)), age_s=1e5), make_job("b", measured=False))
        plan = PolluxPolicy(PolicySettings()).decide(Snapshot(now=0, nodes=make_nodes(1), jobs=jobs))
        assert plan.explanation is not None
        a, b = plan.explanation.jobs
        assert (a.job, a.before.num_replicas, a.after.num_replicas) == ("a", 1, 2)
        assert a.has_changed and a.gain > 0
        assert a.option_replicas.tolist() == [0, 1, 2, 3, 4]
        assert np.all(np.diff(a.option_speedups) > 0)
        assert a.option_speedups[2] == pytest.approx(1.0)  # the fair share of four slots for two jobs
        assert "not measured" in b.note

    @pytest.mark.parametrize("num_jobs", [1, 5, 17])
    def test_commands_that_do_not_adapt_get_what_they_ask_for(self, num_jobs):
        jobs = tuple(make_job(f"j{i}", batch=None, measured=False, requested_replicas=2) for i in range(num_jobs))
        jobs = tuple(dataclasses.replace(job, spec=dataclasses.replace(job.spec, min_replicas=2)) for job in jobs)
        plan = PolluxPolicy(PolicySettings()).decide(Snapshot(now=0, nodes=make_nodes(2), jobs=jobs))
        found = [plan.allocation_of(job.name).num_replicas for job in jobs]
        assert found.count(2) == min(num_jobs, 4)
        assert set(found) <= {0, 2}


def test_interference_avoidance_can_be_switched_off():
    """Two jobs of three replicas on three nodes of two slots would have to share the middle node."""
    theta = PARAMS._replace(alpha_n=1e-6, beta_n=1e-8, alpha_r=1e-6, beta_r=1e-8)
    jobs = tuple(
        make_job(f"j{i}", params={"gpu": theta}, noise_scale=1e9, min_replicas=3, max_replicas=3) for i in range(2)
    )
    snapshot = Snapshot(now=0, nodes=make_nodes(3, 2), jobs=jobs)

    def running(avoid: bool) -> int:
        plan = make_policy("pollux", PolicySettings(avoid_interference=avoid)).decide(snapshot)
        return sum(bool(plan.allocation_of(job.name)) for job in jobs)

    assert running(True) == 1
    assert running(False) == 2


def test_batch_limits_bound_the_replicas():
    small = dataclasses.replace(LIMITS, maximum=256, device_min=64, device_max=128)
    job = make_job("a", batch=small, max_profiled_replicas=64)
    assert max_replicas(job, 64, PolicySettings()) == 4
    for capacity, profiled in itertools.product((1, 8), (0, 2)):
        explored = dataclasses.replace(make_job("a"), max_profiled_replicas=profiled)
        assert max_replicas(explored, capacity, PolicySettings()) == min(capacity, max(4 * profiled, 4))


def test_what_others_cannot_use_is_there_for_who_can():
    """A hundred jobs of one replica each leave the rest to the one that grows, however far above a fair share."""
    theta = PARAMS._replace(alpha_n=1e-4, beta_n=1e-9, alpha_r=1e-4, beta_r=1e-9)
    wide = dataclasses.replace(LIMITS, maximum=1 << 20)
    small = [make_job(f"j{i}", max_replicas=1) for i in range(100)]
    big = make_job("big", batch=wide, params={"gpu": theta}, noise_scale=1e9, max_profiled_replicas=500)
    snapshot = Snapshot(now=0, nodes=make_nodes(50, 10), jobs=(*small, big))
    plan = PolluxPolicy(PolicySettings()).decide(snapshot)
    assert plan.allocation_of("big").num_replicas == 400


def test_one_job_may_get_everything_where_the_sum_counts():
    theta = PARAMS._replace(alpha_n=1e-4, beta_n=1e-9, alpha_r=1e-4, beta_r=1e-9)
    wide = dataclasses.replace(LIMITS, maximum=1 << 20)
    good = make_job("good", batch=wide, params={"gpu": theta}, noise_scale=1e9, max_profiled_replicas=96)
    poor = [make_job(f"j{i}", noise_scale=0.0) for i in range(31)]
    snapshot = Snapshot(now=0, nodes=make_nodes(24), jobs=(good, *poor))
    plan = PolluxPolicy(PolicySettings(p=1.0)).decide(snapshot)
    assert plan.allocation_of("good").num_replicas > 16 * 3  # fair shares of three


def test_the_last_piece_goes_where_it_fits_tightest():
    cost = np.ones((1, 2, 6))
    cost[0, :, 0], cost[0, 0, 5], cost[0, 1, 5] = 10.0, np.inf, 0.1
    for sizes in ([1, 4, 4], [4, 4, 1]):
        problem = PlacementProblem(
            capacity=np.array(sizes),
            settled_cost=SettledCosts(cost, np.array([0]), lambda found, rows: found),
            moved_cost=cost,
            current=[{}],
            is_fixed=np.array([False]),
        )
        shares = place(problem, np.array([5])).shares[0]
        assert sorted(sizes[node] for node in shares) == [1, 4]


@pytest.mark.parametrize("nodes", [make_nodes(2), (*make_nodes(2), *make_mixed(big=8))])
def test_jobs_that_may_not_keep_what_they_hold_are_moved(nodes):
    """Two that span the same nodes, and one beyond its bounds: as after a change of policy or of limits."""
    both = {"gpu": PARAMS, "big": PARAMS}
    clash = [
        make_job(name, params=both, allocation=Allocation.of(("n0", 1), ("n1", 1)), age_s=1e5) for name in ("a", "b")
    ]
    large = make_job("c", params=both, allocation=Allocation.of(("n0", 2)), max_replicas=1, age_s=1e5)
    waiting = [make_job(f"w{i}", params=both) for i in range(3)]
    snapshot = Snapshot(now=0, nodes=nodes, jobs=(*clash, large, *waiting))
    plan = PolluxPolicy(PolicySettings()).decide(snapshot)
    assert plan.explanation is not None and np.isfinite(plan.explanation.fitness)
    assert plan.allocation_of("c").num_replicas == 1
    assert sum(plan.allocation_of(name).num_nodes > 1 for name in ("a", "b")) <= 1
    assert sum(allocation.num_replicas for allocation in plan.allocations.values()) > 6


def test_a_job_that_cannot_run_does_not_hold_up_the_others():
    """Its cost is hundreds of times that of a running job; what the others could gain must not pale beside it."""
    jobs = [make_job(f"j{i}", allocation=Allocation.of((f"n{i}", 2)), age_s=1e5) for i in range(3)]
    stuck = make_job("stuck", is_pinned=True)
    plan = PolluxPolicy(PolicySettings()).decide(Snapshot(now=0, nodes=make_nodes(4), jobs=(*jobs, stuck)))
    assert sum(allocation.num_replicas for allocation in plan.allocations.values()) > 6


@examples(50)
@given(snapshots())
def test_keeping_jobs_at_once_is_assigning_them_one_by_one(snapshot):
    if not snapshot.jobs:
        return
    rules = PolicySettings()
    (problem,) = RoundProblem.of(snapshot, speedup_tables(snapshot, rules), rules).problems
    kept, assigned = Placement(problem), Placement(problem)
    kept.keep(range(problem.num_jobs))
    for job, shares in enumerate(problem.current):
        assigned.assign(job, dict(shares))
    for name in ("shares", "free", "residents", "spanners"):
        assert getattr(kept, name) == getattr(assigned, name)
    for name in ("cost", "count", "num_held"):
        np.testing.assert_array_equal(getattr(kept, name), getattr(assigned, name))


def test_pairs_of_nodes_are_divided_in_pieces_as_in_one(monkeypatch):
    jobs = [make_job(f"j{index}", weight=1.0 + index % 7) for index in range(17)]
    snapshot = Snapshot(now=0.0, nodes=make_nodes(12), jobs=tuple(jobs))
    plans = []
    for cached in (1, 1 << 30):
        monkeypatch.setattr("pollux.policy.search._CACHED", cached)
        plans.append(PolluxPolicy(PolicySettings()).decide(snapshot))
    assert plans[0].allocations == plans[1].allocations
    assert all("search" in plan.explanation.method for plan in plans)
