"""A classifier in Lightning: its own validation, early stopping, checkpoints, logging and a schedule over steps."""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def blobs(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    return TensorDataset(torch.randn(count, 8, generator=generator) + 2.0 * F.one_hot(labels, 8), labels)


class LitClassifier(L.LightningModule):
    def __init__(self, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_acc", (logits.argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    L.seed_everything(args.seed)
    trainer = L.Trainer(
        max_epochs=args.max_epochs,
        accelerator="cpu",
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        enable_progress_bar=False,
        logger=CSVLogger("lightning_logs", name="classifier"),
        callbacks=[
            ModelCheckpoint(monitor="val_loss", save_last=True),
            EarlyStopping("val_loss", patience=3),
            LearningRateMonitor("step"),
        ],
    )
    train_loader = DataLoader(blobs(360, 0), batch_size=16, shuffle=True)
    val_loader = DataLoader(blobs(180, 1), batch_size=90)
    trainer.fit(LitClassifier(), train_loader, val_loader)
    result = trainer.validate(dataloaders=val_loader, verbose=False)[0]
    if trainer.is_global_zero:
        print(f"result {result['val_loss']:.4f}")


if __name__ == "__main__":
    main()
