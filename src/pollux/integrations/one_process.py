"""Sets a framework up as if there were one process, and says so where it is not installed. The integrations use it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
