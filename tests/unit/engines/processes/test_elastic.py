"""ElasticJob with real replicas: forked, joined by gloo, resized, killed, and gone at the end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from pollux.engines.processes import elastic
from pollux.engines.processes.elastic import ElasticJob
from pollux.engines.processes.elastic_replica import JobEvent
from pollux.engines.processes.failure import tells_no_checkpoint
from pollux.engines.processes.fork_server import ForkServer
from pollux.engines.processes.replica_job import ReplicaCommand, Tolerance
from pollux.engines.processes.slots import Slot
from pollux.engines.processes.starters import ColdStarter
from pollux.errors import InvalidValueError
from tests.leftovers import processes_in
from tests.long import long

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

# A run object in small: form a group, step until the end, follow the rosters. Rank 0 has the state.
SCRIPT = """
import datetime, os, signal, sys, time
import torch
import torch.distributed as dist
from pollux.membership.replica import membership_from_environment

num_steps, folder = int(sys.argv[1]), sys.argv[2]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
membership = membership_from_environment(os.environ)
state = torch.zeros(1)
if os.path.exists(folder + "/checkpoint"):
    state[0] = int(open(folder + "/checkpoint").read())

def form(group):
    timeout = datetime.timedelta(seconds=5)
    dist.distributed_c10d._world.group_count = 0  # a failed init leaves it raised, and it is part of the keys
    dist.init_process_group("gloo", store=group.store, rank=group.rank, world_size=group.world_size, timeout=timeout)
    dist.broadcast(state, 0)
    membership.note_formed(group)
    print("formed", group.generation, group.attempt, group.rank, group.world_size, int(state), flush=True)
    return group

group, is_formed = membership.join(60.0), False
while state < num_steps:
    try:
        if not is_formed:
            form(group)
            is_formed = True
        flags = torch.tensor([float(membership.has_newer()), 1.0])
        dist.all_reduce(flags[:1], dist.ReduceOp.MAX)
        dist.all_reduce(flags[1:])
        assert flags[1] == group.world_size
        state += 1
        if group.rank == 0:
            open(folder + "/new", "w").write(str(int(state)))
            os.replace(folder + "/new", folder + "/checkpoint")
        if flags[0]:
            dist.destroy_process_group()
            is_formed, group = False, membership.advance(30.0)
        time.sleep(0.01)
    except RuntimeError as error:
        print("broken", str(error)[:60], flush=True)
        if dist.is_initialized():
            dist.destroy_process_group()
        is_formed, group = False, membership.recover(30.0)
    if group is None:
        print("left", flush=True)
        sys.exit(0)
if is_formed:
    dist.barrier()
