"""Fairness against applications whose times can be worked out by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.errors import InvalidValueError, SimulationError
from pollux.model.goodput import candidate_batches
from pollux.simulator.application import NO_HABITS, GradientStats, Habits, StepTime, dense_placement, spread_placements
from pollux.simulator.builtin import load_builtin
from pollux.simulator.fairness import SoloTimes, finish_time_fairness, mean_jobs_present
from pollux.simulator.physics import NodeGroup
from pollux.types import BatchLimits

LIMITS = BatchLimits(initial=8, maximum=64, device_min=1, device_max=64)
GPUS = NodeGroup(accelerator="gpu", num_nodes=16, slots_per_node=4)


@dataclass
class Toy:
    """A step takes a second per node and a little per example; by default large batches lose nothing."""

    name: str = "toy"
    limits: BatchLimits = LIMITS
    min_replicas: int = 1
    max_replicas: int = 8
    num_epochs: int = 2
    var: float = 1e12
    habits: Habits = NO_HABITS
    losses: tuple[float, ...] = ()
    accelerators: tuple[str, ...] = ()
    across: int = 64  # the largest device batch on more than one node

    def device_max(self, accelerator: str, placement: tuple[int, ...]) -> int:
        return self.across if len(placement) > 1 else self.limits.device_max

    def step_time(self, accelerator: str, placement: tuple[int, ...], device_batch: int) -> StepTime:
        return StepTime(float(len(placement)) + device_batch / sum(placement), 0.0)

    def placements(
        self, accelerator: str, num_replicas: int, slots_per_node: int, num_nodes: int
    ) -> Iterator[tuple[int, ...]]:
        return spread_placements(num_replicas, slots_per_node, num_nodes)

    def epoch_end(self, epoch: int) -> float:
        return 100.0 * (epoch + 1)

    def gradient(self, epoch: int, total_batch: int) -> GradientStats:
        return GradientStats(sqr=1.0, var=self.var)

    def iterations_between(self, epoch: int, last: int, total_batch: int) -> float:
        return 100.0 * (last - epoch)


def slow_rate(application: Toy, replicas: int, gpus_per_node: int, epoch: int) -> float:
    """The obvious version of SoloTimes.rates."""
    limits, best = application.limits, 0.0
    for m, s, allowed in zip(*candidate_batches(replicas, limits), strict=True):
        if allowed:
            total = replicas * int(m) * (int(s) + 1)
            step = application.step_time("gpu", dense_placement(replicas, gpus_per_node), int(m))
            gain = application.gradient(epoch, total).gain(total / limits.initial)
            best = max(best, gain / step.iteration_s(int(s)))
    return best


def solo(resize_s: float = 0.0, **fields: object) -> SoloTimes:
    return SoloTimes({"toy": Toy(**fields)}, [GPUS], resize_s=resize_s)  # type: ignore[arg-type]


@pytest.mark.parametrize(("replicas", "placement"), [(1, (1,)), (4, (4,)), (5, (4, 1)), (8, (4, 4))])
def test_dense_placement(replicas: int, placement: tuple[int, ...]) -> None:
    assert dense_placement(replicas, 4) == placement


@pytest.mark.parametrize("var", [0.1, 10.0, 1e12])
@pytest.mark.parametrize("replicas", range(1, 9))
def test_rates_are_the_best_of_all_candidate_batches(replicas: int, var: float) -> None:
    rates = solo(var=var).rates("toy", replicas, GPUS)
    assert rates.tolist() == pytest.approx([slow_rate(Toy(var=var), replicas, 4, epoch) for epoch in range(2)])


def test_no_batch_is_larger_than_a_job_could_train_with_in_that_placement() -> None:
    """A pass costs a second and more on every node, so that small ones are slow."""
    free, bound = solo(), solo(across=4)
    assert bound.jct_s("toy", 4) == free.jct_s("toy", 4)
    assert bound.jct_s("toy", 5) > free.jct_s("toy", 5)
    limits = dataclasses.replace(LIMITS, device_max=4)
    assert bound.jct_s("toy", 5) == solo(limits=limits).jct_s("toy", 5)


def test_alone_on_a_whole_number_of_gpus_with_one_start() -> None:
    rate = slow_rate(Toy(), 2, 4, 0)
    assert solo(resize_s=30.0).jct_s("toy", 2) == pytest.approx(30.0 + 200.0 / rate)


def test_the_rate_is_interpolated_not_the_time() -> None:
    low, high = slow_rate(Toy(), 2, 4, 0), slow_rate(Toy(), 3, 4, 0)
    assert solo().jct_s("toy", 2.25) == pytest.approx(200.0 / (0.75 * low + 0.25 * high))


def test_below_one_gpu_the_rate_shrinks_with_the_share() -> None:
    assert solo().jct_s("toy", 0.25) == pytest.approx(4 * solo().jct_s("toy", 1))


def test_no_more_than_the_application_can_use() -> None:
    assert solo(max_replicas=3).jct_s("toy", 50) == solo(max_replicas=3).jct_s("toy", 3)
    narrow = BatchLimits(initial=8, maximum=8, device_min=4, device_max=8)  # room for two replicas only
    assert solo(limits=narrow).jct_s("toy", 50) == solo(limits=narrow).jct_s("toy", 2)


@given(st.floats(0.01, 8), st.floats(0.01, 8))
def test_within_one_node_a_larger_share_is_never_slower(one: float, other: float) -> None:
    small, large = sorted((min(one, 4.0), min(other, 4.0)))
    assert solo().jct_s("toy", large) <= solo().jct_s("toy", small) * (1 + 1e-9)


@pytest.mark.parametrize("share", [0.0, -1.0, float("nan"), float("inf")])
def test_a_share_must_be_positive(share: float) -> None:
    with pytest.raises(InvalidValueError, match="share"):
        solo().jct_s("toy", share)


def test_an_unknown_application_is_named() -> None:
    with pytest.raises(SimulationError, match="'nobody'"):
        solo().jct_s("nobody", 1)


def test_jobs_present_by_hand() -> None:
    # [0, 10] alone until 5, then with the second job; [5, 15] half its life with the first.
    assert mean_jobs_present([0, 5], [10, 15]).tolist() == pytest.approx([1.5, 1.5])
    assert mean_jobs_present([0, 20], [10, 30]).tolist() == [1.0, 1.0]
    assert mean_jobs_present([0, 0, 0], [6, 6, 6]).tolist() == [3.0, 3.0, 3.0]
    assert mean_jobs_present([0, 3], [6, 3]).tolist() == [1.0, 2.0]  # no life at all: those around then
    assert mean_jobs_present([], []).size == 0


_LIVES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=8)


@given(_LIVES)
def test_jobs_present_against_counting_every_second(lives: list[tuple[int, int]]) -> None:
    begins, ends = [begin for begin, _ in lives], [begin + length for begin, length in lives]
    counted = [
        np.mean([sum(b <= second < e for b, e in zip(begins, ends, strict=True)) for second in range(begin, end)])
        for begin, end in zip(begins, ends, strict=True)
    ]
    assert mean_jobs_present(begins, ends).tolist() == pytest.approx(counted)


def test_rho_of_a_job_that_ran_alone_on_the_cluster_is_one() -> None:
    times = solo(resize_s=30.0)
    alone = times.jct_s("toy", 8)
    assert finish_time_fairness(times, ["toy"], [100.0], [100.0 + alone], 8).tolist() == pytest.approx([1.0])


def test_rho_of_two_that_take_turns() -> None:
    times = solo()
    whole, half = times.jct_s("toy", 8), times.jct_s("toy", 4)
    rho = finish_time_fairness(times, ["toy", "toy"], [0, 0], [2 * whole, 2 * whole], 8)
    assert rho.tolist() == pytest.approx([2 * whole / half] * 2)


def test_the_size_of_the_cluster_may_differ_by_job() -> None:
    times = solo()
    rho = finish_time_fairness(times, ["toy", "toy"], [0, 1000], [500, 1500], [4, 8])
    assert rho.tolist() == pytest.approx([500 / times.jct_s("toy", 4), 500 / times.jct_s("toy", 8)])


def test_rates_that_are_known_give_the_same_again() -> None:
    rng = np.random.default_rng(0)
    applications = load_builtin()
    names = rng.choice(sorted(applications), 160).tolist()
    begins = rng.uniform(0, 28_800, 160)
    ends = begins + rng.uniform(100, 20_000, 160)
    times = SoloTimes(applications, [GPUS], resize_s=30.0)
    first = finish_time_fairness(times, names, begins, ends, 64)
    again = finish_time_fairness(times, names, begins, ends, 64)
    assert again.tolist() == first.tolist()
    assert np.all(np.isfinite(first)) and np.all(first > 0)
