"""The local engine on real processes: placed, resized, stopped, failed, killed."""

from __future__ import annotations

import os
import signal

import pytest

pytest.importorskip("torch")
pytest.importorskip("psutil")

import psutil

from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.ports import JobEnded, JobLost, JobRuns, JobStopped, StartJob
from pollux.types import Allocation, JobSpec
from tests.leftovers import processes_in
from tests.long import long
from tests.unit.engines.bench import Bench, is_alive, until


def places(bench: Bench, job: str) -> list[tuple[str, int]]:
    return [(replica.node, replica.slot) for replica in bench.members(job)]


def test_a_job_keeps_its_processes_and_slots_when_it_is_resized(bench):
    first = bench.run("a", ("node-0", 1))
    assert places(bench, "a") == [("node-0", 0)]
    bench.run("b", ("node-0", 1))
    assert places(bench, "b") == [("node-0", 1)]
    bench.resize("a", ("node-0", 1), ("node-1", 2), generation=2)
    bench.wait_runs("a", 2)
    assert places(bench, "a") == [("node-0", 0), ("node-1", 2), ("node-1", 3)]
    assert bench.pids("a")[0] == first[0].pid
    assert [replica.rank for replica in bench.members("a")] == [0, 1, 2]
    last = bench.pids("a")[1]
    bench.resize("a", ("node-1", 1), generation=3)
    bench.wait_runs("a", 3)
    assert (bench.pids("a"), places(bench, "a")) == ([last], [("node-1", 2)])


def test_a_slot_is_not_given_out_before_its_old_replica_is_gone(bench):
    """A leaver that takes its time: who comes after it waits, and says so."""
    code = """
import os, sys, time, signal
from pollux.membership.replica import membership_from_environment
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
membership = membership_from_environment(os.environ)
group = membership.join(60.0)
while group is not None:
    membership.note_formed(group)
    while not membership.has_newer():
        time.sleep(0.01)
    group = membership.advance(30.0)
while not os.path.exists("go"):
    time.sleep(0.01)
"""
    bench.prepare("a", bench.script(code))
    bench.run("a", ("node-0", 2))
    leaver = bench.pids("a")[1]
    bench.resize("a", ("node-0", 1), generation=2)
    bench.wait_runs("a", 2)
    bench.start("b", ("node-0", 1))
    until(lambda: "waits for slots" in bench.engine.note("b"), "a note")
    assert is_alive(leaver)
    assert list(bench.engine.replicas("b")) == []
    (bench.folder / "go").touch()
    bench.wait_runs("b", 1)
    assert not is_alive(leaver)
    assert bench.engine.note("b") == ""
    assert places(bench, "b") == [("node-0", 1)]


def test_a_stopped_job_starts_again_from_its_checkpoint_with_new_logs(bench):
    bench.run("a", ("node-0", 1))
    until(lambda: len(list((bench.folder / "a-trace").glob("*"))) == 1)
    bench.stop("a")
    bench.wait_of(JobStopped, "a")
    assert list(bench.engine.replicas("a")) == []
    trace = next((bench.folder / "a-trace").glob("*")).read_text().splitlines()
    bench.run("a", ("node-1", 1), generation=5)
    (pid,) = bench.pids("a")
    until(lambda: (bench.folder / "a-trace" / str(pid)).exists())
    until(lambda: (bench.folder / "a-trace" / str(pid)).read_text())
    first_step = int((bench.folder / "a-trace" / str(pid)).read_text().split()[1])
    assert first_step >= int(trace[-1].split()[1])
    assert sorted(path.name for path in (bench.folder / "jobs" / "a" / "logs").iterdir()) == ["1", "5"]
    assert (bench.folder / "jobs" / "a" / "checkpoints").is_dir()


def test_a_job_that_ends_well(bench):
    bench.prepare("a", bench.script("import os; print(os.environ['RANK'], os.environ['CUDA_VISIBLE_DEVICES'] == '')"))
    bench.start("a", ("node-0", 2))
    end = bench.wait_of(JobEnded, "a")
    assert (end.state, end.exit_code, end.reason) == (JobState.SUCCEEDED, 0, "")
    assert sorted(bench.log("a").splitlines()) == ["0 True", "1 True"]


RAISES = """
import os, time
from pollux.membership.replica import membership_from_environment
membership = membership_from_environment(os.environ)
group = membership.join(60.0)
membership.note_formed(group)
if group.rank == 1:
    def inner():
        raise ValueError("the second rank has had enough")
    inner()
time.sleep(60)
"""


def test_a_script_that_raises_fails_with_the_first_failing_ranks_traceback(bench):
    bench.prepare("a", bench.script(RAISES), max_restarts=0)
    bench.start("a", ("node-0", 1), ("node-1", 1))
    end = bench.wait_of(JobEnded, "a")
    assert (end.state, end.exit_code) == (JobState.FAILED, 1)
    summary, *rest = end.reason.splitlines()
    assert summary.startswith("a: a-1 (rank 1) exited with 1: ValueError: the second rank has had enough")
    assert rest[0].startswith("Its stderr (") and rest[1] == "Traceback (most recent call last):"
    assert any("in inner" in line for line in rest)
    until(lambda: processes_in(bench.folder) == [])