membership.close()
print("done", int(state), flush=True)
"""
FOREVER = 10**6


class Bench:
    """Makes jobs, and checks at the end that nothing of them is left."""

    def __init__(self, folder: Path, fork_server: ForkServer) -> None:
        self.folder, self.fork_server = folder, fork_server
        self.jobs: list[ElasticJob] = []

    def job(self, code: str = SCRIPT, num_steps: int = FOREVER, **options: Any) -> ElasticJob:
        script = self.folder / "train.py"
        script.write_text(code)
        options.setdefault("starter", self.fork_server)
        env_of = options.pop("env_of", lambda _slot: {})
        made = {name: options.pop(name) for name in ("starter", "node_of") if name in options}
        slots = options.pop("slots", 1)
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        argv = [str(script), str(num_steps), str(self.folder)]
        logs = self.folder / "logs"
        command = ReplicaCommand(argv=argv, name="t", env=env, cwd=self.folder, log_dir=logs, env_of=env_of)
        job = ElasticJob(command, slots=slots, tolerance=Tolerance(**options), **made)
        self.jobs.append(job)
        job.start()
        return job

    def log(self, replica_id: str, kind: str = "out") -> str:
        return (self.folder / "logs" / f"{replica_id}.{kind}").read_text()

    def step(self) -> int:
        path = self.folder / "checkpoint"
        return int(path.read_text()) if path.exists() else 0


@pytest.fixture
def bench(tmp_path: Path, fork_server: ForkServer) -> Iterator[Bench]:
    bench = Bench(tmp_path, fork_server)
    yield bench
    for job in bench.jobs:
        job.close()
    assert processes_in(tmp_path) == []


def pump_until(job: ElasticJob, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        job.pump()
        story = "\n".join(f"{event.time:.2f} {event.kind} {event.replica_id} {event.detail}" for event in job.events)
        assert time.monotonic() < deadline, f"waited too long:\n{story}"
        time.sleep(0.005)


def of_kind(job: ElasticJob, kind: str) -> list[JobEvent]:
    return [event for event in job.events if event.kind == kind]


def formed(job: ElasticJob, num_members: int) -> Callable[[], bool]:
    return lambda: (
        len(job.members) == num_members
        and any(event.generation == job.controller.generation for event in of_kind(job, "formed"))
    )


def ids(job: ElasticJob) -> list[str]:
    return [member.replica_id for member in job.members]


def test_grow_shrink_and_finish(bench):
    job = bench.job(node_of=lambda slot: f"node{slot // 2}")
    pump_until(job, formed(job, 1))
    job.resize(2)
    assert job.controller.generation == 1  # the newcomer is not ready: the first trains on
    pump_until(job, formed(job, 2))
    job.resize(4)
    before = bench.step()
    pump_until(job, formed(job, 4))
    assert bench.step() >= before
    assert [member.node for member in job.members] == ["node0", "node0", "node1", "node1"]
    assert job.controller.generation == 3
    job.resize(2)
    assert ids(job) == ["t-0", "t-1"]  # published at once
    pump_until(job, formed(job, 2))
    pump_until(job, lambda: len(of_kind(job, "exited")) == 2)
    assert {event.detail for event in of_kind(job, "exited")} == {"code 0"}
    assert bench.log("t-3").splitlines()[-1] == "left"
    lines = [line.split() for line in bench.log("t-0").splitlines()]
    assert [(line[1], line[4]) for line in lines] == [("1", "1"), ("2", "2"), ("3", "4"), ("4", "2")]
    assert job.result is None
    (bench.folder / "checkpoint").unlink()
    assert job.stop(10.0) == 143
    assert "broken" not in bench.log("t-0")


def test_a_job_ends_with_0_when_all_members_do(bench):
    job = bench.job(num_steps=20, slots=2)
    assert job.wait(60.0) == 0, bench.log("t-0", "err")
    assert [bench.log(name).splitlines()[-1] for name in ("t-0", "t-1")] == ["done 20", "done 20"]
    assert [event.kind for event in job.events][-1] == "finished"
    assert job.num_restarts == 0


def test_the_latest_target_wins(bench):
    job = bench.job(slots=2)
    job.resize(4)
    job.resize(3)
    job.resize(1)
    pump_until(job, formed(job, 1))
    job.resize(3)
    job.resize(1)
    job.resize(1)
    pump_until(job, lambda: len(of_kind(job, "exited")) == len(of_kind(job, "spawned")) - 1)
    assert ids(job) == ["t-0"]
    assert job.controller.generation == 1
    assert len(set(event.replica_id for event in of_kind(job, "spawned"))) == len(of_kind(job, "spawned"))


def test_survivors_of_a_killed_member_go_on_and_a_replacement_joins(bench):
    job = bench.job(slots=3)
    pump_until(job, formed(job, 3))
    step = bench.step()
    job.kill(0)
    pump_until(job, lambda: len(job.members) == 2)
    assert ids(job) == ["t-1", "t-2"]
    assert job.controller.roster.lost == ("t-0",)
    pump_until(job, formed(job, 3))
    assert ids(job) == ["t-1", "t-2", "t-3"]
    assert job.num_restarts == 0
    assert bench.step() >= step
    assert any(line.startswith("broken") for line in bench.log("t-1").splitlines())


def test_without_replacement_the_survivors_stay_fewer(bench):
    job = bench.job(slots=2, replace_lost=False)
    pump_until(job, formed(job, 2))
    job.kill(1)
    pump_until(job, formed(job, 1))
    time.sleep(0.1)
    job.pump()
    assert len(of_kind(job, "spawned")) == 2


def kill_all(job):
    """All members, and the job sees none die before the others."""
    pids = [process.handle.pid for process in job._members]
    for rank in range(len(pids)):
        job.kill(rank)
    deadline = time.monotonic() + 20.0
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)  # for the fork_server to tell


def test_when_all_are_lost_the_job_starts_again_up_to_a_bound(bench):
    job = bench.job(slots=2, max_restarts=1)
    pump_until(job, formed(job, 2))
    pump_until(job, lambda: bench.step() > 3)
    kill_all(job)
    pump_until(job, lambda: job.num_restarts == 1)
    pump_until(job, formed(job, 2))
    assert ids(job) == ["t-2", "t-3"]
    pump_until(job, lambda: len(bench.log("t-2").split()) > 5)
    assert int(bench.log("t-2").split()[5]) >= 3  # from the checkpoint
    (restarting,) = of_kind(job, "restarting")
    assert of_kind(job, "spawned")[2].time - restarting.time >= 0.45
    kill_all(job)
    assert job.wait(20.0) == 128 + signal.SIGKILL
    assert "all replicas were lost, after 1 restarts; t-" in job.failure and "killed by SIGKILL" in job.failure


def test_a_script_that_cannot_start_fails_the_job_with_its_stderr(bench):
    job = bench.job("raise ImportError('no module named nonsense')")
    assert job.wait(20.0) == 1
    assert "3 replicas in a row ended before they were ready" in job.failure
    assert job.failure.endswith("ImportError: no module named nonsense")
    assert len(of_kind(job, "spawned")) == 3


REPEATED = "the same error twice, at the same line and before any step: no further start mends it; t-1 exited with 1"
IN_GROUP = f"{SCRIPT.partition('while state')[0]}form(group)\n"
RAISES = "def f(a): pass\nf(b=1)"


@pytest.mark.parametrize("code", [RAISES, IN_GROUP + RAISES, "x = (\n"], ids=["before", "in a group", "syntax"])
def test_a_script_that_raises_the_same_error_in_its_code_is_started_twice(bench, code):
    job = bench.job(code, max_restarts=9)
    assert job.wait(30.0) == 1
    assert REPEATED in job.failure.splitlines()[0], job.failure
    assert ("SyntaxError: " if "(\n" in code[-3:] else "TypeError: f() got") in job.failure.splitlines()[0]
    assert len(of_kind(job, "spawned")) == 2 and job.blame is None


def test_two_replicas_of_one_start_raise_it_once(bench):
    job = bench.job(RAISES, slots=2, max_restarts=9)
    assert job.wait(30.0) == 1
    assert len(of_kind(job, "spawned")) >= 3 and job.blame is None


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nopen(sys.argv[2] + '/starts', 'a').write('x')\n"
        "raise TypeError(len(open(sys.argv[2] + '/starts').read()))",
        "raise ValueError('the same')",
        IN_GROUP + "membership.note_stepped()\nNone.x",
    ],
    ids=["another message", "another kind", "after a step"],
)
def test_errors_that_a_start_may_mend_have_all_starts(bench, code):
    job = bench.job(code, max_restarts=2)
    assert job.wait(30.0) == 1
    assert len(of_kind(job, "spawned")) == 3 and "no further start" not in job.failure


def test_a_script_that_refuses_its_arguments_is_started_once(bench):
    job = bench.job("import argparse\nargparse.ArgumentParser(prog='train.py').parse_args(['--foo'])")
    assert job.wait(20.0) == 2
    assert job.failure.splitlines()[0] == (
        "t: a replica ended before it was ready; it exited with 2 on localhost: "
        "train.py: error: unrecognized arguments: --foo"
    )
    assert len(of_kind(job, "spawned")) == 1 and job.blame is None


def test_a_script_that_cannot_start_is_started_once_if_it_may_not_restart(bench):
    job = bench.job("raise ImportError('no module named nonsense')", max_restarts=0)
    assert job.wait(60.0) == 1
    assert "a replica ended before it was ready" in job.failure
    assert job.crashes == ["t-0 exited with 1 before it was ready"]
    assert len(of_kind(job, "spawned")) == 1


def test_a_script_that_joins_nothing_may_end_well(bench):
    job = bench.job("print('hello')", slots=2)
    assert job.wait(20.0) == 0
    assert bench.log("t-1") == "hello\n"


DEAF = """
import os, signal, sys, time, subprocess
from pollux.membership.replica import membership_from_environment
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "60"])
membership = membership_from_environment(os.environ)
membership.note_formed(membership.join(60.0))
if "finish" in DEAF:
    if membership.rank == 0:
        while not os.path.exists("other-formed"):
            time.sleep(0.01)
        sys.exit(0)
    open("other-formed", "w").close()
