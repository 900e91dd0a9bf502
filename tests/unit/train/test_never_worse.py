"""The promise itself, on a small character GPT: adaptive training is never worse than the batch that the user tuned.

A pass takes the same time whatever its batch, as on a GPU that waits for its host, by a clock that passes advance: so
larger batches look free, and the batch is as large as the noise scale lets it be. What made this a trap was a noise
scale that was 10 to 50 times too large with one pass a step: batches jumped, rate and betas with them, and the model
was ruined.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F

from pollux import train
from pollux.train import step_timer, tuner
from tests.long import long

EXAMPLES = Path(__file__).parents[3] / "examples"
PASS_S, EXAMPLE_S = 0.1, 1e-5


def small_gpt():
    """The example's GPT, smaller still."""
    spec = importlib.util.spec_from_file_location("small_char_gpt", EXAMPLES / "char_gpt.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.CONTEXT, module.WIDTH, module.HEADS, module.LAYERS = 32, 48, 4, 2
    return module


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def on_forward(self, model, inputs):
        if model.training:
            self.now += PASS_S + EXAMPLE_S * len(inputs[0])


def fit(monkeypatch, gpt, policy, *, initial, examples, rate):
    """Trains on so many examples; returns the validation loss, the batches on the way, and the progress counted."""
    clock = Clock()
    for module in (step_timer, tuner):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock, monotonic=clock))
    torch.manual_seed(0)
    data, validation = gpt.load_data(8192)
    model = gpt.GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 40))
    model.register_forward_pre_hook(clock.on_forward)
    batches = []
    with train.init() as run:
        loader = run.dataloader(
            data,
            initial,
            max_batch_size=32 * initial,
            device_batch_size=(1, 32 * initial),
            shuffle=True,
            policy=policy,
        )
        model, optimizer = run.prepare(model, optimizer, scheduler)
        for _ in run.epochs(100):
            for x, y in loader:
                F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                if not getattr(run, "is_exploring", False) and (not batches or batches[-1] != run.batch.total):
                    batches.append(run.batch.total)
                if run.progress.num_examples >= examples:
                    break
            if run.progress.num_examples >= examples:
                break
        return gpt.evaluate(model.module, validation, run.device), batches, run.progress, clock.now


@pytest.mark.parametrize(("initial", "examples", "rate"), [(32, 24_000, 4e-3)])
@long
def test_adaptive_training_is_never_worse_than_the_batch_that_the_user_tuned(monkeypatch, initial, examples, rate):
    gpt = small_gpt()
    settings = {"initial": initial, "rate": rate}
    adaptive, batches, progress, adaptive_s = fit(monkeypatch, gpt, "adaptive", examples=examples, **settings)
    same_progress = int(progress.num_useful)
    fixed, _, _, fixed_s = fit(monkeypatch, gpt, "fixed", examples=same_progress, **settings)
    print(f"adaptive {adaptive:.4f}, fixed {fixed:.4f}, batches {batches}, {adaptive_s:.0f} s instead of {fixed_s:.0f}")
    assert adaptive <= 1.02 * fixed  # at equal progress
    reversals = sum((b - a) * (c - b) < 0 for a, b, c in zip(batches, batches[1:], batches[2:], strict=False))
    assert reversals == 0
    assert max(batches) > initial  # it is not by standing still that nothing is lost
    assert adaptive_s < fixed_s  # and there sooner
