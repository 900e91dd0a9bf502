"""Two networks against each other, in the shape of PyTorch's dcgan example."""

import argparse

import torch
import torch.utils.data
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--batchSize", type=int, default=16)
parser.add_argument("--niter", type=int, default=12)
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--manualSeed", type=int, default=1)
opt = parser.parse_args()
torch.manual_seed(opt.manualSeed)

nz = 4
images = torch.randn(360, 8, generator=torch.Generator().manual_seed(0)) * 0.5 + torch.arange(8) / 4
dataset = torch.utils.data.TensorDataset(images)
dataloader = torch.utils.data.DataLoader(dataset, batch_size=opt.batchSize, shuffle=True)

netG = nn.Linear(nz, 8)
netD = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
criterion = nn.BCEWithLogitsLoss()
fixed_noise = torch.randn(500, nz)
optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(0.5, 0.999))

for epoch in range(opt.niter):
    for i, (real,) in enumerate(dataloader):
        # update the critic: real ones are 1, made ones are 0
        netD.zero_grad()
        errD_real = criterion(netD(real), torch.ones(len(real), 1))
        errD_real.backward()
        fake = netG(torch.randn(len(real), nz))
        errD_fake = criterion(netD(fake.detach()), torch.zeros(len(real), 1))
        errD_fake.backward()
        optimizerD.step()
        # update the generator: the critic should take its work for real
        netG.zero_grad()
        errG = criterion(netD(fake), torch.ones(len(real), 1))
        errG.backward()
        optimizerG.step()
        if i % 10 == 0:
            print(f"[{epoch}/{opt.niter}][{i}/{len(dataloader)}] D: {errD_real + errD_fake:.4f} G: {errG:.4f}")
    torch.save(netG.state_dict(), "netG.pth")
    torch.save(netD.state_dict(), "netD.pth")
distance = (netG(fixed_noise).mean(0) - images.mean(0)).norm() / images.mean(0).norm()
print(f"result {distance.item():.4f}")
