"""Fixed jobs with real processes: torchrun's variables, failures, restarts, moves."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("psutil")

from pollux.engines.processes.failure import tells_no_checkpoint
from pollux.engines.processes.fixed import FixedJob
from pollux.engines.processes.replica_job import ReplicaCommand, Tolerance
from pollux.engines.processes.slots import Slot
from pollux.engines.processes.starters import ColdStarter
from tests.leftovers import processes_in
from tests.long import long
from tests.unit.engines.bench import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

TWO = (Slot("n0", 0), Slot("n1", 1))


class Bench:
    def __init__(self, folder: Path, starter: ColdStarter) -> None:
        self.folder, self.starter = folder, starter
        self.jobs: list[FixedJob] = []

    def command(self, argv: tuple[str, ...], logs: str, **options: Any) -> ReplicaCommand:
        return ReplicaCommand(argv=argv, name="f", log_dir=self.folder / logs, cwd=self.folder, **options)

    def job(
        self,
        code: str,
        *,
        slots: tuple[Slot, ...] = TWO,
        env_of: Callable[[Slot], Mapping[str, str]] = lambda _slot: {},
        **options: Any,
    ) -> FixedJob:
        tolerance = Tolerance(**{"max_restarts": 0, **options})
        env = {"PATH": os.environ["PATH"], "GREETING": "hello"}
        command = self.command((sys.executable, "-c", code), "logs", env=env, env_of=env_of)
        job = FixedJob(command, slots=slots, starter=self.starter, tolerance=tolerance)
        self.jobs.append(job)
        job.start()
        return job

    def log(self, number: int, kind: str = "out") -> str:
        path = self.folder / "logs" / f"f-{number}.{kind}"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with ColdStarter(prefix=()) as starter:
        bench = Bench(tmp_path, starter)
        yield bench
        for job in bench.jobs:
            job.close()
    until(lambda: processes_in(tmp_path) == [])


def pump_until(job: FixedJob, condition: Callable[[], object]) -> None:
    def has_come() -> object:
        job.pump()
        return condition()

    until(has_come, job.failure)


def ended(job: FixedJob) -> int:
    until(lambda: job.pump() is not None, "its end")
    assert job.result is not None
    return job.result


SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


def test_torchruns_variables(bench):
    slots = (Slot("n1", 2), Slot("n0", 0), Slot("n0", 1))
    job = bench.job(SHOW, slots=slots, env_of=lambda slot: {"CUDA_VISIBLE_DEVICES": str(slot.number)})
    assert ended(job) == 0
    seen = [json.loads(bench.log(rank)) for rank in range(3)]
    for name, values in {
        "RANK": "012",
        "LOCAL_RANK": "001",
        "LOCAL_WORLD_SIZE": "122",
        "WORLD_SIZE": "333",
        "GROUP_RANK": "011",
        "CUDA_VISIBLE_DEVICES": "201",
        "TORCHELASTIC_RESTART_COUNT": "000",
        "POLLUX_GENERATION": "111",
    }.items():
        assert [env[name] for env in seen] == list(values), name
    assert {env["MASTER_ADDR"] for env in seen} == {"127.0.0.1"}
    assert len({env["MASTER_PORT"] for env in seen}) == 1 and int(seen[0]["MASTER_PORT"]) > 1023
    assert {env["TORCHELASTIC_RUN_ID"] for env in seen} == {"f"}
    assert {env["GREETING"] for env in seen} == {"hello"}
    assert "HOME" not in seen[0]


@long
def test_ranks_can_meet(bench):
    code = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(int(total), dist.get_rank())
dist.destroy_process_group()
"""
    job = bench.job(code, env_of=lambda slot: {"GLOO_SOCKET_IFNAME": "lo"})
    assert ended(job) == 0, bench.log(0, "err")
    assert bench.log(1) == "2 1\n"


FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    raise KeyError("rank one lost its key")
time.sleep(300)
"""


def test_one_rank_that_fails_ends_all_and_is_told(bench):
    job = bench.job(FAILS)
    assert ended(job) == 1
    assert job.failure.splitlines()[0] == "f: rank 1 on n1 exited with 1: KeyError: 'rank one lost its key'"
    assert job.num_restarts == 0
    assert job.crashes == ["f-1 exited with 1"]
    assert job.replicas == ()


def test_a_job_that_may_be_restarted_is_started_again(bench):
    code = """
