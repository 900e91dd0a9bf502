"""A small regression in Lightning, with its own validation, schedule, checkpoints and logs: for tests of the strategy.

Writes what the trainer says at the end to OUT, by the replica that is rank 0.
"""

import argparse
import json
import time
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from pollux.integrations.lightning import PolluxStrategy


class Regression(L.LightningModule):
    def __init__(self, num_steps):
        super().__init__()
        self.num_steps = num_steps
        self.net = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.history = []

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]))

    def on_validation_epoch_end(self):
        if self.trainer.state.fn == "fit" and not self.trainer.sanity_checking:
            loss = float(self.trainer.callback_metrics["val_loss"])
            self.history.append([self.trainer.current_epoch, self.trainer.global_step, loss])

    def on_save_checkpoint(self, checkpoint):
        checkpoint["history"] = self.history

    def on_load_checkpoint(self, checkpoint):
        self.history = checkpoint["history"]

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        assert self.trainer.estimated_stepping_batches == self.num_steps
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, self.num_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Slow(Callback):
    """Takes its time until it is told to hurry, and says which step it is at."""

    def __init__(self, options):
        self.options = options

    def on_train_batch_end(self, trainer, *_):
        if self.options.hurry and trainer.is_global_zero:
            Path(f"{self.options.out}-step").write_text(str(trainer.global_step))
        while Path(f"{self.options.out}-pause").exists():
            time.sleep(0.01)
        if self.options.hurry and not Path(self.options.hurry).exists():
            time.sleep(self.options.step_s)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--hurry", default="")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--step-s", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(1)
    x = torch.randn(240, 5)
    y = torch.sin(x @ torch.randn(5, 1))
    checkpoint = ModelCheckpoint(monitor="val_loss", save_top_k=1, filename="best-{epoch}")
    strategy = PolluxStrategy(device_batch_size=(1, 8), scaling="none")
    trainer = L.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        strategy=strategy,
        gradient_clip_val=1.0,
        log_every_n_steps=4,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=CSVLogger(f"{options.out}-logs", name="run", flush_logs_every_n_steps=4),
        callbacks=[Slow(options), checkpoint, EarlyStopping("val_loss", patience=50)],
    )
    data = TensorDataset(x, y)
    model = Regression(options.epochs * 20)
    trainer.fit(model, DataLoader(data, batch_size=12, shuffle=True), DataLoader(data, batch_size=60))
    final = trainer.validate(model, DataLoader(data, batch_size=60), verbose=False)[0]
    told = {
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "loss": final["val_loss"],
        "rate": trainer.strategy.lr_scheduler_configs[0].scheduler.get_last_lr()[0],
        "history": model.history,
        "best": checkpoint.best_model_path,
    }
    if trainer.is_global_zero:
        Path(options.out).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
