"""Learning-rate rules at 8 x M0 on a real example: the training loss at equal progress, beside that at M0.

    python benchmarks/scaling_rules.py [--epochs 12] [--factor 8] [--seeds 3] [--plot FILE.html] [--json]

Progress is counted as the library counts it: a step of M examples is worth r·M0 of them, r being AdaScale's gain from
the measured noise scale. A rule is right if its curve lies on that of M0. The example is ``examples/plain/digits.py``,
without dropout and momentum, which are not part of AdaScale's theory.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from pollux import train

BATCH = 32
RATE = 0.05
RULES: dict[str, Any] = {
    "adascale": "adascale",
    "linear": "linear",
    "legw": train.LEGW(warmup_steps=40),
    "sqrt": "sqrt",
    "none": "none",
}


def example() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "examples" / "plain" / "digits.py"
    spec = importlib.util.spec_from_file_location("digits", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def curve(rule: Any, factor: int, num_epochs: int, seed: int) -> list[tuple[float, float]]:
    """(epochs of progress, loss over all training images) a few times per epoch."""
    digits = example()
    data, _ = digits.load_data()
    images, labels = data.tensors
    torch.manual_seed(seed)
    model = digits.build_model()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    points = []
    with train.init(device="cpu") as run:
        total = BATCH * factor
        loader = run.dataloader(
            data,
            BATCH,
            max_batch_size=total,
            device_batch_size=(1, 64),
            policy=train.FixedBatch(total),
            shuffle=True,
            seed=seed,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        replicated, optimizer = run.prepare(model, optimizer, scaling=rule)
        next_point = 0.0
        for _ in run.epochs(num_epochs):
            for x, y in loader:
                done = run.progress.num_useful / len(data)
                if done >= next_point:
                    with torch.no_grad():
                        points.append((done, float(F.cross_entropy(model(images), labels))))
                    next_point += 0.25
                F.cross_entropy(replicated(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    return points


def mean_curve(rule: Any, factor: int, num_epochs: int, seeds: int, grid: np.ndarray) -> np.ndarray:
    """The mean log loss over seeds, on a grid of progress."""
    curves = []
    for seed in range(seeds):
        x, y = zip(*curve(rule, factor, num_epochs, seed), strict=True)
        curves.append(np.interp(grid, x, np.log(np.minimum(np.nan_to_num(y, nan=1e3), 1e3))))
    return np.mean(curves, axis=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--factor", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    grid = np.arange(0.5, options.epochs - 0.25, 0.25)
    curves = {"M0": mean_curve("none", 1, options.epochs, options.seeds, grid)}
    for name, rule in RULES.items():
        curves[name] = mean_curve(rule, options.factor, options.epochs, options.seeds, grid)
    # How much further or less far than M0 a rule is, by the factor between the losses at equal progress.
    ratio = {name: float(np.exp(statistics.median(values - curves["M0"]))) for name, values in curves.items()}
    if options.json:
        losses = {name: np.exp(values).tolist() for name, values in curves.items()}
        print(json.dumps({"progress": grid.tolist(), "loss": losses, "ratio": ratio}))
    else:
        shown = [index for index, at in enumerate(grid) if at in (1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 11.0)]
        batches = f"batch {BATCH} (M0) and {BATCH * options.factor}"
        print(f"training loss after epochs of progress, {batches}, mean of {options.seeds} seeds")
        print(f"{'rule':10}" + "".join(f"{grid[index]:9.0f}" for index in shown) + f"{'of M0':>9}")
        for name, values in curves.items():
            print(f"{name:10}" + "".join(f"{np.exp(values[index]):9.4f}" for index in shown) + f"{ratio[name]:9.2f}")
    if options.plot is not None:
        import plotly.graph_objects as go

        figure = go.Figure()
        for name, values in curves.items():
            figure.add_scatter(x=grid, y=np.exp(values), name=name, line={"width": 4 if name == "M0" else 2})
        figure.update_yaxes(type="log", title="training loss")
        figure.update_xaxes(title="progress, in epochs at M0")
        figure.update_layout(title=f"Learning-rate rules at {options.factor} x M0, digits", template="plotly_white")
        figure.write_html(options.plot, include_plotlyjs=True)


if __name__ == "__main__":
    main()
