"""φ of real models in mid-training is the same however a batch is divided: over replicas, passes, or halves.

Weights are frozen after some training. Then the run's own code measures φ at one total batch, divided as (K, s, m), at
a learning rate of 0. Each takes the examples in an order of its own, so that the estimates are as independent as their
errors say. All pairs of them lie within three standard errors.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
if importlib.util.find_spec("sklearn") is None:
    pytest.skip("needs scikit-learn", allow_module_level=True)

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

from pollux.train import adaptation
from pollux.train.batching import FixedBatch
from tests.long import long
from tests.unit.train.processes import a_run, replicas

TRAIN_STEPS, TRAIN_BATCH = 150, 16
TOTAL, NUM_STEPS = 32, 100  # of the measurement
SHAPES = {  # by name: K, m
    "split": (1, 32),
    "two passes": (1, 16),
    "four passes": (1, 8),
    "eight passes": (1, 4),
    "two replicas": (2, 16),
    "two replicas, two passes": (2, 8),
    "four replicas": (4, 8),
}
State = dict[str, Any]


def example(name: str) -> Any:
    path = Path(__file__).resolve().parents[3] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gpt() -> tuple[nn.Module, torch.optim.Optimizer, Dataset[Any]]:
    """The example's GPT with fewer and narrower layers."""
    module = example("char_gpt")
    module.WIDTH, module.LAYERS, module.HEADS, module.CONTEXT = 32, 2, 2, 32
    data, _ = module.load_data(num_windows=TOTAL * NUM_STEPS)
    model = module.GPT()
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.1), data


def cnn() -> tuple[nn.Module, torch.optim.Optimizer, Dataset[Any]]:
    """Digits twice over, with noise, so that there are examples enough."""
    data, _ = example("digits").load_data()
    images, labels = data.tensors
    copies = -(-TOTAL * NUM_STEPS // len(images))
    images, labels = images.repeat(copies, 1, 1, 1), labels.repeat(copies)
    images = images + 0.2 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), TensorDataset(images, labels)


TASKS = {"GPT, AdamW": gpt, "CNN, SGD": cnn}


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    output = model(x)
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


def trained(task: str) -> tuple[State, State]:
    """Model and optimizer after some training, by plain PyTorch."""
    torch.manual_seed(0)
    model, optimizer, data = TASKS[task]()
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))  # type: ignore[arg-type]
    for step in range(TRAIN_STEPS):
        rows = [data[int(i)] for i in order[torch.arange(step * TRAIN_BATCH, (step + 1) * TRAIN_BATCH) % len(order)]]
        x, y = (torch.stack(part) for part in zip(*rows, strict=True))
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


@contextmanager
def every_step_measured() -> Iterator[None]:
    """All samples weigh the same, so that their average has the error that the samples show."""
    names = ("MAX_INTERVAL", "FIRST_INTERVAL", "FIRST_WINDOW_STEPS")
    before = [getattr(adaptation, name) for name in names]
    adaptation.MAX_INTERVAL, adaptation.FIRST_INTERVAL = 1, 1
    adaptation.FIRST_WINDOW_STEPS = adaptation.WINDOW_STEPS
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(adaptation, name, value)


def measured(task: str, states: tuple[State, State], device_batch: int, seed: int) -> dict[str, float]:
    """φ and its error, of the trained model that does not move any more."""
    torch.set_num_threads(1)
    model, optimizer, data = TASKS[task]()
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    moments = {name: value.clone() for name, value in _second_moments(optimizer)}

    def put_back(*_: Any) -> None:
        """v̂ stays that of the trained model: all measure in the same units."""
        for name, value in _second_moments(optimizer):
            value.copy_(moments[name])

    optimizer.register_step_post_hook(put_back)
    with every_step_measured(), a_run() as run:
        loader = run.dataloader(
            Subset(data, range(TOTAL * NUM_STEPS)), TOTAL, max_batch_size=2 * TOTAL,
            device_batch_size=device_batch, policy=FixedBatch(), shuffle=True, seed=seed,
        )  # fmt: skip
        replicated, optimizer = run.prepare(model, optimizer, scaling="none")
        for _ in run.epochs(1, by="passes"):
            for x, y in loader:
                optimizer.zero_grad()
                loss_of(replicated, x, y).backward()
                optimizer.step()
        state = run._session.state
        assert state is not None and state.exchange.noise is not None
        after = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
        assert torch.equal(before, after)
        noise = state.exchange.noise
        return {
            "phi": noise.noise_scale,
            "error": noise.error,
            "low": noise.noise_scale_low,
            "high": noise.noise_scale_high,
            "num_samples": state.num_measured,
        }


def _second_moments(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, Tensor]]:
    for index, state in enumerate(optimizer.state.values()):
        if "exp_avg_sq" in state:
            yield 2 * index, state["exp_avg_sq"]
            yield 2 * index + 1, state["step"]


@pytest.mark.parametrize("task", TASKS)
@long
def test_phi_of_a_real_model_does_not_depend_on_how_its_batch_is_divided(task):
    torch.set_num_threads(1)
    states = trained(task)
    found = {}
    for seed, (name, (num_replicas, device_batch)) in enumerate(SHAPES.items()):
        results = replicas(num_replicas, measured, task, states, device_batch, seed)
        assert all(result == results[0] for result in results)  # every rank knows the same
        found[name] = results[0]
    for name, result in found.items():
        least = 0.4 * NUM_STEPS if task == "GPT, AdamW" else 0.8 * NUM_STEPS  # AdamW's first 30 steps are not measured
        assert result["num_samples"] >= least, name
        assert 0 < result["error"] < 0.7 * result["phi"], (name, result)  # or agreement would mean nothing
        assert result["low"] < result["phi"] < result["high"]
    for one, other in itertools.combinations(found, 2):
        a, b = found[one], found[other]
        distance = abs(a["phi"] - b["phi"]) / math.hypot(a["error"], b["error"])
        assert distance < 3, (one, a, other, b)


@long
def test_a_split_step_measures_what_two_passes_measure():
    """The same halves of the same examples: not just close, but equal."""
    states = trained("CNN, SGD")
    split, passes = (replicas(1, measured, "CNN, SGD", states, device_batch, 7)[0] for device_batch in (32, 16))
    assert split == passes