def test_crashes_are_mended_only_so_often(bench):
    """Each replacement crashes too; the survivor trains on meanwhile, but not for ever."""
    code = """
import os, time, torch
from pollux import train
from torch.utils.data import TensorDataset
run = train.init()
x = torch.zeros(64, 2)
loader = run.dataloader(TensorDataset(x), batch_size=4)
model = torch.nn.Linear(2, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in run.epochs(100000):
    for (inputs,) in loader:
        model(inputs).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
        if run.rank == 1:
            open(f"crashes/{os.getpid()}", "w").close()
            raise RuntimeError(f"crash number {len(os.listdir('crashes'))}")
"""
    (bench.folder / "crashes").mkdir()
    bench.prepare("a", bench.script(code), max_restarts=2)
    bench.start("a", ("node-0", 2))
    end = bench.wait_of(JobEnded, "a")
    assert len(list((bench.folder / "crashes").iterdir())) == 3
    assert "the first of 3 crashes in a row: RuntimeError: crash number 1" in end.reason.splitlines()[0]


def test_a_deaf_script_is_killed_with_all_it_started_when_it_stops(bench):
    code = """
import os, signal, subprocess, sys, time
from pollux.membership.replica import membership_from_environment
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "300"], start_new_session=True)
inner = "import subprocess; subprocess.Popen(['sleep', '301'], start_new_session=True)"
subprocess.Popen([sys.executable, "-c", inner])
membership = membership_from_environment(os.environ)
membership.note_formed(membership.join(60.0))
time.sleep(300)
"""
    bench.engine.close(stops_jobs=False)
    bench.options["grace_s"] = 0.5
    bench.engine = bench.open()
    bench.prepare("a", bench.script(code))
    bench.run("a", ("node-0", 1))
    until(lambda: len(processes_in(bench.folder)) >= 3, "a replica and two sleepers")
    bench.stop("a")
    bench.wait_of(JobStopped, "a")
    until(lambda: processes_in(bench.folder) == [], "all gone")


def test_a_replica_that_leaves_politely_leaves_nobody_behind(bench):
    code = """
import os, subprocess, sys, time, signal
from pollux.membership.replica import membership_from_environment
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
membership = membership_from_environment(os.environ)
subprocess.Popen(["sleep", "300"], start_new_session=True)
membership.note_formed(membership.join(60.0))
time.sleep(300)
"""
    bench.prepare("a", bench.script(code))
    bench.run("a", ("node-0", 1))
    until(lambda: len(processes_in(bench.folder)) == 2)
    bench.stop("a")
    bench.wait_of(JobStopped, "a")
    until(lambda: processes_in(bench.folder) == [], "all gone")


@long
def test_the_death_of_the_fork_server_is_no_crash_of_the_jobs(bench):
    bench.prepare("a", max_restarts=0)
    old = bench.run("a", ("node-0", 2))
    bench.run("b", ("node-1", 1))
    fork_server = psutil.Process(old[0].pid).ppid()
    assert "pollux.engines.processes.fork_main" in psutil.Process(fork_server).cmdline()
    os.kill(fork_server, signal.SIGKILL)
    gone = {replica.pid for replica in old}
    for job, num_members in (("a", 2), ("b", 1)):
        until(lambda j=job, n=num_members: len(set(bench.pids(j)) - gone) == n, f"{job} trains again")
    assert not any(isinstance(event, JobEnded | JobLost) for event in bench.engine.poll())


def test_a_shell_passes_the_wish_to_leave_on_to_its_commands(bench):
    code = """
import os, signal, sys, time
from pollux.membership.replica import membership_from_environment
def leave(*_):
    time.sleep(0.3)  # the shell is gone by now
    print("saved", flush=True)
    sys.exit(143)
membership = membership_from_environment(os.environ)
membership.note_formed(membership.join(60.0))
signal.signal(signal.SIGTERM, leave)
print("deaf no more", flush=True)
time.sleep(300)
"""
    bench.prepare("a", ("sh", "-c", f"{' '.join(bench.script(code))}; echo ended with $?"))
    bench.run("a", ("node-0", 1))
    until(lambda: "deaf no more" in bench.log("a"))
    bench.stop("a")
    bench.wait_of(JobStopped, "a")
    assert "saved" in bench.log("a")


def test_a_command_that_is_not_there_fails_with_its_name(bench):
    bench.prepare("a", ("no-such-program", "--help"))
    bench.start("a", ("node-0", 1))
    end = bench.wait_of(JobEnded, "a")
    assert (end.state, end.exit_code) == (JobState.FAILED, 127)
    assert "no-such-program: No such file or directory" in end.reason


