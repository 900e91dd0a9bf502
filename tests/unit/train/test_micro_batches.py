"""Batches whose number of micro-gradients is not a whole number after rounding."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from pollux import train
from pollux.train.batching import BatchChoice, BatchSituation
from pollux.types import BatchConfig
from tests.unit.train.processes import Rows, small_model


@pytest.mark.parametrize(("device_batch", "num_passes"), [(49, 2), (98, 2), (47, 3), (39, 8)])
def test_the_noise_is_measured_whatever_the_size_of_equal_passes(device_batch, num_passes):
    """The harmonic mean of two 49s is a little more than 49 in floating point: 98 examples are not quite two of it."""
    total = device_batch * num_passes
    choice = BatchChoice(config=BatchConfig(device_batch, num_passes - 1), total=total)

    class Always:
        def choose(self, situation: BatchSituation) -> BatchChoice:
            return choice

    with train.init() as run:
        module = small_model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        loader = run.dataloader(
            Rows(4 * total), 16, max_batch_size=total, device_batch_size=(1, device_batch), policy=Always()
        )
        model, optimizer = run.prepare(module, optimizer)
        for _ in run.epochs(1, by="passes"):
            for _, x, y in loader:
                (model(x) - y).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert run.num_steps == 4
        assert run.noise_scale is not None
