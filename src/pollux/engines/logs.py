"""The log files of our own processes. Called before a supervisor or a proxy is started."""

from __future__ import annotations

import contextlib
from pathlib import Path

MAX_LOG_BYTES = 16 << 20


def rotate(path: Path) -> None:
    """Put a log that has become long aside, in place of an older one."""
    with contextlib.suppress(OSError):
        if path.stat().st_size > MAX_LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
