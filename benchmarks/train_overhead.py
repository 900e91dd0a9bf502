"""What the training library costs: step time and peak memory against plain DDP, in the same process.

    python benchmarks/train_overhead.py [--models NAME ...] [--rounds N] [--json]

Both train the same model on the same data, turn by turn, in blocks long enough to hold several measurements of the
noise scale; a block's time is its wall time between two synchronisations. Plain DDP has ``gradient_as_bucket_view`` on,
which is the faster way. On a machine without GPU, small models take the place of the large ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
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
WARM_UP_STEPS = 64  # also what it takes to choose how often to measure


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
    plain_ms: float
    pollux_ms: float
    overhead: float
    spread: float  # of the plain blocks: (upper quartile - lower quartile) / median
    plain_mib: float | None  # None without a GPU
    pollux_mib: float | None
    measured_every: int


class Prepared(Dataset[Any]):
    """Examples that are on the device already: the loader's own work is what remains to be timed."""

    def __init__(self, inputs: tuple[Tensor, Tensor], length: int) -> None:
        self.inputs, self.length = inputs, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return index

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.inputs


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
    Case("resnet50 128, SGD", resnet50, sgd, images(224, 1000), 128, 64, channels_last=True),
    Case("gpt2-124m 16x512, fused AdamW", GPT, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True),
         tokens(512, 50257), 16, 64),
    Case("resnet18 32x32 128, SGD", resnet18, sgd, images(32, 10), 128, 128, channels_last=True),
)  # fmt: skip
CPU_CASES = (
    Case("resnet18 32x32 16, SGD (cpu)", resnet18, sgd, images(32, 10), 16, 4),
    Case("small gpt 4x64, AdamW (cpu)", lambda: GPT(512, 64, 128, 4, 4),
         lambda m: torch.optim.AdamW(m.parameters(), lr=1e-4), tokens(64, 512), 4, 32),
)  # fmt: skip


def as_it_is(batch: Any) -> Any:
    return batch


class Contestant:
    """A model with its own endless loop, advanced some steps at a time."""

    def __init__(self, case: Case, device: torch.device, run: train.Run | None) -> None:
        torch.manual_seed(0)
        self.device = device
        model = case.model().to(device)
        if case.channels_last:
            model = model.to(memory_format=torch.channels_last)
        x, y = case.inputs(case.batch_size, device)
        if case.channels_last:
            x = x.to(memory_format=torch.channels_last)
        data = Prepared((x, y), case.batch_size * 10**6)
        optimizer = case.optimizer(model)
        loader: Any
        if run is None:
            self.model: nn.Module = DistributedDataParallel(model, gradient_as_bucket_view=True)
            self.optimizer = optimizer
            loader = DataLoader(data, batch_size=case.batch_size, collate_fn=as_it_is)
        else:
            loader = run.dataloader(data, case.batch_size, collate_fn=as_it_is)
            self.model, self.optimizer = run.prepare(model, optimizer)
        self._steps = self._train(loader)

    def _train(self, loader: Any) -> Iterator[None]:
        for x, y in loader:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                logits = self.model(x)
                loss = F.cross_entropy(logits.flatten(0, -2), y.flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
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


def peak_mib(case: Case, device: torch.device, with_pollux: bool, num_steps: int) -> float | None:
    """Of this model alone, with measured steps among the ``num_steps``."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run = train.init(device=device)
    contestant = Contestant(case, device, run if with_pollux else None)
    contestant.advance(num_steps)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    del contestant
    run.close()
    return peak


def compare(case: Case, device: torch.device, rounds: int) -> Row:
    plain_mib = peak_mib(case, device, False, PEAK_STEPS)
    pollux_mib = peak_mib(case, device, True, PEAK_STEPS)
    gc.collect()
    run = train.init(device=device)
    warm_up = WARM_UP_STEPS if device.type == "cuda" else 16
    plain, ours = Contestant(case, device, None), Contestant(case, device, run)
    plain.advance(warm_up)
    ours.advance(warm_up)
    times: dict[str, list[float]] = {"plain": [], "ours": []}
    for index in range(rounds):
        pair = [("plain", plain), ("ours", ours)]
        for name, contestant in pair if index % 2 == 0 else pair[::-1]:
            times[name].append(contestant.advance(case.block_steps))
    interval = run.measured_every
    run.close()
    # Pairs of neighbouring blocks share the machine's state; their ratio is steadier than that of two medians.
    ratio = statistics.median(o / p for o, p in zip(times["ours"], times["plain"], strict=True))
    low, middle, high = statistics.quantiles(times["plain"], n=4)
    return Row(
        model=case.name,
        plain_ms=middle * 1000,
        pollux_ms=middle * ratio * 1000,
        overhead=ratio - 1,
        spread=(high - low) / middle,
        plain_mib=plain_mib,
        pollux_mib=pollux_mib,
        measured_every=interval,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[], help="only those whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=8, help="blocks of each kind (default 8)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args()
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if is_gpu else torch.device("cpu")
    machine = torch.cuda.get_device_name(0) if is_gpu else "CPU"
    cases = [case for case in (GPU_CASES if is_gpu else CPU_CASES)
             if not options.models or any(name in case.name for name in options.models)]  # fmt: skip
    rows = []
    if not options.json:
        print(f"{machine}, torch {torch.__version__}, {options.rounds} pairs of blocks")
        print(f"{'model':34} {'plain ms':>9} {'pollux ms':>9} {'overhead':>9} {'spread':>7} {'plain MiB':>10} "
              f"{'pollux MiB':>10} {'measured':>12}")  # fmt: skip
    for case in cases:
        row = compare(case, device, options.rounds)
        rows.append(row)
        if not options.json:
            every = f"every {row.measured_every}"
            print(f"{row.model:34} {row.plain_ms:9.2f} {row.pollux_ms:9.2f} {row.overhead:+9.2%} {row.spread:7.1%} "
                  f"{row.plain_mib or 0:10.0f} {row.pollux_mib or 0:10.0f} {every:>12}", flush=True)  # fmt: skip
    if options.json:
        print(json.dumps({"machine": machine, "torch": torch.__version__, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
