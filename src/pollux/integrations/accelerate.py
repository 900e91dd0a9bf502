"""Accelerate's ``Accelerator``, elastic and adaptive. Scripts import ``Accelerator`` from here. Needs accelerate.

``prepare`` takes what people give it. To Accelerate every replica is alone: evaluation data is not divided, and
gathering for metrics returns what it was given.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader

from pollux import train
from pollux.errors import InvalidValueError
from pollux.integrations.one_process import check_launcher, needs, one_process
from pollux.integrations.torch_loader import BatchOptions, elastic_loader

with needs("accelerate", "hf"):
    import accelerate

__all__ = ["Accelerator"]

_T = TypeVar("_T")
_Collate = Callable[[list[Any]], object]
_REFUSED = ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config")


class Accelerator(accelerate.Accelerator):
    """``accelerate.Accelerator`` for a job that is resized while it trains.

    ``max_batch_size`` and ``device_batch_size`` are those of ``run.dataloader``; the batch size of the loader that is
    prepared is M0, the total batch for which the learning rate was tuned. Write ``accelerator.epochs(n)`` in place of
    ``range(n)``.
    """

    def __init__(
        self,
        *,
        max_batch_size: int | None = None,
        device_batch_size: int | tuple[int, int] | None = None,
        scaling: str = "auto",
        checkpoint_dir: str | Path | None = None,
        **options: Any,
    ) -> None:
        _check_options(options)
        check_launcher(os.environ)
        self.run = train.init(checkpoint_dir=checkpoint_dir, device="cpu" if options.get("cpu") else None)
        self._batch: BatchOptions = {"max_batch_size": max_batch_size, "device_batch_size": device_batch_size}
        self._scaling = scaling
        with one_process():
            super().__init__(**options)

    # --- what is prepared ---------------------------------------------------------------------------------------

    def prepare(self, *objects: Any, **_: object) -> Any:
        """The objects in their order. The first loader is that of training; others give all of their data.

        Raises:
            InvalidValueError: the model is without its optimizer or loader.
        """
        models = [one for one in objects if isinstance(one, nn.Module)]
        optimizers = [one for one in objects if isinstance(one, torch.optim.Optimizer)]
        schedulers = [one for one in objects if isinstance(one, torch.optim.lr_scheduler.LRScheduler)]
        loaders = [one for one in objects if isinstance(one, DataLoader)]
        if (models or optimizers) and (not models or len(models) != len(optimizers) or not loaders):
            raise InvalidValueError(
                f"prepare was given {len(models)} models, {len(optimizers)} optimizers and {len(loaders)} loaders: "
                "give each model with its optimizer, and the training loader, in one call"
            )
        made: dict[int, object] = {}
        if models:
            for model in models:
                model.to(self.device)
            made[id(loaders[0])] = elastic_loader(
                self.run, loaders[0], self._batch, collate_fn=self._on_device(loaders[0].collate_fn)
            )
            many = len(models) > 1
            given: Any = tuple(models) if many else models[0]
            steppers: Any = tuple(optimizers) if many else optimizers[0]
            rates: Any = None if not schedulers else tuple(schedulers) if many else schedulers[0]
            prepared, _ = self.run.prepare(given, steppers, rates, scaling=self._scaling)
            made.update(zip(map(id, models), prepared if many else (prepared,), strict=True))
        made.update((id(one), self._whole(one)) for one in loaders if id(one) not in made)
        result = tuple(made.get(id(one), one) for one in objects)
        return result if len(result) != 1 else result[0]

    def _on_device(self, collate: _Collate) -> _Collate:
        """Batches arrive on the device, as people are used to; from workers they come as they are."""
        if self.device.type == "cpu":
            return collate
        return lambda rows: accelerate.utils.send_to_device(collate(rows), self.device)

    def _whole(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Evaluation data, not divided, on the device."""
        if self.device.type == "cpu":
            return loader
        return accelerate.data_loader.prepare_data_loader(  # type: ignore[no-any-return]
            loader, self.device, num_processes=1, process_index=0, put_on_device=True
        )

    def epochs(self, num_epochs: int, *, by: str = "progress") -> Iterator[int]:
        """``run.epochs``: goes on where an interrupted run stopped."""
        return self.run.epochs(num_epochs, by=by)

    # --- the loop -----------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        loss.backward(**options)  # type: ignore[no-untyped-call]

    @property
    def sync_gradients(self) -> bool:
        """Whether this pass is the last of its step: where to clip."""
        return self.run.is_last_pass

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """In the last pass of a step; nothing in the others."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type) if self.sync_gradients else None

    def gather_for_metrics(self, input_data: _T, use_gather_object: bool = False) -> _T:
        return input_data

    def gather(self, tensor: _T) -> _T:
        return tensor

    def reduce(self, tensor: torch.Tensor | float, reduction: str = "sum", scale: float = 1.0) -> torch.Tensor:
        """Over all replicas; a tensor of one number."""
        total = self.run.sum(float(tensor)) if reduction == "sum" else self.run.mean(float(tensor))
        return torch.tensor(total * scale, device=self.device)

    def unwrap_model(self, model: nn.Module, *_: object, **__: object) -> nn.Module:
        return getattr(model, "module", model)

    # --- who this replica is ------------------------------------------------------------------------------------

    @property
    def is_main_process(self) -> bool:
        return bool(self.run.is_main)

    @property
    def is_local_main_process(self) -> bool:
        return bool(self.run.is_main)

    @property
    def process_index(self) -> int:
        return int(self.run.rank)

    @property
    def num_processes(self) -> int:
        return self.run.world_size

    def print(self, *values: object, **options: Any) -> None:
        self.run.print(*values, **options)

    def save(self, obj: object, f: str | Path, safe_serialization: bool = False) -> None:
        self.run.save(obj, f)

    def save_state(self, *_: object, **__: object) -> str:
        raise InvalidValueError(
            "save_state: Pollux saves and resumes by itself; give checkpoint_dir, or run in a cluster"
        )

    def end_training(self) -> None:
        super().end_training()
        self.run.close()


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse what cannot be elastic.

    Raises:
        InvalidValueError: names the option, and what to do instead.
    """
    for name in _REFUSED:
        if options.get(name) is not None:
            raise InvalidValueError(
                f"{name} cannot be elastic: only data parallelism can; leave it out, or submit the job as fixed"
            )
    plugin = options.get("gradient_accumulation_plugin")
    for what, steps in (
        ("gradient_accumulation_steps", options.get("gradient_accumulation_steps", 1)),
        ("gradient_accumulation_plugin.num_steps", getattr(plugin, "num_steps", None) or 1),
    ):
        if str(steps) != "1":
            raise InvalidValueError(
                f"{what}={steps}: Pollux accumulates by itself; give the whole batch to the loader, and "
                "device_batch_size"
            )
    precision = str(options.get("mixed_precision"))
    if precision.endswith("fp16"):
        raise InvalidValueError(f"mixed_precision={precision!r} needs loss scaling; use 'bf16'")
