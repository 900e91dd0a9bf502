"""One job of ``testbed.py``: a task of ``quality_tasks.py``, trained by ``pollux.train`` to a fixed amount of progress.

``--steps`` counts steps at M0, so that jobs with other batches do as much work. ``--batch 0`` adapts the batch;
otherwise it stays, and so does what a larger one is worth less by the noise scale. The quality on held-out data is
logged eight times on the way and at the end.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import Sampler

from pollux import train
from pollux.train.batching import FixedBatch
from quality_tasks import MAX_FACTOR, TASKS, Problem, Situation, Task, made_up_data

NUM_EVALUATIONS = 8
DRAWN_AT_ONCE = 65_536


class Folder(Mapping[str, NDArray[Any]]):
    """The arrays that ``testbed.py`` has unpacked; a job reads those it needs."""

    def __init__(self, path: Path) -> None:
        self._paths = {file.stem: file for file in sorted(path.glob("*.npy"))}

    def __getitem__(self, name: str) -> NDArray[Any]:
        array: NDArray[Any] = np.load(self._paths[name])
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


class Draws(Sampler[int]):
    """Examples drawn with replacement, for longer than any job lasts. Pollux sets ``generator``."""

    generator: torch.Generator | None = None

    def __init__(self, num_examples: int) -> None:
        self._num_examples = num_examples

    def __len__(self) -> int:
        return 10**10

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randint(self._num_examples, (DRAWN_AT_ONCE,), generator=self.generator).tolist()


def as_it_is(batch: Any) -> Any:
    return batch


def evaluate(task: Task, problem: Problem, model: nn.Module, device: torch.device) -> float:
    model.eval()
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=uses_bfloat16(task, device)):
        quality = problem.evaluate(model)
    model.train()
    return quality


def uses_bfloat16(task: Task, device: torch.device) -> bool:
    return task.uses_bfloat16 and device.type == "cuda"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=list(TASKS), required=True)
    parser.add_argument("--steps", type=int, required=True, help="at M0")
    parser.add_argument("--batch", type=int, default=0, help="a batch that stays; 0: adapt it (default)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="folder of arrays; left out: tiny models on made-up data")
    options = parser.parse_args()

    task = TASKS[options.task]
    torch.set_float32_matmul_precision("high")
    run = train.init(timeout_s=60)
    if run.device.type == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    arrays = made_up_data() if options.data is None else Folder(options.data)
    problem = task.load(Situation(arrays, run.device, options.data is None))
    bare = problem.make_model().to(run.device)
    optimizer = task.make_optimizer(bare, 1.0)
    scheduler = task.make_scheduler(optimizer, 1.0)
    initial = task.initial_batch
    largest = MAX_FACTOR * initial
    sizes: dict[str, Any] = {"max_batch_size": largest}
    if options.batch:
        sizes = {"max_batch_size": max(options.batch, initial), "policy": FixedBatch(total=options.batch)}
    loader = run.dataloader(
        problem.dataset, initial, device_batch_size=(1, largest), sampler=Draws(len(problem.dataset)),
        seed=options.seed, collate_fn=as_it_is, **sizes,
    )  # fmt: skip
    model, optimizer = run.prepare(bare, optimizer, scheduler)
    batches = iter(loader)
    for _ in run.steps(options.steps):
        x, y = next(batches)
        with torch.autocast(run.device.type, torch.bfloat16, enabled=uses_bfloat16(task, run.device)):
            logits = model(x)
        F.cross_entropy(logits.flatten(0, -2).float(), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if run.every(max(options.steps // NUM_EVALUATIONS, 1)):
            run.log(quality=evaluate(task, problem, bare, run.device))
    run.log(quality=evaluate(task, problem, bare, run.device))


if __name__ == "__main__":
    main()
