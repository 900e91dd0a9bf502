"""An LSTM that carries its hidden state from batch to batch, in the shape of PyTorch's word_language_model example."""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pollux.train import init

parser = argparse.ArgumentParser()
parser.add_argument("--nhid", type=int, default=48)
parser.add_argument("--lr", type=float, default=4.0)
parser.add_argument("--clip", type=float, default=0.5)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch-size", type=int, default=12)
parser.add_argument("--bptt", type=int, default=8)
parser.add_argument("--seed", type=int, default=1111)
parser.add_argument("--log-interval", type=int, default=20)
parser.add_argument("--save", default="model.pt")
args = parser.parse_args()
run = init(print_once=True)
torch.manual_seed(args.seed)


def corpus(num_words, seed, vocabulary=20):
    """Words of which each follows from the one before and the one before that, with a tenth of noise."""
    generator = torch.Generator().manual_seed(seed)
    words = [0, 1]
    for noise in torch.rand(num_words, generator=generator).tolist():
        words.append((words[-1] + 3 * words[-2] + 1) % vocabulary if noise > 0.1 else int(noise * 10 * vocabulary))
    return torch.tensor(words)


def batchify(data, bsz):
    """Columns of text, which are read in parallel."""
    nbatch = data.size(0) // bsz
    return data[: nbatch * bsz].view(bsz, -1).t().contiguous()


def segments(columns):
    """All columns at the first place in the text, then all at the next; and the words that follow."""
    places = range(0, columns.size(0) - args.bptt, args.bptt)
    data, targets = (torch.cat([columns[i + shift : i + shift + args.bptt].t() for i in places]) for shift in (0, 1))
    return TensorDataset(data, targets)


train_loader = run.dataloader(segments(batchify(corpus(6000, 0), args.batch_size)), batch_size=args.batch_size)
val_loader = DataLoader(segments(batchify(corpus(1500, 1), 10)), batch_size=10)


class RNNModel(nn.Module):
    def __init__(self, ntoken, nhid):
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(ntoken, nhid), nn.Linear(nhid, ntoken)
        self.rnn = nn.LSTM(nhid, nhid, batch_first=True)
        self.nhid = nhid

    def forward(self, data, hidden):
        output, hidden = self.rnn(self.encoder(data), hidden)
        return self.decoder(output).flatten(0, 1), hidden

    def init_hidden(self, bsz):
        return torch.zeros(1, bsz, self.nhid), torch.zeros(1, bsz, self.nhid)


model = RNNModel(20, args.nhid)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
model, optimizer = run.prepare(model, optimizer)


def repackage_hidden(hidden):
    """The same values, without their history."""
    return tuple(value.detach() for value in hidden)


def evaluate(loader):
    model.eval()
    total_loss = 0.0
    hidden = model.init_hidden(10)
    with torch.no_grad():
        for data, targets in loader:
            output, hidden = model(data, hidden)
            total_loss += criterion(output, targets.flatten()).item()
    return total_loss / len(loader)


def train(epoch):
    model.train()
    hidden = model.init_hidden(args.batch_size)
    for batch, (data, targets) in enumerate(train_loader):
        hidden = repackage_hidden(hidden if hidden[0].size(1) == len(data) else model.init_hidden(len(data)))
        optimizer.zero_grad()
        output, hidden = model(data, hidden)
        loss = criterion(output, targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        if run.every(args.log_interval):
            print(f"| epoch {epoch} | batch {batch} | loss {loss.item():.2f} | ppl {math.exp(loss.item()):.2f}")


best = run.track("best", {"val_loss": None})
for epoch in run.epochs(args.epochs):
    train(epoch)
    val_loss = evaluate(val_loader)
    print(f"| end of epoch {epoch} | valid loss {val_loss:.2f} | valid ppl {math.exp(val_loss):.2f}")
    if not best["val_loss"] or val_loss < best["val_loss"]:
        run.save(model.state_dict(), args.save)
        best["val_loss"] = val_loss
    else:
        for group in optimizer.param_groups:
            group["lr"] /= 4.0
print(f"result {evaluate(val_loader):.4f}")
