"""What the fork server imports before it forks replicas, and what each replica sets anew. Called by ``fork_main``."""

from __future__ import annotations

import gc
import os
import random
import sys


def preload() -> None:
    """Everything slow that a training script will need, and nothing that wakes CUDA or starts a thread."""
    import torch
    import torch._dynamo
    import torch.distributed
    import torch.nn.parallel

    from pollux import train

    for name in train.__all__:
        getattr(train, name)  # which loads it
    # The first optimizer loads much of torch. Constructed only: a step, even on the CPU, would touch CUDA.
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    gc.collect()
    gc.freeze()  # these objects will not be looked at again: their pages stay shared


def adopt_environment() -> None:
    """In a forked replica: what torch would have read from its environment, and random numbers of its own."""
    if "torch" not in sys.modules:  # it is not installed
        return
    import numpy as np
    import torch

    if os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        torch.set_num_threads(max(int(os.environ["OMP_NUM_THREADS"]), 1))
    random.seed()
    np.random.seed()
    torch.default_generator.seed()  # not torch.seed(), which would queue a call for CUDA
