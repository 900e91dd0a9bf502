"""Auto-scaled simulations: what comes and goes, what it costs, and what a budget allows."""

from __future__ import annotations

import math
from typing import ClassVar
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st

from pollux.errors import InvalidValueError
from pollux.policy import PolicySettings, make_policy
from pollux.simulator.builtin import load_builtin
from pollux.simulator.config import SimulationConfig
from pollux.simulator.engine import SimulatedEngine
from pollux.simulator.generate import generate_workload
from pollux.simulator.result import summarise
from pollux.simulator.run import SimulationRun, simulate
from pollux.simulator.workload import Workload, job_spec
from pollux.testing.examples import examples

APPLICATIONS = load_builtin()
MIX = {"cifar10": 0.6, "ncf": 0.4}
PHYSICS = {"gpus_per_node": 4, "resize_s": 5.0, "decides_on_events": True, "remembers_profiles": True}


def run(workload: Workload, policy: str = "pollux", **config: object) -> SimulationRun:
    physics = SimulationConfig(**(PHYSICS | config))  # type: ignore[arg-type]
    return simulate(workload, APPLICATIONS, make_policy(policy, PolicySettings(resize_s=5.0)), physics)


class RecordingEngine(SimulatedEngine):
    """Writes down what is paid for when."""

    pieces: ClassVar[list[tuple[float, float, float]]]  # (from, until, slots)

    def advance(self, until: float, *, stops_at_event: bool = False) -> float:
        since, paid = self.now, self.node_s
        reached = super().advance(until, stops_at_event=stops_at_event)
        if reached > since:
            self.pieces.append((since, reached, (self.node_s - paid) / (reached - since) * 4))
        return reached


def most_spent_in_a_window(pieces: list[tuple[float, float, float]], window_s: float) -> float:
    """Slot-seconds in the worst window; it ends where a piece does."""
    times = np.array([pieces[0][0], *(until for _, until, _ in pieces)])
    spent = np.concatenate([[0.0], np.cumsum([slots * (until - since) for since, until, slots in pieces])])
    ends = times[times >= times[0] + window_s]
    return float(np.max(np.interp(ends, times, spent) - np.interp(ends - window_s, times, spent)))


@examples(6, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    seed=st.integers(0, 1000),
    budget_nodes=st.integers(1, 4),
    extra_slots=st.sampled_from([0.0, 1.0, 3.0]),
    window_s=st.sampled_from([3600.0, 4 * 3600.0]),
    node_start_s=st.sampled_from([0.0, 120.0]),
)
def test_no_window_of_a_run_costs_more_than_the_budget(seed, budget_nodes, extra_slots, window_s, node_start_s):
    workload = generate_workload(APPLICATIONS, num_jobs=6, hours=2, seed=seed, mix=MIX)
    budget = 4 * budget_nodes + extra_slots
    RecordingEngine.pieces = [(-window_s, 0.0, budget)]
    with patch("pollux.simulator.run.SimulatedEngine", RecordingEngine):
        done = run(
            workload,
            min_nodes=1,
            max_nodes=12,
            budget_slots=budget,
            budget_window_s=window_s,
            node_start_s=node_start_s,
        )
    sizes = {sample.num_slots // 4 for sample in done.samples}
    assert min(sizes) >= 1 and max(sizes) <= 12
    a_node = 4 * 600  # slot-seconds: one node for ten minutes is the grain of it
    assert most_spent_in_a_window(RecordingEngine.pieces, window_s) <= budget * window_s + a_node


def test_savings_are_spent_on_a_burst():
    """One job, two quiet hours, then many at once: more nodes than the budget's average, for a while."""
    spec = APPLICATIONS["cifar10"]

    def job(name: str, time_s: float) -> object:
        return job_spec(spec, name=name, time_s=time_s, num_replicas=1, batch_size=128)

    jobs = (job("early", 0), *(job(f"late{i}", 7200) for i in range(24)))
    workload = Workload("burst", jobs)  # type: ignore[arg-type]
    scaled = run(workload, min_nodes=1, max_nodes=12, budget_slots=12.0)
    fixed = run(workload, num_nodes=3)
    assert max(sample.num_slots for sample in scaled.samples) > 12
    assert scaled.node_s <= fixed.node_s
    assert summarise(scaled).avg_jct_s < summarise(fixed).avg_jct_s / 1.3


def test_a_node_that_starts_is_paid_for_and_not_used():
    workload = generate_workload(APPLICATIONS, num_jobs=10, hours=1, seed=3, mix=MIX)
    slow = run(workload, min_nodes=1, max_nodes=8, node_start_s=300.0)
    up_s = sum(
        sample.num_slots / 4 * (after.at - sample.at)
        for sample, after in zip(slow.samples, slow.samples[1:], strict=False)
    )
    assert slow.node_s > up_s
    assert max(sample.num_slots for sample in slow.samples) > 4


def test_throughput_alone_asks_for_more_nodes_than_goodput():
    spec = job_spec(APPLICATIONS["cifar10"], name="a", time_s=0, num_replicas=1, batch_size=128)
    workload = Workload("one", (spec,))
    by_goodput = run(workload, min_nodes=1, max_nodes=8)
    by_throughput = run(workload, min_nodes=1, max_nodes=8, counts_efficiency=False)
    assert by_throughput.node_s > by_goodput.node_s
    replicas = [(sample.replicas["a"], sample.efficiency["a"]) for sample in by_throughput.samples if sample.replicas]
    assert min(efficiency for _, efficiency in replicas) < 1.0  # it believes otherwise, and pays for it


def test_all_or_nothing_policies_scale_too():
    workload = generate_workload(APPLICATIONS, num_jobs=10, hours=1, seed=1, mix=MIX, max_replicas=16)
    done = run(workload, policy="fifo", min_nodes=1, max_nodes=6)
    assert all(record.finished_at is not None for record in done.store.jobs.values())
    assert 1 < max(sample.num_slots // 4 for sample in done.samples) <= 6


def test_cost_needs_a_price():
    workload = generate_workload(APPLICATIONS, num_jobs=4, hours=1, seed=1, mix=MIX)
    result = summarise(run(workload, num_nodes=2, node_price=3.0))
    assert result.slot_hours == pytest.approx(result.node_hours * 4)
    assert result.cost == pytest.approx(result.node_hours * 3.0)
    assert result.to_json()["cost"] == result.cost
    assert summarise(run(workload, num_nodes=2)).cost is None


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"budget_slots": 8.0}, "fewest and the most"),
        ({"node_price": -1.0}, "price of -1"),
        ({"node_price": math.nan}, "price of nan"),
    ],
)
def test_nonsense_is_refused(bad, words):
    with pytest.raises(InvalidValueError, match=words):
        SimulationConfig(**bad)
    with pytest.raises(InvalidValueError, match="cost 12"):
        _ = SimulationConfig(min_nodes=3, max_nodes=4, budget_slots=8.0).autoscale
