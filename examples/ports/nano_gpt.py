"""A small GPT on characters, in the shape of nanoGPT's train.py: a loop over iterations that draws its own batches."""

import math
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

from pollux.train import init

out_dir = "out"
eval_interval = 50
log_interval = 10
eval_iters = 10
gradient_accumulation_steps = 1  # used to simulate larger batch sizes
batch_size = 8
block_size = 16
n_embd = 32
learning_rate = 1e-2
max_iters = 200
warmup_iters = 20
min_lr = 1e-3
grad_clip = 1.0
seed = 1337
for argument in sys.argv[1:]:
    key, value = argument.removeprefix("--").split("=")
    globals()[key] = type(globals()[key])(value)

run = init(print_once=True)
master_process = run.is_main
os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(seed)

text = "the quick brown fox jumps over the lazy dog while a slow green turtle looks on and says nothing. " * 40
chars = sorted(set(text))
encoded = torch.tensor([chars.index(char) for char in text])
data_of = {"train": encoded[: len(encoded) * 9 // 10], "val": encoded[len(encoded) * 9 // 10 :]}


def get_batch(split, size):
    data = data_of[split]
    ix = torch.randint(len(data) - block_size, (size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        q, k, v = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).split(n_embd, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(chars), n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.Sequential(Block(), Block())
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, len(chars))

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        logits = self.lm_head(self.ln_f(self.h(x)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
model, optimizer = run.prepare(model, optimizer)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = [model(*get_batch(split, batch_size))[1].item() for _ in range(eval_iters)]
        out[split] = sum(losses) / eval_iters
    model.train()
    return out


def get_lr(it):
    """Linear warm-up, then cosine decay."""
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    decay_ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * min(decay_ratio, 1.0))) * (learning_rate - min_lr)


best = run.track("best", {"val_loss": 1e9})
iter_num = 0
for iter_num in run.steps(max_iters, batch_size=2 * batch_size):
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    if run.every(eval_interval) and master_process:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if losses["val"] < best["val_loss"]:
            best["val_loss"] = losses["val"]
            run.save({"model": model.state_dict(), "iter_num": iter_num}, os.path.join(out_dir, "ckpt.pt"))
    for _ in range(gradient_accumulation_steps):
        X, Y = get_batch("train", run.local_batch_size)
        logits, loss = model(X, Y)
        (loss / gradient_accumulation_steps).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if run.every(log_interval) and master_process:
        print(f"iter {iter_num}: loss {loss.item():.4f}")
    iter_num += 1
    if iter_num > max_iters:
        break
print(f"result {estimate_loss()['val']:.4f}")
