"""Jobs of other frameworks share a machine: resized by a checkpoint and a new start, and they lose nothing by it."""

from __future__ import annotations

import importlib.util
import itertools
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pollux.api.job import JobDetail
from tests.e2e.cluster import LiveCluster
from tests.long import long

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "elastic"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LiveCluster]:
    """Equal shares: sizes follow from the number of jobs alone."""
    made = LiveCluster(tmp_path, slots=2, policy="equal").start()
    yield made
    made.stop()


def sleeper(cluster: LiveCluster, name: str) -> None:
    """A job that takes one of the two slots until it is cancelled."""
    cluster.submit("-c", "import time; time.sleep(600)", name=name, kind="fixed")
    cluster.until_replicas(name, 1)


def trains_with(cluster: LiveCluster, name: str, num_replicas: int) -> None:
    """Until the job has made a few steps at this size."""
    cluster.until_replicas(name, num_replicas)
    job = cluster.client.job(name)
    before = job.reports()[-1].num_steps
    cluster.until(lambda: job.reports()[-1].num_steps >= before + 5, f"{name}: steps with {num_replicas} replicas")


def resized_twice(cluster: LiveCluster, name: str) -> JobDetail:
    """1 -> 2 -> 1 replicas while it trains, by another job that goes and a further one that comes."""
    trains_with(cluster, name, 1)
    cluster.client.job("first").cancel()
    trains_with(cluster, name, 2)
    sleeper(cluster, "second")
    trains_with(cluster, name, 1)
    return cluster.client.job(name).describe()


@long
def test_a_shell_script_is_resized_twice_and_does_every_shard_once(cluster: LiveCluster) -> None:
    num_shards, output = 40, cluster.folder / "shards"
    sleeper(cluster, "first")
    job = cluster.client.submit(
        [str(EXAMPLES / "shards.sh"), str(num_shards), "0.3", str(output)],
        name="shards",
        cwd=str(cluster.folder),
        env={"PYTHON": sys.executable},
    )
    assert job.describe().kind == "restartable"
    detail = resized_twice(cluster, "shards")
    assert cluster.until_over("shards") == "succeeded", cluster.story("shards")
    results = {int(path.name): int(path.read_text()) for path in output.iterdir()}
    assert results == {shard: shard**2 for shard in range(num_shards)}
    last = job.reports()[-1]
    assert last.progress is not None and last.progress > 0.9
    assert detail.num_crashes == 0
    took = [resize.took_s for resize in job.describe().resizes if resize.took_s is not None]
    assert len(took) >= 3 and min(took) > 0.3  # until the first shard of a start was reported


@long
@pytest.mark.parametrize(("script", "package"), [("jax_digits.py", "jax"), ("tf_digits.py", "tensorflow")])
def test_a_framework_is_resized_twice_and_killed_and_learns_as_well(
    cluster: LiveCluster, script: str, package: str
) -> None:
    for needed in (package, "sklearn"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"needs {needed}")
    sleeper(cluster, "first")
    job = cluster.submit(
        EXAMPLES / script, "--epochs", 20, "--emulate-device", 1.5, name="digits", env={"JAX_PLATFORMS": "cpu"}
    )
    assert job.describe().kind == "restartable"
    detail = resized_twice(cluster, "digits")
    assert {report.num_replicas for report in job.reports()} == {1, 2}
    psutil.Process(cluster.pids("digits")[0]).send_signal(signal.SIGKILL)
    cluster.until(lambda: job.view().num_crashes == 1, "the crash seen")
    cluster.client.job("second").cancel()
    assert cluster.until_over("digits", 180) == "succeeded", cluster.story("digits")
    reports = job.reports()
    steps = [report.num_steps for report in reports]
    assert reports[-1].progress == 1.0
    assert job.result().metrics["accuracy"] > 0.95, cluster.story("digits")
    assert any(report.noise_scale is not None and report.noise_scale > 0 for report in reports)
    assert {report.total_batch for report in reports} != {32}  # adapted to what was learnt of its speed and noise
    lost = [before - after for before, after in itertools.pairwise(steps) if after < before]
    assert len(lost) <= 1  # by the kill, not by the resizes
    took = [resize.took_s for resize in detail.resizes if resize.took_s is not None]
    assert min(took) > 1.0  # importing a framework and compiling are part of what a restart costs
