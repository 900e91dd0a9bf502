"""A small regression with Accelerate, as people write it: for tests of its elastic version.

Writes the loss over all the data to OUT at the end, by the replica that is rank 0.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from pollux.integrations.accelerate import Accelerator


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--hurry", default="")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--step-s", type=float, default=0.0)
    options = parser.parse_args()
    torch.manual_seed(1)
    x = torch.randn(240, 5)
    y = torch.sin(x @ torch.randn(5, 1))
    accelerator = Accelerator(cpu=True, device_batch_size=(1, 8), scaling="none")
    model = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True)
    test_loader = DataLoader(TensorDataset(x, y), batch_size=60)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, options.epochs * len(loader))
    model, optimizer, loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, test_loader, scheduler
    )
    for _ in accelerator.epochs(options.epochs):
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if accelerator.is_main_process and options.hurry:
                Path(f"{options.out}-step").write_text(str(accelerator.run.num_steps + 1))
            while Path(f"{options.out}-pause").exists():
                time.sleep(0.01)
            if options.hurry and not Path(options.hurry).exists():
                time.sleep(options.step_s)
    model.eval()
    with torch.no_grad():
        pairs = [accelerator.gather_for_metrics((model(inputs), targets)) for inputs, targets in test_loader]
    error = F.mse_loss(torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs]))
    told = {"steps": accelerator.run.num_steps, "loss": error.item(), "rate": scheduler.get_last_lr()[0]}
    if accelerator.is_main_process:
        Path(options.out).write_text(json.dumps(told))
    accelerator.end_training()


if __name__ == "__main__":
    main()
