"""Hides the variables of distributed training from a framework. The integrations use it while they set it up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def one_process() -> Iterator[None]:
    """Within this a framework finds one process: replicas, groups and ranks are Pollux's, and change."""
    hidden = {name: os.environ.pop(name) for name in _DISTRIBUTED if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
