"""What the training library costs: step time and peak memory against bare PyTorch and plain DDP, in the same process.

    python benchmarks/train_overhead.py [--models NAME ...] [--rounds N] [--replicas K] [--json]

All train the same model on the same data, in short alternating blocks, because a machine's speed drifts. A block's time
is its wall time between two synchronisations. Overheads are ratios of all blocks' times together, measurements of the
noise scale included, with a standard error over the blocks. With one replica the baselines are *bare* PyTorch,
the usual choice on one GPU, and DDP. With --replicas K the script starts K processes, on K GPUs or side by side
on one (NCCL then needs a host id for each), and the baseline is DDP, with ``gradient_as_bucket_view`` on, which is
faster. Data is read by index from a tensor on the device, as a loader does. Without a GPU, small models
replace the large ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from models import GPT, resnet18, resnet50
from pollux import train

PEAK_STEPS = 40  # the noise is measured among them, for Adam too
WARM_UP_STEPS = 600  # until the noise scale is measured as rarely as it will be: the first samples come faster


@dataclass(frozen=True)
class Case:
    name: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    inputs: Callable[[int, torch.device], tuple[Tensor, Tensor]]
    batch_size: int
    block_steps: int
    channels_last: bool = False


@dataclass(frozen=True)
class Row:
    model: str
    replicas: int
    bare_ms: float | None  # None with several replicas
    ddp_ms: float
    pollux_ms: float
    over_bare: float | None
    over_bare_error: float | None  # standard error
    over_ddp: float
    over_ddp_error: float
    plain_mib: float | None  # None without a GPU
    pollux_mib: float | None
    measured_every: int


class Indexed(Dataset[Any]):
    """Examples on the device, read by index, a whole batch at a time."""

    NUM_ROWS = 2048

    def __init__(self, inputs: tuple[Tensor, Tensor], length: int) -> None:
        self.inputs, self.length = inputs, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return index

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        x, y = self.inputs
        rows = (torch.tensor(indices) % len(x)).to(x.device, non_blocking=True)
        return x[rows], y[rows]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def images(size: int, classes: int) -> Callable[[int, torch.device], tuple[Tensor, Tensor]]:
    def make(batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        return torch.randn(batch, 3, size, size, device=device), torch.randint(classes, (batch,), device=device)

    return make


def tokens(length: int, vocabulary: int) -> Callable[[int, torch.device], tuple[Tensor, Tensor]]:
    def make(batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        ids = torch.randint(vocabulary, (batch, length + 1), device=device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return make


GPU_CASES = (
    Case("resnet50 128, SGD", resnet50, sgd, images(224, 1000), 128, 32, channels_last=True),
    Case("gpt2-124m 16x512, fused AdamW", GPT, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True),
         tokens(512, 50257), 16, 16),
    Case("resnet18 32x32 128, SGD", resnet18, sgd, images(32, 10), 128, 32, channels_last=True),
    Case("resnet18 32x32 32, SGD", resnet18, sgd, images(32, 10), 32, 32, channels_last=True),
    Case("gpt 10.7m 16x256, fused AdamW", lambda: GPT(128, 256, 384, 6, 6),
         lambda m: torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True), tokens(256, 128), 16, 32),
)  # fmt: skip
CPU_CASES = (
    Case("resnet18 32x32 16, SGD (cpu)", resnet18, sgd, images(32, 10), 16, 4),
    Case("small gpt 4x64, AdamW (cpu)", lambda: GPT(512, 64, 128, 4, 4),
         lambda m: torch.optim.AdamW(m.parameters(), lr=1e-4), tokens(64, 512), 4, 32),
)  # fmt: skip


def as_it_is(batch: Any) -> Any:
    return batch


class Contestant:
    """A model with its own endless loop, advanced some steps at a time. ``kind``: "bare", "ddp" or "pollux"."""

    def __init__(self, case: Case, device: torch.device, kind: str, run: train.Run) -> None:
        torch.manual_seed(0)
        self.device = device
        model = case.model().to(device)
        if case.channels_last:
            model = model.to(memory_format=torch.channels_last)
        x, y = case.inputs(max(Indexed.NUM_ROWS if device.type == "cuda" else 0, case.batch_size), device)
        if case.channels_last:
            x = x.to(memory_format=torch.channels_last)
        data = Indexed((x, y), case.batch_size * 10**6)
        optimizer = case.optimizer(model)
        loader: Any
        if kind == "pollux":
            total = case.batch_size * run.world_size
            # Room for another batch, so that the noise scale is of use and measured; the batch stays as it is.
            policy = train.FixedBatch()
            loader = run.dataloader(data, total, max_batch_size=2 * total, policy=policy, collate_fn=as_it_is)
            self.model, self.optimizer = run.prepare(model, optimizer)
        else:
            self.model = DistributedDataParallel(model, gradient_as_bucket_view=True) if kind == "ddp" else model
            self.optimizer = optimizer
            loader = DataLoader(data, batch_size=case.batch_size, collate_fn=as_it_is)
        self._run = run if kind == "pollux" else None
        self._steps = self._train(loader)

    def _train(self, loader: Any) -> Iterator[None]:
        """One item per optimizer step, however many passes that has."""
        num_steps = 0
        for x, y in loader:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                logits = self.model(x)
                loss = F.cross_entropy(logits.flatten(0, -2), y.flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self._run is None:
                yield
            elif self._run.num_steps != num_steps or self._run.num_steps == 0:
                num_steps = self._run.num_steps
                yield

    def advance(self, num_steps: int) -> float:
        """Seconds per step."""
        synchronise(self.device)
        begun = time.perf_counter()
        for _ in range(num_steps):
            next(self._steps)
        synchronise(self.device)
        return (time.perf_counter() - begun) / num_steps


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_mib(case: Case, device: torch.device, kind: str, num_steps: int) -> float | None:
    """Of this model alone, with measured steps among the ``num_steps``."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run = train.init(device=device)
    contestant = Contestant(case, device, kind, run)
    contestant.advance(num_steps)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    del contestant
    run.close()
    return peak


