"""A real server with a real engine, for tests of those who talk to one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pollux.server.config import ServiceConfig
from pollux.server.service import Service
from tests.leftovers import processes_in

WAIT_S = 90.0  # for what takes a second or two on an idle machine

# Trains until it has made its steps; small, but measured, resized and reported like any other.
ELASTIC = """
import sys, time
import torch
from torch.utils.data import TensorDataset
from pollux import train

torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 4), torch.randn(512, 1))
run = train.init()
loader = run.dataloader(data, batch_size=32, max_batch_size=128, device_batch_size=(8, 64))
model = torch.nn.Linear(4, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
for epoch in run.epochs(int(sys.argv[1])):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        time.sleep(0.01)
        optimizer.step()
        optimizer.zero_grad()
    run.log(loss=float(loss))
"""


def config_of(directory: Path, **settings: object) -> ServiceConfig:
    return ServiceConfig(**{"data_directory": directory, "port": 0, "slots": 4, "stop_timeout_s": 30.0, **settings})


@contextlib.contextmanager
def live_server(directory: Path) -> Iterator[Service]:
    """With 4 CPU slots."""
    with Service(config_of(directory)) as service:
        yield service


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    ends_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_at, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


def nobody_works_in(folder: Path) -> None:
    """But for ourselves."""
    eventually(lambda: set(processes_in(folder)) <= {os.getpid()}, f"the last process in {folder} ends", 20.0)
