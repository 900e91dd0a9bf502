"""What sharded training costs under the library: step time against plain FSDP2, on the same replicas.

    python benchmarks/fsdp.py [--replicas K] [--rounds N] [--json]

Both train the same GPT in short alternating blocks, because a machine's speed drifts. The overhead is the ratio of all
blocks' times together, measurements of the noise scale included, with a standard error over the blocks. The script
starts K processes, on K GPUs or side by side on one (NCCL then needs a host id for each). ``benchmarks/resize.py
--shard`` measures the resizes of a sharded model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from models import GPT
from pollux import train
from train_overhead import start_replicas

WARM_UP_STEPS = 100  # the noise scale is measured more often in the first steps


@dataclass(frozen=True)
class Row:
    device: str
    replicas: int
    fsdp_ms: float
    pollux_ms: float
    overhead: float
    overhead_error: float  # standard error
    measured_every: int


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    logits = model(x)
    F.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def plain(make: Callable[[], nn.Module], x: Tensor, y: Tensor, device: torch.device) -> Callable[[], None]:
    model = make().to(device)
    shard(model, init_device_mesh(device.type, (torch.distributed.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return lambda: train_step(model, optimizer, x, y)


def ours(run: train.Run, make: Callable[[], nn.Module], x: Tensor, y: Tensor) -> Callable[[], None]:
    model = make()
    loader = run.dataloader(TensorDataset(x.cpu().repeat(512, 1), y.cpu().repeat(512, 1)), len(x) * run.world_size)
    prepared, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4), shard=shard)

    def steps() -> Iterator[None]:
        for _ in run.epochs(10**6, by="passes"):
            for _, _ in loader:
                train_step(prepared, optimizer, x, y)  # the same data on the device, as the plain loop has it
                yield

    endless = steps()
    return lambda: next(endless)


def timed(step: Callable[[], None], num_steps: int, device: torch.device) -> float:
    begun = time.perf_counter()
    for _ in range(num_steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begun) / num_steps * 1e3


def compare(rounds: int) -> Row:
    torch.set_num_threads(1)
    with train.init() as run:
        device = run.device
        size = (50257, 512, 768, 12, 12) if device.type == "cuda" else (512, 64, 128, 4, 4)
        batch, length, block = (8, 512, 16) if device.type == "cuda" else (4, 64, 8)

        def make() -> nn.Module:
            torch.manual_seed(0)
            return GPT(*size)

        ids = torch.randint(size[0], (batch, length + 1), device=device)
        x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        kinds = {"fsdp": plain(make, x, y, device), "pollux": ours(run, make, x, y)}
        for step in kinds.values():
            timed(step, WARM_UP_STEPS, device)
        times: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(rounds):
            for name, step in kinds.items():
                times[name].append(timed(step, block, device))
        ratios = [ours_ms / plain_ms for ours_ms, plain_ms in zip(times["pollux"], times["fsdp"], strict=True)]
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        return Row(
            device=name,
            replicas=run.world_size,
            fsdp_ms=statistics.mean(times["fsdp"]),
            pollux_ms=statistics.mean(times["pollux"]),
            overhead=sum(times["pollux"]) / sum(times["fsdp"]) - 1,
            overhead_error=statistics.stdev(ratios) / len(ratios) ** 0.5,
            measured_every=run.measured_every,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2, help="processes that train together (default 2)")
    parser.add_argument("--rounds", type=int, default=32, help="blocks of each kind (default 32)")
    parser.add_argument("--json", action="store_true", help="print the row as JSON")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit(start_replicas(options.replicas))
    row = compare(options.rounds)
    if os.environ["RANK"] != "0":
        return
    if options.json:
        print(json.dumps(asdict(row)))
        return
    print(f"{row.device}, torch {torch.__version__}, {row.replicas} replicas")
    ratio = f"{row.overhead:+.2%} ± {row.overhead_error:.2%}"
    print(f"plain FSDP2 {row.fsdp_ms:.2f} ms, ours {row.pollux_ms:.2f} ms: {ratio}", end=", ")
    print(f"noise scale measured every {row.measured_every} steps")


if __name__ == "__main__":
    main()
