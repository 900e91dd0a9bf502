"""Fits a line with pollux.train, slowly: each example takes a little time, as on a device with more to do."""

import sys
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from pollux import train

NUM_EXAMPLES, EXAMPLE_S = 256, 0.002

torch.manual_seed(0)
x = torch.randn(NUM_EXAMPLES, 8)
y = x @ torch.randn(8, 1) + 0.1 * torch.randn(NUM_EXAMPLES, 1)
run = train.init()
loader = run.dataloader(TensorDataset(x, y), batch_size=16, max_batch_size=64, device_batch_size=(2, 32))
model = nn.Linear(8, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
for _epoch in run.epochs(int(sys.argv[1])):
    for inputs, targets in loader:
        time.sleep(EXAMPLE_S * len(inputs))
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
