"""The sharded training jobs that ``fsdp.py`` resizes and kills. Each replica runs :func:`run_job`.

*free*: trains until the folder says stop, with a line per step as ``resize.py`` reads them, and one per hand-over with
the most memory that it took. *gated*: 12 steps of AdamW on rows that no number of replicas divides. A step waits until
the folder allows it. At the end rank 0 compares all values with the same steps in plain PyTorch.
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from pollux import train

NUM_STEPS, BATCH, ROWS = 12, 12, 13  # of the gated job
GATE_S = 60.0
NEVER_S = 1e6
LAYERS = 10


@dataclass(frozen=True)
class Task:
    kind: str  # free, gated
    device: str
    width: int = 256
    copies: int = 1
    compiled: str = ""  # torch.compile's backend
    checkpoint_every_s: float = NEVER_S

    def write(self, folder: Path) -> None:
        (folder / "task.json").write_text(json.dumps(asdict(self)))

    @property
    def state_bytes(self) -> int:
        """Of the free job: parameters and AdamW's two moments."""
        return 12 * LAYERS * self.width**2


def run_job(folder: Path) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    task = Task(**json.loads((folder / "task.json").read_text()))
    train_freely(folder, task) if task.kind == "free" else train_gated(folder, task)


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


# --- free ------------------------------------------------------------------------------------------------------------


def train_freely(folder: Path, task: Task) -> None:
    torch.manual_seed(0)
    run = train.init(device=task.device, checkpoint_every_s=task.checkpoint_every_s, timeout_s=60.0)
    is_gpu = run.device.type == "cuda"
    data = TensorDataset(torch.randn(512, task.width))
    loader = run.dataloader(data, 16, shuffle=True, policy="fixed")
    layers = [nn.Linear(task.width, task.width, bias=False) for _ in range(LAYERS)]
    for layer in layers if task.compiled else ():
        layer.compile(backend=task.compiled)
    model = nn.Sequential(*layers)
    model, optimizer = run.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-5), shard=shard, shard_copies=task.copies
    )
    generation = -1
    with (
        (folder / f"steps-{os.getpid()}").open("w", buffering=1) as steps,
        (folder / f"memory-{os.getpid()}").open("w", buffering=1) as memory,
    ):
        for _ in run.epochs(10**6, by="passes"):
            for (x,) in loader:
                if run.generation != generation:
                    generation = run.generation
                    peak = torch.cuda.max_memory_allocated() if is_gpu else 0
                    memory.write(f"{time.time()} {generation} {run.world_size} {peak}\n")
                with run.attempt():
                    model(x.to(run.device)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if is_gpu:
                        torch.cuda.synchronize()
                        torch.cuda.reset_peak_memory_stats()
                steps.write(f"{time.time()} {run.generation} {run.world_size} {run.num_steps}\n")
                if (folder / "stop").exists():
                    return


# --- gated -----------------------------------------------------------------------------------------------------------


class Uneven(nn.Module):
    """Rows that no number of replicas divides, a tied weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, ROWS), nn.Linear(ROWS, 5), nn.Linear(5, ROWS)
        self.tied = nn.Linear(ROWS, 5)
        self.tied.weight = self.middle.weight
        self.head = nn.Linear(5, 1)
        self.register_buffer("scale", torch.full((1,), 0.9))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.middle, self.last):
            x = layer(x).tanh()
        return self.head(self.tied(x).tanh() * self.scale)


def shard_uneven(model: nn.Module, mesh: DeviceMesh) -> None:
    assert isinstance(model, Uneven)
    fully_shard(model.first, mesh=mesh)
    fully_shard(model.last, mesh=mesh)
    fully_shard(model, mesh=mesh)


def made(compiled: str = "") -> tuple[Uneven, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Uneven()
    if compiled:
        model.first.compile(backend=compiled)
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH * NUM_STEPS, 6, generator=generator)
    return x, x.sum(1, keepdim=True).tanh()


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and the optimizer's moments, whole. Of a sharded model all replicas take part."""

    def whole(tensor: Any) -> Tensor:
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().cpu()

    values = {}
    for name, parameter in model.named_parameters():
        values[name] = whole(parameter)
        for key, value in optimizer.state[parameter].items():
            values[f"{name}.{key}"] = whole(value)
    return values


def reference(device: torch.device) -> dict[str, Tensor]:
    """The same steps, unsharded, on one device."""
    model, _ = made()
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    inputs, targets = (one.to(device) for one in rows())
    for first in range(0, len(inputs), BATCH):
        optimizer.zero_grad()
        loss_of(model, inputs[first : first + BATCH], targets[first : first + BATCH]).backward()
        optimizer.step()
    return values_of(model, optimizer)


def train_gated(folder: Path, task: Task) -> None:
    run = train.init(device=task.device, checkpoint_every_s=task.checkpoint_every_s, timeout_s=60.0)
    loader = run.dataloader(TensorDataset(*rows()), BATCH)
    model, optimizer = made(task.compiled)
    prepared, _ = run.prepare(model, optimizer, shard=shard_uneven, shard_copies=task.copies, scaling="none")
    with (folder / f"steps-{os.getpid()}").open("w", buffering=1) as steps:
        for _ in run.epochs(1):
            for x, y in loader:
                wait_until_allowed(folder, run.num_steps)
                with run.attempt():
                    loss_of(prepared, x.to(run.device), y.to(run.device)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                steps.write(f"{time.time()} {run.generation} {run.world_size} {run.num_steps}\n")
    values = values_of(model, optimizer)
    if run.rank == 0:
        expected = reference(run.device)
        assert set(values) == set(expected)
        difference = max(float((values[name] - expected[name]).abs().max()) for name in values)
        replace(folder / "difference", str(difference))


def wait_until_allowed(folder: Path, step: int) -> None:
    """Until the folder allows the step with this number, for a minute at most."""
    deadline = time.monotonic() + GATE_S
    while not (folder / "allowed").exists() or int((folder / "allowed").read_text()) <= step:
        if time.monotonic() > deadline:
            raise TimeoutError(f"step {step} was not allowed within {GATE_S:g} s")
        time.sleep(0.01)
