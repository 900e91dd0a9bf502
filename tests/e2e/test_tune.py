"""Studies of a real network on a real cluster: found, pruned, killed in the middle, and gone on with."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("optuna", reason="studies need the extra tune")

from pollux.tune import Study
from tests.e2e.cluster import LiveCluster
from tests.long import long

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SPACE = {"lr": "log:1e-4..1.0", "momentum": "0.5..0.99", "width": "choice:8,16"}
PATIENCE_S = 240.0


@pytest.fixture
def cluster(tmp_path):
    made = LiveCluster(tmp_path).start()
    yield made
    made.stop()


def begin(cluster, trials, *, epochs=4, ms=0.0, **options):
    command = ["python", str(EXAMPLES / "digits_study.py"), "--epochs", str(epochs), "--emulate-device", str(ms)]
    given = {"space": SPACE, "metric": "val_loss", "trials": trials, "name": "digits", **options}
    return Study(command, client=cluster.client, **given).start()


def check(found, trials):
    assert found.state == "finished", found
    counted = [one for one in found.trials if one.state in ("complete", "pruned")]
    assert len(counted) == trials, [(one.number, one.state, one.reason) for one in found.trials]
    assert len({one.job for one in found.trials}) == len(found.trials)
    assert found.best_value == min(one.value for one in counted if one.value is not None)


def test_a_study_of_a_real_network_goes_on_after_the_server_is_killed(cluster):
    study = begin(cluster, 6)
    cluster.until(lambda: sum(one.value is not None for one in study.describe().trials) >= 2, "two values")
    before = {one.number: one.params for one in study.describe().trials}
    cluster.kill_server()
    cluster.start()
    study = Study.attach("digits", cluster.client)
    found = study.wait(PATIENCE_S)
    check(found, 6)
    assert {number: found.trials[number].params for number in before} == before
    assert found.best_value < 2.28  # it learns: guessing gives 2.30; which trials are pruned depends on their speed
    curves = study.curves().curves
    assert all(0 < point.progress <= 1 for points in curves.values() for point in points)
    jobs = cluster.client.jobs()
    assert sorted(job.name for job in jobs) == sorted(one.job for one in found.trials)


@long
def test_server_trials_and_fork_server_are_killed_in_turn(cluster):
    """Fifty times something dies; no trial is lost or counted twice."""
    study = begin(cluster, 24, epochs=6, ms=1.0, max_restarts=50)
    for index in range(50):
        time.sleep(1.5)
        study = Study.attach("digits", cluster.client)
        if study.describe().is_over:
            break
        if index % 5 == 0:
            cluster.kill_server()
            cluster.start()
        elif index % 5 == 1:
            _kill_fork_servers(cluster)
        else:
            _kill_a_replica(cluster, study)
    found = Study.attach("digits", cluster.client).wait(3 * PATIENCE_S)
    check(found, 24)


def _kill_a_replica(cluster, study):
    running = [one.job for one in study.describe().trials if one.state == "running" and one.num_replicas]
    for job in running[:1]:
        for pid in list(cluster.pids(job).values())[:1]:
            if pid is not None and psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)


def _kill_fork_servers(cluster):
    for process in psutil.process_iter(["cmdline", "environ"]):
        words = process.info["cmdline"] or []
        if any("fork_main" in word for word in words) and str(cluster.data) in " ".join(words):
            process.kill()
