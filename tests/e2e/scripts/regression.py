"""A small regression in double precision that tells everything: batches, losses, and digests of all state.

``<out>/<pid>`` gets a line of JSON per step: the committed steps, generation, rank, the indices read, the loss over the
whole step's examples, and, in the first step of a generation, digests of parameters, optimizer and random state.
"""

import argparse
import hashlib
import json
import logging
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from pollux import train

NUM_EXAMPLES = 250  # not a multiple of the batch: the last step of an epoch is short
BATCH = 12
SEED = 3


def make_data():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(NUM_EXAMPLES, 5, generator=generator, dtype=torch.float64)
    y = torch.sin(x @ torch.randn(5, 1, generator=generator, dtype=torch.float64))
    return x, y


def make_model(kind):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=1e-2)
    return model, optimizer


def digest(tree):
    """Of any nest of tensors, arrays and numbers, to the last bit."""
    hashed = hashlib.blake2b(digest_size=8)

    def add(node):
        if isinstance(node, torch.Tensor):
            hashed.update(node.detach().cpu().numpy().tobytes())
        elif isinstance(node, np.ndarray):
            hashed.update(node.tobytes())
        elif isinstance(node, dict):
            for key in sorted(node, key=str):
                add(str(key))
                add(node[key])
        elif isinstance(node, list | tuple):
            for child in node:
                add(child)
        else:
            hashed.update(repr(node).encode())

    add(tree)
    return hashed.hexdigest()


def digests(model, optimizer):
    return {
        "parameters": digest(model.state_dict()),
        "optimizer": digest(optimizer.state_dict()),
        "torch": digest(torch.get_rng_state()),
        "numpy": digest(np.random.get_state()),
        "python": digest(random.getstate()),
    }


def seed_by(number):
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def draw():
    """Every generator moves in every step."""
    torch.rand(1), np.random.rand(), random.random()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--step-s", type=float, default=0.01)
    parser.add_argument("--hurry", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.set_num_threads(1)
    run = train.init()
    x, y = make_data()
    loader = run.dataloader(TensorDataset(torch.arange(NUM_EXAMPLES), x, y), BATCH, shuffle=True, seed=SEED)
    module, optimizer = make_model(args.optimizer)
    seed_by(os.getpid())  # newcomers must get the others' state, not happen to have it
    model, optimizer = run.prepare(module, optimizer, scaling="none")
    args.out.mkdir(parents=True, exist_ok=True)
    trace = (args.out / str(os.getpid())).open("a", buffering=1)
    generation = None

    def tell(**values):
        place = {"step": run.num_steps, "generation": run.generation, "rank": run.rank, "size": run.world_size}
        print(json.dumps({"pid": os.getpid(), **place, **values}), file=trace)

    for epoch in run.epochs(args.epochs):
        for indices, inputs, targets in loader:
            state = digests(module, optimizer) if run.generation != generation else None
            generation = run.generation
            if args.hurry is None or not args.hurry.exists():
                time.sleep(args.step_s)
            draw()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            num_own = loader.elastic.current.num_examples
            sums = torch.tensor([loss.item() * num_own, num_own], dtype=torch.float64)
            dist.all_reduce(sums)
            optimizer.step()
            optimizer.zero_grad()
            mean = (sums[0] / sums[1]).item()
            tell(epoch=epoch, indices=indices.tolist()[:num_own], loss=mean, digests=state)
    tell(digests=digests(module, optimizer), is_end=True)


if __name__ == "__main__":
    main()
