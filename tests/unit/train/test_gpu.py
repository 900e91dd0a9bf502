"""What only a GPU can show. Skipped where there is none; CI has none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from pollux import train

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
        )

    def forward(self, x):
        return self.body(x)


def images(length=256):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(length, 3, 8, 8, generator=generator)
    return TensorDataset(x, x.mean((1, 2, 3)).mul(40).long().clamp(-5, 4) + 5)


def make(kind, model):
    return {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
    }[kind]()


def fit(run, kind, *, precision=None, epochs=3, options=None, compiles=False, checked_steps=0):
    """Trains, and returns the losses of all steps."""
    torch.manual_seed(0)
    model = Convolutional().to(run.device, memory_format=torch.channels_last)
    scaler = torch.amp.GradScaler("cuda") if precision is torch.float16 else None
    optimizer = make(kind, model)
    loader = run.dataloader(images(), 16, shuffle=True, **(options or {}))
    if compiles:
        model = torch.compile(model, backend="aot_eager")
    model, optimizer = run.prepare(model, optimizer, grad_scaler=scaler)
    losses = []
    for _ in run.epochs(epochs):
        for x, y in loader:
            with torch.autocast("cuda", precision or torch.bfloat16, enabled=precision is not None):
                loss = F.cross_entropy(model(x.to(run.device)), y.to(run.device))
            if scaler is None:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return [float(loss) for loss in losses]


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("precision", [None, torch.bfloat16, torch.float16])
def test_training_and_measuring_work_in_every_precision(kind, precision):
    with train.init() as run:
        losses = fit(run, kind, precision=precision, epochs=8)
        assert run.device.type == "cuda"
        assert sum(losses[-16:]) < 0.9 * sum(losses[:16])
        assert run.noise_scale > 0


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_accumulation_gives_the_gradient_of_the_whole_batch(kind):
    with train.init() as run:
        whole = fit(run, kind, epochs=1)
        whole_state = [p.detach().clone() for p in run._trainees.members[0].module.parameters()]
    with train.init() as run:
        halves = fit(run, kind, epochs=1, options={"device_batch_size": (1, 8)})
        state = [p.detach().clone() for p in run._trainees.members[0].module.parameters()]
    assert len(halves) == 2 * len(whole)
    # Batch normalisation sees half batches, so this is close and not equal.
    for one, other in zip(whole_state, state, strict=True):
        assert torch.allclose(one, other, atol=0.05)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("device_batch", [16, 8])
def test_a_step_never_waits_for_the_gpu(kind, device_batch):
    with train.init() as run:
        torch.manual_seed(0)
        model = Convolutional().to(run.device)
        optimizer = make(kind, model)
        loader = run.dataloader(images(512), 16, device_batch_size=(1, device_batch), pin_memory=True)
        model, optimizer = run.prepare(model, optimizer)
        num_passes = 0
        try:
            for _ in run.epochs(3):
                for x, y in loader:
                    x, y = x.to(run.device, non_blocking=True), y.to(run.device, non_blocking=True)
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    num_passes += 1
                    if num_passes == 12:  # what is allocated once has been
                        torch.cuda.synchronize()
                        torch.cuda.set_sync_debug_mode("error")
                torch.cuda.set_sync_debug_mode("default")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert run.noise_scale >= 0


def test_the_noise_scale_is_that_of_the_cpu():
    results = {}
    for device in ("cpu", "cuda:0"):
        with train.init(device=device) as run:
            torch.manual_seed(0)
            model = nn.Linear(20, 4).to(run.device)
            generator = torch.Generator().manual_seed(1)
            data = TensorDataset(torch.randn(512, 20, generator=generator), torch.randn(512, 4, generator=generator))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            loader = run.dataloader(data, 16, device_batch_size=(1, 8))
            model, optimizer = run.prepare(model, optimizer, scaling="none")
            for _ in run.epochs(1):
                for x, y in loader:
                    F.mse_loss(model(x.to(run.device)), y.to(run.device)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            # The GPU reads its numbers two steps late, the CPU one: compare what both have seen but for one sample.
            results[device] = run.noise_scale
    assert results["cuda:0"] == pytest.approx(results["cpu"], rel=0.2)


def test_compiled_and_channels_last():
    with train.init() as run:
        losses = fit(run, "sgd", epochs=4, compiles=True)
    assert losses[-1] < losses[0]


def test_out_of_memory_halves_the_device_batch_and_retries():
    free = torch.cuda.mem_get_info()[0]
    with train.init() as run:
        model = nn.Linear(8, 1).to(run.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = TensorDataset(torch.randn(64, 8), torch.arange(64))
        loader = run.dataloader(data, 16, device_batch_size=(1, 16))
        model, optimizer = run.prepare(model, optimizer)
        seen, attempts = [], 0
        for _ in run.epochs(1):
            for x, index in loader:
                with run.attempt():
                    attempts += 1
                    hog = torch.empty(
                        int(free * len(x) / 10), dtype=torch.uint8, device=run.device
                    )  # 10 and more: too many
                    model(x.to(run.device)).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    seen += index.tolist()
                    del hog
        assert run.batch.config.device_batch == 8 and run.batch.total == 16
    assert sorted(seen) == list(range(64)) and attempts == 9


def test_checkpoint_and_resume(tmp_path: Path):
    def once(epochs):
        with train.init(checkpoint_dir=tmp_path) as run:
            losses = fit(run, "adamw", precision=torch.bfloat16, epochs=epochs)
            return losses, [p.detach().cpu() for p in run._trainees.members[0].module.parameters()], run.num_steps

    straight_losses, _, _ = once(1)
    _, parameters, steps = once(2)
    assert len(straight_losses) == 16 and steps == 32
    losses, again, steps = once(2)
    assert losses == [] and steps == 32
    for one, other in zip(parameters, again, strict=True):
        assert torch.equal(one, other)


# NCCL in the job's store, which is a Python object that NCCL's own threads call.

NCCL = """
import datetime, os, sys, threading, time
import torch
import torch.distributed as dist
from pollux.membership.client import RemoteStore
from pollux.membership.server import StoreServer
from pollux.membership.store import for_groups, prefixed

