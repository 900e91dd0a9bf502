"""Optimizers for which a larger batch means something else: Lion, and those that nobody here knows.

A pass takes the same time whatever its batch, by a clock that passes advance, so larger batches look free.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from torch import nn

from pollux import train
from pollux.train import step_timer, tuner
from pollux.train.noise import steps_averaged

INITIAL, NUM_ROWS, EPOCHS = 20, 3000, 5


class Lion(torch.optim.Optimizer):
    """Chen et al., 2023."""

    def __init__(self, parameters, lr, betas=(0.9, 0.99)):
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for one in group["params"]:
                mean = self.state[one].setdefault("exp_avg", torch.zeros_like(one))
                one.add_((mean * beta1 + one.grad * (1 - beta1)).sign(), alpha=-group["lr"])
                mean.mul_(beta2).add_(one.grad, alpha=1 - beta2)


class Signless(torch.optim.Optimizer):
    """Plain gradient descent under a name of its own."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                one.add_(one.grad, alpha=-group["lr"])


class Clock:
    now = 0.0

    def __call__(self):
        return self.now

    def on_forward(self, model, inputs):
        if model.training:
            self.now += 0.01


def problem(seed):
    """Classes drawn by a noisy teacher."""
    torch.manual_seed(100 + seed)
    x = torch.randn(NUM_ROWS, 20)
    teacher = torch.randn(20, 16), torch.randn(16, 5)
    noise = 0.7 * torch.randn(NUM_ROWS, 5)
    y = (torch.tanh(x @ teacher[0] / 4) @ teacher[1] + noise).argmax(1)
    return x, y


def fit(monkeypatch, make, seed, policy, scaling="auto", epochs=EPOCHS):
    """The training loss, the batches on the way, and the largest epoch count, at so much progress."""
    clock = Clock()
    for module in (step_timer, tuner):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock, monotonic=clock))
    x, y = problem(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 64, bias=False), nn.Tanh(), nn.Linear(64, 5, bias=False))
    optimizer = make(model.parameters())
    model.register_forward_pre_hook(clock.on_forward)
    batches = set()
    with train.init() as run:
        data = torch.utils.data.TensorDataset(x, y)
        loader = run.dataloader(data, INITIAL, max_batch_size=32 * INITIAL, shuffle=True, policy=policy)
        model, optimizer = run.prepare(model, optimizer, scaling=scaling)
        for _ in run.epochs(epochs):
            for rows, classes in loader:
                F.cross_entropy(model(rows), classes).backward()
                optimizer.step()
                optimizer.zero_grad()
                if not run.is_exploring:
                    batches.add(run.batch.total)
        with torch.no_grad():
            return F.cross_entropy(model(x), y).item(), batches, run


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_lion_learns_as_much_per_epoch_as_with_its_own_batch(monkeypatch, seed):
    """Its momentum averages the noise away, so that the raw noise scale promises what larger batches do not keep."""
    adaptive, batches, _ = fit(monkeypatch, lambda found: Lion(found, lr=5e-4), seed, "adaptive")
    fixed, _, _ = fit(monkeypatch, lambda found: Lion(found, lr=5e-4), seed, "fixed")
    print(f"adaptive {adaptive:.4f}, fixed {fixed:.4f}, batches {sorted(batches)}")
    assert adaptive <= 1.02 * fixed


def test_lions_noise_is_that_of_its_average():
    """By drawing it: the variance of β1·m + (1-β1)·g, with m an average with β2, for noise alone."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(3000, 400, generator=generator, dtype=torch.float64)
    beta1, beta2 = 0.9, 0.95
    mean, found = torch.zeros(400, dtype=torch.float64), []
    for row in draws:
        found.append(beta1 * mean + (1 - beta1) * row)
        mean = beta2 * mean + (1 - beta2) * row
    variance = torch.stack(found[200:]).var().item()
    optimizer = Lion([nn.Parameter(torch.ones(2))], lr=0.1, betas=(beta1, beta2))
    assert 1 / steps_averaged(optimizer) == pytest.approx(variance, rel=0.02)


def test_other_optimizers_count_each_gradient():
    found = [nn.Parameter(torch.ones(2))]
    for other in (torch.optim.Adam(found), torch.optim.SGD(found, lr=0.1, momentum=0.9), Signless(found, 0.1)):
        assert steps_averaged(other) == 1.0
    assert steps_averaged(Lion(found, lr=0.1, betas=(0.9, 1.0))) == 1.0  # no average that can be known


def test_the_batch_of_an_unknown_optimizer_stays_unless_a_rule_is_named(monkeypatch, caplog):
    """At the same rate, a larger batch may teach no more than a small one."""
    _, batches, run = fit(monkeypatch, lambda found: Signless(found, 0.1), 0, "adaptive", epochs=2)
    assert batches == {INITIAL} and run.num_steps == math.ceil(NUM_ROWS / INITIAL) * 2
    assert "no learning-rate rule is known for Signless: its rate and an adaptive batch stay" in caplog.text
    _, batches, _ = fit(monkeypatch, lambda found: Signless(found, 0.1), 0, "adaptive", scaling="none", epochs=2)
    assert max(batches) > INITIAL
