"""A variational auto-encoder of small pictures, in the shape of PyTorch's vae example."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from pollux.train import init

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--log-interval", type=int, default=10)
args = parser.parse_args()
run = init(print_once=True)
torch.manual_seed(args.seed)


def bars(count, seed):
    """Pictures in which some rows are white."""
    rows = torch.rand(count, 8, generator=torch.Generator().manual_seed(seed)) < 0.3
    return TensorDataset(rows.float()[:, :, None].expand(count, 8, 8).contiguous())


train_loader = run.dataloader(bars(640, 0), batch_size=args.batch_size, shuffle=True)
test_loader = DataLoader(bars(256, 1), batch_size=256)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 64)
        self.fc21 = nn.Linear(64, 8)
        self.fc22 = nn.Linear(64, 8)
        self.fc3 = nn.Linear(8, 64)
        self.fc4 = nn.Linear(64, 64)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        return mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 64))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


model = VAE()
optimizer = optim.Adam(model.parameters(), lr=3e-3)
model, optimizer = run.prepare(model, optimizer)


def loss_function(recon_x, x, mu, logvar):
    """Reconstruction and KL divergence, summed over examples."""
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def train(epoch):
    model.train()
    train_loss = 0
    for batch_idx, (data,) in enumerate(train_loader):
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        (loss / len(data)).backward()
        train_loss += loss.item()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}/{len(train_loader)}]\tLoss: {loss.item() / len(data):.6f}")
    train_loss = run.sum(train_loss) / len(train_loader.dataset)
    print(f"====> Epoch: {epoch} Average loss: {train_loss:.4f}")


def test():
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for (data,) in test_loader:
            recon_batch, mu, logvar = model(data)
            test_loss += loss_function(recon_batch, data, mu, logvar).item()
    test_loss /= len(test_loader.dataset)
    print(f"====> Test set loss: {test_loss:.4f}")
    return test_loss


if __name__ == "__main__":
    test_loss = test()
    for epoch in run.epochs(args.epochs):
        train(epoch)
        test_loss = test()
        with torch.no_grad():
            sample = model.decode(torch.randn(64, 8)).view(64, 8, 8)
            run.save(sample, f"sample_{epoch}.pt")
    print(f"result {test_loss:.4f}")
