"""A small student learns from a frozen teacher, in the shape of distillation scripts with bucketed batches."""

import argparse
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, Sampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--lr", type=float, default=5e-3)
parser.add_argument("--temperature", type=float, default=2.0)
parser.add_argument("--alpha", type=float, default=0.5)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--log-interval", type=int, default=10)
args = parser.parse_args()
torch.manual_seed(args.seed)

VOCABULARY, CLASSES = 24, 4


class Sentences(Dataset):
    """Rows of words of different lengths; the class is that of most of their words."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, 24, (count,), generator=generator).tolist()
        self.rows = [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]
        self.labels = [int(torch.bincount(row % CLASSES, minlength=CLASSES).argmax()) for row in self.rows]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index], self.labels[index]


class BucketSampler(Sampler):
    """Batches of about equal lengths, in a new order every epoch."""

    def __init__(self, lengths, batch_size):
        self.order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batch_size = batch_size

    def __len__(self):
        return -(-len(self.order) // self.batch_size)

    def __iter__(self):
        starts = list(range(0, len(self.order), self.batch_size))
        random.shuffle(starts)
        for start in starts:
            yield self.order[start : start + self.batch_size]


def collate(examples):
    rows, labels = zip(*examples, strict=True)
    return pad_sequence(rows, batch_first=True), torch.tensor(labels)


train_set, test_set = Sentences(480, 0), Sentences(256, 1)
sampler = BucketSampler([len(row) for row in train_set.rows], args.batch_size)
train_loader = DataLoader(train_set, batch_sampler=sampler, collate_fn=collate)
test_loader = DataLoader(test_set, batch_size=64, collate_fn=collate)


class Teacher(nn.Module):
    """Counts words of each class."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Embedding(VOCABULARY, CLASSES)
        with torch.no_grad():
            self.scores.weight.copy_(F.one_hot(torch.arange(VOCABULARY) % CLASSES, CLASSES))
            self.scores.weight[0] = 0.0

    def forward(self, x):
        return self.scores(x).sum(1)


class Student(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.05), nn.Linear(width, width))
            for _ in range(2)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        mask = (x != 0).unsqueeze(-1)
        x = self.embedding(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head((x * mask).sum(1) / mask.sum(1))


teacher, student = Teacher(), Student()
teacher.eval()
for parameter in teacher.parameters():
    parameter.requires_grad_(False)
optimizer = torch.optim.AdamW(student.parameters(), lr=args.lr)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(train_loader))


def train(epoch):
    student.train()
    running = 0.0
    for step, (x, y) in enumerate(train_loader):
        with torch.no_grad():
            soft = F.softmax(teacher(x) / args.temperature, dim=-1)
        logits = student(x)
        soft_loss = F.kl_div(F.log_softmax(logits / args.temperature, dim=-1), soft, reduction="batchmean")
        loss = args.alpha * args.temperature**2 * soft_loss + (1 - args.alpha) * F.cross_entropy(logits, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        running += loss.item()
        if step % args.log_interval == 0:
            print(f"epoch {epoch} step {step}/{len(train_loader)} loss {loss.item():.4f}")
    print(f"epoch {epoch}: mean loss {running / len(train_loader):.4f}")


@torch.no_grad()
def agreement():
    student.eval()
    right = sum(int((student(x).argmax(-1) == teacher(x).argmax(-1)).sum()) for x, _ in test_loader)
    return right / len(test_set)


share = agreement()
for epoch in range(args.epochs):
    train(epoch)
    share = agreement()
    print(f"epoch {epoch}: agrees with the teacher on {share:.3f}")
    torch.save(student.state_dict(), "student.pt")
print(f"result {share:.4f}")
