"""A diffusion model of points, in the shape of public DDPM scripts: a stream of shards, an EMA, clipped gradients."""

import argparse
import copy
import math
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=24)
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--ema-decay", type=float, default=0.95)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()
torch.manual_seed(args.seed)

STEPS, SHARDS, PER_SHARD = 50, 10, 128
CENTRES = torch.tensor([[math.cos(k * math.pi / 3), math.sin(k * math.pi / 3)] for k in range(6)])


class Shards(IterableDataset):
    """Points around six centres, shard after shard, shuffled in a buffer, as webdataset reads tar files."""

    def __init__(self, buffer_size=256):
        self.buffer_size = buffer_size
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        worker = get_worker_info()
        shards = list(range(SHARDS))
        random.Random(self.epoch).shuffle(shards)
        if worker is not None:
            shards = shards[worker.id :: worker.num_workers]
        buffer = []
        draw = random.Random(self.epoch)
        for shard in shards:
            generator = torch.Generator().manual_seed(shard)
            which = torch.randint(len(CENTRES), (PER_SHARD,), generator=generator)
            for point in CENTRES[which] + 0.08 * torch.randn(PER_SHARD, 2, generator=generator):
                buffer.append(point)
                if len(buffer) >= self.buffer_size:
                    yield buffer.pop(draw.randrange(len(buffer)))
        draw.shuffle(buffer)
        yield from buffer


class Denoiser(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.time = nn.Embedding(STEPS, width)
        self.first = nn.Linear(2, width)
        self.middle = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.last = nn.Linear(width, 2)

    def forward(self, x, t):
        x = self.first(x) + self.time(t)
        for layer in self.middle:
            x = x + F.silu(layer(F.silu(x)))
        return self.last(x)


betas = torch.linspace(1e-3, 0.15, STEPS)
alphas = torch.cumprod(1 - betas, 0)
dataset = Shards()
loader = DataLoader(dataset, batch_size=args.batch_size, num_workers=args.workers)
model = Denoiser()
ema = copy.deepcopy(model).eval().requires_grad_(False)
if args.compile:
    model = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-4)
total = args.epochs * (SHARDS * PER_SHARD // args.batch_size)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min(step / 20, 1.0) * 0.5 * (1 + math.cos(math.pi * min(step / total, 1.0)))
)


@torch.no_grad()
def update_ema():
    for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
        slow.lerp_(fast, 1 - args.ema_decay)


@torch.no_grad()
def sample(count):
    x = torch.randn(count, 2)
    for t in reversed(range(STEPS)):
        noise = ema(x, torch.full((count,), t))
        x = (x - betas[t] / (1 - alphas[t]).sqrt() * noise) / (1 - betas[t]).sqrt()
        if t:
            x = x + betas[t].sqrt() * torch.randn_like(x)
    return x


def distance(points):
    """Mean distance to the next centre."""
    return torch.cdist(points, CENTRES).min(1).values.mean().item()


for epoch in range(args.epochs):
    dataset.set_epoch(epoch)
    losses = []
    for x in loader:
        t = torch.randint(STEPS, (len(x),))
        noise = torch.randn_like(x)
        noisy = alphas[t, None].sqrt() * x + (1 - alphas[t, None]).sqrt() * noise
        loss = F.mse_loss(model(noisy, t), noise)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        update_ema()
        losses.append(loss.item())
    print(f"epoch {epoch} loss {sum(losses) / len(losses):.4f} rate {scheduler.get_last_lr()[0]:.5f}")
    torch.save({"model": model.state_dict(), "ema": ema.state_dict()}, "checkpoint.pt")
print(f"result {distance(sample(512)):.4f}")
