"""AdaScale on a real example: at 8 x M0 the loss at equal progress is that at M0. The other rules: benchmarks/."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from pollux.train import adaptation, scaling
from pollux.train.adaptation import Adaptation
from tests.long import long

if importlib.util.find_spec("sklearn") is None:  # found only: importing it takes a second, in every process
    pytest.skip("needs scikit-learn", allow_module_level=True)


@pytest.fixture(scope="module")
def rules():
    path = Path(__file__).resolve().parents[3] / "benchmarks" / "scaling_rules.py"
    spec = importlib.util.spec_from_file_location("scaling_rules", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.set_num_threads(1)
    return module


@pytest.mark.parametrize("num_seeds", [1, 2])
@long
def test_adascale_learns_at_eight_times_the_batch_what_m0_learns(rules, monkeypatch, num_seeds):
    # The rule itself, from the first step on. A run would get there by doublings, with the rate gliding after them.
    monkeypatch.setattr(scaling, "GLIDE", 1e9)
    monkeypatch.setattr(scaling, "MAX_GLIDE", 1e9)
    monkeypatch.setattr(Adaptation, "direction", lambda self, trainee: 1)
    monkeypatch.setattr(adaptation, "MEASURING_BUDGET", 1e9)  # every step is measured, however busy the machine is
    num_epochs = 10
    grid = np.arange(6.0, num_epochs - 0.5, 0.25)  # before, both sit on the same plateau
    tuned = rules.mean_curve("none", 1, num_epochs, num_seeds, grid)
    adaptive = rules.mean_curve("adascale", 8, num_epochs, num_seeds, grid)
    unscaled = rules.mean_curve("none", 8, num_epochs, 1, grid)
    # Two seeds of M0 differ by a factor of about 1.3 at equal progress; the plain rate is behind by far more.
    assert np.exp(abs(np.median(adaptive - tuned))) < 1.6
    assert np.exp(np.median(unscaled - tuned)) > 3
