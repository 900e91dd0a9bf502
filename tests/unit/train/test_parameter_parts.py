"""A model's parameters in parts, whose squared norms are measured apart; and what replicas exchange of them."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F

from pollux import train
from pollux.train.gradients import Norms
from pollux.train.noise import squared_norm
from pollux.train.parameter_parts import NUM_PARTS, ParameterParts
from pollux.train.step_exchange import MIN_SAMPLES, MeasuredStep, StepExchange
from pollux.train.team import Team


def parameters(*sizes: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(size)) for size in sizes]


def identities(tensors: list[torch.nn.Parameter]) -> tuple[int, ...]:
    return tuple(map(id, tensors))


def test_the_largest_parameters_are_parts_of_their_own_and_all_others_the_last():
    small, large, new = parameters(*[2] * 10), parameters(*range(100, 115)), parameters(7)
    frozen = torch.nn.Parameter(torch.randn(10_000), requires_grad=False)
    parts = ParameterParts(torch.optim.SGD([frozen, *small, *large], lr=0.1))
    tensors = [*small, *large, *new]
    found = parts.squared_norms([one.detach() for one in tensors], identities(tensors), 2.0)
    assert found.shape == (NUM_PARTS,)
    for part, one in enumerate(large):
        assert found[part].item() == pytest.approx(one.detach().square().sum().item() / 4)
    assert found[-1].item() == pytest.approx(sum(one.detach().square().sum().item() for one in [*small, *new]) / 4)
    assert found.sum().item() == pytest.approx(squared_norm([one.detach() for one in tensors], 2.0).item())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_types_do_not_matter(dtype):
    """Neither a default type that a script has set, nor gradients of several types."""
    tensors = [*parameters(4, 5), torch.nn.Parameter(torch.randn(6).to(dtype))]
    expected = squared_norm([one.detach() for one in tensors], 1.0).item()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        parts = ParameterParts(torch.optim.SGD(tensors, lr=0.1))
        found = parts.squared_norms([one.detach() for one in tensors], identities(tensors), 1.0)
    finally:
        torch.set_default_dtype(before)
    assert found.dtype == torch.float32 and found.sum().item() == pytest.approx(expected, rel=1e-2)


def test_two_models_are_exchanged_side_by_side():
    exchange = StepExchange(Team(torch.device("cpu"), timeout_s=1.0))
    exchange.open([1.0, 1.0], drives=None)
    measured = MeasuredStep(num_gradients=2, batch_size=8.0, count=2.0, scale=1.0, initial_batch=16)
    norms = [Norms(torch.full((NUM_PARTS,), value * 2), torch.ones(NUM_PARTS), 0.0, ()) for value in (2.0, 3.0)]
    for step in range(MIN_SAMPLES + 1):
        exchange.start(step, wants_attention=step == 3, interval=4, directions=[1, -1])
        assert exchange.finish() == (step == 3, 4, [1, -1])
        exchange.add(step, norms, measured)
    first, second = (channel.noise for channel in exchange.channels)
    # |G|² = 2·1 - value has no room for noise in the second, and var = 16·(value - 1).
    assert first is not None and second is not None
    assert exchange.channels[0].last_sqr == pytest.approx(0.0) and exchange.channels[1].last_sqr == pytest.approx(-16.0)
    assert second.var > first.var > 0 and exchange.lead in (0, 1)


@pytest.mark.parametrize("width", [1, 4])
def test_complex_parameters_are_measured_with_adam(width):
    """A column would be broadcast to a wrong norm, where anything wider raises."""
    torch.manual_seed(0)

    class Wave(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, width, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.view_as_real(x.to(torch.complex64) @ self.weight).flatten(1)

    model = Wave()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x, y = torch.randn(2048, 8), torch.randn(2048, 2 * width)
    with train.init() as run:
        loader = run.dataloader(torch.utils.data.TensorDataset(x, y), 16, max_batch_size=64, shuffle=True)
        model, optimizer = run.prepare(model, optimizer)
        for _ in run.epochs(1):
            for batch, target in loader:
                F.mse_loss(model(batch), target).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert run.noise_scale > 1
