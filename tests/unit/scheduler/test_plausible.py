"""What is believed of a job that tells of itself: by the loop, with a clock set by hand."""

from __future__ import annotations

from typing import Any

import pytest

from pollux.policy import make_policy
from pollux.scheduler.loop import Scheduler, SchedulerConfig
from pollux.scheduler.ports import JobReport, MemoryStore
from pollux.scheduler.record import JobRecord
from pollux.types import BatchLimits, JobSpec, Node
from tests.fakes import HandClock, SlowEngine

LIMITS = BatchLimits(initial=32, maximum=512, device_max=64)


class Told:
    """A scheduler with one job that reports what the test says."""

    def __init__(self) -> None:
        self.clock, self.engine = HandClock(), SlowEngine([Node(name="a", num_slots=4, accelerator="cpu")])
        self.scheduler = Scheduler(
            policy=make_policy("pollux"),
            engine=self.engine,
            store=MemoryStore(),
            clock=self.clock,
            config=SchedulerConfig(interval_s=1000.0),
        )
        self.record: JobRecord = self.scheduler.submit(JobSpec(name="job", batch=LIMITS))

    def report(self, at: float, **values: Any) -> None:
        self.clock.time = at
        self.engine.events.append(JobReport(job="job", accelerator="cpu", **values))
        self.scheduler.tick()

    def told(self, about: str) -> list[str]:
        return [change.reason for change in self.record.history if about in change.reason]


@pytest.fixture
def job() -> Told:
    return Told()


def test_progress_that_is_faster_than_its_throughput_counts_for_what_is_possible(job: Told) -> None:
    job.report(10.0, throughput=100.0, remaining_examples=1_000_000.0, progress=0.0)
    job.report(110.0, throughput=100.0, remaining_examples=5.0, progress=0.999995)
    remaining, progress = job.record.remaining_examples, job.record.progress
    assert remaining is not None and progress is not None
    # 100 s at one and a half times 100 examples a second, and a minute to begin with.
    assert remaining == pytest.approx(1_000_000 - 15_000 - 6_000)
    assert progress == pytest.approx(1 - remaining / 1_000_000)
    job.report(120.0, throughput=100.0, remaining_examples=5.0, progress=0.999995)
    assert len(job.told("examples left")) == 1  # once, not with every report


def test_progress_that_fits_its_throughput_is_believed(job: Told) -> None:
    job.report(10.0, throughput=100.0, remaining_examples=1_000_000.0, progress=0.0)
    job.report(110.0, throughput=100.0, remaining_examples=990_000.0, progress=0.01)
    assert (job.record.remaining_examples, job.record.progress) == (990_000.0, 0.01)
    # It goes back to a checkpoint, and on from there.
    job.report(120.0, throughput=100.0, remaining_examples=995_000.0, progress=0.005)
    job.report(220.0, throughput=100.0, remaining_examples=985_000.0, progress=0.015)
    assert (job.record.remaining_examples, job.told("examples left")) == (985_000.0, [])


def test_a_noise_scale_far_above_its_largest_batch_is_clipped_and_told_once(job: Told) -> None:
    for at in (10.0, 20.0):
        job.report(at, noise_scale=2e14, noise_scale_error=1e14)
    assert (job.record.noise_scale, job.record.noise_scale_error) == (512_000.0, 512_000.0)
    assert len(job.told("noise scale")) == 1
    job.report(30.0, noise_scale=400.0, noise_scale_error=40.0)
    assert (job.record.noise_scale, job.record.noise_scale_error) == (400.0, 40.0)
