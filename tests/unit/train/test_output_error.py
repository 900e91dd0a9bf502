"""What the growth guard compares: a loss that the model returns, else the gradient of the loss by the outputs."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from pollux.train.output_error import OutputError


def outputs(scale: float) -> tuple[Tensor, Tensor]:
    """Features, and a number that training raises, as a contrastive model returns its temperature."""
    return torch.ones(4, 3, requires_grad=True), torch.tensor(scale, requires_grad=True)


def test_a_number_that_is_no_loss_is_not_taken_for_one():
    errors = OutputError()
    for step in range(1, 7):
        features, scale = outputs(10.0 + step)
        errors.watch((features, scale), 4, 1.0)
        (features * scale).square().mean().backward()
        values = errors.take()
        gradient = 2 * (10.0 + step) ** 2 * torch.ones(4, 3) / 12
        expected = [4 * float(gradient.square().sum())] if step > 2 else []
        assert values == pytest.approx(expected, rel=1e-4)


def test_a_number_that_the_loss_does_not_use_is_not_taken_for_one():
    errors = OutputError()
    found = []
    for _ in range(4):
        features, scale = outputs(10.0)
        errors.watch({"scale": scale, "features": features}, 4, 1.0)
        features.square().mean().backward()
        found += errors.take()
    assert found == pytest.approx([4 * 12 * (2 / 12) ** 2] * 2)


@pytest.mark.parametrize("share", [1.0, 0.25])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_loss_beside_other_outputs_is_taken(share, scale):
    errors = OutputError()
    found = []
    for value in (3.0, 2.0, math.nan, 1.0):
        logits = torch.full((4, 3), value, requires_grad=True)
        loss = logits.mean()
        errors.watch((logits, loss), 4, torch.tensor(scale))
        (loss * share * scale).backward()
        found += errors.take()
    assert found == pytest.approx([2.0, math.nan, 1.0], nan_ok=True)


def test_a_model_that_returns_its_loss_alone_needs_one_step():
    errors = OutputError()
    loss = torch.tensor(2.0, requires_grad=True)
    errors.watch(loss, 4, 1.0)
    assert errors.take() == [2.0]
