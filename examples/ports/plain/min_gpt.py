"""A transformer that learns to sort, in the shape of minGPT: a Trainer class that reads its loader without end."""

import argparse
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, RandomSampler
from torch.utils.data.dataloader import DataLoader

LENGTH, NUM_DIGITS = 6, 3


class SortDataset(Dataset):
    """Sequences of digits, and after each the same digits in order."""

    def __init__(self, split):
        self.remainder = 0 if split == "test" else 1

    def __len__(self):
        return 10000

    def __getitem__(self, idx):
        generator = torch.Generator().manual_seed(idx * 2 + self.remainder)
        digits = torch.randint(NUM_DIGITS, (LENGTH,), generator=generator)
        both = torch.cat([digits, digits.sort().values])
        x, y = both[:-1].clone(), both[1:].clone()
        y[: LENGTH - 1] = -1  # only the sorted half is learnt
        return x, y


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(NUM_DIGITS, 32), nn.Embedding(2 * LENGTH - 1, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, NUM_DIGITS)

    def forward(self, idx, targets=None):
        x = self.tokens(idx) + self.positions(torch.arange(idx.size(1)))
        mask = nn.Transformer.generate_square_subsequent_mask(idx.size(1))
        logits = self.head(self.blocks(x, mask=mask, is_causal=True))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss


class Trainer:
    def __init__(self, config, model, train_dataset):
        self.config, self.model, self.train_dataset = config, model, train_dataset
        self.callbacks = defaultdict(list)
        self.iter_num = 0

    def add_callback(self, onevent, callback):
        self.callbacks[onevent].append(callback)

    def trigger_callbacks(self, onevent):
        for callback in self.callbacks[onevent]:
            callback(self)

    def run(self):
        model, config = self.model, self.config
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
        sampler = RandomSampler(self.train_dataset, replacement=True, num_samples=int(1e10))
        train_loader = DataLoader(self.train_dataset, sampler=sampler, batch_size=config.batch_size)
        model.train()
        data_iter = iter(train_loader)
        while self.iter_num < config.max_iters:
            x, y = next(data_iter)
            _, self.loss = model(x, y)
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            self.optimizer.step()
            self.trigger_callbacks("on_batch_end")
            self.iter_num += 1


def accuracy(model):
    rows = [SortDataset("test")[index] for index in range(256)]
    x, y = (torch.stack(column) for column in zip(*rows, strict=True))
    model.eval()
    with torch.no_grad():
        right = model(x)[0].argmax(2) == y
    model.train()
    return right[:, LENGTH - 1 :].float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--max-iters", type=int, default=250)
    parser.add_argument("--seed", type=int, default=1)
    config = parser.parse_args()
    torch.manual_seed(config.seed)
    model = GPT()
    trainer = Trainer(config, model, SortDataset("train"))

    def batch_end_callback(trainer):
        if trainer.iter_num % 50 == 0:
            print(f"iter {trainer.iter_num}: train loss {trainer.loss.item():.5f}")

    trainer.add_callback("on_batch_end", batch_end_callback)
    trainer.run()
    torch.save(model.state_dict(), "model.pt")
    print(f"result {accuracy(model):.4f}")


if __name__ == "__main__":
    main()
