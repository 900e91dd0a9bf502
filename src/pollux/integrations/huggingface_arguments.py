"""Arguments of an elastic Hugging Face trainer, and what of them cannot be elastic. ``huggingface`` uses it.

Needs transformers and accelerate.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from pollux.errors import InvalidValueError
from pollux.integrations.one_process import check_launcher, needs, one_process

with needs("transformers", "hf"):
    import transformers


_SHARDS = (
    "it shards the model for a fixed number of replicas; leave it out, or write the loop with pollux.train and "
    "run.prepare(..., shard=...)"
)


def _planned_rank() -> int:
    return int(os.environ.get("RANK") or 0)


@dataclass
class ElasticArguments:
    """A mix-in for ``TrainingArguments`` and its subclasses, to be named before them.

    ``per_device_train_batch_size`` is M0: the total batch for which the learning rate was tuned, on one device.
    """

    max_batch_size: int | None = field(default=None, metadata={"help": "The batch adapts between M0 and this."})
    device_batch_size: int | None = field(default=None, metadata={"help": "What a device takes in one pass, at most."})
    scaling: str = field(default="auto", metadata={"help": "The rule for the learning rate; see pollux.train.scaling."})

    def __post_init__(self) -> None:
        self._rank: Callable[[], int] = _planned_rank
        check_launcher(os.environ)
        if getattr(self, "deepspeed", None):  # before transformers asks for the package
            raise InvalidValueError(_refusal("deepspeed", _SHARDS))
        with one_process():
            super().__post_init__()  # type: ignore[misc]
            _ = self.device  # type: ignore[attr-defined]  # set up while the variables are hidden
        self._n_gpu = min(self._n_gpu, 1)  # type: ignore[has-type]

    def __getstate__(self) -> dict[str, object]:
        """The trainer saves its arguments with each model."""
        return {**self.__dict__, "_rank": _planned_rank}

    def follow(self, rank: Callable[[], int]) -> None:
        """Ask here for the rank from now on."""
        self._rank = rank

    @property
    def process_index(self) -> int:
        return self._rank()

    @property
    def local_process_index(self) -> int:
        return self._rank()  # one replica of a job logs and saves, not one for each machine


@dataclass
class TrainingArguments(ElasticArguments, transformers.TrainingArguments):
    """``transformers.TrainingArguments`` with ``max_batch_size``, ``device_batch_size`` and ``scaling``."""


def check_arguments(args: object) -> None:
    """Refuse what cannot be elastic, before anything is trained.

    Raises:
        InvalidValueError: names the option, its value, and what to do instead.
    """
    if not isinstance(args, ElasticArguments):
        raise InvalidValueError(
            f"args is a {type(args).__name__}; pollux.integrations.huggingface.TrainingArguments is needed, or a "
            "dataclass of ElasticArguments and the one you have"
        )
    _check_options(args)


def _check_options(args: Any) -> None:
    is_adaptive = args.max_batch_size is not None
    accumulation = getattr(args.accelerator_config, "gradient_accumulation_kwargs", None) or {}
    second = accumulation.get("num_steps", 1)
    for is_wrong, what, advice in (
        (bool(getattr(args, "deepspeed", None)), "deepspeed", _SHARDS),
        (bool(getattr(args, "fsdp", None)), "fsdp", _SHARDS),
        (bool(getattr(args, "parallelism_config", None)), "parallelism_config", "only data parallelism can be elastic"),
        (
            args.gradient_accumulation_steps != 1,
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}",
            "Pollux accumulates by itself: give device_batch_size, and the whole batch as per_device_train_batch_size",
        ),
        (
            second != 1,
            f"accelerator_config.gradient_accumulation_kwargs['num_steps']={second}",
            "Pollux accumulates by itself: give device_batch_size, and the whole batch as per_device_train_batch_size",
        ),
        (
            is_adaptive and args.max_steps > 0,
            f"max_steps={args.max_steps} with max_batch_size={args.max_batch_size}",
            "a step of a larger batch is worth several: give num_train_epochs, or no max_batch_size",
        ),
        (
            is_adaptive and args.dataloader_drop_last,
            "dataloader_drop_last with max_batch_size",
            "how much is dropped would depend on the batch: leave one of them out",
        ),
        (bool(args.auto_find_batch_size), "auto_find_batch_size", "Pollux halves a pass that does not fit"),
        (bool(args.fp16), "fp16", "use bf16=True, which needs no loss scaling"),
        (
            getattr(args, "train_sampling_strategy", "random") not in ("random", "sequential"),
            f"train_sampling_strategy={args.train_sampling_strategy!r}",
            "Pollux draws the order: 'random' or 'sequential'",
        ),
        (
            is_adaptive and args.max_batch_size < args.per_device_train_batch_size,
            f"max_batch_size={args.max_batch_size}",
            f"it must be at least per_device_train_batch_size={args.per_device_train_batch_size}",
        ),
    ):
        if is_wrong:
            raise InvalidValueError(_refusal(what, advice))


def _refusal(what: str, advice: str) -> str:
    return f"{what} cannot be used with an elastic trainer: {advice}"


def check_trainer(kind: type, mixin: type) -> None:
    """Refuse a trainer whose own batches or loop the mix-in would replace without a word, such as TRL's GRPO.

    Raises:
        InvalidValueError: names the class and its method.
    """
    below = kind.__mro__[kind.__mro__.index(mixin) + 1 :]
    for one in below[: below.index(transformers.Trainer)]:
        for method in ("get_train_dataloader", "_get_train_sampler", "_inner_training_loop"):
            if method in vars(one):
                raise InvalidValueError(
                    f"{one.__name__} has a {method} of its own, which an elastic trainer would replace: "
                    "submit the job with --kind fixed and the trainer as it is, or write the loop with pollux.train"
                )


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """A group without a parameter that trains has no gradient, and so no noise scale.

    Raises:
        InvalidValueError: says which.
    """
    for number, group in enumerate(optimizer.param_groups):
        if group["params"] and not any(parameter.requires_grad for parameter in group["params"]):
            raise InvalidValueError(
                f"parameter group {number} of the optimizer has frozen parameters alone: leave it out of the optimizer"
            )
