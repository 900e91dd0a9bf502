"""A small convolutional network that reads handwritten digits: scikit-learn's 1797 images of 8 x 8 pixels."""

import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import TensorDataset

from pollux import train


def load_data() -> tuple[TensorDataset, TensorDataset]:
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.2, stratify=y, random_state=0)
    return TensorDataset(x_train, y_train), TensorDataset(x_test, y_test)


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Linear(64, 10),
    )


@torch.no_grad()
def evaluate(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """The share of images read correctly."""
    model.eval()
    x, y = data.tensors
    accuracy = (model(x.to(device)).argmax(1).cpu() == y).float().mean().item()
    model.train()
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-batch-size", type=int, default=512)
    parser.add_argument("--emulate-device", metavar="MS", dest="ms", type=float, default=0.0, help="wait per example")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the network is too small for more
    run = train.init()
    device = run.device

    data, test_data = load_data()
    loader = run.dataloader(
        data, batch_size=args.batch_size, max_batch_size=args.max_batch_size, device_batch_size=(8, 256), shuffle=True
    )
    model = build_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

    if args.ms:  # by a sleep in the forward pass, which counts as computing; the gradients are real
        if run.rank == 0:
            print(f"emulating a device: a training pass takes 20 ms and {args.ms:g} ms per example more", flush=True)
        model.register_forward_pre_hook(
            lambda m, x: time.sleep(0.02 + args.ms * len(x[0]) / 1e3) if m.training else None
        )
    model, optimizer = run.prepare(model, optimizer, lr_scheduler)
    start = time.time()
    for epoch in run.epochs(args.epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        lr_scheduler.step()
        accuracy = evaluate(model, test_data, device)
        run.log(accuracy=accuracy)
        if run.rank == 0:
            print(f"epoch {epoch + 1:2d}: test accuracy {accuracy:.2%}, {time.time() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
