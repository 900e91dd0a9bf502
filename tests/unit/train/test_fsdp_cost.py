"""What a step of a sharded model costs the host beside plain FSDP2, counted: Python calls and collectives."""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from pollux import train
from pollux.train import sharded_gradients
from pollux.train.adaptation import Adaptation
from tests.unit.train.processes import Rows, a_run, loss_of
from tests.unit.train.processes import replicas as replicas_of

LAYERS, BATCH, WARM_STEPS, STEPS = 6, 4, 60, 24
# With two replicas a step has 3 collectives for each layer, 20 in all. Measured: 289 and 269, 578 and 559 before.
MOST_CALLS = 340

replicas = partial(replicas_of, timeout_s=240.0)


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Linear(6, 1))


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    assert isinstance(model, nn.Sequential)
    for index in range(LAYERS):
        fully_shard(model[index], mesh=mesh)
    fully_shard(model, mesh=mesh)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> Iterator[None]:
    for _, x, y in loader:
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def count(step: Callable[[], object]) -> int:
    """Python functions called."""
    calls = 0

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(on_event)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def extra_calls() -> float:
    """Python calls of an ordinary step under the library, less those of plain FSDP2."""
    with a_run() as run:
        size = run.world_size
        data = Rows(BATCH * size * 1000)
        plain_model = blocks()
        shard(plain_model, init_device_mesh("cpu", (size,)))
        plain_loader = DataLoader(data, BATCH)
        plain = steps(plain_model, torch.optim.AdamW(plain_model.parameters()), plain_loader)
        loader = run.dataloader(data, BATCH * size, max_batch_size=2 * BATCH * size, policy=train.FixedBatch())
        model = blocks()
        model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters()), shard=shard)
        ours = steps(model, optimizer, loader)
        for _ in range(WARM_STEPS):
            next(ours)
        Adaptation.interval = lambda self: 1 << 20  # type: ignore[method-assign]  # none of the next is measured
        for _ in range(4):
            next(ours)
        numbers: dict[str, list[int]] = {"plain": [], "ours": []}
        for index in range(STEPS):
            numbers["ours"].append(count(lambda: next(ours)))
            called = count(lambda: next(plain))
            if index:  # the first steps make the optimizer's state
                numbers["plain"].append(called)
        return statistics.median(numbers["ours"]) - statistics.median(numbers["plain"])


def test_an_ordinary_step_makes_few_python_calls_more_than_plain_fsdp2() -> None:
    extra = replicas(2, extra_calls)
    assert all(0 < one <= MOST_CALLS for one in extra), extra


def collectives_of_a_step(copies: int) -> Counter[str]:
    seen: Counter[str] = Counter()

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            seen[name] += 1
            return original(*args, **options)

        return call

    dist.all_reduce = watched("all_reduce", dist.all_reduce)
    sharded_gradients._all_gather = watched("all_gather", sharded_gradients._all_gather)
    with a_run() as run:
        loader = run.dataloader(Rows(BATCH * 2 * 100), BATCH * 2)
        model = blocks()
        model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters()), shard=shard, shard_copies=copies)
        ours = steps(model, optimizer, loader)
        for _ in range(8):
            next(ours)
        seen.clear()
        next(ours)
        return seen.copy()


@pytest.mark.parametrize(
    ("num_replicas", "copies", "gathers", "sums"),
    [(2, 1, 13, 8), (2, 2, 0, 8)],  # a sum for each of 7 layers, and the step's exchange
)
def test_the_agreement_of_replicas_with_copies_takes_no_collective_of_its_own(
    num_replicas: int, copies: int, gathers: int, sums: int
) -> None:
    for seen in replicas(num_replicas, collectives_of_a_step, copies):
        assert (seen["all_gather"], seen["all_reduce"]) == (gathers, sums)