import os, sys
path = f"state-{os.environ['RANK']}"
number = int(open(path).read()) if os.path.exists(path) else 0
open(path, "w").write(str(number + 1))
print(number, os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["POLLUX_GENERATION"], flush=True)
sys.exit(3 if number < 2 else 0)
"""
    began = time.monotonic()
    job = bench.job(code, slots=TWO[:1], max_restarts=3)
    assert ended(job) == 0
    assert time.monotonic() - began > 1.4  # half a second, then a second
    assert [bench.log(number) for number in range(3)] == ["0 0 1\n", "1 1 2\n", "2 2 3\n"]
    assert job.num_restarts == 2


def test_restarts_are_bounded_and_excuses_do_not_count(bench):
    excuses = ["the disk is full", "the disk is full", ""]
    job = bench.job("import sys; sys.exit(7)", max_restarts=1, excuse=lambda: (excuses or [""]).pop(0))
    assert ended(job) == 7
    assert (
        "f: rank 0 on n0 exited with 7, after 1 restarts" in job.failure or "rank 1 on n1 exited with 7" in job.failure
    )
    assert job.num_restarts == 1
    assert len(job.crashes) == 4  # two of them excused
    assert excuses == []


STAYS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("leaving", flush=True), sys.exit(0)))
print(os.environ["RANK"], os.environ["WORLD_SIZE"], flush=True)
time.sleep(300)
"""


def test_a_move_is_a_new_start_elsewhere(bench):
    job = bench.job(STAYS, max_restarts=3)
    pump_until(job, lambda: bench.log(0) and bench.log(1))
    assert job.is_settled
    old = {view.pid for view in job.replicas}
    job.place(TWO)
    assert {view.pid for view in job.replicas} == old  # they are there already
    job.place((Slot("n1", 3),))
    assert not job.is_settled
    assert {view.state for view in job.replicas} == {"leaving"}
    pump_until(job, lambda: job.is_settled and bench.log(2))
    assert bench.log(0) == "0 2\nleaving\n"
    assert bench.log(2) == "0 1\n"
    assert [view.slot for view in job.replicas] == [Slot("n1", 3)]
    assert job.num_restarts == 0


def test_a_stop_is_no_success_even_if_all_leave_with_0(bench):
    job = bench.job(STAYS)
    pump_until(job, lambda: bench.log(0) and bench.log(1))
    job.request_stop(10.0)
    assert ended(job) == 143
    assert bench.log(1) == "1 2\nleaving\n"


def test_who_is_deaf_is_killed_with_its_children(bench):
    code = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "300"])
subprocess.Popen(["sleep", "300"], start_new_session=True)
print("deaf", flush=True)
time.sleep(300)
"""
    job = bench.job(code, slots=TWO[:1])
    pump_until(job, lambda: bench.log(0))
    job.request_stop(0.2)
    assert ended(job) == 143
    until(lambda: processes_in(bench.folder) == [])


def test_nothing_is_started_while_it_is_held(bench):
    job = bench.job(STAYS, slots=TWO[:1], max_restarts=3)
    pump_until(job, lambda: bench.log(0))
    (view,) = job.replicas
    job.hold()
    until(lambda: Path(f"/proc/{view.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    job.place((Slot("n1", 5),))
    job.pump()
    assert [replica.pid for replica in job.replicas] == [view.pid]
    job.release()
    pump_until(job, lambda: bench.log(1))
    assert [replica.slot.number for replica in job.replicas] == [5]


def test_a_program_that_is_not_there(bench):
    job = bench.job("")
    job.close()
    command = bench.command(("no-such-program",), "logs2", env={})
    missing = FixedJob(command, slots=TWO[:1], starter=bench.starter, tolerance=Tolerance(max_restarts=0))
    missing.start()
    assert ended(missing) == 127
    assert "no-such-program: No such file or directory" in missing.failure
    assert missing.blame is not None and missing.blame.node == "n0"
    assert "No such file or directory" in missing.blame.cause


def test_a_script_with_a_bug_blames_no_node(bench):
    job = bench.job("raise ValueError('a bug')", slots=TWO[:1])
    assert ended(job) == 1
    assert job.blame is None and "rank 0 on n0 exited with 1" in job.failure


def test_a_move_that_comes_after_its_end_does_not_start_it_again(bench):
    job = bench.job("pass", slots=TWO[:1])
    until(lambda: (bench.starter.poll(), job._processes[0].exit_code)[1] == 0)  # known to the starter, not to the job
    job.place(TWO[1:])
    assert ended(job) == 0
    assert job._num_spawned == 1


def test_a_command_gets_the_signals_as_a_shell_would_give_them(bench):
    """An interpreter ignores SIGPIPE, and whoever it becomes would too: writers to a closed pipe would not end."""
    command = bench.command(("grep", "SigIgn", "/proc/self/status"), "plain", env={"PATH": os.environ["PATH"]})
    plain = FixedJob(command, slots=TWO[:1], starter=bench.starter, tolerance=Tolerance(max_restarts=0))
    plain.start()
    assert ended(plain) == 0
    assert int((bench.folder / "plain" / "f-0.out").read_text().split()[1], 16) & (1 << (signal.SIGPIPE - 1)) == 0


def test_a_script_that_can_use_no_checkpoint_is_not_started_again(bench):
    raises = "from pollux.errors import UnreadableCheckpointError; raise UnreadableCheckpointError('none')"
    job = bench.job(f"import sys; sys.path[:0] = {sys.path!r}\n{raises}", slots=TWO[:1], max_restarts=100)
    assert ended(job) == 1
    assert tells_no_checkpoint(job.failure.splitlines()[0]), job.failure
    assert len(job.crashes) == 1
