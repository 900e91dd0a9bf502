"""Scripts in the shape of public ones (examples/ports): resized, one replica killed, and as good as the plain ones."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from pollux.engines.processes.elastic import ElasticJob
from tests.e2e.cluster import LiveCluster
from tests.e2e.jobs import Bench, is_formed, of_kind, pump_until, resize_waiting
from tests.long import long
from tests.ports import BOUNDS, NEEDS, PORTS

NAMES = ["mnist", *sorted(BOUNDS.keys() - {"mnist"})]
Record = Callable[[str, object], None]  # pytest's record_property: scripts/ports_table.py reads it from --junitxml


def needs(name: str) -> None:
    for package in NEEDS.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")


def num_steps(bench: Bench) -> int:
    """Of all replicas together."""
    path = bench.out.with_name(f"{bench.out.name}-steps")
    return path.stat().st_size if path.exists() else 0


def train_on(bench: Bench, job: ElasticJob, more: int) -> None:
    reached = num_steps(bench) + more
    pump_until(bench, job, lambda: num_steps(bench) >= reached, 120)


def result_of(text: str) -> float:
    found = re.findall(r"^result (\S+)$", text, re.MULTILINE)
    assert len(found) == 1, f"{len(found)} results in {text[-2000:]!r}"
    return float(found[0])


def check_result(name: str, column: str, printed: str, record_property: Record) -> None:
    result = result_of(printed)
    record_property(column, result)
    lowest, highest = BOUNDS[name]
    assert lowest <= result <= highest, printed[-3000:]


@pytest.mark.parametrize("name", NAMES)
@long
def test_a_ported_script_is_resized_and_loses_a_replica(bench: Bench, name: str, record_property: Record) -> None:
    needs(name)
    job = bench.start(1, "paced.py", args=[PORTS / f"{name}.py"])
    pump_until(bench, job, lambda: is_formed(job, 1), 120)
    train_on(bench, job, 3)
    resize_waiting(bench, job, 2)
    train_on(bench, job, 6)
    pid = job.replicas[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    pump_until(bench, job, lambda: len(of_kind(job, "formed")) >= 3, 120)
    train_on(bench, job, 2)
    bench.finish(job, 240)
    printed = "\n".join(path.read_text() for path in sorted(bench.folder.glob("logs/*/*.out")))
    check_result(name, "killed", printed, record_property)


@long
@pytest.mark.parametrize("name", NAMES)
def test_a_ported_script_runs_alone_and_is_as_good_as_the_plain_one(
    name: str, tmp_path: Path, record_property: Record
) -> None:
    needs(name)
    env = {key: value for key, value in os.environ.items() if not key.startswith(("POLLUX_", "TORCH"))}
    for column, script in (("plain", PORTS / "plain" / f"{name}.py"), ("alone", PORTS / f"{name}.py")):
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=tmp_path,
            env={**env, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        check_result(name, column, done.stdout, record_property)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    made = LiveCluster(tmp_path_factory.mktemp("cluster"), slots=2).start()
    yield made
    made.stop()


@long
@pytest.mark.parametrize("name", NAMES)
def test_a_ported_script_trains_in_a_cluster_with_two_replicas(
    cluster: LiveCluster, name: str, record_property: Record
) -> None:
    needs(name)
    called = name.replace("_", "-")
    job = cluster.submit(PORTS / f"{name}.py", name=called, min_replicas=2, max_replicas=2)
    assert job.wait(300) == "succeeded", cluster.story(called)
    logs = (cluster.data / "jobs" / called / "logs").glob("*/*.out")
    check_result(name, "cluster", "\n".join(path.read_text() for path in sorted(logs)), record_property)
