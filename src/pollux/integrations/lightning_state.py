"""What Lightning's trainer remembers, for replicas that join and for checkpoints. The strategy tracks it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pollux.integrations.one_process import needs

with needs("lightning", "lightning"):
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.trainer import call


class TrainerProgress:
    """Callbacks, the loggers' versions, and what the module's and the datamodule's own hooks save."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        of_module: dict[str, Any] = {}
        call._call_lightning_module_hook(trainer, "on_save_checkpoint", of_module)
        return {
            "callbacks": call._call_callbacks_state_dict(trainer),
            "versions": [getattr(logger, "version", None) for logger in trainer.loggers],
            "should_stop": trainer.should_stop,
            "module": of_module,
            "datamodule": {} if trainer.datamodule is None else trainer.datamodule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        for logger, version in zip(trainer.loggers, state["versions"], strict=False):
            if hasattr(logger, "_version") and logger._version != version:
                logger._version, logger._experiment = version, None
        for callback in trainer.callbacks:
            saved = state["callbacks"].get(callback.state_key)
            if isinstance(callback, ModelCheckpoint) and saved is not None:
                callback.dirpath = saved["dirpath"]  # it follows from the logger's version
        call._call_callbacks_load_state_dict(trainer, {"callbacks": state["callbacks"]})
        trainer.should_stop = state["should_stop"]
        call._call_lightning_module_hook(trainer, "on_load_checkpoint", state["module"])
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(state["datamodule"])


def continue_csv(logger: Any) -> None:
    """Let a CSVLogger go on with the file of the replica before; it would delete it."""
    if not isinstance(logger, CSVLogger):
        return
    path = Path(logger.log_dir) / "metrics.csv"
    if not path.is_file():
        return
    before = path.read_bytes()
    path.unlink()
    writer = logger.experiment
    path.write_bytes(before)
    writer.metrics_keys = before.splitlines()[0].decode().split(",")
