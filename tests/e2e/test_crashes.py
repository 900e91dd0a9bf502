"""Members that die, freeze or are told to leave: training ends as if nothing had happened."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from pollux.engines.processes import elastic
from pollux.engines.processes.elastic import ElasticJob
from tests.e2e.jobs import SCRIPTS, Bench, is_formed, of_kind, pump_for, pump_until
from tests.long import first_of, long


def checkpoint_names(bench: Bench) -> list[str]:
    return sorted(path.name for path in bench.checkpoints.glob("step-*"))


def checkpoint_steps(bench: Bench) -> list[int]:
    return [int(name.split("-")[1]) for name in checkpoint_names(bench)]


def pids(bench: Bench) -> dict[int, int]:
    """By rank, of the newest generation that a step was begun in."""
    rows = {pid: rows[-1] for pid, rows in bench.traces().items()}
    newest = max(row.generation for row in rows.values())
    return {row.rank: pid for pid, row in rows.items() if row.generation == newest}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("seed", "num_kills"), [(0, 4), *(pytest.param(seed, 10, marks=long) for seed in range(5))])
def test_random_members_are_killed_at_random_moments(bench: Bench, seed: int, num_kills: int) -> None:
    """So many kills: survivors go on in place, and when there are none the checkpoint does."""
    chance = random.Random(seed)
    args = ["--epochs", 30, "--step-s", 0.01, "--after-s", 0.005, "--save-s", 0.5]
    job = bench.start(chance.randint(2, 4), args=args, max_restarts=num_kills)
    killed: set[str] = set()
    while len(killed) < num_kills and job.result is None:
        # Some hit a group that is still forming after the kill before.
        pump_for(job, chance.choice([0.02, 0.1, 0.3, 0.6]) * chance.random() * 2)
        if chance.random() < 0.2:
            job.resize(chance.randint(2, 4))
        alive = [rank for rank, member in enumerate(job.members) if member.replica_id not in killed]
        if alive:
            rank = chance.choice(alive)
            killed.add(job.members[rank].replica_id)
            job.kill(rank)
    assert job.result is None, f"seed {seed}: over after {len(killed)} kills\n{bench.story(job)}"
    bench.finish(job, timeout_s=90.0)  # a group of which several die while they connect waits for one after the other
    exits = {event.replica_id for event in of_kind(job, "exited") if event.detail == "code -9"}
    assert killed <= exits, f"seed {seed}"
    bench.check_ledger(30, job)


def test_a_member_dies_while_the_others_wait_for_it_in_a_collective_of_their_own(bench: Bench) -> None:
    """``run.attempt`` repeats the step, and no survivor ends."""
    job = bench.start(3, args=["--epochs", 2, "--own-s", 0.3, "--step-s", 0.0])
    for num_killed in range(1, 3):
        pump_until(bench, job, lambda: is_formed(job, 3))
        step = bench.step() + 2
        pump_until(bench, job, lambda step=step: bench.step() >= step)
        job.kill(1)  # it sleeps, and the others wait
        pump_until(bench, job, lambda num=num_killed: len(of_kind(job, "exited")) == num)
    bench.finish(job)
    codes = sorted(event.detail for event in of_kind(job, "exited"))
    assert set(codes) == {"code -9", "code 0"} and codes.count("code -9") == 2, bench.story(job)
    bench.check_ledger(2, job)


def test_a_loss_told_after_the_optimizers_step_does_not_repeat_it(bench: Bench) -> None:
    """The gradients were good when they were used; what became of the group since is for the next step."""
    job = bench.start(3, args=["--epochs", 1, "--step-s", 0.0, "--after-s", 0.25])
    for num_left in (2, 1):
        pump_until(bench, job, lambda: is_formed(job, len(job.members)))
        step = bench.step() + 2
        pump_until(bench, job, lambda step=step: bench.step() >= step)
        pump_for(job, 0.05)  # all of them are past the optimizer's step now, for another 0.2 s
        job._tolerance = dataclasses.replace(job._tolerance, replace_lost=False)
        job.kill(num_left)
        pump_until(bench, job, lambda num_left=num_left: is_formed(job, num_left))
    bench.finish(job)
    bench.check_ledger(1, job)


def test_memory_runs_out_on_one_replica(bench: Bench) -> None:
    """All begin the step again, on the same examples, with smaller passes; the others are not kept waiting."""
    job = bench.start(3, args=["--epochs", 2, "--oom-at", 7])
    bench.finish(job, timeout_s=15.0)
    bench.check_ledger(2, job)
    assert "out of memory with 4 examples on the device" in bench.story()
    assert len(of_kind(job, "spawned")) == 3


def test_a_sum_that_not_all_replicas_got(bench: Bench) -> None:
    """They have made the same steps, but some have measured more: they must agree on that too."""
    job = bench.start(3, args=["--epochs", 2, "--deaf-at", 7])
    bench.finish(job, timeout_s=15.0)
    assert "pretended; re-forming" in bench.story()
    bench.check_ledger(2, job)


@pytest.mark.parametrize("rank", first_of([0, 2]))
def test_a_frozen_member_is_left_behind(bench: Bench, rank: int) -> None:
    """Its connections stay open and its collectives never end: only the owner can tell, by naming it as lost."""
    # Slow enough that the survivors still train when it wakes and leaves.
    job = bench.start(3, args=["--epochs", 12, "--step-s", 0.05], replace_lost=False)
    pump_until(bench, job, lambda: bench.step() >= 10)
    frozen = pids(bench)[rank]
    job.kill(rank, signal.SIGSTOP)
    pump_for(job, 0.5)
    step = bench.step()
    pump_for(job, 0.5)
    assert bench.step() == step  # nobody goes on without it
    survivors = [member for number, member in enumerate(job.members) if number != rank]
    told = time.time()
    generation = job.controller.publish(survivors, lost=[job.members[rank].replica_id])
    pump_until(bench, job, lambda: bench.step() > step + 5, timeout_s=10.0)
    assert (job.controller.formed_at(generation) or 0.0) - told < 5.0
    names = checkpoint_names(bench)
    job.kill(rank, signal.SIGCONT)
    pump_until(bench, job, lambda: of_kind(job, "exited"), timeout_s=10.0)
    assert [event.detail for event in of_kind(job, "exited")] == ["code 143"]
    assert checkpoint_names(bench) == names == []
    assert bench.traces()[frozen][-1].generation < generation  # no step of its own in between
    bench.finish(job)
    bench.check_ledger(12, job)


@long
def test_a_member_that_is_frozen_while_a_group_forms_is_left_behind(bench: Bench) -> None:
    job = bench.start(2, args=["--epochs", 20, "--step-s", 0.005])
    pump_until(bench, job, lambda: bench.step() >= 5)
    job.resize(3)
    pump_until(bench, job, lambda: len(job.members) == 3)  # published: now they all meet
    job.kill(2, signal.SIGSTOP)
    pump_for(job, 0.7)
    told = time.monotonic()
    generation = job.controller.publish(job.members[:2], lost=[job.members[2].replica_id])
    pump_until(bench, job, lambda: job.controller.is_formed(generation), timeout_s=20.0)
    assert time.monotonic() - told < 10.0  # connecting to a frozen one ends by a time limit of its own
    job.kill(2)
    bench.finish(job)
    bench.check_ledger(20, job)


@long
def test_the_last_survivor_of_a_group_that_was_re_forming_goes_on_alone(bench: Bench) -> None:
    job = bench.start(4, args=["--epochs", 12, "--step-s", 0.01], replace_lost=False)
    pump_until(bench, job, lambda: bench.step() >= 10)
    step, survivor = bench.step(), pids(bench)[2]
    job.kill(0)
    pump_until(bench, job, lambda: len(job.members) == 3)  # published, and the others are about to meet
    job.kill(0)  # the old rank 1
    job.kill(2)  # the old rank 3
    pump_until(bench, job, lambda: is_formed(job, 1), timeout_s=30.0)
    bench.finish(job)
    bench.check_ledger(12, job)
    rows = bench.traces()[survivor]
    assert rows[-1].size == 1 and rows[-1].step == 12 * 20 - 1
    assert job.num_restarts == 0 and min(row.step for row in rows if row.generation > 1) >= step


@long
def test_who_cannot_recover_leaves_for_the_last_checkpoint(bench: Bench) -> None:
    """One member freezes, nobody says so: the others give up in bounded time, and all start again."""
    args = ["--epochs", 20, "--step-s", 0.01, "--save-s", 0.2, "--timeout-s", 4.0]
    job = bench.start(3, args=args)
    pump_until(bench, job, lambda: checkpoint_names(bench))
    pump_until(bench, job, lambda: bench.step() >= 25)
    by_rank = pids(bench)
    job.kill(1, signal.SIGSTOP)
    first = set(bench.traces())
    # The job is not pumped meanwhile: it would see the first one's end, and tell the other who is lost.
    deadline = time.monotonic() + 60.0
    while any(is_running(by_rank[rank]) for rank in (0, 2)):
        assert time.monotonic() < deadline, bench.story(job)
        time.sleep(0.02)
    saved = max(int(name.split("-")[1].split(".")[0]) for name in checkpoint_names(bench))
    job.kill(1)
    pump_until(bench, job, lambda: len(of_kind(job, "exited")) == 3)
    assert sorted(event.detail for event in of_kind(job, "exited")) == ["code -9", "code 1", "code 1"]
    pump_until(bench, job, lambda: job.num_restarts == 1)
    pump_until(bench, job, lambda: set(bench.traces()) - first)
    resumed = next(rows for pid, rows in bench.traces().items() if pid not in first)
    assert resumed[0].step >= saved > 0
    bench.finish(job)
    bench.check_ledger(20, job)


@long
def test_pauses_before_restarts_grow_only_while_there_is_no_training(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "HEALTHY_S", 0.3)
    job = bench.start(1, args=["--epochs", 12, "--save-s", 0.1], max_restarts=5)
    for trains_s in (0.5, 0.5, 0.5, 0.0):
        num_restarts = job.num_restarts
        pump_until(bench, job, lambda: is_formed(job, 1))
        pump_for(job, trains_s)
        job.kill(0)
        pump_until(bench, job, lambda num_restarts=num_restarts: job.num_restarts > num_restarts)
    bench.finish(job)
    bench.check_ledger(12, job)
    spawned = [event.time for event in of_kind(job, "spawned")]
    pauses = [spawned[n + 1] - event.time for n, event in enumerate(of_kind(job, "restarting"))]
    assert [round(pause, 1) for pause in pauses] == pytest.approx([0.5, 0.5, 0.5, 1.0], abs=0.2)


# --- told to leave ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", first_of(["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"]))
def test_signals_leave_a_checkpoint_for_any_number_of_replicas(bench: Bench, name: str) -> None:
    before, after = {"SIGTERM": (3, 1), "SIGUSR1": (1, 2), "SIGUSR2": (2, 4), "SIGHUP": (4, 3)}[name]
    # Whoever leaves unasked would be replaced at once, perhaps before the others are gone.
    job = bench.start(before, args=["--epochs", 5], max_restarts=0, replace_lost=False)
    pump_until(bench, job, lambda: bench.step() >= 10)
    told = time.time()
    if name == "SIGTERM":
        job.request_stop(10.0)
    else:
        job.kill(before - 1, signal.Signals[name])  # one is told, all leave
    assert job.wait(10.0) == 143
    assert [event.detail for event in of_kind(job, "exited")] == ["code 143"] * before, bench.story(job)
    last = max(row.step for rows in bench.traces().values() for row in rows)
    late = [row for rows in bench.traces().values() for row in rows if row.time > told]
    assert len(late) <= 3 * before  # at the next boundary at which all can know
    assert checkpoint_steps(bench) == [last + 1]
    resumed = bench.start(after, args=["--epochs", 5])
    bench.finish(resumed)
    bench.check_ledger(5, resumed)
    assert min(rows[0].step for rows in list(bench.traces().values())[before:]) == last + 1


@pytest.mark.parametrize("size", [1, 3])
def test_a_job_of_which_nothing_is_needed_leaves_at_once(bench: Bench, size: int) -> None:
    job = bench.start(size, args=["--epochs", 50])
    pump_until(bench, job, lambda: bench.step() >= 10)
    told = time.monotonic()
    job.request_stop(20.0, saves=False)
    assert job.wait(20.0) == 143
    assert time.monotonic() - told < 10.0  # none waits for one that has left
    assert checkpoint_steps(bench) == [] and job.num_restarts == 0


def test_a_job_that_loses_a_member_while_it_stops_leaves_a_checkpoint_all_the_same(bench: Bench) -> None:
    job = bench.start(3, args=["--epochs", 10])
    pump_until(bench, job, lambda: bench.step() >= 10)
    job.kill(1)
    told = time.monotonic()
    assert job.stop(20.0) == 143
    assert time.monotonic() - told < 15.0  # a group that had begun to connect waits for 3 s
    assert sorted(event.detail for event in of_kind(job, "exited")) == ["code -9", "code 143", "code 143"]
    last = max(row.step for rows in bench.traces().values() for row in rows)
    assert checkpoint_steps(bench) == [last + 1]


def stop(bench: Bench, job: ElasticJob, step: int) -> int:
    """Preempt a job after this step; what its checkpoint is of."""
    pump_until(bench, job, lambda: bench.step() >= step)
    assert job.stop(10.0) == 143
    return checkpoint_steps(bench)[-1]


def test_a_torn_checkpoint_is_passed_over(bench: Bench) -> None:
    first = stop(bench, bench.start(2, args=["--epochs", 5]), 10)
    second = stop(bench, bench.start(3, args=["--epochs", 5]), first + 10)
    assert second > first
    torn = bench.checkpoints / checkpoint_names(bench)[-1]
    largest = max(torn.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    known = len(bench.traces())
    job = bench.start(2, args=["--epochs", 5])
    bench.finish(job)
    bench.check_ledger(5, job)
    assert list(bench.traces().values())[known][0].step == first
    assert f"resumed after step {first}" in bench.story() and "Trying the one before" in bench.story()


@long
def test_under_torchrun_and_then_alone(bench: Bench) -> None:
    args = ["--epochs", "30", "--step-s", "0.02", "--out", str(bench.out), "--hurry", str(bench.hurry)]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command: dict[str, Any] = {"cwd": bench.folder, "env": bench.env, "text": True, **piped}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with subprocess.Popen([*torchrun, str(SCRIPTS / "ledger.py"), *args], **command) as process:
        try:
            deadline = time.monotonic() + 60.0
            while bench.step() < 10:
                assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
                time.sleep(0.05)
            process.terminate()
            log, _ = process.communicate(timeout=40.0)
        finally:
            process.kill()
    traces = bench.traces()
    assert [rows[-1].size for rows in traces.values()] == [2, 2]
    last = max(row.step for rows in traces.values() for row in rows)
    assert checkpoint_steps(bench) == [last + 1], log
    bench.hurry.touch()
    alone = subprocess.run([sys.executable, str(SCRIPTS / "ledger.py"), *args], **command, timeout=60.0)
    assert alone.returncode == 0, alone.stdout
    assert list(bench.traces().values())[2][0].step == last + 1
    bench.check_ledger(30)