time.sleep(60)
"""


@long
def test_newcomers_that_never_get_ready_are_given_up_and_the_members_go_on(bench, monkeypatch):
    monkeypatch.setattr(elastic, "NEWCOMER_S", 1.0)
    job = bench.job(f"import os, time\nif os.environ['POLLUX_REPLICA_ID'] != 't-0':\n    time.sleep(300)\n{SCRIPT}")
    pump_until(job, formed(job, 1))
    job.resize(2)
    pump_until(job, lambda: job.given_up)
    assert {event.detail for event in of_kind(job, "killed")} == {"was not ready after 1 s"}
    assert len(of_kind(job, "killed")) == elastic.MAX_SPAWN_FAILURES
    before = bench.step()
    pump_until(job, lambda: job.is_settled and bench.step() > before)
    assert ids(job) == ["t-0"] and job.result is None


def test_who_does_not_leave_or_stop_is_killed_with_its_children(bench):
    job = bench.job(DEAF.replace("DEAF", "''"), slots=2, grace_s=0.3)
    pump_until(job, formed(job, 2))
    assert len(processes_in(bench.folder)) == 4
    job.resize(1)
    pump_until(job, lambda: of_kind(job, "exited"))
    assert of_kind(job, "exited")[0].detail == "code -9"
    pump_until(job, lambda: len(processes_in(bench.folder)) == 2)
    assert job.stop(0.3) == 143
    pump_until(job, lambda: processes_in(bench.folder) == [])


def test_waiting_for_others_to_finish_is_bounded(bench):
    job = bench.job(DEAF.replace("DEAF", "'finish'"), slots=2, finish_grace_s=0.3, max_restarts=0)
    assert job.wait(20.0) == 128 + signal.SIGKILL
    assert of_kind(job, "killed")[0].detail == "still ran 0.3 s after another had finished"


def test_cold_replicas_do_the_same(bench):
    with ColdStarter() as cold:
        job = bench.job("import sys; print(sys.argv[1]); sys.exit(7)", num_steps=5, starter=cold)
        assert job.wait(20.0) == 7
        job.close()
    assert bench.log("t-0") == "5\n"


def test_settled_is_who_sits_where_it_should_and_trains(bench):
    job = bench.job(slots=[Slot("n0", 0)])
    assert not job.is_settled
    assert [(view.state, view.rank) for view in job.replicas] == [("starting", None)]
    pump_until(job, lambda: job.is_settled)
    job.place([Slot("n0", 0), Slot("n1", 1)])
    assert not job.is_settled
    pump_until(job, lambda: job.is_settled)
    assert [(view.rank, view.slot.number, view.state) for view in job.replicas] == [(0, 0, "member"), (1, 1, "member")]
    job.place([Slot("n1", 1)])
    pump_until(job, lambda: job.is_settled and len(job.replicas) == 1)
    assert job.replicas[0].pid is not None and job.replicas[0].rank == 0


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_resize_says_what_it_waits_for(bench):
    slow = SCRIPT.replace("time.sleep(0.01)", "time.sleep(float(open(folder + '/pause').read()))")
    (bench.folder / "pause").write_text("0.01")
    (bench.folder / "gate").mkdir()
    script = "import os, sys, time\nwhile not os.path.exists(sys.argv[2] + '/gate'): time.sleep(0.01)\n" + slow
    job = bench.job(script)
    assert job.phase.text == "new replicas start: 0 of 1 are ready"
    pump_until(job, formed(job, 1))
    pump_until(job, lambda: job.is_settled)
    assert job.phase.text == ""
    (bench.folder / "gate").rmdir()
    job.resize(3)
    assert job.phase.text == "new replicas start: 0 of 2 are ready"
    (bench.folder / "pause").write_text("3")
    (bench.folder / "gate").mkdir()
    pump_until(job, lambda: job.phase.name.startswith("waits for replicas to reach"))
    assert job.phase.detail.split(", ")[0] == "t-0"
    (bench.folder / "pause").write_text("0.01")
    seen = set()
    pump_until(job, lambda: seen.add(job.phase.name) or job.is_settled)
    assert job.phase.text == "" and "replicas form their group and hand over the state" in seen


def test_a_held_job_stands_still_and_goes_on(bench):
    job = bench.job(grace_s=0.2)
    pump_until(job, formed(job, 1))
    (view,) = job.replicas
    job.hold()
    pump_until(job, lambda: state_of(view.pid) == "T")
    job.place([Slot("elsewhere", 7)])
    time.sleep(0.4)  # longer than the grace of a leaver
    job.pump()
    assert [(other.pid, other.state) for other in job.replicas] == [(view.pid, "member")]
    job.release()
    pump_until(job, lambda: job.is_settled)
    assert job.slots == (Slot("elsewhere", 7),)
    job.hold()
    assert job.stop(10.0) == 143  # who stops is not held any more


CRASHES = """
import os, sys, time
from pollux.membership.replica import membership_from_environment
membership = membership_from_environment(os.environ)
group = membership.join(60.0)
membership.note_formed(group)
while not os.path.exists(sys.argv[2] + "/crash"):
    time.sleep(0.01)
