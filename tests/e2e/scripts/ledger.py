"""A model that is a ledger: after training, parameter i says how often example i was consumed in committed steps.

Each example's gradient is -1 at its own parameter, steps are means over M examples, and plain SGD with learning rate M
adds 1 for every consumption. What is lost, repeated or taken over wrongly on the way shows in the end.

What a test wants to know on the way is in ``<out>-trace/<pid>``: a line per step with the time, the committed steps,
the generation, the rank, the number of replicas and the averages that the noise scale comes from.
"""

import argparse
import contextlib
import json
import logging
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from pollux import train
from pollux.train.team import BrokenGroup


class Numbers(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


class Ledger(torch.nn.Module):
    def __init__(self, length):
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(length, dtype=torch.float64))
        self.register_buffer("num_forward", torch.zeros((), dtype=torch.int64))

    def forward(self, indices):
        if self.training:
            self.num_forward += 1
        return self.counts[indices]


def shard(model, mesh):
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=mesh)


def noise_of(run):
    """What the noise scale comes from, as one word."""
    state = run._session.state.exchange.moments.state_dict()
    return json.dumps(state, default=torch.Tensor.tolist, separators=(",", ":"))


class Deaf:
    """A sum that the others get and this replica does not, as when a peer dies in the middle of it."""

    def __init__(self, sums):
        self.sums = sums

    def wait(self):
        self.sums.wait()
        raise BrokenGroup("pretended")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=240)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--setup-s", type=float, default=0.0, help="how long a newcomer takes before it is ready")
    parser.add_argument("--step-s", type=float, default=0.01, help="before the forward pass")
    parser.add_argument("--after-s", type=float, default=0.0, help="from the optimizer's step to the end of the body")
    parser.add_argument("--hurry", type=Path, help="no waiting any more once this file is there")
    parser.add_argument("--save-s", type=float, help="between checkpoints, instead of half a minute and more")
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--oom-at", type=int, help="the step in which rank 1 pretends to have no memory left, once")
    parser.add_argument("--own-s", type=float, help="a sum of the script's own in each step; but for rank 0, so late")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shard", action="store_true", help="over the replicas, by fully_shard")
    parser.add_argument("--deaf-at", type=int, help="the step whose small all-reduce fails on rank 1 alone")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = train.init(checkpoint_every_s=args.save_s, timeout_s=args.timeout_s)
    loader = run.dataloader(Numbers(args.length), args.batch, shuffle=True, seed=3)
    model = Ledger(args.length)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.batch, momentum=0.0)
    model, optimizer = run.prepare(model, optimizer, scaling="none", shard=shard if args.shard else None)
    traces = args.out.with_name(f"{args.out.name}-trace")
    traces.mkdir(parents=True, exist_ok=True)
    trace = (traces / str(os.getpid())).open("a", buffering=1)
    time.sleep(args.setup_s)

    def pause(duration_s):
        if args.hurry is None or not args.hurry.exists():
            time.sleep(duration_s)

    epochs = []
    for epoch in run.epochs(args.epochs):
        epochs.append(epoch)
        for indices in loader:
            place = run.num_steps, run.generation, run.rank, run.world_size
            print(time.time(), *place, noise_of(run), file=trace)
            pause(args.step_s)
            can_fail = args.oom_at is not None or args.own_s is not None
            with run.attempt() if can_fail else contextlib.nullcontext():
                if args.oom_at == run.num_steps and run.rank == 1:
                    args.oom_at = -1
                    raise torch.OutOfMemoryError("pretended")
                loss = -model(indices).mean()
                if args.own_s is not None:
                    pause(args.own_s if run.rank > 0 else 0.0)
                    dist.all_reduce(loss.detach().clone())
                loss.backward()
                optimizer.step()
                if args.deaf_at == run.num_steps and run.rank == 1:
                    exchange = run._session.state.exchange
                    exchange._sum = Deaf(exchange._sum)
                pause(args.after_s)
                optimizer.zero_grad()
    counts = model.module.counts.detach()
    result = {
        "counts": (counts.full_tensor() if args.shard else counts).tolist(),
        "epochs": epochs,
        "steps": run.num_steps,
        "rank": run.rank,
        "size": run.world_size,
        "generation": run.generation,
        "passes": run.progress.num_passes,
        "pid": os.getpid(),
    }
    temporary = args.out.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(result))
    temporary.rename(args.out.with_name(f"{args.out.name}-{run.rank}.json"))


if __name__ == "__main__":
    main()
