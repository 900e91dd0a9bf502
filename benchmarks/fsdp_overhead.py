"""One replica of ``fsdp.py``'s comparison: a step of a sharded model under the library, and the same in plain FSDP2.

Both train the same GPT on the same data, read by index from a tensor on the device, in short alternating blocks. How
many blocks follows from the time that is left, which rank 0 decides. Rank 0 prints JSON lines, a first one after a few
blocks, so that a run that is cut short tells something too. Progress goes to stderr.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

from models import GPT
from pollux import train
from train_overhead import Indexed, as_it_is, overhead, synchronise

WARM_UP_STEPS = 100  # the noise scale is measured more often in the first steps
END_S = 3.0  # for leaving
BLOCK_S = 0.15  # long beside a synchronisation, short beside the machine's drift
SHOWN_EVERY_S = 8.0
COLLECTIVE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Size:
    """Of the model and of a replica's share of a batch."""

    vocabulary: int
    width: int
    depth: int
    heads: int
    batch: int
    length: int


SIZES = {
    "tiny": Size(512, 128, 4, 4, 4, 64),
    "small": Size(128, 384, 6, 6, 16, 256),  # 10.7 M parameters
    "medium": Size(8192, 768, 8, 12, 16, 512),  # 63 M
    "gpt2": Size(50257, 768, 12, 12, 8, 512),  # 124 M
}


@dataclass(frozen=True)
class Row:
    part: str
    device: str
    replicas: int
    size: str
    compiled: str  # torch.compile's backend
    fsdp_ms: float
    pollux_ms: float
    overhead: float
    overhead_error: float  # standard error
    num_blocks: int  # of each kind
    block_steps: int
    measured_every: int
    is_final: bool


def say(text: str) -> None:
    rank = os.environ.get("RANK", "-")
    print(f"{time.strftime('%H:%M:%S')} rank {rank}: {text}", file=sys.stderr, flush=True)


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    is_gpu = mesh.device_type == "cuda"
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mp_policy": low} if is_gpu else {}
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


class Comparison:
    """The two contestants of one model."""

    def __init__(self, name: str, backend: str, run: train.Run) -> None:
        self.name, self.backend, self.run, self.device = name, backend, run, run.device
        self.size = size = SIZES[name]
        ids = torch.randint(size.vocabulary, (64, size.length + 1), device=self.device)
        inputs = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        self.data = Indexed(inputs, size.batch * 10**6)
        self.steps = {"fsdp": self._plain(), "pollux": self._ours()}

    def _model(self) -> nn.Module:
        torch.manual_seed(0)
        size = self.size
        model = GPT(size.vocabulary, size.length, size.width, size.depth, size.heads)
        for block in model.blocks if self.backend else ():
            block.compile(backend=self.backend)
        return model

    def _plain(self) -> Iterator[None]:
        model = self._model().to(self.device)
        shard(model, init_device_mesh(self.device.type, (dist.get_world_size(),)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        return train_on(model, optimizer, DataLoader(self.data, self.size.batch, collate_fn=as_it_is))

    def _ours(self) -> Iterator[None]:
        total = self.size.batch * self.run.world_size
        # Room for another batch, so that the noise scale is of use and measured; the batch stays as it is.
        options = {"max_batch_size": 2 * total, "policy": train.FixedBatch(), "collate_fn": as_it_is}
        loader = self.run.dataloader(self.data, total, **options)
        model = self._model()
        model, optimizer = self.run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4), shard=shard)
        return train_on(model, optimizer, loader)

    def block(self, kind: str, num_steps: int) -> float:
        """Milliseconds a step."""
        synchronise(self.device)
        begun = time.perf_counter()
        for _ in range(num_steps):
            next(self.steps[kind])
        synchronise(self.device)
        return (time.perf_counter() - begun) / num_steps * 1e3

    def measure(self, limit_s: float, show: Callable[[Row], None]) -> Row:
        end = time.monotonic() + limit_s
        step_ms = 0.0
        for share, kind in zip((0.2, 0.4), self.steps, strict=True):
            step_ms = self.block(kind, 1)
            say(f"{self.name}: first step of {kind} {step_ms:.0f} ms")
            for done in count(4, 4):
                step_ms = self.block(kind, 4)
                if agreed(done >= WARM_UP_STEPS or time.monotonic() > end - limit_s * (1 - share)):
                    say(f"{self.name}: {kind} is warm after {done} steps, {step_ms:.1f} ms a step")
                    break
        num_steps = agreed(max(round(BLOCK_S * 1e3 / step_ms), 1))
        times: dict[str, list[float]] = {kind: [] for kind in self.steps}
        shown = time.monotonic()
        for index in count():
            kinds = list(self.steps)
            for kind in kinds if index % 2 == 0 else kinds[::-1]:
                times[kind].append(self.block(kind, num_steps))
            if agreed(index >= 3 and time.monotonic() > end):
                return self._row(times, num_steps, is_final=True)
            if index >= 3 and time.monotonic() - shown > SHOWN_EVERY_S:
                shown = time.monotonic()
                show(self._row(times, num_steps, is_final=False))
        raise AssertionError

    def _row(self, times: dict[str, list[float]], num_steps: int, *, is_final: bool) -> Row:
        ratio, error = overhead(times["pollux"], times["fsdp"])
        blocks = len(times["fsdp"])
        return Row(
            part="overhead",
            device=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU",
            replicas=self.run.world_size,
            size=self.name,
            compiled=self.backend,
            fsdp_ms=round(sum(times["fsdp"]) / blocks, 3),
            pollux_ms=round(sum(times["pollux"]) / blocks, 3),
            overhead=round(ratio, 4),
            overhead_error=round(error, 4),
            num_blocks=blocks,
            block_steps=num_steps,
            measured_every=self.run.measured_every,
            is_final=is_final,
        )


def train_on(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> Iterator[None]:
    for x, y in loader:
        F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def agreed(value: int) -> int:
    """Rank 0's, on all ranks."""
    told = torch.tensor([int(value)])
    dist.broadcast(told, 0)  # on the hosts: it waits for no device
    return int(told)


def print_row(row: Row) -> None:
    print(json.dumps(asdict(row)), flush=True)


def run_replica(sizes: list[str], backend: str, limit_s: float, device: str) -> None:
    end = time.monotonic() + limit_s - END_S
    logging.basicConfig(level=logging.INFO, format=f"rank {os.environ['RANK']}: %(message)s")
    torch.set_num_threads(1)
    for index, name in enumerate(sizes):
        say(f"{name}: connecting")
        with train.init(device=device or None, timeout_s=COLLECTIVE_TIMEOUT_S) as run:
            say(f"{name}: {run.world_size} replicas on {run.device}, torch {torch.__version__}")
            comparison = Comparison(name, backend, run)
            left_s = agreed(max((end - time.monotonic()) / (len(sizes) - index), 1.0))
            row = comparison.measure(left_s, print_row if run.rank == 0 else _keep_quiet)
            if run.rank == 0:
                print_row(row)
            del comparison


def _keep_quiet(_row: Row) -> None:
    pass