raise RuntimeError(f"crash of {os.environ['POLLUX_REPLICA_ID']}")
"""


def test_a_script_that_always_raises_fails_with_its_first_traceback(bench):
    (bench.folder / "crash").touch()
    job = bench.job(CRASHES, slots=2, max_restarts=1)
    assert job.wait(30.0) == 1
    summary = job.failure.splitlines()[0]
    assert "exited with 1, the first of 2 crashes in a row: RuntimeError: crash of t-" in summary
    assert summary.split("crash of ")[1][:3] in ("t-0", "t-1")  # of the first start
    # Both crash at once and are started again, or one does first and the other, left alone, is the second.
    assert job.num_restarts <= 1 and 2 <= len(of_kind(job, "spawned")) <= 4


@long
def test_what_is_excused_is_not_counted(bench):
    excuses = ["no space"] * 6
    (bench.folder / "crash").touch()
    job = bench.job(CRASHES, max_restarts=0, excuse=lambda: excuses.pop() if excuses else "")
    assert job.wait(40.0) == 1
    assert len(of_kind(job, "restarting")) >= 2
    assert job.num_restarts == 0


def test_who_finishes_while_it_is_stopped_has_finished(bench):
    code = """
import os, signal, sys, time
from pollux.membership.replica import membership_from_environment
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
membership = membership_from_environment(os.environ)
membership.note_formed(membership.join(60.0))
time.sleep(60)
"""
    job = bench.job(code, slots=2)
    pump_until(job, formed(job, 2))
    assert job.stop(10.0) == 0


def test_targets_and_ranks_that_cannot_be(bench):
    job = bench.job()
    with pytest.raises(InvalidValueError, match=r"at least 1 replica, got 0; to end it use stop"):
        job.resize(0)
    with pytest.raises(InvalidValueError, match="no rank 3"):
        job.kill(3)


def test_newcomers_that_never_get_ready_end_the_change_and_not_the_job(bench, tmp_path):
    """A node without a file that the script needs: the members go on, and the node and the cause are told."""
    (tmp_path / "good").write_text("")
    code = "import os\nopen(os.environ['NEEDED']).close()\n" + SCRIPT

    def env_of(slot: Slot) -> dict[str, str]:
        return {"NEEDED": str(tmp_path / slot.node)}

    job = bench.job(code, slots=[Slot("good", 0)], env_of=env_of)
    pump_until(job, lambda: job.is_settled)
    job.place([Slot("good", 0), Slot("bad", 1)])
    pump_until(job, lambda: job.given_up or job.result is not None)
    assert job.result is None, job.failure
    assert job.given_up[0].node == "bad" and "No such file or directory" in job.given_up[0].cause
    assert job.is_settled and job.slots == (Slot("good", 0),)
    before = bench.step()
    pump_until(job, lambda: bench.step() > before)


def test_newcomers_that_run_out_of_memory_in_the_hand_over_end_the_change_and_not_the_job(bench):
    """They are members by then. The job trained well before, and goes on so; a later place may suit it."""
    raises = "sys.exit('Traceback (most recent call last):\\n  ...\\ntorch.OutOfMemoryError: CUDA out of memory')"
    code = SCRIPT.replace("    dist.broadcast(", f"    if os.environ['SMALL']: {raises}\n    dist.broadcast(")
    job = bench.job(
        code,
        slots=[Slot("large", 0)],
        env_of=lambda slot: {"SMALL": "yes" if slot.node == "small" else ""},
        max_restarts=1,
    )
    pump_until(job, lambda: job.is_settled)
    job.place([Slot("large", 0), Slot("small", 1), Slot("small", 2)])
    pump_until(job, lambda: job.given_up or job.result is not None)
    assert job.result is None, job.failure
    assert job.given_up == [("small", "torch.OutOfMemoryError: CUDA out of memory")]
    pump_until(job, lambda: job.is_settled)
    assert job.slots == (Slot("large", 0),) and not of_kind(job, "restarting")
    before = bench.step()
    pump_until(job, lambda: bench.step() > before)
    job.place([Slot("large", 0), Slot("large", 1)])
    pump_until(job, lambda: job.is_settled and len(job.slots) == 2)


def test_a_bug_that_shows_when_replicas_join_ends_the_change_after_some_tries(bench):
    code = SCRIPT.replace(
        "    dist.broadcast(state, 0)\n", "    assert group.rank == 0\n    dist.broadcast(state, 0)\n"
    )
    job = bench.job(code, max_restarts=0)
    pump_until(job, lambda: job.is_settled)
    job.resize(2)
    pump_until(job, lambda: job.given_up or job.result is not None)
    assert job.result is None, job.failure
    assert "AssertionError" in job.given_up[0].cause and 2 <= len(of_kind(job, "spawned")) <= 5
    pump_until(job, lambda: job.is_settled)
    assert len(job.slots) == 1


@long
def test_a_start_that_fails_names_the_node_where_the_cause_may_be_there(bench):
    job = bench.job("import no_such_package", slots=[Slot("bad", 0)])
    assert job.wait(20.0) == 1
    assert job.blame == ("bad", "ModuleNotFoundError: No module named 'no_such_package'")
    assert "the last exited with 1 on bad: ModuleNotFoundError" in job.failure
    other = bench.job("raise ValueError('a bug')", slots=[Slot("bad", 0)])
    assert other.wait(20.0) == 1
    assert other.blame is None


NO_CHECKPOINT = """
from pollux.errors import UnreadableCheckpointError
raise UnreadableCheckpointError("none of the 2 checkpoints there can be used")
"""


def test_a_script_that_can_use_no_checkpoint_is_not_started_again(bench):
    job = bench.job(f"{SCRIPT.partition('while state')[0]}form(group){NO_CHECKPOINT}", slots=2, max_restarts=100_000)
    assert job.wait(30.0) == 1
    assert tells_no_checkpoint(job.failure.splitlines()[0]), job.failure
    assert len(of_kind(job, "restarting")) <= 1