def compare(case: Case, device: torch.device, rounds: int) -> Row:
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    plain_mib = pollux_mib = None
    if is_alone:
        plain_mib, pollux_mib = peak_mib(case, device, "bare", PEAK_STEPS), peak_mib(case, device, "pollux", PEAK_STEPS)
    gc.collect()
    run = train.init(device=device)
    warm_up = WARM_UP_STEPS if device.type == "cuda" else 16
    kinds = ["bare", "ddp", "pollux"] if is_alone else ["ddp", "pollux"]
    contestants = {kind: Contestant(case, device, kind, run) for kind in kinds}
    for kind, contestant in contestants.items():
        contestant.advance(warm_up if kind == "pollux" else 16)
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for index in range(rounds):
        for kind in kinds if index % 2 == 0 else kinds[::-1]:
            times[kind].append(contestants[kind].advance(case.block_steps))
    interval, replicas = run.measured_every, run.world_size
    run.close()

    over_ddp, ddp_error = overhead(times["pollux"], times["ddp"])
    over_bare, bare_error = overhead(times["pollux"], times["bare"]) if is_alone else (None, None)
    return Row(
        model=case.name,
        replicas=replicas,
        bare_ms=statistics.median(times["bare"]) * 1000 if is_alone else None,
        ddp_ms=statistics.median(times["ddp"]) * 1000,
        pollux_ms=statistics.median(times["pollux"]) * 1000,
        over_bare=over_bare,
        over_bare_error=bare_error,
        over_ddp=over_ddp,
        over_ddp_error=ddp_error,
        plain_mib=plain_mib,
        pollux_mib=pollux_mib,
        measured_every=interval,
    )


def overhead(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """By how much our blocks took longer in all, and the standard error of that (jackknife over pairs of blocks)."""
    total_ours, total_theirs, count = sum(ours), sum(theirs), len(ours)
    without = [(total_ours - our) / (total_theirs - their) for our, their in zip(ours, theirs, strict=True)]
    mean = statistics.fmean(without)
    error = ((count - 1) / count * sum((ratio - mean) ** 2 for ratio in without)) ** 0.5
    return total_ours / total_theirs - 1, error


def start_replicas(num_replicas: int) -> int:
    """This script once per replica, as torchrun would; the first one's output is shown."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    children = []
    for rank in range(num_replicas):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_replicas),
            "LOCAL_WORLD_SIZE": str(num_replicas),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "NCCL_HOSTID": f"overhead-{rank}",  # NCCL refuses two ranks on one GPU of one host
            "NCCL_SOCKET_IFNAME": "lo",
        }
        arguments = [sys.executable, *sys.argv]
        output = None if rank == 0 else subprocess.DEVNULL
        children.append(subprocess.Popen(arguments, env=environment, stdout=output))
    return max(child.wait() for child in children)


def show(row: Row) -> str:
    bare = "-" if row.bare_ms is None else f"{row.bare_ms:9.2f} {row.over_bare:+8.2%} ± {row.over_bare_error:.2%}"
    ddp = f"{row.ddp_ms:9.2f} {row.over_ddp:+8.2%} ± {row.over_ddp_error:.2%}"
    return (
        f"{row.model:30} {row.replicas:3} {row.pollux_ms:9.2f} {bare:>26} {ddp:>26}"
        f" {row.plain_mib or 0:9.0f} {row.pollux_mib or 0:9.0f}   every {row.measured_every}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[], help="only those whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=32, help="blocks of each kind (default 32)")
    parser.add_argument("--replicas", type=int, default=1, help="processes that train together (default 1)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args()
    if options.replicas > 1 and "RANK" not in os.environ:
        sys.exit(start_replicas(options.replicas))
    is_gpu = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local % torch.cuda.device_count()) if is_gpu else torch.device("cpu")
    machine = torch.cuda.get_device_name(0) if is_gpu else "CPU"
    cases = [case for case in (GPU_CASES if is_gpu else CPU_CASES)
             if not options.models or any(name in case.name for name in options.models)]  # fmt: skip
    rows = []
    is_first = os.environ.get("RANK", "0") == "0"
    if not options.json and is_first:
        print(f"{machine}, torch {torch.__version__}, {options.rounds} blocks of each kind")
        print(f"{'model':30} {'K':>3} {'pollux ms':>9} {'bare ms, over':>26} {'DDP ms, over':>26} "
              f"{'bare MiB':>9} {'our MiB':>9}   measured")  # fmt: skip
    for case in cases:
        row = compare(case, device, options.rounds)
        rows.append(row)
        if not options.json and is_first:
            print(show(row), flush=True)
    if options.json and is_first:
        print(json.dumps({"machine": machine, "torch": torch.__version__, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
