"""The training job that ``gpu_faults.py`` breaks: a small network, and a ledger of the examples it has consumed.

The ledger is a parameter with one number per example. An example's gradient is -1 at its own number and steps are means
over the batch, so plain SGD with the batch as its rate adds 1 for every consumption. After n epochs every number must
be n: a lost, repeated or wrongly summed example shows within an epoch.

Each replica keeps a file with its process id as name, which the controller reads: the time of its last committed step,
the generation and the number of steps, and what it does now. What breaks the rule above is written to ``wrong-<pid>``.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from pollux import train

LENGTH = 240
BATCH = 24
OWN_EVERY = 4  # steps between collectives of the script's own
CHECKPOINT_EVERY_S = 1.0
TIMEOUT_S = 60.0
PHASES = ("outside the loop", "forward", "own collective", "backward", "optimizer")

_FORMAT = struct.Struct("=dqqq")


@dataclass(frozen=True, slots=True)
class Beat:
    """What a replica last told. ``time_s`` is that of its last committed step, 0 before the first of its group."""

    time_s: float
    generation: int
    num_steps: int
    phase: str


class Beats:
    """The replica's side of its file."""

    def __init__(self, folder: Path) -> None:
        path = folder / f"beat-{os.getpid()}"
        path.write_bytes(bytes(_FORMAT.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _FORMAT.size)
        self._fields = (0.0, -1, 0)
        self.enter(0)

    def enter(self, phase: int) -> None:
        self._map[:] = _FORMAT.pack(*self._fields, phase)

    def commit(self, generation: int, num_steps: int) -> None:
        self._fields = (time.time(), generation, num_steps)
        self.enter(0)


def read_beat(path: Path) -> Beat:
    time_s, generation, num_steps, phase = _FORMAT.unpack(path.read_bytes().ljust(_FORMAT.size, b"\0"))
    return Beat(time_s, generation, num_steps, PHASES[phase])


class Examples(Dataset[tuple[int, Tensor]]):
    def __init__(self, width: int) -> None:
        self.inputs = torch.randn(LENGTH, width, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.inputs[index]


class LedgerNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(LENGTH, dtype=torch.float64))
        layers = [nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, indices: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.counts[indices], self.body(x)


def check(model: LedgerNet, num_epochs: int, folder: Path) -> None:
    """Every example was consumed once in each epoch so far."""
    counts = model.counts.detach().cpu()
    wrong = (counts - num_epochs).abs() > 1e-6
    if wrong.any() or any(not torch.isfinite(one).all() for one in model.state_dict().values()):
        first = int(wrong.int().argmax())
        text = f"{num_epochs} epochs: {int(wrong.sum())} examples, such as {first}, consumed {counts[first]:g} times\n"
        with (folder / f"wrong-{os.getpid()}").open("a") as file:
            file.write(text)


def run_job(folder: Path, width: int, device: str, step_s: float) -> None:
    """Trains until it is stopped."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = train.init(device=device, checkpoint_every_s=CHECKPOINT_EVERY_S, timeout_s=TIMEOUT_S)
    loader = run.dataloader(Examples(width), BATCH, shuffle=True, seed=3)
    module = LedgerNet(width).to(run.device)
    groups = [{"params": [module.counts], "lr": float(BATCH)}, {"params": module.body.parameters(), "lr": 1e-3}]
    model, optimizer = run.prepare(module, torch.optim.SGD(groups, lr=1e-3), scaling="none")
    beats, generation = Beats(folder), -1
    for epoch in run.epochs(10**6, by="passes"):
        for indices, x in loader:
            if run.generation == generation:
                beats.commit(generation, run.num_steps)
            generation = run.generation
            with run.attempt():
                time.sleep(step_s)
                beats.enter(1)
                counted, outputs = model(indices.to(run.device), x.to(run.device))
                loss = outputs.square().mean() - counted.mean()
                if run.num_steps % OWN_EVERY == 0:
                    beats.enter(2)
                    seen = loss.detach().clone()
                    dist.all_reduce(seen)
                    seen.item()  # as people do: the host waits for the device
                beats.enter(3)
                loss.backward()
                beats.enter(4)
                optimizer.step()
                optimizer.zero_grad()
            beats.enter(0)
        if run.progress.num_epochs == epoch:  # otherwise the state of others was taken over, in another epoch
            check(module, epoch + 1, folder)
