"""Sets a framework up as if there were one process, and says so where it is not installed. The integrations use it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pollux.errors import InvalidValueError

_DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SHARDING = (
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)


@contextmanager
def needs(package: str, extra: str) -> Iterator[None]:
    """Around the imports of a framework.

    Raises:
        ImportError: it is not installed; says how to get it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        message = f'{package} is not installed: pip install "pollux-scheduler[{extra}]"'
        raise ImportError(message, name=error.name) from error


@contextmanager
def one_process() -> Iterator[None]:
    """Within this a framework finds one process: replicas, groups and ranks are Pollux's, and change."""
    hidden = {name: os.environ.pop(name) for name in _DISTRIBUTED if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def check_launcher(environment: Mapping[str, str]) -> None:
    """Refuse what ``accelerate launch`` has set by variables and cannot be elastic. Hugging Face's trainer reads them.

    Raises:
        InvalidValueError: names the variable, its value, and what to do instead.
    """
    for name in _SHARDING:
        if (value := environment.get(name, "")).lower() in ("1", "true", "yes", "on"):
            raise InvalidValueError(
                f"{name}={value} cannot be elastic: only data parallelism can; leave it out, or submit the job as fixed"
            )
    name = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    if (value := environment.get(name, "1")) != "1":
        raise InvalidValueError(
            f"{name}={value}: Pollux accumulates by itself; give the whole batch, and device_batch_size"
        )
    if environment.get("ACCELERATE_MIXED_PRECISION", "").endswith("fp16"):
        raise InvalidValueError("ACCELERATE_MIXED_PRECISION='fp16' needs loss scaling; use 'bf16'")
