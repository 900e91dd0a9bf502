"""Jobs share a machine: real server, real supervisor, real replicas. Then every part of it is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.cluster import LiveCluster
from tests.long import long

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EPOCHS = 10  # of 20 steps: with 0.3 s each a minute, unless it is told to hurry


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LiveCluster]:
    made = LiveCluster(tmp_path).start()
    yield made
    made.stop()


@long
def test_jobs_grow_and_shrink_in_place_and_all_learn(cluster: LiveCluster) -> None:
    digits = [EXAMPLES / "digits.py", "--emulate-device", 3, "--epochs"]
    long = cluster.submit(*digits, 24, name="long")  # outlasts the others: with all slots it changes its batch
    short = cluster.submit(*digits, 5, name="short")
    cluster.until_replicas("short", 2)
    shared = cluster.until_replicas("long", 2)
    pids = set(cluster.pids("long").values())
    assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)

    assert short.wait(90) == "succeeded", cluster.story("short")
    grown = cluster.until_replicas("long", 3, 4)
    most = set(cluster.pids("long").values())
    assert pids < most  # the same processes, and more

    late = cluster.submit(*digits, 4, name="late")
    cluster.until_replicas("late", 1, 2)
    shrunk = cluster.until_replicas("long", 1, 2)
    assert set(cluster.pids("long").values()) < most
    assert shrunk.generation > grown.generation > shared.generation

    for job in (late, long):
        assert job.wait(180) == "succeeded", cluster.story(job.name)
    for job in (short, late, long):
        assert job.result().metrics["accuracy"] > 0.9, cluster.story(job.name)
    reports = long.reports()
    by_replicas = {count: [r for r in reports if r.num_replicas == count] for count in (1, 2, 3, 4)}
    assert {r.total_batch for r in reports} != {32}  # re-batched on the way
    gains = {round(r.gain, 6) for r in reports if r.total_batch > 32 and r.noise_scale is not None}
    assert gains and min(gains) > 1  # and learnt more from a step, by which the learning rate goes
    assert by_replicas[1] and by_replicas[2] and (by_replicas[3] or by_replicas[4])
    for job in (short, late, long):
        assert job.describe().lost_share < 0.2


@long
def test_killing_the_supervisor_is_survived(cluster: LiveCluster) -> None:
    cluster.submit_ledger("one", epochs=EPOCHS, step_s=0.3, min_replicas=3)
    cluster.until_replicas("one", 3, 4)
    pids = set(cluster.pids("one").values())
    cluster.supervisor.kill()
    cluster.until(lambda: cluster.client.job("one").view().num_crashes == 1, "the loss seen")
    cluster.until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "replicas that end with it")
    cluster.hurry("one")
    assert cluster.until_over("one") == "succeeded", cluster.story("one")
    cluster.check_ledger("one", EPOCHS)


@long
def test_what_a_killed_server_leaves_can_be_ended_and_goes_on_later(cluster: LiveCluster) -> None:
    cluster.submit_ledger("one", epochs=EPOCHS, step_s=0.3, min_replicas=2)
    cluster.until_replicas("one", 2)
    cluster.kill_server()
    ended = subprocess.run(
        [sys.executable, "-m", "pollux", "down", "--data", cluster.data], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0 and "its jobs did" in ended.stderr, ended.stderr
    assert cluster.processes() == []
    cluster.start()
    cluster.hurry("one")
    assert cluster.until_over("one") == "succeeded", cluster.story("one")
    cluster.check_ledger("one", EPOCHS)


@pytest.mark.parametrize("delays_s", [(0.15, 1.5), (0.0, 0.6)])
@long
def test_a_server_killed_at_any_moment_loses_nothing(cluster: LiveCluster, delays_s: tuple[float, ...]) -> None:
    for delay_s in delays_s:  # before they start, while they grow, ...
        names = [f"{name}-after-{delay_s:g}-s" for name in ("one", "two")]
        for name in names:
            cluster.submit_ledger(name)
        time.sleep(delay_s)
        cluster.kill_server()
        time.sleep(0.3)
        cluster.start()
        for name in names:
            cluster.hurry(name)
            assert cluster.until_over(name) == "succeeded", cluster.story(name)
            cluster.check_ledger(name)


# What happens to jobs alone is nothing to the next ones: these share a server -----------------


@pytest.fixture(scope="class")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    made = LiveCluster(tmp_path_factory.mktemp("shared")).start()
    yield made
    made.stop()


class TestShared:
    @long
    def test_an_echo_in_an_array_is_not_interpreted_by_any_shell(self, shared_cluster: LiveCluster) -> None:
        cluster = shared_cluster
        jobs = cluster.client.submit(["echo", "$HOME; rm -rf $(pwd) `id` & | >x"], name="say", array="0-1")
        assert isinstance(jobs, list)
        for job in jobs:
            assert job.wait(30) == "succeeded"
            assert "$HOME; rm -rf $(pwd) `id` & | >x" in "".join(job.logs())

    def test_a_plain_command_runs_with_torchruns_variables(self, shared_cluster: LiveCluster) -> None:
        cluster = shared_cluster
        script = cluster.folder / "plain.py"
        script.write_text(
            "import os, torch.distributed as dist, torch\n"
            "dist.init_process_group('gloo')\n"
            "x = torch.ones(1); dist.all_reduce(x)\n"
            "print('sum', int(x), 'rank', os.environ['RANK'])\n"
            "dist.destroy_process_group()\n"
        )
        job = cluster.submit(script, replicas=2)
        assert job.wait(60) == "succeeded", cluster.story(job.name)
        text = "".join(job.logs())
        assert "sum 2 rank 0" in text and "sum 2 rank 1" in text

    @long
    def test_a_script_that_raises_fails_with_its_traceback(self, shared_cluster: LiveCluster) -> None:
        cluster = shared_cluster
        script = cluster.folder / "raises.py"
        script.write_text(
            "from pollux import train\nrun = train.init()\n\n"
            "def explode():\n    raise RuntimeError('no such luck')\n\nexplode()\n"
        )
        job = cluster.submit(script)
        assert job.wait(60) == "failed"
        detail = job.describe()
        assert "RuntimeError: no such luck" in detail.failure and "in explode" in detail.failure
        assert detail.exit_code == 1
        shown = subprocess.run(
            [sys.executable, "-m", "pollux", "describe", "--data", cluster.data, job.name],
            capture_output=True,
            text=True,
        )
        assert shown.returncode == 0 and "RuntimeError: no such luck" in shown.stdout

    def test_killed_replicas_are_replaced_and_the_survivors_go_on(self, shared_cluster: LiveCluster) -> None:
        cluster = shared_cluster
        cluster.submit_ledger("killed", epochs=EPOCHS, step_s=0.3, min_replicas=3)
        cluster.until_replicas("killed", 3, 4)
        pids = cluster.pids("killed")
        os.kill(pids[1], signal.SIGKILL)
        cluster.until(
            lambda: len(alive := set(cluster.pids("killed").values())) >= 3 and pids[1] not in alive, "a replacement"
        )
        assert pids[0] in cluster.pids("killed").values()
        cluster.until(lambda: cluster.client.job("killed").view().num_crashes == 1, "the loss seen")
        detail = cluster.client.job("killed").describe()
        assert any("was killed by SIGKILL" in transition.reason for transition in detail.transitions)
        for pid in cluster.pids("killed").values():  # all at once: only the checkpoint is left
            os.kill(pid, signal.SIGKILL)
        cluster.until(lambda: cluster.pids("killed") and pids[0] not in cluster.pids("killed").values(), "a restart")
        cluster.hurry("killed")
        assert cluster.until_over("killed") == "succeeded", cluster.story("killed")
        cluster.check_ledger("killed", EPOCHS)
        notes = [note.text for note in cluster.client.job("killed").describe().training_notes]
        assert any("goes on from a checkpoint" in text or "begins anew" in text for text in notes), notes

    @long
    def test_killing_the_parent_of_all_replicas_is_survived(self, shared_cluster: LiveCluster) -> None:
        cluster = shared_cluster
        for name in ("left", "right"):
            cluster.submit_ledger(name, epochs=EPOCHS, step_s=0.3, min_replicas=2, max_restarts=0)
        for name in ("left", "right"):
            cluster.until_replicas(name, 2)
        cluster.fork_server.kill()
        for name in ("left", "right"):
            cluster.hurry(name)
            assert cluster.until_over(name) == "succeeded", cluster.story(name)
            cluster.check_ledger(name, EPOCHS)

    def test_a_killed_server_changes_nothing_for_the_jobs(self, shared_cluster: LiveCluster) -> None:
        cluster = shared_cluster
        for name in ("one", "two"):
            cluster.submit_ledger(name, epochs=EPOCHS, step_s=0.3, min_replicas=2)
        cluster.submit_ledger("three", epochs=1, after=("one",))
        for name in ("one", "two"):
            cluster.until_replicas(name, 2)
        pids = {name: set(cluster.pids(name).values()) for name in ("one", "two")}
        cluster.kill_server()
        trace = cluster.folder / "one-trace"
        seen = sum(len(path.read_text().splitlines()) for path in trace.iterdir())
        cluster.until(
            lambda: sum(len(path.read_text().splitlines()) for path in trace.iterdir()) > seen + 20,
            "steps without a server",
        )
        cluster.start()
        for name in ("one", "two"):
            cluster.until_replicas(name, 2)
            assert set(cluster.pids(name).values()) == pids[name]
            cluster.hurry(name)
        cluster.hurry("three")
        for name in ("one", "two", "three"):
            assert cluster.until_over(name) == "succeeded", cluster.story(name)
            cluster.check_ledger(name, 1 if name == "three" else EPOCHS)
            starts = [t for t in cluster.client.job(name).describe().transitions if t.source == "pending"]
            assert len(starts) == 1
        before, after = (cluster.client.job(name).view() for name in ("one", "three"))
        assert after.started_at > before.finished_at - 1


@pytest.fixture(scope="class")
def strict_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    made = LiveCluster(tmp_path_factory.mktemp("strict"), grace_s=1.0, min_free_mib=4).start()
    yield made
    made.stop()


@long
class TestStrict:
    def test_a_script_that_hangs_is_stopped_by_its_time_limit(self, strict_cluster: LiveCluster) -> None:
        cluster = strict_cluster
        script = cluster.folder / "hangs.py"
        script.write_text(
            "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf')\ntime.sleep(600)\n"
        )
        job = cluster.submit(script, time_limit_s=2.0)
        assert job.wait(30) == "failed"
        assert "time limit of 2 s" in job.view().reason

    @pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
    def test_a_full_disk_pauses_the_job_and_nothing_is_lost(self, strict_cluster: LiveCluster) -> None:
        cluster = strict_cluster
        disk = cluster.data / "jobs"
        disk.mkdir(exist_ok=True)
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", disk], capture_output=True, text=True
        )
        if mounted.returncode:
            pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
        try:
            cluster.submit_ledger("one", epochs=EPOCHS, step_s=0.3, min_replicas=3)
            cluster.until_replicas("one", 3, 4)
            with (disk / "filling").open("wb") as file, pytest.raises(OSError):
                while True:
                    file.write(bytes(1 << 16))
                    file.flush()
            view = cluster.until(lambda: (v := cluster.client.job("one").view()).note and v, "a pause with its reason")
            assert view.note.startswith("paused") and "MiB" in view.note and view.state != "failed"
            (disk / "filling").unlink()
            cluster.hurry("one")
            assert cluster.until_over("one") == "succeeded", cluster.story("one")
            cluster.check_ledger("one", EPOCHS)
            cluster.stop()
        finally:
            subprocess.run(["umount", "-l", disk], check=True)


@long
def test_a_job_whose_every_checkpoint_is_torn_is_held_and_begins_anew_when_its_owner_says_so(
    cluster: LiveCluster,
) -> None:
    job = cluster.submit_ledger("torn", epochs=2, step_s=0.1, max_restarts=100_000)
    checkpoints = cluster.data / "jobs" / "torn" / "checkpoints"
    cluster.until(lambda: len(list(checkpoints.glob("step-*"))) == 2, "two checkpoints")
    for pid in cluster.pids("torn").values():
        os.kill(pid, signal.SIGKILL)
    for path in checkpoints.glob("step-*/*.safetensors"):
        os.truncate(path, 10)
    cluster.until(lambda: "pollux release torn" in job.view().reason, "its being held", 20)
    assert job.view().state == "pending" and not cluster.pids("torn")
    shutil.rmtree(checkpoints)
    cluster.client.act("release", ["torn"])
    cluster.hurry("torn")
    assert job.wait(60) == "succeeded", cluster.story("torn")
    cluster.check_ledger("torn", 2)
