"""Replicas that were frozen, given up, and woke up: real processes, a controller by hand."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
psutil = pytest.importorskip("psutil")

from pollux import train  # noqa: E402
from pollux.engines.processes.fork_server import ForkServer  # noqa: E402
from pollux.engines.processes.starters import Command, ReplicaProcess  # noqa: E402
from pollux.membership.controller import JobController  # noqa: E402
from pollux.membership.roster import Member  # noqa: E402
from pollux.train.checkpoint import CheckpointDirectory  # noqa: E402
from pollux.train.http_report import HttpReporter  # noqa: E402
from pollux.train.leaving import Leave  # noqa: E402
from tests.leftovers import processes_in  # noqa: E402
from tests.unit.train.processes import Rows, small_model  # noqa: E402
from tests.unit.train.test_http_report import Listener, listener  # noqa: E402, F401

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

SCRIPT = """
import os, sys, time
import torch
from pollux import train
from pollux.membership import replica as membership
from pollux.train import fence

fence.FENCED_S, membership.ANSWER_S = float(sys.argv[1]), 2.0
sticks_at = int(sys.argv[2])
run = train.init(checkpoint_dir="checkpoints", checkpoint_every_s=0.2, timeout_s=60.0)
loader = run.dataloader(torch.utils.data.TensorDataset(torch.randn(64, 4)), batch_size=8)
model = torch.nn.Linear(4, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
for epoch in run.epochs(10**6):
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
        print(run.generation, run.num_steps, flush=True)
        if run.num_steps == sticks_at:
            time.sleep(600)  # in the script's own code: there is no step boundary
"""


class Bench:
    def __init__(self, folder: Path, fork_server: ForkServer) -> None:
        self.folder, self.fork_server = folder, fork_server
        self.controller = JobController("t")
        self.started: dict[str, ReplicaProcess] = {}
        (folder / "train.py").write_text(SCRIPT)

    def start(self, *names: str, fenced_s: float = 5.0, sticks_at: int = -1) -> list[Member]:
        """Replicas that train together, each on a node of its own."""
        members = [Member(replica_id=name, node=f"node-{name}") for name in names]
        for rank, member in enumerate(members):
            environment = self.controller.environment(member, planned_rank=rank, planned_world=len(members))
            command = Command(
                argv=[str(self.folder / "train.py"), str(fenced_s), str(sticks_at)],
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **environment},
                cwd=str(self.folder),
                stdout=str(self.folder / f"{member.replica_id}.out"),
                stderr=str(self.folder / f"{member.replica_id}.err"),
            )
            self.started[member.replica_id] = self.fork_server.spawn(command)
        self.until(lambda: all(self.controller.is_ready(name) for name in names), "ready")
        self.controller.publish(members)
        self.until(lambda: self.controller.is_formed(self.controller.generation), "formed")
        return members

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.fork_server.poll()
            assert time.monotonic() < deadline, f"{what}: waited too long\n{self.story()}"
            time.sleep(0.01)

    def story(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.err")))

    def err(self, name: str) -> str:
        return (self.folder / f"{name}.err").read_text()

    def steps(self, name: str) -> int:
        return len((self.folder / f"{name}.out").read_text().splitlines())

    def exit_code(self, name: str) -> int | None:
        return self.started[name].exit_code

    def saved(self, generation: int) -> set[str]:
        """Names of the checkpoints of a generation."""
        names = {path.name for path in (self.folder / "checkpoints").glob("step-*")}
        return {name for name in names if name.partition(".")[0].split("-")[3] == str(generation)}

    def signal(self, name: str, signum: int) -> None:
        self.fork_server.signal(self.started[name], signum, group=True)

    def freeze(self, name: str) -> None:
        self.signal(name, signal.SIGSTOP)
        process = psutil.Process(self.started[name].pid)
        self.until(lambda: process.status() == psutil.STATUS_STOPPED, "freezing")


@pytest.fixture
def bench(tmp_path: Path, fork_server: ForkServer) -> Iterator[Bench]:
    bench = Bench(tmp_path, fork_server)
    yield bench
    for name in bench.started:
        bench.signal(name, signal.SIGKILL)
    bench.until(lambda: all(one.exit_code is not None for one in bench.started.values()), "the end")
    bench.controller.close()
    assert processes_in(tmp_path) == []


@pytest.mark.parametrize("num_survivors", [1, 2])
def test_a_frozen_replica_that_wakes_up_saves_nothing_and_leaves(bench: Bench, num_survivors: int) -> None:
    others = bench.start(*"abc"[: 1 + num_survivors])[1:]
    bench.until(lambda: bench.saved(1), "a checkpoint")
    bench.freeze("a")
    bench.controller.publish(others, lost=["a"])
    bench.until(lambda: bench.saved(2), "a checkpoint of the survivors")
    before, steps = bench.saved(1), bench.steps("a")
    bench.signal("a", signal.SIGCONT)
    bench.until(lambda: bench.exit_code("a") is not None, "leaving", 15.0)
    assert bench.exit_code("a") == 143, bench.story()
    assert "fenced: its owner has given it up" in bench.err("a")
    assert bench.saved(1) <= before  # nothing new of it; old ones may be gone by now
    assert bench.steps("a") <= steps + 5
    trained = bench.steps("b")
    bench.until(lambda: bench.steps("b") > trained + 5, "training on")
    assert CheckpointDirectory(bench.folder / "checkpoints").latest().generation == 2


def test_a_replica_frozen_alone_and_replaced_leaves(bench: Bench) -> None:
    """Nobody's collective breaks: a job of one, moved to another machine. The newcomer resumes and is the newer one."""
    bench.start("a")
    bench.until(lambda: bench.saved(1), "a checkpoint")
    bench.freeze("a")
    bench.controller.fence(["a"])
    bench.start("b")
    bench.until(lambda: bench.saved(2), "a checkpoint of its successor")
    before = bench.saved(1)
    bench.signal("a", signal.SIGCONT)
    bench.until(lambda: bench.exit_code("a") is not None, "leaving", 15.0)
    assert bench.exit_code("a") == 143 and "fenced: its owner has given it up" in bench.err("a")
    assert bench.saved(1) <= before
    assert bench.exit_code("b") is None


def test_a_replica_that_comes_to_no_boundary_is_forced_out(bench: Bench) -> None:
    bench.start("a", fenced_s=0.5, sticks_at=5)
    bench.until(lambda: bench.steps("a") >= 5, "being stuck")
    bench.controller.fence(["a"])
    bench.until(lambda: bench.exit_code("a") is not None, "leaving", 15.0)
    assert bench.exit_code("a") == 143
    assert bench.err("a").splitlines()[-1].startswith("fenced: still here after 0.5 s")


def test_a_replica_without_an_owner_saves_nothing_and_leaves(bench: Bench) -> None:
    bench.start("a")
    bench.until(lambda: bench.saved(1), "a checkpoint")
    bench.controller.close()
    num_steps = bench.steps("a")
    bench.until(lambda: bench.exit_code("a") is not None, "leaving", 20.0)
    assert bench.exit_code("a") == 143
    assert "has not answered for 2 s" in bench.err("a")
    # One may have been on its way, with leave to publish, while the store closed.
    assert int(max(bench.saved(1)).split("-")[1]) <= num_steps + 3
    assert not list((bench.folder / "checkpoints").glob(".temporary.*"))


# In this process, told by the server


def train_until_told(reporter: HttpReporter, folder: Path, num_epochs: int) -> None:
    model = small_model()
    with train.init(checkpoint_dir=folder, device="cpu", reporter=reporter) as run:
        loader = run.dataloader(Rows(32), batch_size=4)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in run.epochs(num_epochs):
            for _, inputs, targets in loader:
                (model(inputs) - targets).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.001)


def test_a_run_whose_reports_are_refused_leaves(listener: Listener, tmp_path: Path) -> None:  # noqa: F811
    listener.status, listener.answer = 409, {"error": {"message": "'a-1' was given up"}}
    with pytest.raises(Leave, match="fenced: the server says: 'a-1' was given up"):
        train_until_told(HttpReporter(listener.url, "secret", "a", "a-1"), tmp_path, 10**6)
    assert listener.num_refused == 1
