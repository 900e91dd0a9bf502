"""A small ResNet with a schedule, evaluation and checkpoints, in the shape of PyTorch's imagenet example."""

import argparse
import shutil
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from pollux.train import init

run = init(print_once=True)


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = nn.Conv2d(inplanes, planes, 1, stride, bias=False)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.downsample(x))


def resnet(num_classes):
    blocks = [BasicBlock(3, 8, 1), BasicBlock(8, 16, 2)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes))


def textures(count, seed, num_classes=4):
    """Noisy stripes of four widths, in random colours."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(num_classes, (count,), generator=generator)
    phase = torch.arange(12)[None, :] * (labels[:, None] + 1) * 0.5 + torch.rand(count, 1, generator=generator) * 6
    images = torch.sin(phase)[:, None, None, :] * (0.5 + torch.rand(count, 3, 1, 1, generator=generator))
    return TensorDataset(images + 2.0 * torch.randn(count, 3, 12, 12, generator=generator), labels)


class AverageMeter:
    """Keeps the last value and the average."""

    def __init__(self, name, fmt):
        self.name, self.fmt = name, fmt
        self.val, self.sum, self.count = 0.0, 0.0, 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(self.count, 1)

    def __str__(self):
        return f"{self.name} {self.val:{self.fmt}} ({self.avg:{self.fmt}})"


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean().item() * 100


def train(train_loader, model, criterion, optimizer, epoch, args):
    batch_time, losses = AverageMeter("Time", "6.3f"), AverageMeter("Loss", ".4e")
    top1 = AverageMeter("Acc@1", "6.2f")
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(train_loader):
        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        top1.update(accuracy(output, target), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch_time.update(time.time() - end)
        end = time.time()
        if run.every(args.print_freq):
            print(f"Epoch: [{epoch}][{i}/{len(train_loader)}]", batch_time, losses, top1, sep="\t")


def validate(val_loader, model, criterion):
    losses, top1 = AverageMeter("Loss", ".4e"), AverageMeter("Acc@1", "6.2f")
    model.eval()
    with torch.no_grad():
        for images, target in val_loader:
            output = model(images)
            losses.update(criterion(output, target).item(), images.size(0))
            top1.update(accuracy(output, target), images.size(0))
    print(" *", losses, top1)
    return top1.avg


def save_checkpoint(state, is_best, filename="checkpoint.pth.tar"):
    run.save(state, filename)
    if is_best and run.is_main:
        shutil.copyfile(filename, "model_best.pth.tar")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("-b", "--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--wd", type=float, default=1e-4)
    parser.add_argument("-p", "--print-freq", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    best = run.track("best", {"acc1": 0.0})

    model = resnet(4)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.wd)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.3)
    train_loader = run.dataloader(textures(504, 0), batch_size=args.batch_size, shuffle=True)
    val_loader = DataLoader(textures(256, 1), batch_size=64)
    model, optimizer = run.prepare(model, optimizer, scheduler)

    for epoch in run.epochs(args.epochs):
        train(train_loader, model, criterion, optimizer, epoch, args)
        acc1 = validate(val_loader, model, criterion)
        scheduler.step()
        is_best = acc1 > best["acc1"]
        best["acc1"] = max(acc1, best["acc1"])
        save_checkpoint({"epoch": epoch + 1, "state_dict": model.state_dict(), "best_acc1": best["acc1"]}, is_best)
    print(f"result {validate(val_loader, model, criterion) / 100:.4f}")


if __name__ == "__main__":
    main()
