"""When a waiting job starts, by playing the queue on: known ends give a narrow range, guessed ends a wide one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pollux.policy import PolicySettings, make_policy
from pollux.scheduler.forecast import StartForecast, forecast_start
from pollux.types import (
    NO_ALLOCATION,
    Allocation,
    BatchLimits,
    JobSpec,
    JobView,
    Node,
    Plan,
    Snapshot,
    ThroughputParams,
)

NODE = Node(name="a", num_slots=2, accelerator="cpu")
THETA = ThroughputParams(0.0, 0.01, 0.0, 0.0, 0.0, 0.0, 1.0)  # 100 examples a second and replica
LIMITS = BatchLimits(initial=10, maximum=10, device_min=5, device_max=10)


def holding(name: str, slots: int, *, left_s: float | None = None, ran_s: float = 100.0) -> JobView:
    """A job that keeps its slots; ``left_s``: what it reports, at its speed with one replica."""
    spec = JobSpec(
        name=name, min_replicas=slots, max_replicas=slots, requested_replicas=slots, batch=LIMITS, is_preemptible=False
    )
    known: dict[str, Any] = {}
    if left_s is not None:
        known = {"params": {"cpu": THETA}, "noise_scale": 0.0, "remaining_examples": 100.0 * left_s}
    return JobView(
        spec=spec, age_s=ran_s, attained_s=ran_s, num_resizes=0, allocation=Allocation.of(("a", slots)), **known
    )


def waiting(name: str, slots: int) -> JobView:
    spec = JobSpec(name=name, min_replicas=slots, max_replicas=slots, requested_replicas=slots, is_preemptible=False)
    return JobView(spec=spec, age_s=1.0)


def foreseen(*jobs: JobView, of: str, policy: str = "fifo", **options: Any) -> StartForecast:
    def make() -> Callable[[Snapshot], Plan]:
        return make_policy(policy, PolicySettings()).decide

    return forecast_start(Snapshot(now=0.0, nodes=(NODE,), jobs=jobs), of, make, np.random.default_rng(1), **options)


@pytest.mark.parametrize("policy", ["fifo", "pollux"])
def test_what_jobs_report_says_when_the_next_one_starts(policy: str) -> None:
    found = foreseen(holding("runs", 2, left_s=1000.0), waiting("mine", 2), of="mine", policy=policy)
    assert found.num_runs == 30 and found.num_guessed == 0
    # Two replicas are about twice as fast as one: 5 of the 10 examples take 0.05 s instead of 0.1 s.
    assert found.median_s == pytest.approx(500.0, rel=0.15)
    assert found.low_s is not None and found.high_s is not None
    assert 300 < found.low_s < found.median_s < found.high_s < 900


def test_those_before_it_come_first() -> None:
    alone = foreseen(holding("runs", 2, left_s=1000.0), waiting("mine", 2), of="mine")
    behind = foreseen(holding("runs", 2, left_s=1000.0), waiting("first", 2), waiting("mine", 2), of="mine")
    assert alone.median_s is not None and behind.median_s is not None
    assert behind.median_s > alone.median_s and behind.num_guessed == 1


def test_a_guessed_end_is_a_wide_range_around_its_age() -> None:
    found = foreseen(holding("sleep", 2, ran_s=3600.0), waiting("mine", 1), of="mine")
    assert found.num_guessed == 1 and found.low_s is not None and found.median_s is not None
    assert found.high_s is not None and found.high_s > 5 * found.low_s
    assert 600 < found.median_s < 4 * 3600  # it is as likely as not to go on for as long again
    limited = foreseen(holding("sleep", 2, ran_s=3600.0), waiting("mine", 1), of="mine", limits_s={"sleep": 60.0})
    assert limited.high_s is not None and limited.high_s <= 60.0


def test_what_fits_now_starts_with_the_next_decision() -> None:
    found = foreseen(holding("runs", 1, left_s=10.0), waiting("mine", 1), of="mine")
    assert (found.low_s, found.median_s, found.high_s, found.num_runs) == (0.0, 0.0, 0.0, 1)


def test_no_time_is_no_answer_and_no_end_is_no_start() -> None:
    jobs = holding("runs", 2, left_s=10.0), waiting("mine", 1)
    hurried = foreseen(*jobs, of="mine", has_time=lambda: False)
    assert hurried.num_runs == 0 and hurried.median_s is None
    never = foreseen(waiting("mine", 3), of="mine")
    assert never.num_runs == 30 and never.median_s is None and NO_ALLOCATION.num_replicas == 0
