"""A trial of a study whose values follow from its parameters: a small network in double precision, whose batch stays.

It logs ``loss`` after each epoch. It may be killed, resized and started again: the values differ in late digits only.
"""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from pollux import train

NUM_EXAMPLES, BATCH = 192, 12


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--step-s", type=float, default=0.02)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(NUM_EXAMPLES, 5, dtype=torch.float64)
    y = torch.sin(x @ torch.randn(5, 1, dtype=torch.float64))
    run = train.init()
    module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=run.param("lr", 0.05), momentum=run.param("momentum", 0.5))
    loader = run.dataloader(TensorDataset(x, y), BATCH, shuffle=True, seed=1, policy="fixed")
    model, optimizer = run.prepare(module, optimizer, scaling="none")
    for _ in run.epochs(args.epochs):
        for inputs, targets in loader:
            time.sleep(args.step_s)
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            run.log(loss=nn.functional.mse_loss(module(x), y).item())


main()
