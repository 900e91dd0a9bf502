"""Small scripts in the style of public ones, ported as ``docs/porting.md`` says. Each writes its quality as JSON."""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from pollux import train


def pause(args):
    if not args.hurry.exists():
        time.sleep(0.02)


def blobs(num_examples=360):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(num_examples) % 3
    return torch.randn(num_examples, 8, generator=generator) + 2.0 * F.one_hot(labels, 8), labels


def mnist(run, args):
    """A classifier with BatchNorm and dropout, a scheduler between epochs, sums over an epoch."""
    x, y = blobs()
    loader = run.dataloader(TensorDataset(x, y), 16, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    model, optimizer = run.prepare(model, optimizer, scheduler)
    total = 0.0
    for _ in run.epochs(args.length):
        model.train()
        for data, target in loader:
            pause(args)
            optimizer.zero_grad()
            F.cross_entropy(model(data), target).backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            total = run.mean((model(x).argmax(1) == y).float().mean())
    assert scheduler.last_epoch == args.length
    return total


def nano_gpt(run, args):
    """Counts steps, draws its own batches, sets the rate by hand, saves from the main process."""
    x, y = blobs()
    master_process = run.rank == 0
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = run.prepare(model, optimizer)
    for step in run.steps(args.length * 20, batch_size=16):
        pause(args)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / (args.length * 20))
        rows = torch.randint(len(x), (run.local_batch_size,))
        if run.every(50) and master_process:
            run.save({"model": model.state_dict(), "step": step}, f"{args.out}-gpt.pt")
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return (model(x).argmax(1) == y).float().mean().item()


def dcgan(run, args):
    """Two models and two optimizers."""
    x, _ = blobs()
    loader = run.dataloader(TensorDataset(x), 16, shuffle=True)
    g, d = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    optimizers = torch.optim.Adam(g.parameters(), lr=1e-2), torch.optim.Adam(d.parameters(), lr=1e-2)
    (g, d), (opt_g, opt_d) = run.prepare((g, d), optimizers)
    for _ in run.epochs(args.length):
        for (real,) in loader:
            pause(args)
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            d.zero_grad()
            F.binary_cross_entropy_with_logits(d(real), ones).backward()
            fake = g(torch.randn(len(real), 4))
            F.binary_cross_entropy_with_logits(d(fake.detach()), zeros).backward()
            opt_d.step()
            g.zero_grad()
            F.binary_cross_entropy_with_logits(d(fake), ones).backward()
            opt_g.step()
    distance = (g(torch.randn(500, 4)).mean(0) - x.mean(0)).norm().item()
    return 1.0 - min(distance / x.mean(0).norm().item(), 1.0)


def reinforce(run, args):
    """A policy gradient: every step plays its share of episodes, of one choice each."""
    x, y = blobs()
    policy = nn.Linear(8, 3)
    policy, optimizer = run.prepare(policy, torch.optim.Adam(policy.parameters(), lr=2e-2))
    for _ in run.steps(args.length * 20, batch_size=32):
        pause(args)
        rows = torch.randint(len(x), (run.local_batch_size,))
        choice = torch.distributions.Categorical(logits=policy(x[rows]))
        action = choice.sample()
        reward = (action == y[rows]).float() - 1 / 3
        optimizer.zero_grad()
        (-choice.log_prob(action) * reward).mean().backward()
        optimizer.step()
    return (policy(x).argmax(1) == y).float().mean().item()


KINDS = {"mnist": mnist, "nano_gpt": nano_gpt, "dcgan": dcgan, "reinforce": reinforce}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--length", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hurry", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    run = train.init()
    quality = KINDS[args.kind](run, args)
    if run.is_main:
        result = {"quality": quality, "steps": run.num_steps, "size": run.world_size}
        args.out.with_name(f"{args.out.name}-{args.kind}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
