"""Jobs that once ended otherwise: replicas that should have gone on in place, or been left in peace."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.e2e.jobs import Bench, of_kind, pump_for, pump_until
from tests.long import first_of

NUM_STEPS = 20
SCRIPT = """
import json, os, sys, time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from pollux import train

options = json.loads(sys.argv[-1])
torch.set_num_threads(1)
torch.manual_seed(0)
run = train.init(device="cpu")
pairs = TensorDataset(torch.randn(160, 8), torch.randn(160, 1))
loader = run.dataloader(pairs, 8, device_batch_size=8)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, _ = run.prepare(model, optimizer, bucket_cap_mb=0.001)
for _ in run.epochs(1, by="passes"):
    num_forward, generation = 0, run.generation
    for x, y in loader:
        if run.generation != generation:
            num_forward, generation = 0, run.generation
        is_due = run.world_size == options.get("size") and num_forward == options["num_forward"]
        if is_due and run.rank == run.world_size - 1:
            os.kill(os.getpid(), 9)
        elif is_due:
            time.sleep(0.5)  # the other is gone by then
        num_forward += 1
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
Path(f"left-{run.rank}").write_text(json.dumps({"time": time.time(), "steps": run.num_steps, "pid": os.getpid()}))
if run.rank == 0:
    time.sleep(options.get("export_s", 0.0))
    Path("exported").touch()
"""


def start(bench: Bench, num_replicas: int, **options: Any) -> Any:
    path = bench.folder / "script.py"
    path.write_text(SCRIPT)
    return bench.start(num_replicas, str(path), args=[json.dumps(options)], replace_lost=False)


def left(bench: Bench, rank: int) -> Any:
    return json.loads((bench.folder / f"left-{rank}").read_text())


@pytest.mark.parametrize("num_forward", first_of([1, 0, 2]))
def test_a_member_lost_before_a_generations_first_forward_passes(bench: Bench, num_forward: int) -> None:
    """DDP lays its buckets out anew in the second one, by a collective of its own: survivors stay all the same."""
    job = start(bench, 3, size=3, num_forward=num_forward)
    pump_until(bench, job, lambda: len(job.members) == 3)
    bench.finish(job, timeout_s=20.0)
    assert [left(bench, rank)["steps"] for rank in range(2)] == [NUM_STEPS] * 2, bench.story(job)
    assert len(of_kind(job, "spawned")) == 3, bench.story(job)
    assert sorted(event.detail for event in of_kind(job, "exited")) == ["code -9", "code 0", "code 0"]


def test_a_first_rank_that_is_busy_after_training_is_left_in_peace(bench: Bench) -> None:
    job = start(bench, 2, num_forward=-1, export_s=1.5)
    pump_until(bench, job, lambda: (bench.folder / "left-0").exists())
    begun = time.monotonic()
    bench.finish(job, timeout_s=20.0)
    assert time.monotonic() - begun > 1.0
    assert (bench.folder / "exported").exists(), bench.story(job)
    assert sorted(event.detail for event in of_kind(job, "exited")) == ["code 0", "code 0"]
    assert left(bench, 0)["steps"] == left(bench, 1)["steps"] == NUM_STEPS
    assert not of_kind(job, "killed")


def test_a_member_that_is_frozen_in_the_second_step_is_left_behind(bench: Bench) -> None:
    """DDP lays its buckets out anew there, with a collective that nobody can be called away from."""
    job = bench.start(3, args=["--epochs", 1, "--step-s", 0.3], replace_lost=False)
    pump_until(bench, job, lambda: bench.step() >= 1)
    job.kill(0, signal.SIGSTOP)
    pump_for(job, 1.0)
    assert bench.step() == 1
    job.controller.publish(job.members[1:], lost=[job.members[0].replica_id])
    pump_until(bench, job, lambda: bench.step() >= 3, timeout_s=20.0)
    job.kill(0)
    bench.finish(job)
    bench.check_ledger(1, job)
