"""A small GPT whose optimizer and width are parameters of a study; for ``benchmarks/tune.py --task gpt``.

It predicts the next character of the Python standard library's source. An epoch is ``--steps`` steps at M0, with
windows drawn with replacement. As a script it trains by ``pollux.train``; peers call :func:`train_plain`.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from models import GPT
from pollux import train
from quality_tasks import Situation, TextProblem
from testbed_job import Draws, Folder, as_it_is

SPACE = ("lr=log:1e-4..3e-2", "beta2=0.9..0.999", "decay=log:1e-3..1.0", "width=choice:128,256")
BATCH, LARGEST = 16, 512  # M0, and what it may grow to
LENGTH, DEPTH, WARM_UP = 128, 4, 50
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "lib2to3"}
MOST_BYTES = 8_000_000


def write_text(folder: Path) -> Path:
    """Source code as arrays of bytes, the last tenth held out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    parts, size = [], 0
    for path in sorted(library.rglob("*.py")):
        if size < MOST_BYTES and not LEFT_OUT.intersection(path.relative_to(library).parts):
            parts.append(np.frombuffer(path.read_bytes(), np.uint8))
            size += len(parts[-1])
    text = np.concatenate(parts)
    np.save(folder / "text_train.npy", text[: len(text) * 9 // 10])
    np.save(folder / "text_val.npy", text[len(text) * 9 // 10 :])
    return folder


def load(data: Path, device: torch.device, is_tiny: bool) -> TextProblem:
    def unused() -> nn.Module:
        raise AssertionError("the width is a parameter")

    length = 16 if is_tiny else LENGTH
    return TextProblem(Situation(Folder(data), device, is_tiny), "text", length, length // 2, unused)


def build(params: Mapping[str, Any], device: torch.device, is_tiny: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    width, depth, length = (int(params["width"]) // 8, 1, 16) if is_tiny else (int(params["width"]), DEPTH, LENGTH)
    model = GPT(256, length, width, depth, max(width // 64, 1)).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=float(params["lr"]),
        betas=(0.9, float(params["beta2"])),
        weight_decay=float(params["decay"]),
        fused=device.type == "cuda",
    )
    return model, optimizer


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / WARM_UP, 1.0))


def learn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.device.type == "cuda"):
        logits = model(x)
    F.cross_entropy(logits.flatten(0, 1).float(), y.flatten()).backward()


def validate(problem: TextProblem, model: nn.Module, device: torch.device) -> float:
    model.eval()
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        loss = problem.evaluate(model)
    model.train()
    return loss


def plain_batches(problem: TextProblem) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield problem.dataset.__getitems__(torch.randint(len(problem.dataset), (BATCH,), generator=generator).tolist())


def train_plain(
    problem: TextProblem, params: Mapping[str, Any], args: argparse.Namespace, after_epoch: Callable[[int, float], bool]
) -> None:
    """Without Pollux, at M0. Stops when ``after_epoch`` says so."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, optimizer = build(params, device, args.tiny)
    scheduler, batches = warm_up(optimizer), plain_batches(problem)
    for epoch in range(1, args.epochs + 1):
        for _ in range(args.steps):
            learn(model, *next(batches))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        if not after_epoch(epoch, validate(problem, model, device)):
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=200, help="at M0, of an epoch")
    parser.add_argument("--data", type=Path, required=True, help="a folder of write_text")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    run = train.init(timeout_s=60)
    if run.device.type == "cpu":
        torch.set_num_threads(1)
    params = {"lr": run.param("lr", 1e-3), "beta2": run.param("beta2", 0.99), "decay": run.param("decay", 0.1)}
    problem = load(args.data, run.device, args.tiny)
    bare, optimizer = build(params | {"width": run.param("width", 256)}, run.device, args.tiny)
    scheduler = warm_up(optimizer)
    loader = run.dataloader(
        problem.dataset, BATCH, max_batch_size=LARGEST, device_batch_size=(1, LARGEST),
        sampler=Draws(len(problem.dataset)), seed=0, collate_fn=as_it_is,
    )  # fmt: skip
    model, optimizer = run.prepare(bare, optimizer, scheduler)
    batches = iter(loader)
    for _ in run.steps(args.epochs * args.steps):
        learn(model, *next(batches))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if run.every(args.steps) and run.num_steps:  # not in the first step
            run.log(val_loss=validate(problem, bare, run.device))
    run.log(val_loss=validate(problem, bare, run.device))


if __name__ == "__main__":
    main()
