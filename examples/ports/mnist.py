"""A small convolutional network on images of strokes, in the shape of PyTorch's mnist example."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from pollux.train import init

run = init(print_once=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, 4)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout1(torch.flatten(x, 1))
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def strokes(count, seed):
    """Noisy pictures of a horizontal, a vertical and two diagonal lines."""
    generator = torch.Generator().manual_seed(seed)
    line = torch.zeros(4, 8, 8)
    line[0, 4], line[1, :, 4], line[2], line[3] = 1, 1, torch.eye(8), torch.eye(8).flip(1)
    labels = torch.randint(4, (count,), generator=generator)
    images = line[labels] + 0.9 * torch.randn(count, 8, 8, generator=generator)
    return TensorDataset(images[:, None], labels)


def train(args, model, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if run.every(args.log_interval):
            print(f"Train Epoch: {epoch} [{batch_idx}/{len(train_loader)}]\tLoss: {loss.item():.6f}")


def test(model, test_loader):
    model.eval()
    test_loss, correct = 0, 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(dim=1).eq(target).sum().item()
    test_loss /= len(test_loader.dataset)
    print(f"\nTest set: Average loss: {test_loss:.4f}, Accuracy: {correct}/{len(test_loader.dataset)}\n")
    return correct / len(test_loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=10)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    train_loader = run.dataloader(strokes(512, 0), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(strokes(256, 1), batch_size=256)
    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    model, optimizer = run.prepare(model, optimizer, scheduler)
    accuracy = 0.0
    for epoch in run.epochs(args.epochs):
        train(args, model, train_loader, optimizer, epoch)
        accuracy = test(model, test_loader)
        scheduler.step()
    run.save(model.state_dict(), "mnist_cnn.pt")
    print(f"result {accuracy:.4f}")


if __name__ == "__main__":
    main()
