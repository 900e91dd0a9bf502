"""multiprocessing's fork server, as all tests of a worker use it: the first to start it decides what it has imported.

A replica that has to import torch itself takes a second of a core more than one that is forked with it.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOAD = [
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.nn.parallel",
    "torch.distributed.algorithms.join",
    "torch.testing",
    "pytest",
    "hypothesis",
    "tests.unit.train.processes",
]


def fork_context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context
