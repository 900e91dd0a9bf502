"""Models of Lightning that its tests train. A module of its own: the framework takes seconds to import, and all
workers collect all tests."""

from __future__ import annotations

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint

from pollux.integrations.lightning import PolluxStrategy

__all__ = ["Callback", "EarlyStopping", "L", "ModelCheckpoint", "PolluxStrategy"]


class Regression(L.LightningModule):
    def __init__(self, scheduler=None, interval="step", frequency=1):
        super().__init__()
        self.net = torch.nn.Linear(3, 1)
        self.scheduler, self.interval, self.frequency = scheduler, interval, frequency
        self.seen, self.validated = [], []

    def training_step(self, batch, batch_idx):
        self.seen.append(len(batch[0]))
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.net(batch[0]) - batch[1]).square().mean())

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.validated.append(self.trainer.global_step)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.scheduler is None:
            return optimizer
        made = self.scheduler(optimizer)
        config = {"scheduler": made, "interval": self.interval, "frequency": self.frequency, "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Manual(Regression):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class NoOptimizer(Regression):
    def configure_optimizers(self):
        return None


class FromIterator(Regression):
    def training_step(self, dataloader_iter):
        raise AssertionError
