"""Every example once per epoch, whatever happens on the way: random resizes, preemptions and kills."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, note
from hypothesis import strategies as st

pytest.importorskip("torch")

from pollux.engines.processes.fork_server import ForkServer
from pollux.testing.examples import examples
from tests.e2e.jobs import Bench, pump_for
from tests.long import long

Event = tuple[str, int, float]  # what, a number for it, seconds before it

DELAYS = st.floats(0.0, 0.5)
EVENTS = st.one_of(
    st.tuples(st.just("resize"), st.integers(1, 4), DELAYS),
    st.tuples(st.just("kill"), st.integers(0, 3), DELAYS),
    st.tuples(st.just("preempt"), st.integers(1, 4), DELAYS),
)


def train_through(bench: Bench, num_epochs: int, num_replicas: int, events: Iterable[Event], *options: str) -> None:
    args = ["--epochs", num_epochs, "--step-s", 0.01, "--after-s", 0.005, "--save-s", 0.4, *options]
    job = bench.start(num_replicas, args=args, max_restarts=1000)
    for kind, number, delay_s in events:
        pump_for(job, delay_s)
        if job.result is not None:
            break
        if kind == "resize":
            job.resize(number)
        elif kind == "kill" and job.members:
            job.kill(number % len(job.members))
        elif kind == "preempt":
            assert job.stop(15.0) in (0, 143), bench.story(job)
            job.close()
            job = bench.start(number, args=args, max_restarts=1000)
    bench.finish(job, timeout_s=90.0)
    bench.check_ledger(num_epochs, job)


@given(num_replicas=st.integers(1, 4), events=st.lists(EVENTS, min_size=3, max_size=7))
@examples(
    8,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),  # shrinking would take minutes
    suppress_health_check=list(HealthCheck),
)
@long
def test_exactly_once(
    tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer, num_replicas: int, events: list[Event]
) -> None:
    note(f"{num_replicas} replicas, {events}")
    bench = Bench(tmp_path_factory.mktemp("once"), fork_server)
    try:
        train_through(bench, 10, num_replicas, events)
    finally:
        bench.close()


@pytest.mark.parametrize("seed", [11])
@long
def test_exactly_once_through_many_events(tmp_path: Path, fork_server: ForkServer, seed: int) -> None:
    chance = random.Random(seed)
    kinds = chance.choices(["resize", "kill", "preempt"], [3, 3, 1], k=30)
    events = [(kind, chance.randint(1, 4), chance.expovariate(3.0)) for kind in kinds]
    bench = Bench(tmp_path, fork_server)
    try:
        train_through(bench, 30, 3, events)
    finally:
        bench.close()


@long
def test_exactly_once_of_a_sharded_model(tmp_path: Path, fork_server: ForkServer) -> None:
    """Shards move at the resizes; after the kill all go back to the last checkpoint."""
    events = [("resize", 3, 0.5), ("kill", 1, 1.5), ("resize", 1, 1.0), ("preempt", 2, 0.5)]
    bench = Bench(tmp_path, fork_server)
    try:
        train_through(bench, 8, 2, events, "--shard")
    finally:
        bench.close()


@pytest.mark.parametrize("seed", [12])
@long
def test_exactly_once_of_a_sharded_model_through_many_events(
    tmp_path: Path, fork_server: ForkServer, seed: int
) -> None:
    chance = random.Random(seed)
    kinds = chance.choices(["resize", "kill", "preempt"], [3, 2, 1], k=20)
    events = [(kind, chance.randint(1, 4), chance.expovariate(1.0)) for kind in kinds]
    bench = Bench(tmp_path, fork_server)
    try:
        train_through(bench, 30, 3, events, "--shard")
    finally:
        bench.close()
