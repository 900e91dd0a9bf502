"""Matrix factorisation: which other names would this module use? Learnt from Python's own standard library."""

import argparse
import re
import sysconfig
import time
from collections import Counter
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from pollux import train

TOP = 20
NAME = re.compile(rb"(?<=\.)[A-Za-z]\w+|\b[A-Za-z]\w+(?=\()")  # what follows a dot, or is called
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}  # encodings: near copies


def load_data() -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Pairs of (module, name it uses), four fifths to train and one to test; the numbers of modules and of names.

    Names count when at least 5 modules use them, modules when they use at least 10 such names.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in sorted(root.rglob("*.py")) if not LEFT_OUT & set(file.relative_to(root).parts)]
    used = [set(NAME.findall(file.read_bytes())) for file in files]
    counts = Counter(name for names in used for name in names)
    number = {name: i for i, name in enumerate(sorted(name for name in counts if counts[name] >= 5))}
    rows = [sorted(number[name] for name in names if name in number) for names in used]
    rows = [row for row in rows if len(row) >= 10]
    pairs = torch.tensor([(module, name) for module, row in enumerate(rows) for name in row])
    is_test = torch.rand(len(pairs), generator=torch.Generator().manual_seed(0)) < 0.2
    return pairs[~is_test], pairs[is_test], len(rows), len(number)


class Factors(nn.Module):
    """Scores every name for each of the given modules. The bias is what a name is worth anywhere."""

    def __init__(self, num_modules: int, num_names: int, width: int = 32) -> None:
        super().__init__()
        self.module, self.name = nn.Embedding(num_modules, width), nn.Linear(width, num_names)
        self.dropout = nn.Dropout(0.5)
        nn.init.normal_(self.module.weight, std=0.1)

    def forward(self, modules: torch.Tensor) -> torch.Tensor:
        return self.name(self.dropout(self.module(modules)))


def recall(scores: torch.Tensor, train_pairs: torch.Tensor, test_pairs: torch.Tensor) -> float:
    """The share of its held-out names (at most TOP) among a module's TOP new suggestions, averaged over modules."""
    scores[train_pairs[:, 0], train_pairs[:, 1]] = -torch.inf
    wanted = torch.zeros_like(scores)
    wanted[test_pairs[:, 0], test_pairs[:, 1]] = 1
    hits, possible = wanted.gather(1, scores.topk(TOP).indices).sum(1), wanted.sum(1).clamp(max=TOP)
    return (hits / possible)[possible > 0].mean().item()


@torch.no_grad()
def evaluate(model: nn.Module, train_pairs: torch.Tensor, test_pairs: torch.Tensor, device: torch.device) -> float:
    model.eval()
    scores = model(torch.arange(int(train_pairs[:, 0].max()) + 1, device=device)).cpu()
    model.train()
    return recall(scores, train_pairs, test_pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-batch-size", type=int, default=2048)
    parser.add_argument("--emulate-device", metavar="MS", dest="ms", type=float, default=0.0, help="wait per example")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the model is too small for more
    run = train.init()
    device = run.device

    train_pairs, test_pairs, num_modules, num_names = load_data()
    data = TensorDataset(*train_pairs.T)
    loader = run.dataloader(
        data, batch_size=args.batch_size, max_batch_size=args.max_batch_size, device_batch_size=(16, 1024), shuffle=True
    )
    model = Factors(num_modules, num_names).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    popularity = torch.bincount(train_pairs[:, 1], minlength=num_names).float().repeat(num_modules, 1)
    baseline = recall(popularity, train_pairs, test_pairs)

    if args.ms:  # by a sleep in the forward pass, which counts as computing; the gradients are real
        if run.rank == 0:
            print(f"emulating a device: a training pass takes 20 ms and {args.ms:g} ms per example more", flush=True)
        model.register_forward_pre_hook(
            lambda m, x: time.sleep(0.02 + args.ms * len(x[0]) / 1e3) if m.training else None
        )
    model, optimizer = run.prepare(model, optimizer)
    start = time.time()
    for epoch in run.epochs(args.epochs):
        for modules, names in loader:
            loss = F.cross_entropy(model(modules.to(device)), names.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found = evaluate(model, train_pairs, test_pairs, device)
        result = f"{found:.1%} (popularity alone: {baseline:.1%})"
        run.log(recall=found)
        if run.rank == 0:
            print(f"epoch {epoch + 1:2d}: recall@{TOP} {result}, {time.time() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
