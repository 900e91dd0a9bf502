"""Measures learning curves of the digits network for many parameter sets: the table that simulated studies read.

Trial k of a study with random sampling and seed 0 has the parameters of row k. The file that is there is gone on with.

    python benchmarks/digits_curves.py --trials 200 --out src/pollux/evaluation/digits_curves.csv
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from pollux.api.request import JobRequest
from pollux.api.space import parse_parameter
from pollux.api.study import StudyRequest
from pollux.tune.storage import StudyStorage

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from digits_study import build_model, load_data, validate

SPACE = ("lr=log:1e-4..1.0", "momentum=0.5..0.99", "width=choice:8,16,32", "dropout=0.0..0.6")
EPOCHS, BATCH = 16, 32


def draw(num_trials: int) -> list[dict[str, float]]:
    """What the study's own sampler draws."""
    request = StudyRequest(
        job=JobRequest(command=("python", "train.py")),
        space=tuple(map(parse_parameter, SPACE)),
        name="digits",
        metric="val_loss",
        trials=num_trials,
        sampler="random",
    )
    study = StudyStorage(None).create(request, 0.0)
    return [{name: float(value) for name, value in study.ask().params.items()} for _ in range(num_trials)]


def measure(params: dict[str, float]) -> list[float]:
    """The validation loss after each epoch; a loss that is not finite stays so."""
    torch.manual_seed(0)
    data, test = load_data()
    images, labels = data.tensors
    model = build_model(int(params["width"]), params["dropout"])
    optimizer = torch.optim.SGD(model.parameters(), lr=params["lr"], momentum=params["momentum"])
    found: list[float] = []
    for _ in range(EPOCHS):
        if found and not math.isfinite(found[-1]):
            found.append(found[-1])
            continue
        for chosen in torch.randperm(len(images)).split(BATCH):
            F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(validate(model, *test.tensors)[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    drawn = draw(args.trials)
    num_done = len(args.out.read_text().splitlines()) - 1 if args.out.exists() else 0
    with args.out.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if num_done <= 0:
            writer.writerow([*drawn[0], *(f"epoch_{number}" for number in range(1, EPOCHS + 1))])
        for params in drawn[max(num_done, 0) :]:
            values = [f"{value:.4g}" for value in measure(params)]
            writer.writerow([*(f"{value:.6g}" for value in params.values()), *values])
            file.flush()


if __name__ == "__main__":
    main()
