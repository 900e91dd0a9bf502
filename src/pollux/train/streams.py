"""Random streams of replicas: each draws numbers of its own, and they follow from the script's seed.

The handover of state calls it. Rank 0 of a run goes on with the stream that the script has seeded, as plain PyTorch
would. Other ranks get a stream that follows from (rank 0's seed, committed steps, rank) when they join, unless the
script has seeded them by rank. A replica that stays keeps its stream through resizes.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from pollux.train.order import torch_seed


def script_seed() -> int:
    """The seed that the script has given to torch; torch's fixed default if it gave none."""
    return torch.initial_seed()


def begin_stream(seed: int, num_steps: int, rank: int) -> None:
    """Seed Python's, numpy's, torch's and the device's generators."""
    own = torch_seed(seed % 2**63, num_steps, rank)
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)
