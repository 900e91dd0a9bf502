"""A character-level GPT that learns to write Python from the source of Python's own standard library."""

import argparse
import math
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from pollux import train

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 128, 64, 128, 4, 4  # ASCII; 0.8 million parameters


def load_data(num_windows: int) -> tuple[TensorDataset, TensorDataset]:
    """Windows of text, and the same one character on: from the first 90 % to train, from the rest to validate."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[!_]*.py"))
    source = b"".join(file.read_bytes() for file in files)[:2_000_000]
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8).clamp(max=VOCABULARY - 1).long()
    split = len(text) * 9 // 10

    def windows(part: torch.Tensor, count: int) -> TensorDataset:
        starts = torch.linspace(0, len(part) - CONTEXT - 1, count).long()
        tokens = part[starts[:, None] + torch.arange(CONTEXT + 1)]
        return TensorDataset(tokens[:, :-1], tokens[:, 1:])

    return windows(text[:split], num_windows), windows(text[split:], 256)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


@torch.no_grad()
def evaluate(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """Cross-entropy per character, in nats."""
    model.eval()
    x, y = (tensor.to(device) for tensor in data.tensors)
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()
    model.train()
    return loss


@torch.no_grad()
def generate(model: nn.Module, prompt: str, length: int, device: torch.device) -> str:
    model.eval()
    tokens = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(length):
        probabilities = F.softmax(model(tokens[:, -CONTEXT:])[:, -1] / 0.8, dim=-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1)], dim=1)
    return bytes(tokens[0].tolist()).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps-scale", type=float, default=1.0, help="makes an epoch so many times longer")
    parser.add_argument("--max-batch-size", type=int, default=256)
    parser.add_argument("--emulate-device", metavar="MS", dest="ms", type=float, default=0.0, help="wait per example")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # several of these may share a machine
    run = train.init()
    device = run.device

    data, val_data = load_data(num_windows=int(4096 * args.steps_scale))
    loader = run.dataloader(
        data, batch_size=args.batch_size, max_batch_size=args.max_batch_size, device_batch_size=(4, 64), shuffle=True
    )
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.1)
    num_steps = args.epochs * math.ceil(len(data) / args.batch_size)

    def rate(step: int) -> float:
        """Warm-up over the first tenth, and a cosine that ends at a tenth."""
        return min((step + 1) / (0.1 * num_steps), 0.55 + 0.45 * math.cos(math.pi * min(step / num_steps, 1)))

    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    if args.ms:  # by a sleep in the forward pass, which counts as computing; the gradients are real
        if run.rank == 0:
            print(f"emulating a device: a training pass takes 20 ms and {args.ms:g} ms per example more", flush=True)
        model.register_forward_pre_hook(
            lambda m, x: time.sleep(0.02 + args.ms * len(x[0]) / 1e3) if m.training else None
        )
    model, optimizer = run.prepare(model, optimizer, lr_scheduler)
    start = time.time()
    for epoch in run.epochs(args.epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)).flatten(0, 1), y.to(device).flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            lr_scheduler.step()
        val_loss = evaluate(model, val_data, device)
        run.log(val_loss=val_loss)
        if run.rank == 0:
            print(f"epoch {epoch + 1}: validation loss {val_loss:.3f}, {time.time() - start:.1f} s", flush=True)
    if run.rank == 0:
        print(generate(model, "def ", 400, device))


if __name__ == "__main__":
    main()