def test_an_end_is_kept_until_the_poll_after_the_one_that_told_it(bench):
    bench.prepare("a", bench.script("pass"))
    bench.start("a", ("node-0", 1))
    bench.wait_of(JobEnded, "a")
    bench.engine.close(stops_jobs=False)  # killed before it could save
    bench.engine = bench.open()
    bench.engine.adopt([bench.record("a", JobState.RUNNING, 1, ("node-0", 1))])
    assert bench.wait_of(JobEnded, "a").state is JobState.SUCCEEDED
    bench.engine.poll()  # acknowledges
    bench.engine.adopt([bench.record("a", JobState.RUNNING, 1, ("node-0", 1))])
    assert bench.wait_of(JobLost, "a").reason.startswith("its replicas are gone")


def test_an_end_that_is_told_twice_does_not_end_the_next_start(bench):
    bench.prepare("a", ("sleep", "300"), kind="fixed")
    bench.run("a", ("node-0", 1))
    bench.stop("a")
    bench.wait_of(JobStopped, "a")
    bench.start("a", ("node-0", 1), generation=2)
    bench.engine._take({"event": "stopped", "job": "a", "generation": 1})
    bench.wait_runs("a", 2)
    assert list(bench.engine.poll()) == []


def test_a_second_engine_takes_the_place_of_the_first(bench):
    bench.run("a", ("node-0", 1))
    pids = bench.pids("a")
    first = bench.engine
    bench.engine = bench.open()
    until(lambda: first.note("a") == first.trouble == "paused: another server commands its replicas")
    first.close(stops_jobs=False)
    bench.engine.adopt([bench.record("a", JobState.RUNNING, 1, ("node-0", 1))])
    bench.wait_runs("a", 1)
    assert bench.pids("a") == pids


@pytest.mark.parametrize("state", [JobState.STARTING, JobState.RUNNING, JobState.RESIZING, JobState.STOPPING])
def test_a_job_that_nobody_runs_is_lost_or_has_stopped(bench, state):
    bench.engine.adopt([bench.record("ghost", state, 3, ("node-0", 1))])
    event = bench.wait_for(lambda event: event.job == "ghost")
    assert isinstance(event, JobStopped if state is JobState.STOPPING else JobLost)


def test_adoption_repeats_commands_that_never_arrived(bench):
    bench.run("a", ("node-0", 1))
    bench.run("b", ("node-0", 1))
    bench.run("c", ("node-1", 1))
    bench.run("d", ("node-1", 1))
    pids = {job: bench.pids(job) for job in "abcd"}
    bench.engine.close(stops_jobs=False)
    bench.engine = bench.open()
    bench.engine.adopt(
        [
            bench.record("a", JobState.RUNNING, 1, ("node-0", 1)),
            bench.record("b", JobState.STOPPING, 1, ("node-0", 1)),
            bench.record("c", JobState.RESIZING, 2, ("node-0", 1)),
        ]
    )
    bench.wait_for(lambda event: event == JobRuns(job="a", generation=1))
    assert bench.pids("a") == pids["a"]
    bench.wait_of(JobStopped, "b")
    bench.wait_runs("c", 2)
    assert places(bench, "c") == [("node-0", 1)]
    until(lambda: not is_alive(pids["d"][0]), "nobody knows d any more")
    assert list(bench.engine.replicas("d")) == []


def test_adoption_gives_back_what_a_job_lost_while_nobody_listened(bench):
    bench.run("a", ("node-0", 1))
    bench.engine.close(stops_jobs=False)
    bench.engine = bench.open()
    bench.engine.adopt([bench.record("a", JobState.RUNNING, 1, ("node-0", 1), ("node-1", 1))])
    until(lambda: [place for place, _ in places(bench, "a")] == ["node-0", "node-1"], "a grows again")


def test_an_end_that_could_not_be_saved_is_told_again_however_often_that_takes(bench):
    """A full disk under the database: whoever polls begins again and again."""
    bench.prepare("a", bench.script("pass"))
    bench.start("a", ("node-0", 1))
    bench.wait_of(JobEnded, "a")
    for _ in range(3):
        bench.engine.adopt([bench.record("a", JobState.RUNNING, 1, ("node-0", 1))])
        event = bench.wait_for(lambda event: event.job == "a")
        assert isinstance(event, JobEnded), event


def test_a_job_that_cannot_be_launched_harms_no_other(bench):
    bench.prepare("a", ("sleep", "300"), kind="fixed")
    allocation = Allocation.of(("node-0", 1))
    bench.engine.apply(
        [StartJob(job=name, spec=JobSpec(name=name), allocation=allocation, generation=1) for name in ("ghost", "a")]
    )
    end = bench.wait_of(JobEnded, "ghost")
    assert end.state is JobState.FAILED and "ghost" in end.reason
    bench.wait_runs("a", 1)
