"""The digits network with its learning rate, momentum, width and dropout as parameters of a study.

    pollux tune examples/digits_study.py --space lr=log:1e-4..1 --space momentum=0.5..0.99 \\
        --space width=choice:8,16,32 --space dropout=0.0..0.6 --metric val_loss --trials 24
"""

import argparse
import importlib.util
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from pollux import train


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Scikit-learn's file of digits, without importing scikit-learn: every trial would wait for that."""
    found = importlib.util.find_spec("sklearn")
    assert found is not None and found.origin is not None, "the digits come with scikit-learn"
    table = np.loadtxt(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    table = np.random.default_rng(0).permutation(table)
    x = torch.tensor(table[:, :-1], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(table[:, -1], dtype=torch.int64)
    return TensorDataset(x[360:], y[360:]), TensorDataset(x[:360], y[:360])


def build_model(width: int, dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 16, 64),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(64, 10),
    )


@torch.no_grad()
def validate(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """The mean loss, and the share of images read correctly."""
    model.eval()
    output = model(images)
    model.train()
    return F.cross_entropy(output, labels).item(), (output.argmax(1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--emulate-device", metavar="MS", dest="ms", type=float, default=0.0, help="wait per example")
    parser.add_argument("--emulate-launch", metavar="MS", type=float, default=20.0, help="and per step (default 20)")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the network is too small for more
    run = train.init()
    lr, momentum = run.param("lr", 0.05), run.param("momentum", 0.9)
    model = build_model(run.param("width", 16), run.param("dropout", 0.25)).to(run.device)
    data, test_data = load_data()
    images, labels = (one.to(run.device) for one in test_data.tensors)
    loader = run.dataloader(data, batch_size=32, max_batch_size=512, device_batch_size=(8, 256), shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    if args.ms:  # by a sleep in the forward pass, which counts as computing; the gradients are real
        model.register_forward_pre_hook(
            lambda m, x: time.sleep((args.emulate_launch + args.ms * len(x[0])) / 1e3) if m.training else None
        )
    model, optimizer = run.prepare(model, optimizer)
    for _ in run.epochs(args.epochs):
        for x, y in loader:
            F.cross_entropy(model(x.to(run.device)), y.to(run.device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        loss, accuracy = validate(model, images, labels)
        run.log(val_loss=loss, accuracy=accuracy)


if __name__ == "__main__":
    main()