os.environ["TORCH_NCCL_COORD_CHECK_MILSEC"] = "100"  # its monitor asks the store for a signal so often
os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
server = StoreServer("127.0.0.1", 0, "the secret")
threads = set()

class Watched(RemoteStore):
    def find(self, keys):
        threads.add(threading.get_ident())
        return super().find(keys)

def form(number):
    store = prefixed(f"group/{number}/0", for_groups(Watched("127.0.0.1", server.port, "the secret")))
    timeout = datetime.timedelta(seconds=20)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, timeout=timeout)

def check_sum():
    value = torch.ones(4, device="cuda")
    dist.all_reduce(value)
    torch.cuda.synchronize()
    assert value.sum().item() == 4.0

for number in range(3):
    began = time.monotonic()
    form(number)
    check_sum()
    print("formed in", round(time.monotonic() - began, 3), "s", flush=True)
    time.sleep(1.0)
    if sys.argv[1] == "abort":
        world = dist.group.WORLD
        aborting = threading.Thread(target=lambda: world._get_backend(torch.device("cuda")).abort())
        aborting.start()
        aborting.join(20.0)
        assert not aborting.is_alive(), "abort hangs"
        del world
    if sys.argv[1] != "leave" or number < 2:
        dist.destroy_process_group()
others = threads - {threading.main_thread().ident}
print("threads of NCCL that asked the store:", len(others), flush=True)
if sys.argv[1] == "raise":
    form(3)
    check_sum()
    raise ValueError("the script's own")
"""


@pytest.mark.parametrize(("how", "code"), [("destroy", 0), ("abort", 0), ("leave", 0), ("raise", 1)])
def test_nccl_meets_in_the_jobs_store(tmp_path, how, code):
    """Formed three times; then destroyed, aborted from another thread, left as it is, or left by an exception."""
    script = tmp_path / "script.py"
    script.write_text(NCCL)
    done = subprocess.run(
        [sys.executable, str(script), how], capture_output=True, text=True, timeout=120, env=dict(os.environ)
    )
    print(done.stdout, done.stderr[-3000:])
    assert done.returncode == code
    assert done.stdout.count("formed in") == 3 and "threads of NCCL" in done.stdout
